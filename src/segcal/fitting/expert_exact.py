"""The global optimum of an expert map: which solver to take, and what to report."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from segcal.cases import CaseSet
from segcal.fitting.data import Fitted
from segcal.fitting.expert_fit import expert_map
from segcal.fitting.expert_form import ExpertForm
from segcal.fitting.expert_penalties import expert_penalties
from segcal.fitting.expert_problem import ExpertProblem
from segcal.fitting.first_pass import FirstPass, most_voxels
from segcal.fitting.penalty import Strengths
from segcal.solvers import DampedNewton, Newton, SampledNewton, Solution, minimise
from segcal.types import FloatArray

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
# The solver ends when it expects to gain no more than this, in nats per voxel; damped steps, whose last part is long,
# end at more where each reads everything.
_GAIN, _DAMPED_GAIN, _COMPLETE_GAIN = 1e-7, 5e-7, 1e-12
# The projected gradient at which damped steps end all the same. Where classes can nearly be told apart, parameters go
# far for little: a gradient of 1e-8 over a hundred units is 1e-6.
_FLAT = 1e-12


def sample_voxels(form: ExpertForm, *, everything: bool) -> int:
    """How many voxels to draw: those to fit to or, where all voxels are read again, those for the curvature."""
    return min(SAMPLE_VOXELS, _curvature_voxels(form)) if everything else SAMPLE_VOXELS


def fit_exactly(
    form: ExpertForm,
    strengths: Strengths,
    first: FirstPass,
    cases: CaseSet | None = None,
    start: FloatArray | None = None,
) -> tuple[FloatArray, Fitted]:
    """The optimal theta on the sample of a first pass or, given the cases, on all their voxels; and the report."""
    centre = form.scaled_identity(first.beta())
    if np.isinf(strengths.shrinkage):
        return centre, _report_of_centre(form, first, centre)
    penalties, notes = expert_penalties(form, strengths, first, centre)
    problem = ExpertProblem(form, first, penalties, cases)
    solution = _solve(problem, problem.x(centre if start is None else start), warm=start is not None)
    return _conclude(problem, solution, notes)


def _solve(problem: ExpertProblem, x: FloatArray, *, warm: bool) -> Solution[FloatArray]:
    """Take the step policy that suits the problem; a warm start needs no rough fit before."""
    form, sample, rich = problem.form, problem.first.sample, _curvature_voxels(problem.form)
    solve = partial(minimise, lower=problem.lower, upper=problem.upper, blocks=problem.blocks)
    gain = _DAMPED_GAIN if problem.streaming else _COMPLETE_GAIN if sample.complete else _GAIN
    damped = DampedNewton(problem.whole, problem.curvature)
    if _overfits_samples(form):
        return solve(damped, x, gain=gain, tolerance=_FLAT, max_evaluations=200)
    if len(sample) > rich // _START and not warm:
        rough = 1e-6 if form.routed else 1e-4  # experts have few voxels each, and wander off from a rough start
        x = solve(Newton(problem.on(sample.thin(rich // _START))), x, tolerance=rough).value
    if problem.streaming or len(sample) > _START * rich:
        sampled = SampledNewton(problem.on(sample.thin(rich)), problem.whole)
        solution = solve(sampled, x, gain=_GAIN, max_evaluations=_PASSES)
        if solution.converged:
            return solution
        x = solution.value
    if problem.streaming:
        return solve(damped, x, gain=gain, tolerance=_FLAT, max_evaluations=200)
    return solve(Newton(problem.on(sample)), x)


def _overfits_samples(form: ExpertForm) -> bool:
    return form.routed and not form.constrained


def _curvature_voxels(form: ExpertForm) -> int:
    each = _VOXELS_PER_FREE_PARAMETER if _overfits_samples(form) else _VOXELS_PER_PARAMETER
    return max(min(_CURVATURE_VOXELS, most_voxels(form.num_classes)), each * math.prod(form.shape))


def _conclude(problem: ExpertProblem, solution: Solution[FloatArray], notes: list[str]) -> tuple[FloatArray, Fitted]:
    """The solution and its report, or the identity where that is better on the data themselves."""
    form, first, sample = problem.form, problem.first, problem.first.sample
    theta = problem.theta(solution.value)
    weights = sample.weights / sample.total
    whole = problem.streaming or sample.complete
    before = first.nll if whole else float(weights @ _losses(sample.logits, sample.labels))
    after = solution.objective - problem.penalty(theta)
    if after > before:
        notes.append("the penalties leave nothing better than the identity, which is kept")
        theta, after = form.identity, before
    if solution.flat:
        notes.append("some parameters are not determined by the data: the likelihood is level along them")
    bounded = int(np.count_nonzero(solution.active))
    if bounded and not form.constrained:
        largest = float(np.abs(solution.value).max())
        notes.append(f"{bounded} parameters are at their bound of {largest:g}: beyond it the likelihood goes on rising")
    if not whole:
        mapped = expert_map(theta, form.features)(sample.logits.double())
        notes.append(f"fitted to {sample.note(_losses(mapped, sample.labels))}")
    used = first.total if whole else len(sample)
    found = Fitted(before, after, solution.converged, solution.certificate, solution.iterations, used, notes)
    return theta, found


def _report_of_centre(form: ExpertForm, first: FirstPass, centre: FloatArray) -> Fitted:
    """The report of infinite shrinkage."""
    sample, mapping = first.sample, expert_map(centre, form.features)
    before, after = (
        float(sample.weights @ _losses(scores, sample.labels)) / sample.total
        for scores in (sample.logits, mapping(sample.logits.double()))
    )
    notes = ["infinite shrinkage: temperature scaling, as nearly as the constraints allow"]
    return Fitted(before, after, True, 0.0, 0, len(sample), notes)


def _losses(scores: Tensor, labels: Tensor) -> FloatArray:
    return np.asarray(torch.nn.functional.cross_entropy(scores.double(), labels, reduction="none").numpy())
