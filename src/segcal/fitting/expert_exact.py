"""The global optimum of an expert map: the convex problem, its penalties, which solver to take, and what to report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np
import torch

from segcal.cases import CaseSet
from segcal.cases.shares import added, in_shares
from segcal.fitting.data import Fitted, over_chunks
from segcal.fitting.expert_form import ExpertForm, Quadratic, Strengths
from segcal.fitting.expert_sums import Rows, Sums, expert_map, expert_sums
from segcal.fitting.first_pass import FirstPass, most_voxels
from segcal.fitting.sampling import VoxelSample
from segcal.kernels import ExpertMap, fast_maps
from segcal.kernels.experts import Features
from segcal.solvers import DampedNewton, Newton, Policy, Problem, SampledNewton, Solution, minimise
from segcal.types import Case, Chunk, FloatArray

# Times and passes below: 19 classes, 524,288 voxels, one thread; ms, cms-op and cms-ap.
#: Voxels that ``voxels="auto"`` fits to. Of a million voxels it ends 5e-7 to 2e-6 nats above the optimum of all.
SAMPLE_VOXELS = 400_000
# Voxels whose curvature is computed: at least so many, and so many per parameter. A third of them takes 5 to 8 passes
# over the data instead of 2; three times as many take 2 to 2.5 times as long.
_CURVATURE_VOXELS, _VOXELS_PER_PARAMETER = 100_000, 15
# The same for free experts (cdc), whose fit computes the curvature of all voxels: data up to this size stay in memory.
_VOXELS_PER_FREE_PARAMETER = 60
# Newton's method starts on a third of those voxels. Starting on all or on a tenth takes 1.2 to 2 times as long.
_ROUGH = 3
# The certificate at which that start ends. Experts have few voxels each: from 1e-4 they need 4 to 5 passes, not 2.
_ROUGH_ROUTED, _ROUGH_POOLED = 1e-6, 1e-4
# Newton's method goes on with the whole sample up to 3 times those voxels. At 4 times it takes 1.4 to 2.1 times as long
# as SampledNewton.
_DIRECT = 3
# Passes of SampledNewton before it is given up; 2 to 9 were needed.
_PASSES = 12
# The expected gain, in nats per voxel, at which solvers end: fits end within 4e-7 of the optimum. Damped steps cost two
# reads of the data where they are streamed, and little where the sample is complete.
_GAIN, _STREAMED_GAIN, _COMPLETE_GAIN = 1e-7, 5e-7, 1e-12
# The certificate at which damped steps end. Where classes are nearly separable parameters move far for little gain: a
# gradient of 1e-8 over a hundred units is 1e-6 nats. Fits of cdc take about ninety passes.
_DAMPED_TOLERANCE, _DAMPED_PASSES = 1e-12, 200

# Voxels per parameter below which an expert is shrunk toward the map of all voxels.
_ENOUGH = 10
# Curvature of equal shifts of all classes. The softmax does not see them; without a penalty they would drift.
_SHIFT_CURVATURE = 1e-2
# Voxels that the map of all voxels is fitted to; as many as the start of the experts' own fit.
_POOLED_VOXELS = 100_000 // 3
# Class names that a note lists.
_LISTED = 20


class ExpertProblem:
    """Mean NLL plus penalties, as a function of the free parameters ``x`` of all experts.

    An expert's parameters are ``theta_e = basis @ x_e`` (or ``x_e`` itself), and every expert is a block of its own.
    The objective is that of the sample of the first pass or, given cases that it does not cover, of all their voxels.

    Attributes:
        streaming: Whether every evaluation of the objective reads the cases.
        blocks: The indices in ``x`` of every expert's parameters.
        bounds: Lower and upper bounds of ``x``.
    """

    def __init__(
        self, form: ExpertForm, first: FirstPass, penalties: list[Quadratic], cases: CaseSet | None = None
    ) -> None:
        self.form, self.first, self.penalties = form, first, penalties
        self.basis, self.threads = form.basis, torch.get_num_threads()
        self.cases = cases
        self.streaming = cases is not None and not first.sample.complete
        self._sums = partial(expert_sums, features=form.features, threads=self.threads)
        self._known: dict[int, dict[bytes, tuple[float, FloatArray]]] = defaultdict(dict)
        experts, outputs, columns = form.shape
        free = outputs * columns if self.basis is None else self.basis.shape[1]
        self.blocks = list(np.arange(experts * free).reshape(experts, free))
        lower, upper = form.bounds
        self.bounds = (lower.ravel(), upper.ravel()) if self.basis is None else (lower.min(), upper.max())

    def theta(self, x: FloatArray) -> FloatArray:
        """``(E, K, J + 1)`` of ``x (E F,)``."""
        blocks = x.reshape(len(self.blocks), -1)
        return (blocks if self.basis is None else blocks @ self.basis.T).reshape(self.form.shape)

    def x(self, theta: FloatArray) -> FloatArray:
        """The ``x`` of a theta that the basis can express."""
        blocks = theta.reshape(len(theta), -1)
        if self.basis is not None:
            blocks = np.linalg.lstsq(self.basis, blocks.T, rcond=None)[0].T
        return np.ascontiguousarray(blocks).ravel()

    def solve(self, policy: Policy[Any], x: FloatArray, **options: Any) -> Solution[FloatArray]:
        """The minimum that a policy finds from ``x``; the options are those of ``minimise``."""
        return minimise(policy, x, *self.bounds, blocks=self.blocks, **options)

    def penalty(self, theta: FloatArray) -> float:
        """The penalties of all experts."""
        return sum(own.value(part.ravel()) for own, part in zip(self.penalties, theta, strict=True))

    def on(self, sample: VoxelSample) -> Problem:
        """The objective on a sample: values by expert, gradient and Hessians."""
        rows = self._sample_rows if sample is self.first.sample else self._rows(sample)

        def problem(x: FloatArray) -> tuple[FloatArray, FloatArray, list[FloatArray]]:
            sums = self._sums(rows, self.theta(x), curvature=True)
            return *self._combine(sums, x), [self._hessian(e, own) for e, own in enumerate(sums.curvature)]

        return problem

    def whole(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Values by expert and gradient of the objective."""
        return self._combine(self._streamed(self.theta(x)) if self.streaming else self._remembered(self.theta(x)), x)

    def curvature(self, x: FloatArray, experts: Sequence[int]) -> list[FloatArray]:
        """Hessians of some experts."""
        theta = self.theta(x)
        if self.streaming:
            sums = self._streamed(theta, experts)
        else:
            sums = self._sums(self._sample_rows, theta, curvature=True, experts=experts)
        return [self._hessian(e, sums.curvature[e]) for e in experts]

    def _remembered(self, theta: FloatArray) -> Sums:
        """NLL and gradient on the sample; sums of experts that did not move are not computed again.

        A solver moves some experts while others rest, and returns to the point before where a step is refused: so the
        sums at the last two points of every expert are kept.
        """
        points = [own.tobytes() for own in theta]
        new = [e for e, point in enumerate(points) if point not in self._known[e]]
        if new:
            sums = self._sums(self._sample_rows, theta, experts=new)
            for e in new:
                last = list(self._known[e].items())[-1:]
                self._known[e] = {**dict(last), points[e]: (sums.nll[e], sums.gradient[e])}
        nll, gradient = zip(*(self._known[e][point] for e, point in enumerate(points)), strict=True)
        return Sums(np.array(nll), np.stack(gradient))

    def _streamed(self, theta: FloatArray, experts: Sequence[int] | None = None) -> Sums:
        """NLL and gradient over all voxels of the cases; given experts, over theirs only, and with curvature.

        The compiled loops have no curvature and cannot handle impossible classes.
        """
        assert self.cases is not None
        fast, threads = not experts and not self.first.impossible, self.threads if experts else 1
        options = self.form.features, experts, fast, threads
        return added(*in_shares(_share_sums, self.cases, theta, *options, merge=_added_exactly))

    @cached_property
    def _sample_rows(self) -> Rows:
        return self._rows(self.first.sample)

    def _rows(self, sample: VoxelSample) -> Rows:
        return Rows.of(sample.logits, sample.labels, sample.weights, self.form.features, len(self.blocks))

    def _hessian(self, expert: int, curvature: FloatArray) -> FloatArray:
        """An expert's Hessian ``(F, F)`` from the sums ``(P, P)`` over its voxels."""
        hessian = curvature / self.first.total + self.penalties[expert].matrix
        return hessian if self.basis is None else self.basis.T @ hessian @ self.basis

    def _combine(self, sums: Sums, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Values by expert ``(E,)`` and the gradient ``(E F,)``, penalties included."""
        theta = self.theta(x).reshape(len(self.blocks), -1)
        values = sums.nll / self.first.total
        gradient = sums.gradient.reshape(theta.shape) / self.first.total
        for e, penalty in enumerate(self.penalties):
            values[e] += penalty.value(theta[e])
            gradient[e] += penalty.gradient(theta[e])
        return values, (gradient if self.basis is None else gradient @ self.basis).ravel()


def _share_sums(
    cases: CaseSet, theta: FloatArray, features: Features, experts: Sequence[int] | None, fast: bool, threads: int
) -> tuple[Sums, Sums]:
    """``ExpertProblem._streamed`` of some cases, and what rounding has lost of it."""

    def chunk_sums(_: Case, chunk: Chunk) -> Sums:
        if fast and fast_maps(chunk.logits) is not None:
            from segcal.kernels.expert_cpu import expert_gradient

            return Sums(*expert_gradient(chunk.logits, chunk.labels, chunk.valid, expert_map(theta, features)))
        chosen = chunk.valid.cpu()
        if experts and len(theta) > 1:
            chosen = chosen & torch.isin(chunk.logits.argmax(1).cpu(), torch.tensor(experts))
        z, labels = chunk.logits.movedim(1, -1).cpu()[chosen], chunk.labels.cpu()[chosen]
        rows = Rows.of(z, labels, np.ones(len(z)), features, len(theta))
        return expert_sums(rows, theta, features, curvature=bool(experts), experts=experts, threads=threads)

    nothing = Sums(*[np.zeros(())] * 3)
    return reduce(_added_exactly, ((sums, nothing) for sums in over_chunks(cases, chunk_sums)))


def _added_exactly(mine: tuple[Sums, Sums], other: tuple[Sums, Sums]) -> tuple[Sums, Sums]:
    """Sums, and what rounding has lost of them (Knuth's two-sum), so that their order does not matter.

    Where parameters are hardly determined, the rounding of a sum in another order would move them by 1e-8.
    """
    total, lost = added(mine[0], other[0]), added(mine[1], other[1])
    moved = Sums(*(whole - own for whole, own in zip(total, mine[0], strict=True)))
    errors = (
        (own - (whole - part)) + (new - part) + low
        for whole, own, new, part, low in zip(total, mine[0], other[0], moved, lost, strict=True)
    )
    return total, Sums(*errors)


def sample_voxels(form: ExpertForm, *, everything: bool) -> int:
    """How many voxels to draw: those to fit to or, where all voxels are read again, those for the curvature."""
    return min(SAMPLE_VOXELS, _curvature_voxels(form)) if everything else SAMPLE_VOXELS


def fit_exactly(
    form: ExpertForm, strengths: Strengths, first: FirstPass, cases: CaseSet | None, start: FloatArray | None = None
) -> tuple[FloatArray, Fitted]:
    """The optimal theta on the sample of a first pass or, given the cases, on all their voxels; and the report."""
    centre = form.scaled_identity(first.beta())
    if np.isinf(strengths.shrinkage):
        before, after = (_sample_nll(first.sample, own) for own in (None, expert_map(centre, form.features)))
        note = "infinite shrinkage: temperature scaling, as nearly as the constraints allow"
        return centre, Fitted(before, after, True, 0.0, 0, len(first.sample), [note])
    penalties, notes = _penalties(form, strengths, first, centre)
    problem = ExpertProblem(form, first, penalties, cases)
    solution = _solve(problem, problem.x(centre if start is None else start), warm=start is not None)
    return _conclude(problem, solution, notes)


def _solve(problem: ExpertProblem, x: FloatArray, *, warm: bool) -> Solution[FloatArray]:
    """Choose the step policy; see the table in ``segcal.solvers.driver``. A warm start needs no rough fit first."""
    form, sample, needed = problem.form, problem.first.sample, _curvature_voxels(problem.form)
    if _overfits(form):
        return _solve_damped(problem, x)
    if len(sample) > needed // _ROUGH and not warm:
        tolerance = _ROUGH_ROUTED if form.routed else _ROUGH_POOLED
        x = problem.solve(Newton(problem.on(sample.thin(needed // _ROUGH))), x, tolerance=tolerance).value
    if problem.streaming or len(sample) > _DIRECT * needed:
        sampled = SampledNewton(problem.on(sample.thin(needed)), problem.whole)
        solution = problem.solve(sampled, x, gain=_GAIN, max_evaluations=_PASSES)
        if solution.converged:
            return solution
        x = solution.value
    return _solve_damped(problem, x) if problem.streaming else problem.solve(Newton(problem.on(sample)), x)


def _solve_damped(problem: ExpertProblem, x: FloatArray) -> Solution[FloatArray]:
    gain = _STREAMED_GAIN if problem.streaming else _COMPLETE_GAIN if problem.first.sample.complete else _GAIN
    policy = DampedNewton(problem.whole, problem.curvature)
    return problem.solve(policy, x, gain=gain, tolerance=_DAMPED_TOLERANCE, max_evaluations=_DAMPED_PASSES)


def _overfits(form: ExpertForm) -> bool:
    """Whether a map has so many free parameters that it fits a sample at the cost of all other voxels."""
    return form.routed and not form.constrained


def _curvature_voxels(form: ExpertForm) -> int:
    each = _VOXELS_PER_FREE_PARAMETER if _overfits(form) else _VOXELS_PER_PARAMETER
    return max(min(_CURVATURE_VOXELS, most_voxels(form.num_classes)), each * math.prod(form.shape))


def _conclude(problem: ExpertProblem, solution: Solution[FloatArray], notes: list[str]) -> tuple[FloatArray, Fitted]:
    """The solution and its report, or the identity where that is better on the data themselves."""
    form, first, theta = problem.form, problem.first, problem.theta(solution.value)
    whole = problem.streaming or first.sample.complete
    before = first.nll if whole else _sample_nll(first.sample)
    after = solution.objective - problem.penalty(theta)
    if after > before:
        notes.append("the penalties leave nothing better than the identity, which is kept")
        theta, after = form.identity, before
    if solution.flat:
        notes.append("some parameters are not determined by the data: the likelihood is constant along them")
    bounded = int(np.count_nonzero(solution.active))
    if bounded and not form.constrained:
        largest = float(np.abs(solution.value).max())
        notes.append(f"{bounded} parameters are at their bound of {largest:g}: beyond it the likelihood still rises")
    if not whole:
        losses = _losses(first.sample, expert_map(theta, form.features))
        notes.append(f"fitted to {first.sample.note(losses)}")
    used = first.total if whole else len(first.sample)
    return theta, Fitted(before, after, solution.converged, solution.certificate, solution.iterations, used, notes)


def _penalties(
    form: ExpertForm, strengths: Strengths, first: FirstPass, centre: FloatArray
) -> tuple[list[Quadratic], list[str]]:
    """The penalty of each expert, and notes for the user; ``centre`` is temperature scaling as a theta."""
    experts, outputs, columns = form.shape
    free, basis = np.less(*form.bounds), form.basis
    size = int(free[0].sum()) if basis is None else basis.shape[1]
    voxels = first.predicted if experts > 1 else np.array([first.total])
    few = np.flatnonzero(voxels < _ENOUGH * size)
    absent = np.flatnonzero((first.true == 0) & (form.features != "gaps"))
    parents, notes = centre, []
    if len(few) and experts > 1:
        parents = _pooled(form, first)
        listed = _listed([f"{first.class_names[e]} ({voxels[e]:,})" for e in few])
        notes.append(f"predicted too rarely for an expert of its own, so shrunk toward the pooled map: {listed}")
    elif len(few):
        few_voxels = f"{first.total:,} voxels are few for {size} parameters"
        notes.append(f"{few_voxels}, so the map is shrunk toward temperature scaling")
    if len(absent):
        listed = _listed([first.class_names[k] for k in absent])
        notes.append(f"never true, so their part of the map is shrunk toward temperature scaling: {listed}")
    penalties = []
    for e, parent in enumerate(parents.reshape(experts, -1)):
        penalty = Quadratic(outputs * columns)
        if e in few:
            strength = _ENOUGH * size / max(int(voxels[e]), 1) - 1
            penalty.add(np.full(outputs * columns, strength / first.total), parent)
        if len(absent):
            never_true = np.zeros((outputs, columns))
            never_true[absent] = 1 / first.total
            penalty.add(never_true.ravel(), parent)
        if strengths.shrinkage:
            penalty.add((free[e] * (2 * strengths.shrinkage / free[e].sum() / experts)).ravel(), centre[e].ravel())
        if strengths.off_diagonal or strengths.bias:
            matrix = form.odir(e, strengths.off_diagonal, strengths.bias) / experts
            penalty.add(matrix, form.identity[e].ravel())
        if not form.constrained and not strengths.shrinkage:
            penalty.add(_shift_penalty(form, strengths), centre[e].ravel())
        penalties.append(penalty)
    return penalties, notes


def _shift_penalty(form: ExpertForm, strengths: Strengths) -> FloatArray:
    """The matrix that penalises equal shifts of all classes, one for each column of theta that nothing else fixes."""
    _, outputs, columns = form.shape
    shifts = np.kron(np.ones((outputs, 1)), np.eye(columns))
    fixed = np.full(columns, strengths.off_diagonal > 0 or form.features == "own-logit")
    fixed[-1] = strengths.bias > 0
    basis = form.basis
    if basis is not None:  # a shift outside the basis would change the map
        outside = shifts - basis @ np.linalg.lstsq(basis, shifts, rcond=None)[0]
        fixed |= np.abs(outside).max(0) > 1e-9
    return np.asarray(_SHIFT_CURVATURE / outputs * (shifts * ~fixed) @ shifts.T)


def _pooled(form: ExpertForm, first: FirstPass) -> FloatArray:
    """One map fitted to all voxels, as the parent of every expert ``(E, K, J + 1)``."""
    pooled = replace(form, routed=False)
    start = pooled.scaled_identity(first.beta())
    penalty = Quadratic(start.size)
    penalty.add(np.full(start.size, _ENOUGH * start.size / first.total**2), start.ravel())
    problem = ExpertProblem(pooled, first, [penalty])
    found = problem.solve(Newton(problem.on(first.sample.thin(_POOLED_VOXELS))), start.ravel(), tolerance=1e-6)
    return np.clip(np.broadcast_to(problem.theta(found.value), form.shape), *form.bounds)


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def _sample_nll(sample: VoxelSample, mapping: ExpertMap | None = None) -> float:
    return float(sample.weights / sample.total @ _losses(sample, mapping))


def _losses(sample: VoxelSample, mapping: ExpertMap | None = None) -> FloatArray:
    scores = sample.logits
    if mapping is not None:
        kernels = fast_maps(scores)
        scores = mapping(scores) if kernels is None else kernels.apply_experts(scores, mapping, keep=False)
    return np.asarray(torch.nn.functional.cross_entropy(scores.double(), sample.labels, reduction="none").numpy())
