"""A quasi-Newton method by blocks, for sums over very many data whose curvature is known roughly, from a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from segcal.solvers.quadratic import minimise_quadratic
from segcal.solvers.sampled import Whole
from segcal.solvers.solution import Box, FloatArray, Solution, checked_start, converged_message, refuse_start

_SHORTER = 0.25  # a refused step is shortened to this
_DECREASE = 1e-4  # of what the slope promises, at least
_CURVED = 0.2  # where the gradient has changed less than by this share of the model's, the model has its part (Powell)
# Added to the curvature at the start, in shares of the diagonal and of its mean: what a sample does not see may be
# steep. Steps teach where there is less.
_MORE, _EVENLY = 0.2, 1e-3
_REFUSALS = 12


def secant_newton(
    whole: Whole,
    start: ArrayLike,
    curvature: Sequence[tuple[Any, FloatArray]],
    lower: ArrayLike | None = None,
    upper: ArrayLike | None = None,
    *,
    gain: float = 1e-7,
    tolerance: float = 1e-8,
    max_passes: int = 200,
) -> Solution[FloatArray]:
    """The minimum of a smooth convex f over a box, by BFGS in every block (Nocedal and Wright 2006, chapters 6 and 18).

    The first model of the curvature is what the caller has, say of a sample; every pass corrects it along the step
    that was taken. Blocks are judged each on its own. Near the minimum it converges faster than any geometric series,
    where the error of a sample's curvature would leave one.

    Args:
        whole: ``x -> (value, gradient)``.
        start: Where to begin; moved into the box.
        curvature: ``(index, Hessian)`` of every block; the indices divide the variables.
        lower: Lower bounds: None, a number, or one per component.
        upper: Upper bounds, likewise.
        gain: Done when the models promise to lower f by no more than this; also done at ``tolerance``.
        tolerance: Done when the certificate of ``segcal.solvers.Solution`` is at most this.
        max_passes: Evaluations of f at most.

    Examples:
        >>> steep = np.array([1.0, 100.0])
        >>> bowl = lambda x: (0.5 * x @ (steep * x), steep * x)
        >>> solution = secant_newton(bowl, [1.0, 1.0], [(slice(None), np.eye(2))])
        >>> solution.converged, bool(solution.objective < 1e-6)
        (True, True)
    """
    x = checked_start(start)
    box = Box(lower, upper, x.size)
    x = box.project(x)
    value, gradient = whole(x.copy())
    values = np.asarray(value, np.float64).reshape(-1)
    if not (np.isfinite(values).all() and np.isfinite(gradient).all()):
        raise refuse_start(values.sum())
    parts = [
        _Part(index, x[index].copy(), float(own), gradient[index].copy(), np.array(block, np.float64), box[index])
        for (index, block), own in zip(curvature, values, strict=True)
    ]
    history, passes, enough = [float(values.sum())], 1, gain / len(parts)
    while passes < max_passes and any(part.moving(enough, tolerance) for part in parts):
        moving = [part for part in parts if part.moving(enough, tolerance)]
        for part in parts:
            x[part.index] = part.trial if part in moving else part.x
        value, gradient = whole(x.copy())
        passes += 1
        for part, own in zip(parts, np.asarray(value, np.float64).reshape(-1), strict=True):
            if part in moving:
                part.judge(float(own), gradient[part.index])
        history.append(sum(part.value for part in parts))
    slope = np.empty_like(x)
    for part in parts:
        x[part.index], slope[part.index] = part.x, part.gradient
    certificate, active = box.certificate(x, slope), box.active(x)
    converged = not any(part.moving(enough, tolerance) or part.refusals >= _REFUSALS for part in parts)
    return Solution(
        value=x,
        objective=history[-1],
        converged=converged,
        certificate=certificate,
        iterations=passes - 1,
        evaluations=passes,
        message=converged_message(certificate, active, False)
        if converged
        else f"not converged: projected gradient {certificate:.1e} after {passes} passes",
        active=active,
        flat=False,
        history=tuple(history),
    )


class _Part:
    """An independent function of some of the variables: where it is, its model, and the step it tries."""

    def __init__(
        self, index: Any, x: FloatArray, value: float, gradient: FloatArray, hessian: FloatArray, box: Box
    ) -> None:
        self.index, self.x, self.value, self.gradient, self.box = index, x, value, gradient, box
        diagonal = hessian.diagonal()
        self.hessian = hessian + np.diag(_MORE * (diagonal + _EVENLY * max(float(diagonal.mean()), 1e-300)))
        self._aim()

    def _aim(self) -> None:
        self.step = minimise_quadratic(self.hessian, self.gradient, self.x, self.box) - self.x
        self.slope = float(self.gradient @ self.step)
        self.promised = -(self.slope + 0.5 * float(self.step @ self.hessian @ self.step))
        self.scale, self.refusals = 1.0, 0

    def moving(self, enough: float, tolerance: float) -> bool:
        """Whether there is something to gain, and a way."""
        worth = self.promised > enough and self.box.certificate(self.x, self.gradient) > tolerance
        return worth and self.refusals < _REFUSALS

    @property
    def trial(self) -> FloatArray:
        """The next point to evaluate."""
        return self.box.project(self.x + self.scale * self.step)

    def judge(self, value: float, gradient: FloatArray) -> None:
        """Take the trial point and learn the curvature on the way, or shorten the step."""
        finite = bool(np.isfinite(value) and np.isfinite(gradient).all())
        if finite and value <= self.value + _DECREASE * self.scale * self.slope:
            self._learn(self.trial - self.x, gradient - self.gradient)
            self.x, self.value, self.gradient = self.trial, value, gradient.copy()
            self._aim()
        else:
            self.scale, self.refusals = self.scale * _SHORTER, self.refusals + 1

    def _learn(self, step: FloatArray, change: FloatArray) -> None:
        """BFGS, damped (Powell 1978) so that the model stays positive definite."""
        known = self.hessian @ step
        expected, found = float(step @ known), float(step @ change)
        if expected <= 0:
            return
        if found < _CURVED * expected:
            share = (1 - _CURVED) * expected / (expected - found)
            change, found = share * change + (1 - share) * known, _CURVED * expected
        self.hessian += np.outer(change, change) / found - np.outer(known, known) / expected
