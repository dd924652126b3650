"""Newton's method with damping by blocks, where a value costs much less than the curvature."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from segcal.solvers.newton import Index
from segcal.solvers.quadratic import minimise_quadratic
from segcal.solvers.sampled import Whole
from segcal.solvers.solution import (
    Box,
    FloatArray,
    Solution,
    checked_start,
    converged_message,
    falls_on,
    refuse_start,
)

#: ``(x, numbers of blocks) -> Hessians`` of those blocks; they may be rough, which costs steps.
Curvature = Callable[[FloatArray, Sequence[int]], Sequence[FloatArray]]

# Damping at first, in shares of the mean curvature. It is alike in all directions: the steps that go astray are those
# along which there is next to no curvature.
_DAMPING = 1e-3
# The share of the promised decrease below which there is more damping, and above which there is less; by this factor.
_POOR, _GOOD, _FACTOR = 0.25, 0.75, 4.0
_REFUSALS = 15
_NOISE = 1e-7  # changes of f, relative to f, that may be rounding, for f may be summed in float32
_SMALL = 0.1  # of its share of what is enough to gain: with less a block waits for the others
_NOTHING = 1e-3  # of that: a step that promises less is none


def damped_newton(
    whole: Whole,
    curvature: Curvature,
    start: ArrayLike,
    indices: Sequence[Index],
    lower: ArrayLike | None = None,
    upper: ArrayLike | None = None,
    *,
    gain: float = 1e-7,
    tolerance: float = 1e-8,
    max_passes: int = 200,
) -> Solution[FloatArray]:
    """The minimum of a smooth convex f over a box, by damped Newton steps in every block (Levenberg, Marquardt).

    A step that overshoots is not shortened but bent toward where the function is steep: along directions with next to
    no curvature Newton's own steps go astray. Each block has its own damping, and its curvature is asked for only where
    it has moved and goes on.

    Args:
        whole: ``x -> (value, gradient)``; for blocks the value is an array with the share of each.
        curvature: The Hessians of some blocks.
        start: Where to begin; moved into the box.
        indices: The variables of every block.
        lower: Lower bounds: None, a number, or one per component.
        upper: Upper bounds, likewise.
        gain: Done when undamped models promise to lower f by no more than this; also done at ``tolerance``.
        tolerance: Done when the certificate of ``segcal.solvers.Solution`` is at most this.
        max_passes: Evaluations of f at most.

    Examples:
        >>> def whole(x):
        ...     return np.sum(np.exp(x) - 3 * x), np.exp(x) - 3
        >>> solution = damped_newton(whole, lambda x, _: [np.diag(np.exp(x))], [5.0, -2.0], [slice(None)])
        >>> np.exp(solution.value).round(3), solution.converged
        (array([3., 3.]), True)
    """
    x = checked_start(start)
    box = Box(lower, upper, x.size)
    x = box.project(x)
    value, gradient = whole(x.copy())
    values = np.asarray(value, np.float64).reshape(-1)
    if not (np.isfinite(values).all() and np.isfinite(gradient).all()):
        raise refuse_start(values.sum())
    enough = _SMALL * gain / len(values)
    parts = [
        _Part(index, x[index].copy(), float(own), gradient[index].copy(), box[index], enough, tolerance)
        for index, own in zip(indices, values, strict=True)
    ]
    history, passes = [float(values.sum())], 1
    while passes < max_passes:
        moved = [n for n, part in enumerate(parts) if part.moved and not part.stationary]
        if moved:
            for n, hessian in zip(moved, curvature(x.copy(), moved), strict=True):
                parts[n].learn(np.array(hessian, np.float64))
        moving = [part for part in parts if part.moving]
        if not moving or sum(part.left for part in parts) <= gain:
            break
        for part in moving:
            x[part.index] = part.trial
        value, gradient = whole(x.copy())
        passes += 1
        for part, own in zip(parts, np.asarray(value, np.float64).reshape(-1), strict=True):
            if part in moving:
                part.judge(float(own), gradient[part.index].copy())
            x[part.index] = part.x
        history.append(sum(part.value for part in parts))
    slope = np.empty_like(x)
    for part in parts:
        slope[part.index] = part.gradient
    certificate, active, flat = box.certificate(x, slope), box.active(x), any(part.flat for part in parts)
    converged = sum(part.left for part in parts) <= gain
    return Solution(
        value=x,
        objective=history[-1],
        converged=converged,
        certificate=certificate,
        iterations=passes - 1,
        evaluations=passes,
        message=converged_message(certificate, active, flat)
        if converged
        else f"not converged: projected gradient {certificate:.1e} after {passes} passes",
        active=active,
        flat=flat,
        history=tuple(history),
    )


class _Part:
    """An independent function of some of the variables: where it is, its curvature there, and the step it tries."""

    def __init__(
        self, index: Index, x: FloatArray, value: float, gradient: FloatArray, box: Box, enough: float, tolerance: float
    ) -> None:
        self.index, self.x, self.value, self.gradient, self.box = index, x, value, gradient, box
        self.enough, self.tolerance = enough, tolerance
        self.damping, self.refusals, self.moved, self.gains, self.flat = _DAMPING, 0, True, np.inf, False

    @property
    def stationary(self) -> bool:
        """Whether it is at a minimum, by the gradient."""
        return self.box.certificate(self.x, self.gradient) <= self.tolerance

    @property
    def resting(self) -> bool:
        """Whether no step is taken, or what it promises is nothing."""
        return self.refusals >= _REFUSALS or (self.refusals > 0 and self.promised <= _NOTHING * self.enough)

    @property
    def left(self) -> float:
        """What there is to gain."""
        return 0.0 if self.stationary else self.gains

    @property
    def moving(self) -> bool:
        """Whether there is something to gain, and a way."""
        return self.left > self.enough and not self.resting

    def learn(self, hessian: FloatArray) -> None:
        """Take the curvature at the point that was reached."""
        self.hessian, self.moved = hessian, False
        step = minimise_quadratic(hessian, self.gradient, self.x, self.box) - self.x
        self.gains = self._promise(hessian, step)
        self._aim()

    def _promise(self, hessian: FloatArray, step: FloatArray) -> float:
        return -float(self.gradient @ step + 0.5 * step @ hessian @ step)

    def _aim(self) -> None:
        diagonal = self.hessian.diagonal()
        damped = self.hessian + self.damping * diagonal.mean() * np.eye(len(diagonal))
        self.trial = minimise_quadratic(damped, self.gradient, self.x, self.box)
        self.promised = self._promise(damped, self.trial - self.x)

    def judge(self, value: float, gradient: FloatArray) -> None:
        """Take the trial point where f is lower, and change the damping by how good the model was."""
        finite = bool(np.isfinite(value) and np.isfinite(gradient).all())
        fall = self.value - value
        if finite and self.promised <= _NOISE * abs(self.value):  # lost in the rounding of f, but not of its slope
            fall = -0.5 * float((self.gradient + gradient) @ (self.trial - self.x))
        share = fall / self.promised if finite and self.promised > 0 else -np.inf
        if share < _POOR:
            self.damping *= _FACTOR if share > 0 else _FACTOR**2
        elif share > _GOOD:
            self.damping /= _FACTOR
        if finite and fall > 0:
            step = self.trial - self.x
            before, after = float(self.gradient @ step), float(gradient @ step)
            self.flat = before < 0 and falls_on(step, self.x, after / before)
            self.x, self.value, self.gradient, self.refusals, self.moved = self.trial, value, gradient, 0, True
        else:
            self.refusals += 1
            self._aim()
