"""Temperature scaling, fitted to the exact optimum in a few passes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.base import Calibrator, ParameterCount
from segcal.cases import CaseSet
from segcal.cases.shares import added, in_shares
from segcal.fitting.data import FitData, Fitted, case_seed, check_voxels, in_groups, over_chunks
from segcal.fitting.limits import BETA, HIGHEST, LOWEST, Limits
from segcal.kernels import AffineMap, Voxels
from segcal.kernels.fitting_passes import TemperatureSums, begin_sums, end_sums, temperature_sums
from segcal.kernels.pieces_cpu import in_turn
from segcal.solvers import newton_1d
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


class HasTemperature:
    """A calibrator with a temperature, of which it keeps the inverse, ``beta``, as a buffer."""

    beta: Tensor

    @property
    def temperature(self) -> float:
        """The temperature T."""
        return 1 / float(self.beta)


class TemperatureScaling(HasTemperature, Calibrator):
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

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("beta", torch.ones((), dtype=torch.float64))

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
        suits = logits.is_cuda or self._affine().suits(logits)
        return kernels.apply_temperature(logits, float(self.beta)) if suits else None

    def _fit(self, data: FitData) -> Fitted:
        identity, sample = _first_pass(data.cases, data.seed)
        start, before = 1.0, temperature_sums(sample, 1.0)
        if before.count:

            def on_sample(beta: float) -> tuple[float, float, float]:
                return (before if beta == 1.0 else temperature_sums(sample, beta)).by_beta(beta)

            start = newton_1d(on_sample, start, (LOWEST, HIGHEST), tolerance=TOLERANCE).value
        return self.refine(data.cases, start, identity.nll / identity.count, identity.count)

    def refine(self, cases: CaseSet, start: float, nll_before: float, voxels: int) -> Fitted:
        """Set 1 / temperature to the optimum of all cases, from a starting point near it."""
        known: dict[float, tuple[float, float, float]] = {}

        def whole(beta: float) -> tuple[float, float, float]:
            known[beta] = in_shares(_sums_at, cases, beta, merge=added).by_beta(beta)
            return known[beta]

        beta = start
        for tolerance in (TOLERANCE, _FLAT_TOLERANCE):
            solution = newton_1d(whole, beta, (LOWEST, HIGHEST), tolerance=tolerance)
            beta, after, (_, slope, curvature) = solution.value, solution.objective, known[solution.value]
            small = abs(slope) <= _SMALL_STEP * beta * curvature
            if small or solution.active:
                break
        if small and slope and not solution.active:
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


def _sums_at(cases: CaseSet, beta: float) -> TemperatureSums:
    return end_sums(in_groups(cases, partial(begin_sums, beta=beta)))


_Drawn = dict[str, tuple[Tensor, Tensor]]  # logits (n, C) and labels (n,) of every case


def _first_pass(cases: CaseSet, seed: int) -> tuple[TemperatureSums, Voxels]:
    """The sums at T = 1, which also checks the data, and a random sample; of tensors on a GPU, the first chunk.

    Cases that have fewer voxels than would be drawn are taken whole.
    """
    share = 0.0 if cases.on_gpu else SAMPLE_VOXELS / len(cases)
    total, drawn = in_shares(_look, cases, share, seed, merge=added)
    if math.isnan(total.nll):
        for _ in over_chunks(cases, lambda _, chunk: temperature_sums(Voxels.of(chunk), 1.0)):
            pass  # raises at the unfit voxel
    check_voxels(total.count)
    if not share:
        return total, Voxels.of(next(cases[0].chunks()))
    logits, labels = zip(*(drawn[name] for name in cases.ids), strict=True)
    return total, Voxels(torch.cat(logits), torch.cat(labels))


def _look(cases: CaseSet, share: float, seed: int) -> tuple[TemperatureSums, _Drawn]:
    logits: dict[str, list[Tensor]] = {}
    labels: dict[str, list[Tensor]] = {}
    random: dict[str, np.random.Generator] = {}

    def draw(case: Case, chunk: Chunk) -> None:
        voxels, per_image = chunk.labels.numel(), chunk.labels[0].numel()
        in_case = math.prod((case.shape[0], *case.shape[2:]))
        if in_case <= share:
            drawn = torch.arange(voxels, device=chunk.logits.device)
        else:
            own = random.setdefault(case.id, np.random.default_rng(case_seed(seed, case.id)))
            part = math.ceil(share * voxels / in_case)
            drawn = torch.from_numpy(own.integers(voxels, size=part)).to(chunk.logits.device)
        valid = chunk.labels.flatten()[drawn] != chunk.ignore_index
        drawn = drawn[valid if chunk.mask is None else valid & chunk.mask.flatten()[drawn]]
        scores, item, place = chunk.logits.flatten(2).movedim(1, -1), drawn // per_image, drawn % per_image
        if scores.device.type == "cpu" and scores.dtype != torch.bfloat16:  # torch's threads would wait for each other
            found = torch.from_numpy(scores.detach().numpy()[item.numpy(), place.numpy()])
        else:
            found = scores[item, place].cpu()
        logits.setdefault(case.id, []).append(found)
        labels.setdefault(case.id, []).append(chunk.labels.flatten()[drawn].cpu().long())

    def draw_case(case: Case) -> None:
        for chunk in case.chunks():
            draw(case, chunk)

    def look(case: Case, chunk: Chunk) -> TemperatureSums | Tensor:
        begun = begin_sums(Voxels.of(chunk), 1.0)
        if share:
            draw(case, chunk)
        return begun

    if all(ref.memory == "cpu" for ref in cases.refs):  # read twice at no cost
        total = _sums_at(cases, 1.0)
        in_turn(lambda ref: draw_case(ref.open()), cases.refs)
    else:
        total = end_sums(over_chunks(cases, look))
    return total, {name: (torch.cat(logits[name]), torch.cat(labels[name])) for name in logits}
