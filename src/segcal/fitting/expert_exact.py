"""The global optimum of an expert map: Newton's method on a sample, a few passes over everything, a certificate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.cases import CaseSet
from segcal.fitting.data import Fitted
from segcal.fitting.expert_fit import RememberedSums, Rows, Sums, expert_map, expert_sums
from segcal.fitting.expert_method import ExpertMethod
from segcal.fitting.expert_problem import ExpertProblem
from segcal.fitting.first_pass import FirstPass, most_voxels
from segcal.fitting.penalty import Quadratic, odir
from segcal.fitting.sampling import VoxelSample
from segcal.kernels import Features, fast_maps
from segcal.solvers import DampedNewton, Newton, SampledNewton, Solution, minimise

FloatArray = NDArray[np.float64]

#: Voxels of the sample that ``voxels="auto"`` fits to.
SAMPLE_VOXELS = 400_000
# Of them, those whose curvature is computed: at least this many, and so many for each parameter,
_CURVATURE_VOXELS, _VOXELS_PER_PARAMETER = 100_000, 15
# and the part of those on which Newton's method starts. It goes on on everything if that is no more than so many times
# as much again, and else needs no more than so many passes over everything.
_START, _PASSES = 3, 12
# Free maps of one class each have so many parameters that they fit a sample by going astray on all other voxels: they
# take damped steps with the curvature of all, or of so many.
_VOXELS_PER_FREE_PARAMETER = 60
#: An expert with fewer voxels than this for each of its parameters is shrunk toward its parent.
STARVED = 10
# Curvature given to shifts of all classes alike, which no softmax sees, so that they stay where they are.
_GAUGE = 1e-2
# The solver ends when it expects to gain no more than this, in nats per voxel; damped steps, whose last part is long,
# end at more where each reads everything.
_GAIN, _DAMPED_GAIN, _COMPLETE_GAIN = 1e-7, 5e-7, 1e-12
# The projected gradient at which damped steps end all the same. Where classes can nearly be told apart, parameters go
# far for little: a gradient of 1e-8 over a hundred units is 1e-6.
_FLAT = 1e-12
# Classes that a note lists.
_LISTED = 20


def sample_voxels(calibrator: ExpertMethod, num_classes: int, *, everything: bool) -> int:
    """How many voxels to draw: those to fit to or, where everything is read again, those for the curvature."""
    return min(SAMPLE_VOXELS, _curvature_voxels(calibrator, num_classes)) if everything else SAMPLE_VOXELS


def _goes_astray(calibrator: ExpertMethod) -> bool:
    return calibrator.routed and not calibrator.constrained


def _curvature_voxels(calibrator: ExpertMethod, num_classes: int) -> int:
    each = _VOXELS_PER_FREE_PARAMETER if _goes_astray(calibrator) else _VOXELS_PER_PARAMETER
    few = min(_CURVATURE_VOXELS, most_voxels(num_classes))
    return max(few, each * math.prod(calibrator.shape(num_classes)))


def fit_exactly(
    calibrator: ExpertMethod, first: FirstPass, cases: CaseSet | None, start: FloatArray | None = None
) -> Fitted:
    """Set the calibrator to its optimum on the sample of a first pass or, given the cases, on everything."""
    classes, sample, features = first.num_classes, first.sample, calibrator.features
    threads = torch.get_num_threads()
    centre = calibrator.scaled_identity(classes, first.beta())
    if np.isinf(calibrator.shrinkage):
        return _only_the_centre(calibrator, first, centre)
    penalties, notes = _penalties(calibrator, first, centre)
    problem = ExpertProblem(centre.shape, features, calibrator.basis(classes), penalties, first.total, threads)
    lower, upper = calibrator.bounds(classes, len(centre))
    if problem.basis is None:
        limits = lower.ravel(), upper.ravel()
    else:
        limits = np.full(problem.free * len(centre), lower.min()), np.full(problem.free * len(centre), upper.max())
    streaming = cases is not None and not sample.complete

    @cache
    def whole_sample() -> RememberedSums:
        return RememberedSums(_rows(sample, features, len(centre)), features, threads)

    def whole(x: FloatArray) -> tuple[FloatArray, FloatArray]:
        theta = problem.theta(x)
        if streaming:
            assert cases is not None
            return problem.combine(_stream(cases, theta, features, fast=not first.impossible), x)
        return problem.combine(whole_sample()(theta), x)

    def curvature(x: FloatArray, experts: Sequence[int]) -> list[FloatArray]:
        theta = problem.theta(x)
        if streaming:
            assert cases is not None
            sums = _stream_curvature(cases, theta, features, experts)
        else:
            sums = _curvature(whole_sample().rows, theta, features, experts)
        return [problem.hessian(e, sums[e]) for e in experts]

    solve = partial(minimise, lower=limits[0], upper=limits[1], blocks=problem.blocks())
    astray, rich = _goes_astray(calibrator), _curvature_voxels(calibrator, classes)
    x = problem.x(centre if start is None else start)
    rough = 1e-6 if calibrator.routed else 1e-4  # experts have few voxels each, and wander off from a rough start
    if len(sample) > rich // _START and start is None and not astray:
        few = _rows(sample.thin(rich // _START), features, len(centre))
        x = solve(Newton(partial(problem.with_curvature, few)), x, tolerance=rough).value
    solution: Solution[FloatArray] | None = None
    if (len(sample) > _START * rich or streaming) and not astray:
        some = _rows(sample.thin(rich) if rich < len(sample) else sample, features, len(centre))
        policy = SampledNewton(partial(problem.with_curvature, some), whole)
        solution = solve(policy, x, gain=_GAIN, max_evaluations=_PASSES)
        x = solution.value
    if solution is None or not solution.converged:
        if streaming or astray:
            gain = _DAMPED_GAIN if streaming else _COMPLETE_GAIN if sample.complete else _GAIN
            solution = solve(DampedNewton(whole, curvature), x, gain=gain, tolerance=_FLAT, max_evaluations=200)
        else:
            solution = solve(Newton(partial(problem.with_curvature, whole_sample().rows)), x)
    return _conclude(calibrator, first, problem, solution, notes, streaming)


def _rows(sample: VoxelSample, features: Features, experts: int) -> Rows:
    return Rows.of(sample.logits, sample.labels, sample.weights, features, experts)


def _stream(cases: CaseSet, theta: FloatArray, features: Features, *, fast: bool) -> Sums:
    """Sums over every voxel of the cases; the fast loops know nothing of impossible classes."""
    mapping = expert_map(theta, features)
    nll, gradient = np.zeros(len(theta)), np.zeros(theta.shape)
    for case in cases:
        for chunk in case.chunks():
            valid = chunk.valid
            if fast and fast_maps(chunk.logits) is not None:
                from segcal.kernels.expert_cpu import expert_gradient

                own_nll, own_gradient = expert_gradient(chunk.logits, chunk.labels, valid, mapping)
            else:
                z = chunk.logits.movedim(1, -1)[valid].cpu()
                rows = Rows.of(z, chunk.labels[valid].cpu(), np.ones(len(z)), features, len(theta))
                own_nll, own_gradient, _ = expert_sums(rows, theta, features)
            nll += own_nll
            gradient += own_gradient
        del case
    return Sums(nll, gradient, None)


def _stream_curvature(cases: CaseSet, theta: FloatArray, features: Features, experts: Sequence[int]) -> FloatArray:
    """The curvature ``(E, P, P)`` of some experts, over every voxel of theirs."""
    total = np.zeros((len(theta), theta[0].size, theta[0].size))
    wanted = torch.tensor(experts)
    for case in cases:
        for chunk in case.chunks():
            chosen = chunk.valid.cpu()
            if len(theta) > 1:
                chosen = chosen & torch.isin(chunk.logits.argmax(1).cpu(), wanted)
            z, labels = chunk.logits.movedim(1, -1).cpu()[chosen], chunk.labels.cpu()[chosen]
            rows = Rows.of(z, labels, np.ones(len(z)), features, len(theta))
            total += _curvature(rows, theta, features, experts)
        del case
    return total


def _curvature(rows: Rows, theta: FloatArray, features: Features, experts: Sequence[int]) -> FloatArray:
    threads = torch.get_num_threads()
    sums = expert_sums(rows, theta, features, curvature=True, experts=experts, threads=threads)
    assert sums.curvature is not None
    return sums.curvature


def _penalties(calibrator: ExpertMethod, first: FirstPass, centre: FloatArray) -> tuple[list[Quadratic], list[str]]:
    """What is added to each expert's NLL, and what to tell the user about it."""
    classes, features, (experts, outputs, inputs) = first.num_classes, calibrator.features, centre.shape
    lower, upper = calibrator.bounds(classes, experts)
    free = lower < upper
    names = calibrator.class_names or tuple(str(k) for k in range(classes))
    voxels = first.predicted if experts > 1 else np.array([first.total])
    basis = calibrator.basis(classes)
    size = int(free[0].sum()) if basis is None else basis.shape[1]
    needed = STARVED * size
    starved = [e for e in range(experts) if voxels[e] < needed]
    absent = [k for k in range(classes) if not first.true[k]] if features != "gaps" else []
    parents = centre
    notes = []
    if starved and experts > 1:
        parents = _pooled(calibrator, first, centre)
        few = _listed([f"{names[e]} ({voxels[e]:,})" for e in starved])
        notes.append(f"predicted too rarely for an expert of its own, so shrunk toward the pooled map: {few}")
    elif starved:
        notes.append(
            f"{first.total:,} voxels are few for {size} parameters, so the map is shrunk toward temperature scaling"
        )
    if absent:
        listed = _listed([names[k] for k in absent])
        notes.append(f"never true, so their part of the map is shrunk toward temperature scaling: {listed}")
    penalties = []
    for e in range(experts):
        penalty = Quadratic(outputs * inputs)
        if e in starved:
            strength = needed / max(int(voxels[e]), 1) - 1
            penalty.add(np.full(outputs * inputs, strength / first.total), parents[e].ravel())
        rows_absent = np.zeros((outputs, inputs))
        rows_absent[absent] = 1 / first.total
        penalty.add(rows_absent.ravel(), parents[e].ravel())
        if calibrator.shrinkage:
            weights = free[e] * (2 * calibrator.shrinkage / free[e].sum() / experts)
            penalty.add(weights.ravel(), centre[e].ravel())
        if calibrator.off_diagonal or calibrator.bias_penalty:
            matrix = odir(classes, features, e, calibrator.off_diagonal, calibrator.bias_penalty) / experts
            penalty.add(matrix, calibrator.identity(classes)[e].ravel())
        if not calibrator.constrained and not calibrator.shrinkage:
            shifts = np.kron(np.ones((outputs, 1)), np.eye(inputs))  # of a column of theta, alike for all classes
            seen = np.full(inputs, calibrator.off_diagonal > 0 or features == "own-logit")
            seen[-1] = calibrator.bias_penalty > 0
            if basis is not None:  # a shift that the basis cannot express is no gauge: it would change the map
                left = shifts - basis @ np.linalg.lstsq(basis, shifts, rcond=None)[0]
                seen |= np.abs(left).max(0) > 1e-9
            penalty.add(_GAUGE / outputs * (shifts * ~seen) @ shifts.T, centre[e].ravel())
        penalties.append(penalty)
    return penalties, notes


def _listed(names: list[str]) -> str:
    """Names in a row, of many the first."""
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def _pooled(calibrator: ExpertMethod, first: FirstPass, centre: FloatArray) -> FloatArray:
    """One map for all winners, as the experts' parent ``(E, K, J + 1)``."""
    features, total = calibrator.features, first.total
    sample = first.sample.thin(_CURVATURE_VOXELS // _START)
    rows = _rows(sample, features, 1)
    start = calibrator.scaled_identity(first.num_classes, first.beta(), experts=1)
    penalty = Quadratic(start.size)
    penalty.add(np.full(start.size, STARVED * start.size / total**2), start.ravel())
    problem = ExpertProblem(start.shape, features, None, [penalty], total, torch.get_num_threads())
    lower, upper = calibrator.bounds(first.num_classes, 1)
    policy = Newton(partial(problem.with_curvature, rows))
    solution = minimise(policy, start.ravel(), lower.ravel(), upper.ravel(), tolerance=1e-6)
    lower, upper = calibrator.bounds(first.num_classes, len(centre))
    return np.clip(np.broadcast_to(solution.value.reshape(start.shape), centre.shape), lower, upper)


def _conclude(
    calibrator: ExpertMethod,
    first: FirstPass,
    problem: ExpertProblem,
    solution: Solution[FloatArray],
    notes: list[str],
    streaming: bool,
) -> Fitted:
    """Take the solution, unless the identity is better on the data themselves."""
    sample, theta = first.sample, problem.theta(solution.value)
    weights = sample.weights / sample.total
    before = first.nll if streaming or sample.complete else float(weights @ _losses(sample.logits, sample.labels))
    after = solution.objective - sum(own.value(theta[e].ravel()) for e, own in enumerate(problem.penalties))
    if after > before:
        notes = [*notes, "the penalties leave nothing better than the identity, which is kept"]
        theta, after = calibrator.identity(first.num_classes), before
    calibrator.set_parameters(theta)
    if solution.flat:
        notes = [*notes, "some parameters are not determined by the data: the likelihood is level along them"]
    bounded = int(np.count_nonzero(solution.active))
    if bounded and not calibrator.constrained:
        largest = float(np.abs(solution.value).max())
        notes = [
            *notes,
            f"{bounded} parameters are at their bound of {largest:g}: beyond it the likelihood goes on rising",
        ]
    used = first.total if streaming else len(sample)
    if used < first.total:
        notes = [*notes, f"fitted to {sample.note(_losses(calibrator(sample.logits), sample.labels))}"]
    return Fitted(
        nll_before=before,
        nll_after=after,
        converged=solution.converged,
        certificate=solution.certificate,
        iterations=solution.iterations,
        voxels_used=used,
        notes=notes,
    )


def _only_the_centre(calibrator: ExpertMethod, first: FirstPass, centre: FloatArray) -> Fitted:
    """The limit of ever stronger shrinkage."""
    sample = first.sample
    calibrator.set_parameters(centre)
    before, after = (
        float(sample.weights @ _losses(scores, sample.labels)) / sample.total
        for scores in (sample.logits, calibrator(sample.logits))
    )
    return Fitted(
        nll_before=before,
        nll_after=after,
        converged=True,
        certificate=0.0,
        iterations=0,
        voxels_used=len(sample),
        notes=["infinite shrinkage: temperature scaling, as nearly as the constraints allow"],
    )


def _losses(scores: Tensor, labels: Tensor) -> FloatArray:
    return np.asarray(torch.nn.functional.cross_entropy(scores.double(), labels, reduction="none").numpy())
