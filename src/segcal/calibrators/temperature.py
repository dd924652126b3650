"""Temperature scaling, to the exact optimum, in a handful of passes."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from segcal.calibrators.base import Calibrator, Fitted
from segcal.cases import CaseSet
from segcal.errors import InputError
from segcal.kernels import AffineMap
from segcal.statistics import VoxelStatistics

# 1 / temperature is kept within these: beyond, every softmax is uniform or one-hot to float32.
LOWEST, HIGHEST = 1e-3, 1e3
# Voxels of the sample that gives the start: its optimum is within about 1/300 of that of everything.
SAMPLE_VOXELS = 100_000
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

    def _scores(self, logits: Tensor) -> Tensor:
        # The difference to the maximum is exact; a product of large logits would round away small margins.
        return (logits - logits.amax(1, keepdim=True)) * self.beta.to(logits)

    def _fit(self, cases: CaseSet, seed: int) -> Fitted:
        identity = _pass(cases, 1.0)  # It also checks the data: scores, labels, at least one valid voxel.
        if not identity.voxels:
            raise InputError("no valid voxel", expected="labels that are neither ignored nor masked")
        sample = _Sample.draw(cases, SAMPLE_VOXELS, seed)
        beta = _root(sample)
        curvature = _curvature(sample, beta)
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


class _Sample(NamedTuple):
    """Scores relative to the best ``(v, C)`` and to the label ``(v,)`` of a random sample of voxels, float64."""

    gaps: Tensor
    label_gap: Tensor

    @classmethod
    def draw(cls, cases: CaseSet, voxels: int, seed: int) -> _Sample:
        generator = torch.Generator().manual_seed(seed)
        share = -(-voxels // len(cases))
        gaps, labels = [torch.zeros(0, cases.num_classes)], [torch.zeros(0, dtype=torch.int64)]
        for case in cases:
            flat = case.valid.flatten().nonzero()[:, 0].cpu()
            chosen = flat[torch.randint(len(flat), (share,), generator=generator)] if len(flat) else flat
            gaps.append(case.logits.movedim(1, -1).reshape(-1, cases.num_classes)[chosen].double().cpu())
            labels.append(case.labels.flatten()[chosen].cpu())
            del case
        z, y = torch.cat(gaps).double(), torch.cat(labels)
        z = z - z.amax(1, keepdim=True)
        return cls(z, z.gather(1, y[:, None])[:, 0])

    def slope(self, beta: float) -> float:
        """Derivative of the sample's mean NLL by beta: mean over voxels of E_p[z] - z_y."""
        p = (beta * self.gaps).softmax(1)
        expected = torch.where(p > 0, p * self.gaps, 0.0).sum(1)
        return float((expected - self.label_gap).mean())


def _root(sample: _Sample) -> float:
    """The sample's optimal beta within the bounds."""
    if sample.slope(LOWEST) >= 0:
        return LOWEST
    if sample.slope(HIGHEST) <= 0:
        return HIGHEST
    return float(brentq(sample.slope, LOWEST, HIGHEST, xtol=1e-12, rtol=1e-10))


def _curvature(sample: _Sample, beta: float) -> float:
    """Second derivative of the sample's mean NLL by log beta, near its optimum: beta^2 Var_p[z]."""
    p = (beta * sample.gaps).softmax(1)
    z = torch.where(p > 0, sample.gaps, 0.0)
    return beta**2 * float(((p * z**2).sum(1) - (p * z).sum(1) ** 2).mean())
