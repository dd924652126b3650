"""Temperature scaling, fitted to the exact optimum in a few passes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.base import Calibrator, ParameterCount
from segcal.cases import CaseSet
from segcal.fitting.data import FitData, Fitted, check_voxels, over_chunks
from segcal.fitting.limits import BETA, HIGHEST, LOWEST, Limits
from segcal.kernels import AffineMap
from segcal.kernels.temperature import TemperatureSums, temperature_sums
from segcal.solvers import Solution, newton_1d
from segcal.types import Case, Chunk

__all__ = ["TemperatureScaling"]

# Voxels of the sample that gives the starting point: its optimum is within about 0.5 % of that of all voxels.
SAMPLE_VOXELS = 40_000
# The passes end at this slope of the mean NLL by beta.
TOLERANCE = 1e-4
# A last Newton step below this share of beta needs no further pass: its error is about 1e-8, the kernel's precision.
_SMALL_STEP = 0.01
# The slope to reach if the curvature is so low that the last step would be longer.
_FLAT_TOLERANCE = 1e-9


class TemperatureScaling(Calibrator):
    """``ts``: ``S(z / T)``, one temperature T for all voxels (Guo et al. 2017). Translation invariant, keeps the order.

    The NLL is convex in beta = 1/T. Newton's method on a sample gives the starting point, and then two passes over all
    voxels are usually enough. At the optimum NLL and entropy are equal (Ding et al. 2021, Theorem 4).

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), plant=[segcal.synthetic.Temperature(2.0)], coherence=0)
        >>> calibrator = TemperatureScaling().fit(cases)
        >>> 1.9 < calibrator.temperature < 2.1, calibrator.fit_report.converged
        (True, True)
    """

    id = "ts"
    title = "Temperature scaling"
    translation_invariant = True
    preserves = "order"
    beta: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("beta", torch.ones((), dtype=torch.float64))

    @property
    def temperature(self) -> float:
        """The temperature T."""
        return 1 / float(self.beta)

    def _summary(self) -> str:
        return f"T = {self.temperature:.4g}"

    def _affine(self) -> AffineMap:
        return AffineMap(self.beta)

    @classmethod
    def parameter_count(cls, num_classes: int) -> ParameterCount:
        """The temperature."""
        return ParameterCount(1, 1)

    def limits(self) -> dict[str, Limits]:
        """The bounds of the fit."""
        return {"beta": BETA}

    def _scores(self, logits: Tensor) -> Tensor:
        # The difference from the maximum is exact; scaling large logits directly would round small margins away.
        return (logits - logits.amax(1, keepdim=True)) * self.beta.to(logits)

    def _fast(self, kernels: Any, logits: Tensor) -> Any:
        return kernels.apply_temperature(logits, float(self.beta)) if self._affine().suits(logits) else None

    def _fit(self, data: FitData) -> Fitted:
        identity, logits, labels = _first_pass(data.cases, data.seed)
        start = 1.0
        if len(labels):

            def on_sample(beta: float) -> tuple[float, float, float]:
                return temperature_sums(logits, labels, beta).by_beta(beta)

            start = newton_1d(on_sample, 1.0, (LOWEST, HIGHEST), tolerance=TOLERANCE).value
        return self.refine(data.cases, start, identity.nll / identity.count, identity.count)

    def refine(self, cases: CaseSet, start: float, nll_before: float, voxels: int) -> Fitted:
        """Set 1 / temperature to the optimum of all cases, from a starting point near it."""
        known: dict[float, tuple[float, float, float]] = {}

        def whole(beta: float) -> tuple[float, float, float]:
            known[beta] = _pass(cases, beta).by_beta(beta)
            return known[beta]

        def minimum(start: float, tolerance: float) -> tuple[Solution[float], float, float]:
            found = newton_1d(whole, start, (LOWEST, HIGHEST), tolerance=tolerance)
            return found, *known[found.value][1:]

        solution, slope, curvature = minimum(start, TOLERANCE)
        if abs(slope) > _SMALL_STEP * solution.value * curvature and not solution.active:
            solution, slope, curvature = minimum(solution.value, _FLAT_TOLERANCE)
        beta, after = solution.value, solution.objective
        if 0 < abs(slope) <= _SMALL_STEP * beta * curvature and not solution.active:
            beta = min(max(beta - slope / curvature, LOWEST), HIGHEST)
            after -= 0.5 * slope**2 / curvature
        if after > nll_before:
            beta, after = 1.0, nll_before
        self.beta.fill_(beta)
        notes = []
        if solution.active:
            notes.append(f"1/T = {beta:g} is at its bound: the best map of these data is one-hot or uniform")
        outcome = solution.converged, solution.certificate, solution.evaluations
        return Fitted(nll_before, after, *outcome, voxels, notes)


def _pass(cases: CaseSet, beta: float) -> TemperatureSums:
    """The sums of all voxels."""
    return sum(over_chunks(cases, lambda _, chunk: _chunk_sums(chunk, beta)), TemperatureSums())


def _chunk_sums(chunk: Chunk, beta: float) -> TemperatureSums:
    return temperature_sums(chunk.logits, chunk.labels, beta, ignore_index=chunk.ignore_index, mask=chunk.mask)


def _first_pass(cases: CaseSet, seed: int) -> tuple[TemperatureSums, Tensor, Tensor]:
    """The sums at T = 1, which also checks the data, and a random sample: ``logits (n, C)``, ``labels (n,)``."""
    random, share = np.random.default_rng(seed), SAMPLE_VOXELS / len(cases)
    logits, labels = [torch.zeros(0, cases.num_classes)], [torch.zeros(0, dtype=torch.int64)]

    def look(case: Case, chunk: Chunk) -> TemperatureSums:
        voxels, per_image = chunk.labels.numel(), chunk.labels[0].numel()
        part = math.ceil(share * voxels / math.prod((case.shape[0], *case.shape[2:])))
        drawn = torch.from_numpy(random.integers(voxels, size=part)).to(chunk.logits.device)
        drawn = drawn[chunk.valid.flatten()[drawn]]
        logits.append(chunk.logits.flatten(2)[drawn // per_image, :, drawn % per_image].cpu())
        labels.append(chunk.labels.flatten()[drawn].cpu().long())
        return _chunk_sums(chunk, 1.0)

    total = sum(over_chunks(cases, look), TemperatureSums())
    check_voxels(total.count)
    return total, torch.cat(logits), torch.cat(labels)
