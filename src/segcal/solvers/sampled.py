"""Newton's method on a sample, corrected by gradients of everything: for sums over very many data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from segcal.solvers.newton import Index, Problem, projected_newton
from segcal.solvers.quadratic import minimise_quadratic
from segcal.solvers.solution import Box, FloatArray, Solution, checked_start, converged_message, refuse_start

#: ``x -> (value, gradient)``; for blocks the value is an array with the share of each.
Whole = Callable[[FloatArray], tuple[Any, FloatArray]]

# Steps on the sample, at first and after every pass: its minimum is not the one wanted, so near it is enough.
_FIRST_STEPS, _STEPS = 2, 1
# Damping of a block whose step was refused; it changes by this factor and ends below the first,
_DAMPING, _FACTOR = 0.05, 4.0
# where the model was good: the decrease was at least this share of what it promised;
_GOOD = 0.75
# and the share of the mean curvature that it adds where the sample sees none.
_EVENLY = 1e-3
# A step refused so often that by now promises less than the error of f, relative to f, cannot be judged.
_REFUSALS, _NOISE = 5, 1e-7
# A sample that finds no way down from a larger certificate than this is no guide: the minimum is elsewhere.
_STATIONARY = 1e-5


def sampled_newton(
    sample: Problem,
    whole: Whole,
    start: ArrayLike,
    lower: ArrayLike | None = None,
    upper: ArrayLike | None = None,
    *,
    gain: float = 1e-7,
    tolerance: float = 1e-8,
    max_passes: int = 30,
) -> Solution[FloatArray]:
    """The minimum of a smooth convex f over a box, from the curvature of a sample and a few gradients of f.

    Newton's method finds the sample's minimum, which is near that of f. From there, with g the gradient of f at x and
    g_s that of the sample's f_s, the next point is the minimum over the box of ``f_s(y) + (g - g_s).y``, which has the
    slope of f at x and the shape of f_s everywhere (Shamir, Srebro and Zhang, ICML 2014). The distance to the minimum
    shrinks at every pass by about the relative difference of the two Hessians. Blocks, as in ``projected_newton``, are
    judged each on its own; one that does not fall goes back and takes steps of a quadratic model with more curvature
    (Levenberg, Marquardt): the sample may see none where the others fall steeply.

    Args:
        sample: ``x -> (value, gradient, Hessian)`` of the sample, as for ``projected_newton``.
        whole: ``x -> (value, gradient)`` of f, in the same units.
        start: Where to begin; moved into the box.
        lower: Lower bounds: None, a number, or one per component.
        upper: Upper bounds, likewise.
        gain: Done when the tilted sample promises to lower f by no more than this; also done at ``tolerance``.
        tolerance: Done when the certificate of ``segcal.solvers.Solution`` is at most this.
        max_passes: Evaluations of f at most.

    Examples:
        >>> data = np.random.default_rng(0).normal(3.0, 1.0, 10_000)
        >>> def part(x, data=data[:100]):
        ...     e = np.exp(x[0] - data)
        ...     return (e - x[0]).mean(), np.array([e.mean() - 1]), np.array([[e.mean()]])
        >>> solution = sampled_newton(part, lambda x: part(x, data)[:2], [0.0])
        >>> abs(float(solution.value[0] + np.log(np.exp(-data).mean()))) < 1e-3, solution.evaluations < 8
        (True, True)
    """
    box = Box(lower, upper, len(checked_start(start)))
    sample = _remembering(sample)
    first = projected_newton(sample, start, lower, upper, tolerance=tolerance, max_iterations=_FIRST_STEPS)
    x = first.value
    hessian = sample(x)[2]
    indices: list[Index] = [slice(None)] if isinstance(hessian, np.ndarray) else [index for index, _ in hessian]
    value, gradient = whole(x.copy())
    values = np.asarray(value, np.float64).reshape(-1)
    if not (np.isfinite(values).all() and np.isfinite(gradient).all()):
        raise refuse_start(values.sum())
    parts = [
        _Part(x[index].copy(), float(own), gradient[index].copy()) for index, own in zip(indices, values, strict=True)
    ]
    history, passes, enough = [float(values.sum())], 1, gain / len(parts)

    def gather() -> tuple[FloatArray, FloatArray]:
        slope = np.empty_like(x)
        for index, part in zip(indices, parts, strict=True):
            x[index], slope[index] = part.x, part.gradient
        return x.copy(), slope

    def unfinished(part: _Part, index: Index) -> bool:
        uncertain = box[index].certificate(part.x, part.gradient) > tolerance
        rounding = part.promised <= _NOISE * abs(part.value)
        return uncertain and part.promised > enough and not (part.refusals >= _REFUSALS and rounding)

    def stuck(part: _Part, index: Index) -> bool:
        return part.promised <= 0 and box[index].certificate(part.x, part.gradient) > max(tolerance, _STATIONARY)

    while passes < max_passes:
        here, slope = gather()
        if any(part.moved for part in parts):
            tilted = _minimise_tilted(sample, here, slope, indices, box, tolerance, enough)
            for index, part, block, found, own in zip(indices, parts, *tilted, strict=True):
                if part.moved:
                    part.moved, part.hessian, part.step, part.promised = False, block, found - part.x, float(own)
                    if part.damping or stuck(part, index):
                        part.damp(box[index], part.damping or _DAMPING)
        for index, part in zip(indices, parts, strict=True):
            if part.refusals:
                part.damp(box[index], max(_FACTOR * part.damping, _DAMPING))
        moving = [(index, part) for index, part in zip(indices, parts, strict=True) if unfinished(part, index)]
        if not moving:
            break
        for index, part in moving:
            x[index] = box[index].project(part.x + part.step)
        value, gradient = whole(x.copy())
        passes += 1
        for (index, part), own in zip(zip(indices, parts, strict=True), np.asarray(value).reshape(-1), strict=True):
            if unfinished(part, index):
                part.judge(x[index].copy(), float(own), gradient[index].copy())
        history.append(sum(part.value for part in parts))
    x, slope = gather()
    certificate, active = box.certificate(x, slope), box.active(x)
    converged = not any(
        unfinished(part, index) or stuck(part, index) for index, part in zip(indices, parts, strict=True)
    )
    return Solution(
        value=x,
        objective=history[-1],
        converged=converged,
        certificate=certificate,
        iterations=first.iterations + passes - 1,
        evaluations=passes,
        message=converged_message(certificate, active, first.flat)
        if converged
        else f"not converged: projected gradient {certificate:.1e} after {passes} passes",
        active=active,
        flat=first.flat,
        history=tuple(history),
    )


class _Part:
    """An independent function of some of the variables: where it is, and the step it tries."""

    def __init__(self, x: FloatArray, value: float, gradient: FloatArray) -> None:
        self.x, self.value, self.gradient = x, value, gradient
        self.step, self.promised, self.refusals, self.moved = np.zeros_like(x), np.inf, 0, True
        self.hessian, self.damping = np.zeros((len(x), len(x))), 0.0  # of the sample, here

    def damp(self, box: Box, damping: float) -> None:
        """Aim at the minimum of the quadratic model with additional curvature."""
        diagonal = self.hessian.diagonal()
        damped = self.hessian + np.diag(damping * (diagonal + _EVENLY * diagonal.mean()))
        self.step = minimise_quadratic(damped, self.gradient, self.x, box) - self.x
        self.promised = -float(self.gradient @ self.step + 0.5 * self.step @ damped @ self.step)
        self.damping = damping

    def judge(self, x: FloatArray, value: float, gradient: FloatArray) -> None:
        """Take the trial point where f is lower."""
        if np.isfinite(gradient).all() and value < self.value:
            if self.value - value >= _GOOD * self.promised:
                self.damping = self.damping / _FACTOR if self.damping > _DAMPING else 0.0
            self.x, self.value, self.gradient, self.refusals, self.moved = x, value, gradient, 0, True
        else:
            self.refusals += 1


def _remembering(problem: Problem) -> Problem:
    """The problem, which knows the results at the last three points: solvers come back to them."""
    known: dict[bytes, tuple[Any, FloatArray, Any]] = {}

    def remembered(x: FloatArray) -> tuple[Any, FloatArray, Any]:
        point = x.tobytes()
        if point not in known:
            known[point] = problem(x)
            if len(known) > 3:
                known.pop(next(iter(known)))
        return known[point]

    return remembered


def _minimise_tilted(
    sample: Problem,
    x: FloatArray,
    gradient: FloatArray,
    indices: list[Index],
    box: Box,
    tolerance: float,
    enough: float,
) -> tuple[list[FloatArray], list[FloatArray], FloatArray]:
    """For every block, the sample's Hessian, the minimum of the tilted sample, and the decrease that it promises."""
    _, own_gradient, hessian = sample(x)
    tilt = gradient - own_gradient
    blocks = [hessian] if isinstance(hessian, np.ndarray) else [block for _, block in hessian]
    steps = [
        minimise_quadratic(block, gradient[index], x[index], box[index]) - x[index]
        for index, block in zip(indices, blocks, strict=True)
    ]
    expected = np.array(
        [
            -float(gradient[index] @ step + 0.5 * step @ block @ step)
            for index, block, step in zip(indices, blocks, steps, strict=True)
        ]
    )
    if (expected <= enough).all():  # as the quadratic model has it, which needs no evaluation
        return blocks, [x[index] for index in indices], expected

    def tilted(y: FloatArray) -> tuple[Any, FloatArray, Any]:
        value, slope, hessian = sample(y)
        shares = np.array([tilt[index] @ (y[index] - x[index]) for index in indices])
        return np.asarray(value) + (shares if np.ndim(value) else shares.sum()), slope + tilt, hessian

    found = projected_newton(tilted, x, box.lower, box.upper, tolerance=tolerance, max_iterations=_STEPS)
    before, after = (np.asarray(tilted(y)[0], np.float64).reshape(-1) for y in (x, found.value))
    return blocks, [found.value[index] for index in indices], before - after
