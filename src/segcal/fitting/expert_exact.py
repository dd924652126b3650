"""The global optimum of an expert map: the convex problem, its penalties, which solver to take, and what to report."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import diags_array, kron

from segcal.cases import CaseSet
from segcal.errors import listed
from segcal.fitting.data import Fitted
from segcal.fitting.expert_form import ExpertForm, Quadratic, Strengths
from segcal.fitting.expert_limited import solve_limited
from segcal.fitting.expert_problem import ExpertProblem
from segcal.fitting.expert_sums import expert_map
from segcal.fitting.first_pass import FirstPass, most_voxels
from segcal.fitting.sampling import VoxelSample
from segcal.kernels import ExpertMap, fast_maps
from segcal.kernels.dispatch import fast_rows
from segcal.kernels.pieces_cpu import in_ranges
from segcal.solvers import DampedNewton, Newton, SampledNewton, Solution
from segcal.types import FloatArray

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

# Numbers in the Hessian of an expert, and of all experts, beyond which L-BFGS is taken: from 38 classes of ms, 725 of
# vs and 28 of cms-op on. With 19 classes it takes as long as Newton's method (processor seconds of ms 7.0 and 7.7, of
# cms-op 21 and 19); a voxel's curvature costs C^4 operations, its gradient C^2.
_HESSIAN, _HESSIANS = 2**21, 2**24
# The gain at which the map of all voxels is good enough as a parent.
_POOLED_GAIN = 1e-5

# Voxels per parameter below which an expert, or the weights of a class, are shrunk.
_ENOUGH = 10
# Curvature of equal shifts of all classes. The softmax does not see them; without a penalty they would drift.
_SHIFT_CURVATURE = 1e-2
# Voxels that the map of all voxels is fitted to, unless its parameters need more; as many as the start of the experts'
# own fit.
_POOLED_VOXELS = 100_000 // 3


def sample_voxels(form: ExpertForm, *, everything: bool) -> int:
    """How many voxels to draw: those to fit to or, where all voxels are read again, those for the curvature."""
    few = everything and not many_parameters(form)
    return min(SAMPLE_VOXELS, _curvature_voxels(form)) if few else SAMPLE_VOXELS


def fit_exactly(
    form: ExpertForm, strengths: Strengths, first: FirstPass, cases: CaseSet | None, start: FloatArray | None = None
) -> tuple[FloatArray, Fitted]:
    """The optimal theta on the sample of a first pass or, given the cases, on all their voxels; and the report."""
    centre = form.scaled_identity(first.beta())
    if np.isinf(strengths.shrinkage):
        before, after = (_sample_nll(first.sample, own) for own in (None, expert_map(centre, form.features)))
        note = "infinite shrinkage: temperature scaling, as nearly as the constraints allow"
        return centre, Fitted(before, after, True, 0.0, 0, len(first.sample), [note])
    unseen = _unseen_shifts(form, strengths)
    penalties, parents, notes = _penalties(form, strengths, first, centre, unseen, everything=cases is not None)
    problem = ExpertProblem(form, first, penalties, cases)
    if start is not None:
        return _conclude(problem, _solve(problem, problem.x(start), unseen, warm=True), notes)
    near = parents if many_parameters(form) else centre  # where voxels are few, L-BFGS need not go far from there
    return _conclude(problem, _solve(problem, problem.x(near), unseen, warm=False), notes)


def _solve(problem: ExpertProblem, x: FloatArray, unseen: FloatArray, *, warm: bool) -> Solution[FloatArray]:
    """Choose the step policy; see the table in ``segcal.solvers.driver``. A warm start needs no rough fit first."""
    form, sample, needed = problem.form, problem.first.sample, _curvature_voxels(problem.form)
    if many_parameters(form):
        return solve_limited(problem, x, unseen, _GAIN)
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


def many_parameters(form: ExpertForm) -> bool:
    """Whether a map has so many parameters that gradients alone are faster, or Hessians too large."""
    experts, outputs, columns = form.shape
    numbers = (outputs * columns) ** 2
    return numbers > _HESSIAN or experts * numbers > _HESSIANS


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
    if many_parameters(form):
        notes.append(f"{math.prod(form.shape):,} parameters, too many for Newton's method: fitted by L-BFGS")
        if not solution.converged:
            notes.append(solution.message)
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
    form: ExpertForm,
    strengths: Strengths,
    first: FirstPass,
    centre: FloatArray,
    unseen: FloatArray,
    *,
    everything: bool = False,
) -> tuple[list[Quadratic], FloatArray, list[str]]:
    """The penalty of each expert, what experts are shrunk toward, and notes; ``centre`` is temperature scaling.

    An expert with few voxels is shrunk toward the map of all voxels. In a map without experts, the weights of a class
    with few voxels are shrunk instead: a handful is separable in the space of all logits, so that their likelihood
    would rise without end while that of other voxels falls. A bias needs no more than a handful. What counts are the
    voxels of the fit: those drawn or, with ``everything``, all.
    """
    experts, outputs, columns = form.shape
    free, basis = np.less(*form.bounds), form.basis
    size = int(free[0].sum()) if basis is None else basis.shape[1]
    true, predicted = (first.true, first.predicted) if everything else first.drawn
    voxels, all_voxels = (own if experts > 1 else own.sum(keepdims=True) for own in (predicted, first.predicted))
    strength = np.broadcast_to(_missing(voxels, all_voxels, size)[:, None, None], form.shape).copy()
    few = np.flatnonzero(strength[:, 0, 0])
    absent = np.flatnonzero((first.true == 0) & (form.features != "gaps"))
    parents, notes = centre, []
    if len(few) and experts > 1:
        parents = _pooled(form, first)
        names = listed([f"{first.class_names[e]} ({voxels[e]:,})" for e in few])
        notes.append(f"predicted too rarely for an expert of its own, so shrunk toward the pooled map: {names}")
    elif len(few):
        few_voxels = f"{voxels[0]:,} voxels are few for {size} parameters"
        notes.append(f"{few_voxels}, so the map is shrunk toward temperature scaling")
    if experts == 1 and form.features != "gaps":  # whose rows are ranks, not classes
        seen = np.maximum(true, predicted)
        rows = _missing(seen, np.maximum(first.true, first.predicted), columns)
        strength[0, :, :-1] = np.maximum(strength[0, :, :-1], rows[:, None])
        if rows.any() and not len(few):
            names = listed([f"{first.class_names[k]} ({seen[k]:,})" for k in np.flatnonzero(rows)])
            notes.append(f"rarely true or predicted, so their weights are shrunk toward temperature scaling: {names}")
    if len(absent):
        names = listed([first.class_names[k] for k in absent])
        notes.append(f"never true, so their part of the map is shrunk toward temperature scaling: {names}")
    penalties = []
    for e, parent in enumerate(parents.reshape(experts, -1)):
        penalty = Quadratic(outputs * columns)
        if strength[e].any():
            penalty.add(strength[e].ravel() / first.total, parent)
        if len(absent):
            never_true = np.zeros((outputs, columns))
            never_true[absent] = 1 / first.total
            penalty.add(never_true.ravel(), parent)
        if strengths.shrinkage:
            penalty.add((free[e] * (2 * strengths.shrinkage / free[e].sum() / experts)).ravel(), centre[e].ravel())
        if strengths.off_diagonal or strengths.bias:
            root = form.odir(e, strengths.off_diagonal, strengths.bias) / np.sqrt(experts)
            penalty.add(root, form.identity[e].ravel())
        if unseen.any() and not many_parameters(form):
            each = diags_array(np.sqrt(_SHIFT_CURVATURE / outputs) * unseen)
            penalty.add(kron(np.ones((1, outputs)), each, format="csr"), centre[e].ravel())
        penalties.append(penalty)
    return penalties, parents, notes


def _missing(voxels: NDArray[np.int64], all_voxels: NDArray[np.int64], parameters: int) -> FloatArray:
    """The strength of shrinkage where there are fewer voxels than parameters need; 0 where there are enough.

    Every one of these voxels stands for several of ``all_voxels``, and is weighted so: the strength is, too.
    """
    least = np.maximum(voxels, 1)
    return np.maximum(_ENOUGH * parameters / least - 1, 0) * np.maximum(all_voxels, 1) / least


def _unseen_shifts(form: ExpertForm, strengths: Strengths) -> FloatArray:
    """1 for the columns of theta ``(J + 1,)`` whose equal shifts in all rows change neither scores nor penalties."""
    free = not form.constrained and not strengths.shrinkage
    unseen = np.full(form.shape[2], float(free and not strengths.off_diagonal and form.features != "own-logit"))
    unseen[-1] = free and not strengths.bias
    return unseen


def _pooled(form: ExpertForm, first: FirstPass) -> FloatArray:
    """One map fitted to all voxels, as the parent of every expert ``(E, K, J + 1)``."""
    pooled, nothing = replace(form, routed=False), Strengths(0, 0, 0)
    needed = max(_POOLED_VOXELS, _ENOUGH * math.prod(pooled.shape))
    first = replace(first, sample=first.sample.thin(needed))
    start, unseen = pooled.scaled_identity(first.beta()), _unseen_shifts(pooled, nothing)
    problem = ExpertProblem(pooled, first, _penalties(pooled, nothing, first, start, unseen)[0])
    if many_parameters(pooled):
        found = solve_limited(problem, problem.x(start), unseen, _POOLED_GAIN)
    else:
        found = problem.solve(Newton(problem.on(first.sample)), problem.x(start), tolerance=1e-6)
    return np.clip(np.broadcast_to(problem.theta(found.value), form.shape), *form.bounds)


def _sample_nll(sample: VoxelSample, mapping: ExpertMap | None = None) -> float:
    return float(sample.weights / sample.total @ _losses(sample, mapping))


def _losses(sample: VoxelSample, mapping: ExpertMap | None = None) -> FloatArray:
    scores = sample.logits
    if mapping is not None:
        kernels = fast_maps(scores)
        scores = mapping(scores) if kernels is None else kernels.apply_experts(scores, mapping, keep=False)
    if (loops := fast_rows(scores)) is None:
        return np.asarray(torch.nn.functional.cross_entropy(scores.double(), sample.labels, reduction="none").numpy())
    given, losses = (scores.contiguous().numpy(), sample.labels.numpy()), np.empty(len(scores))
    in_ranges(lambda start, stop: loops.losses(*given, start, stop, losses), len(scores))
    return losses
