"""Expert maps of so many parameters that no Hessian fits into memory: limited-memory BFGS, expert by expert.

Experts do not share parameters, so each is a problem of its own, on its own voxels. What makes the method fast are the
coordinates y of ``theta = S y V'`` (S scales every number, V turns rows), in which curvatures are about 1. Free maps
are turned to the principal axes of their features: logits of many classes are strongly correlated. Bounds do not allow
that for constrained maps, whose V is the identity. Shifts that the softmax does not see are held, not penalised: the
curvature of a penalty would be far from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from segcal.fitting.expert_form import ExpertForm
from segcal.fitting.expert_problem import ExpertProblem
from segcal.fitting.expert_sums import Rows, diagonal
from segcal.solvers import Solution, limited_memory
from segcal.solvers.limited import WINDOW
from segcal.solvers.solution import Box
from segcal.types import FloatArray

# Evaluations, at most, of the sample and of all voxels; at 150 classes 60 to 400 were needed, and then 20 to 40.
_MOST, _MOST_STREAMED = 500, 60
# Steps that are kept, at most and at least, and numbers in them: of all experts of 150 classes the least number.
_KEPT, _LEAST_KEPT, _NUMBERS = 20, 5, 2**24
# The gain at which a fit ends on all voxels, whose sums are partly float32, as a multiple of that on the sample.
_STREAMED_GAIN = 5
# Curvatures below this share of the largest are taken for it.
_FLOOR = 1e-10


@dataclass(frozen=True)
class _Coordinates:
    """``theta = S y V'`` of one expert: ``scale (K, L)``, and ``turn (L, L)`` or None for the identity.

    In vector scaling, the bias is that at a typical logit of its class, ``centre (C,)``, not at 0. Columns of theta
    that are ``unseen (L,)`` keep their mean, ``level (L,)``.
    """

    form: ExpertForm
    scale: FloatArray
    turn: FloatArray | None
    centre: FloatArray
    unseen: FloatArray
    level: FloatArray

    @classmethod
    def of(cls, problem: ExpertProblem, rows: Rows, theta: FloatArray, unseen: FloatArray, expert: int) -> _Coordinates:
        """Those in which the curvature at ``theta (K, L)`` is about 1."""
        form, ridge = problem.form, problem.penalties[expert].diagonal().reshape(theta.shape)
        turn, centre = None, np.zeros(len(theta))
        if form.features == "own-logit":
            count, first, second = diagonal(rows, theta, form.features).T
            centre = first / np.maximum(count, 1e-300)
            curvature = np.stack((second - centre * first, count), 1)
        else:
            if not form.constrained:
                gram = (rows.x * rows.weight[:, None]).T @ rows.x
                if form.equal_row_sums:  # one axis, the last, is that of the sum that all rows share
                    along = np.append(np.ones(len(gram) - 1), 0) / np.sqrt(len(gram) - 1)
                    across = np.eye(len(gram)) - np.outer(along, along)
                    gram = across @ gram @ across + 2 * np.trace(gram) * np.outer(along, along)
                turn = np.linalg.eigh(gram)[1]
                ridge = np.broadcast_to(ridge.mean(1, keepdims=True), theta.shape)
            curvature = diagonal(rows, theta, form.features, turn)
        curvature = curvature / problem.first.total + ridge
        if form.equal_row_sums:
            curvature[:, -1] = curvature[:, -1].mean()
        scale = 1 / np.sqrt(np.maximum(curvature, _FLOOR * curvature.max(initial=1e-300)))
        return cls(form, scale, turn, centre, unseen, unseen * theta.mean(0))

    @property
    def _vector(self) -> bool:
        return self.form.features == "own-logit"

    def theta(self, y: FloatArray) -> FloatArray:
        """``(K, L)`` of ``y (P,)``."""
        scaled = self.scale * y.reshape(self.scale.shape)
        if self._vector:
            scaled[:, 1] -= self.centre * scaled[:, 0]
        found = scaled if self.turn is None else self.form.project(scaled @ self.turn.T)
        found += self.level - self.unseen * found.mean(0)
        return found

    def gradient(self, slope: FloatArray) -> FloatArray:
        """The gradient by y ``(P,)`` from that by theta ``(K, L)``."""
        slope = slope - self.unseen * slope.mean(0)
        turned = slope if self.turn is None else self.form.project(slope) @ self.turn
        if self._vector:
            turned[:, 0] -= self.centre * turned[:, 1]
        return (self.scale * turned).ravel()

    def bounds(self, expert: int) -> tuple[FloatArray, FloatArray]:
        """Bounds of y; infinite where axes are turned, and for the biases of vector scaling."""
        lower, upper = (own[expert] / self.scale for own in self.form.bounds)
        unbounded = slice(None) if self.turn is not None else slice(1, 2) if self._vector else slice(0)
        lower[:, unbounded], upper[:, unbounded] = -np.inf, np.inf
        return lower.ravel(), upper.ravel()

    def y(self, theta: FloatArray) -> FloatArray:
        """``(P,)`` of ``theta (K, L)``."""
        turned = theta.copy() if self.turn is None else theta @ self.turn
        if self._vector:
            turned[:, 1] += self.centre * turned[:, 0]
        return (turned / self.scale).ravel()


def solve_limited(problem: ExpertProblem, start: FloatArray, unseen: FloatArray, gain: float) -> Solution[FloatArray]:
    """The minimum on the sample, expert by expert; where cases are streamed, from there that of all their voxels.

    ``unseen (L,)`` is 1 for the columns of theta whose equal shifts in all rows change nothing.
    """
    theta = problem.theta(start).copy()
    outcomes, coordinates = [], []
    for e in range(len(theta)):
        own, found = _solve_expert(problem, e, theta[e], unseen, gain / len(theta))
        theta[e] = own.theta(found.value)
        outcomes.append(found)
        coordinates.append(own)
    if problem.streaming:
        found = _solve_all(problem, theta, coordinates, _STREAMED_GAIN * gain)
        theta = _together(coordinates, found.value)
        outcomes.append(found)
    lower, upper = problem.bounds
    box = Box(lower, upper, len(start))
    x = box.project(problem.x(theta))  # free maps are far from their bounds, unless the data are separable
    values, gradient = problem.whole(x)
    certificate, objective = box.certificate(x, gradient), float(values.sum())
    decisive = outcomes[-1:] if problem.streaming else outcomes
    unfinished = [found.history[-1 - WINDOW] - found.history[-1] for found in decisive if not found.converged]
    left = (
        f"gradients ran out in {len(unfinished)} of {len(decisive)} fits, whose last {WINDOW} steps lowered the NLL by"
    )
    return replace(
        max(outcomes, key=lambda found: found.iterations),
        value=x,
        objective=objective,
        converged=not unfinished,
        certificate=certificate,
        evaluations=sum(found.evaluations for found in outcomes),
        message=f"not converged: {left} {sum(unfinished):.1e}" if unfinished else "converged",
        active=box.active(x),
    )


def _solve_expert(
    problem: ExpertProblem, expert: int, theta: FloatArray, unseen: FloatArray, gain: float
) -> tuple[_Coordinates, Solution[FloatArray]]:
    """The minimum of one expert on the sample."""
    rows, penalty, total = problem.sample_rows.of_expert(expert), problem.penalties[expert], problem.first.total
    own = _Coordinates.of(problem, rows, theta, unseen, expert)

    def whole(y: FloatArray) -> tuple[float, FloatArray]:
        at = own.theta(y)
        sums, flat = problem.sums(rows, at[None]), at.ravel()
        slope = sums.gradient[0] / total + penalty.gradient(flat).reshape(at.shape)
        return float(sums.nll[0]) / total + penalty.value(flat), own.gradient(slope)

    bounds = own.bounds(expert)
    found = limited_memory(whole, own.y(theta), *bounds, gain=gain, max_evaluations=_MOST, memory=_KEPT)
    return own, found


def _solve_all(
    problem: ExpertProblem, theta: FloatArray, coordinates: Sequence[_Coordinates], gain: float
) -> Solution[FloatArray]:
    """The minimum of all experts on all voxels, which every evaluation reads."""

    def whole(y: FloatArray) -> tuple[float, FloatArray]:
        at = _together(coordinates, y)
        values, gradient = problem.combine(problem.streamed(at), at)
        slopes = zip(coordinates, gradient.reshape(at.shape), strict=True)
        return float(values.sum()), np.concatenate([own.gradient(slope) for own, slope in slopes])

    lower, upper = zip(*(own.bounds(e) for e, own in enumerate(coordinates)), strict=True)
    start = np.concatenate([own.y(part) for own, part in zip(coordinates, theta, strict=True)])
    bounds = (np.concatenate(lower), np.concatenate(upper))
    kept = min(_KEPT, max(_LEAST_KEPT, _NUMBERS // len(start)))
    return limited_memory(whole, start, *bounds, gain=gain, max_evaluations=_MOST_STREAMED, memory=kept)


def _together(coordinates: Sequence[_Coordinates], y: FloatArray) -> FloatArray:
    """``theta (E, K, L)`` of the coordinates of all experts."""
    parts = zip(coordinates, y.reshape(len(coordinates), -1), strict=True)
    return np.stack([own.theta(part) for own, part in parts])
