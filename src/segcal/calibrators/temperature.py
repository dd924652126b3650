"""Temperature scaling, to the exact optimum, in a handful of passes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.base import Calibrator, FitData, Fitted, ParameterCount
from segcal.calibrators.first_pass import HIGHEST, LOWEST, FirstPass, TemperatureSlope
from segcal.cases import CaseSet
from segcal.kernels import AffineMap
from segcal.statistics import VoxelStatistics

# Voxels of the sample that gives the start.
SAMPLE_VOXELS = 50_000
# Slope of the mean NLL by log beta at which the fit is done. The kernel holds beta in float32, which leaves slopes of a
# few 1e-8; the NLL is then within 1e-14 of its minimum.
TOLERANCE = 1e-7
_PASSES = 12


class TemperatureScaling(Calibrator):
    """``ts``: ``S(z / T)``, one temperature T for all (Guo et al. 2017). Translation invariant, keeps the order.

    The NLL is convex in beta = 1/T, and its derivative is ``(NLL - entropy) / beta`` (Ding et al. 2021, Theorem 4), so
    the pass that evaluates also fits. A sample gives start and curvature; passes over everything then finish.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), plant=[segcal.synthetic.Temperature(2.0)], coherence=0)
        >>> calibrator = TemperatureScaling().fit(cases)
        >>> 1.9 < calibrator.temperature < 2.1, calibrator.fit_report.converged
        (True, True)
    """

    id = "ts"
    translation_invariant = True
    preserves = "order"
    beta: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("beta", torch.ones((), dtype=torch.float64))

    @property
    def temperature(self) -> float:
        """T."""
        return 1 / float(self.beta)

    @property
    def score_map(self) -> AffineMap:
        """The map, to be fused into other passes."""
        return AffineMap(self.beta)

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount:
        """One."""
        return ParameterCount(1, 1)

    def _scores(self, logits: Tensor) -> Tensor:
        # The difference to the maximum is exact; a product of large logits would round away small margins.
        return (logits - logits.amax(1, keepdim=True)) * self.beta.to(logits)

    def _fast(self, kernels: Any, logits: Tensor) -> Tensor:
        log_probs: Tensor = kernels.apply_temperature(logits, float(self.beta))
        return log_probs

    def _fit(self, data: FitData) -> Fitted:
        return self.fit_from(FirstPass.over(data.cases, SAMPLE_VOXELS, data.seed), data.cases)

    def fit_from(self, first: FirstPass, cases: CaseSet) -> Fitted:
        """Set the temperature to the optimum on all cases, of which a first pass has drawn a sample."""
        identity = _Point(1.0, first.nll, math.inf, first.total)
        slope = TemperatureSlope(first.sample.thin(SAMPLE_VOXELS))
        beta = slope.root()
        curvature = slope.curvature(beta)
        points: list[_Point] = []
        while len(points) < _PASSES:
            point = _pass(cases, beta)
            points.append(point)
            outward = (beta == LOWEST and point.slope > 0) or (beta == HIGHEST and point.slope < 0)
            if abs(point.slope) < TOLERANCE or outward:
                break
            if len(points) > 1 and point.slope != points[-2].slope:  # the secant of everything beats the sample's
                curvature = (point.slope - points[-2].slope) / math.log(point.beta / points[-2].beta)
            step = -point.slope / max(curvature, 1e-12)
            beta = float(np.clip(beta * math.exp(np.clip(step, -1, 1)), LOWEST, HIGHEST))
        # Near the optimum the slope tells points apart long after the NLL has lost its last digit.
        better = [point for point in points if point.nll <= identity.nll]
        best = min(better, key=lambda point: abs(point.slope), default=identity)
        self.beta.fill_(best.beta)
        at_bound = best.beta in (LOWEST, HIGHEST)
        return Fitted(
            nll_before=identity.nll,
            nll_after=best.nll,
            converged=abs(best.slope) < TOLERANCE or at_bound,
            certificate=0.0 if at_bound else abs(best.slope),
            iterations=len(points),
            voxels_used=identity.voxels,
            notes=[f"1/T = {best.beta:g} is at its bound: the data ask for a one-hot or uniform map"]
            if at_bound
            else [],
        )


class _Point(NamedTuple):
    beta: float
    nll: float
    slope: float  # of the mean NLL by log beta
    voxels: int


def _pass(cases: CaseSet, beta: float) -> _Point:
    """Mean NLL of everything at a temperature, and its derivative."""
    statistics = VoxelStatistics(cases.num_classes, (), classwise=False)
    score_map = AffineMap(torch.tensor(beta, dtype=torch.float64))
    for case in cases:
        for chunk in case.chunks():
            statistics.update(
                chunk.logits, chunk.labels, ignore_index=case.ignore_index, mask=chunk.mask, score_map=score_map
            )
        del case
    count = statistics.count()
    nll, _, entropy = statistics.total().losses.sum(0) / max(count, 1)
    return _Point(beta, float(nll), float(nll - entropy), count)
