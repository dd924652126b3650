"""Newton's method for smooth convex functions of many variables in a box, dense or in independent blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from segcal.errors import InputError
from segcal.solvers.quadratic import minimise_quadratic
from segcal.solvers.solution import (
    Box,
    FloatArray,
    Solution,
    checked_start,
    converged_message,
    falls_on,
    refuse_start,
)

#: A dense ``(n, n)`` array, or ``(index, block)`` pairs whose indices divide ``range(n)`` among them.
Hessian = FloatArray | Sequence[tuple[NDArray[np.intp], FloatArray]]
#: ``x -> (value, gradient, Hessian)``; for blocks the value is an array with the share of each, which add up to f.
Problem = Callable[[FloatArray], tuple[Any, FloatArray, Hessian]]

Index = slice | NDArray[np.intp]

_DECREASE = 1e-4  # Armijo's constant
_MIN_NOISE, _MAX_NOISE = 1e-14, 1e-5  # the error assumed in f, relative to f: at first, and at most
_MIN_CUT, _MAX_CUT = 0.005, 0.5  # the next trial step is between these times as long as the refused one
_MAX_REFUSALS = 12  # trial points refused in a row
_MAX_STALLS = 3  # steps in a row, all changes of f being noise, that do not halve the certificate
_IDLE = 1e-3  # the decrease, relative to f, that a direction without curvature must promise to be believed
_REACH = 1e6  # times 1 + |x|: the longest first step, for functions with next to no curvature


def projected_newton(
    problem: Problem,
    start: ArrayLike,
    lower: ArrayLike | None = None,
    upper: ArrayLike | None = None,
    *,
    tolerance: float = 1e-8,
    max_iterations: int = 100,
) -> Solution[FloatArray]:
    """The minimum of a smooth convex function over ``lower <= x <= upper``.

    Each step goes toward the minimum of the quadratic model ``g.d + d'Hd/2`` over the whole box (found by
    ``segcal.solvers.quadratic.minimise_quadratic``, without evaluations), so bounds cost no extra evaluations and
    convergence is quadratic once they are identified. Steps are shortened by cubic interpolation until f falls
    (Armijo); how far the last shortened step went limits the next. Near the minimum, where differences of f are
    rounding, the slope at the trial point decides instead (Hager and Zhang, SIAM J. Optim. 16, 2005). Trial points
    where f or a derivative is not finite are refused. Singular Hessians are allowed: of all best steps the shortest is
    taken, components being measured in units of their curvature.

    A block-diagonal Hessian means that f is a sum of independent functions that share their evaluations. Each then has
    its own step length and rests when it is done, so that one hard block slows no other.

    Args:
        problem: ``x -> (value, gradient, Hessian)``. For ``Hessian = [(index, block), ...]`` the value is an array with
            the share of every block.
        start: Where to begin; moved into the box.
        lower: Lower bounds: None, a number, or one per component.
        upper: Upper bounds, likewise.
        tolerance: Converged when the certificate of ``segcal.solvers.Solution`` is at most this.
        max_iterations: Steps to take at most, by every block.

    Examples:
        >>> centre = np.array([1.0, -2.0])
        >>> def bowl(x):
        ...     return 0.5 * np.sum((x - centre) ** 2), x - centre, np.eye(2)
        >>> projected_newton(bowl, [5.0, 5.0]).value
        array([ 1., -2.])
        >>> solution = projected_newton(bowl, [5.0, 5.0], lower=0.0)
        >>> solution.value, solution.active, solution.message
        (array([1., 0.]), array([ 0, -1], dtype=int8), 'converged: projected gradient 0.0e+00, 1 bounds active')
    """
    x = checked_start(start)
    box = Box(lower, upper, x.size)
    x = box.project(x)
    value, gradient, hessian = problem(x.copy())
    indices = _checked_indices(value, gradient, hessian, x.size)
    points = _split(value, gradient, hessian, indices)
    if not all(point.finite for point in points):
        raise refuse_start(np.sum(value))
    parts = [_Part(x[index].copy(), box[index], point, tolerance) for index, point in zip(indices, points, strict=True)]
    history, evaluations = [sum(part.here.value for part in parts)], 1
    while any(part.moving(max_iterations) for part in parts):
        for index, part in zip(indices, parts, strict=True):
            x[index] = part.trial if part.moving(max_iterations) else part.x
        points = _split(*problem(x.copy()), indices)
        evaluations += 1
        taken = [part.judge(point) for part, point in zip(parts, points, strict=True) if part.moving(max_iterations)]
        if any(taken):
            history.append(sum(part.here.value for part in parts))
    gradient = np.empty_like(x)
    for index, part in zip(indices, parts, strict=True):
        x[index], gradient[index] = part.x, part.here.gradient
    certificate, active, flat = box.certificate(x, gradient), box.active(x), any(part.flat for part in parts)
    converged = all(part.status == "done" for part in parts)
    return Solution(
        value=x,
        objective=history[-1],
        converged=converged,
        certificate=certificate,
        iterations=len(history) - 1,
        evaluations=evaluations,
        message=converged_message(certificate, active, flat) if converged else _failure(parts, certificate),
        active=active,
        flat=flat,
        history=tuple(history),
    )


class _Point(NamedTuple):
    """What an evaluation tells a part."""

    value: float
    gradient: FloatArray
    hessian: FloatArray

    @property
    def finite(self) -> bool:
        return all(bool(np.isfinite(numbers).all()) for numbers in self)


class _Part:
    """An independent function of some of the variables: where it is, the step it tries, and how far it may go."""

    def __init__(self, x: FloatArray, box: Box, here: _Point, tolerance: float) -> None:
        self.x, self.box, self.here, self.tolerance = x, box, here, tolerance
        self.reach, self.left, self.steps = np.inf, 0.0, 0
        self.noise, self.refusals, self.stalls = _MIN_NOISE * abs(here.value), 0, 0
        self._aim()

    def _aim(self) -> None:
        noise = _IDLE * abs(self.here.value)
        self.target = minimise_quadratic(self.here.hessian, self.here.gradient, self.x, self.box, noise)
        self.step = self.target - self.x
        self.slope = float(self.here.gradient @ self.step)
        self.length = float(np.linalg.norm(self.step))
        reach = min(self.reach, _REACH * (1 + float(np.linalg.norm(self.x))))
        self.scale = min(1.0, reach / self.length) if self.length else 1.0
        self.certificate = self.box.certificate(self.x, self.here.gradient)
        stationary = self.certificate <= self.tolerance
        self.status: Literal["moving", "done", "stuck"] = (
            "done" if stationary else "moving" if self.slope < 0 else "stuck"
        )

    @property
    def flat(self) -> bool:
        """Whether the function still falls where it is stationary within the tolerance."""
        return falls_on(self.step, self.x, self.left) and -self.slope > self.noise

    def moving(self, most: int) -> bool:
        """Whether it may and can go on."""
        return self.status == "moving" and self.steps < most

    @property
    def trial(self) -> FloatArray:
        """The next point to evaluate."""
        return self.target if self.scale == 1 else self.box.project(self.x + self.scale * self.step)

    def judge(self, there: _Point) -> bool:
        """Take the trial point or shorten the step, and aim anew. True where it was taken."""
        if not there.finite:
            self._shorten(_MIN_CUT)
            return False
        rise, slope = there.value - self.here.value, float(there.gradient @ self.step)
        # A convex f rises by at least the slope here and at most the slope there: what goes beyond is error in f.
        error = max(self.scale * self.slope - rise, rise - self.scale * slope)
        self.noise = max(self.noise, min(error, _MAX_NOISE * abs(self.here.value)))
        level = -self.slope <= 10 * self.noise
        lower = level and rise <= self.noise and slope <= -0.5 * self.slope
        if not (lower or rise <= _DECREASE * self.scale * self.slope):
            self._shorten(_cubic_minimum(rise / self.scale, self.slope, slope))
            return False
        self.reach = np.inf
        if self.scale < 1 or slope > -0.5 * self.slope:
            self.reach = self.scale * self.length * (2.0 if slope < -0.1 * self.slope else 1.0)
        before, self.steps = self.certificate, self.steps + 1
        self.x, self.here, self.left, self.refusals = self.trial, there, slope / self.slope, 0
        self._aim()
        self.stalls = self.stalls + 1 if level and self.certificate > 0.5 * before else 0
        if self.status == "moving" and self.stalls >= _MAX_STALLS:
            self.status = "stuck"
        return True

    def _shorten(self, cut: float) -> None:
        self.scale *= min(max(cut, _MIN_CUT), _MAX_CUT)
        self.refusals += 1
        if self.refusals >= _MAX_REFUSALS or -self.scale * self.slope <= _MIN_NOISE * abs(self.here.value):
            self.status = "stuck"


def _cubic_minimum(rise: float, slope: float, end_slope: float) -> float:
    """The minimum in (0, 1) of the cubic with ``slope`` < 0 at 0, ``end_slope`` at 1, and this rise in between."""
    largest = max(abs(rise), abs(slope), abs(end_slope))  # whose square may overflow
    rise, slope, end_slope = rise / largest, slope / largest, end_slope / largest
    middle = slope + end_slope - 3 * rise
    root = math.sqrt(max(middle * middle - slope * end_slope, 0.0))
    return 1 - (end_slope + root - middle) / (end_slope - slope + 2 * root)


def _split(value: Any, gradient: FloatArray, hessian: Hessian, indices: list[Index]) -> list[_Point]:
    """What every part is to know: copies, since a problem may reuse the arrays it sums into."""
    values = np.asarray(value, np.float64).reshape(-1)
    blocks = [hessian] if isinstance(hessian, np.ndarray) else [block for _, block in hessian]
    return [
        _Point(float(value), np.array(gradient[index], np.float64), np.array(block, np.float64))
        for value, index, block in zip(values, indices, blocks, strict=True)
    ]


def _checked_indices(value: Any, gradient: FloatArray, hessian: Hessian, size: int) -> list[Index]:
    """The variables of every block, once it is certain that everything has the shape it should have."""
    if isinstance(hessian, np.ndarray):
        indices: list[Index] = [slice(None)]
        fits = hessian.shape == (size, size)
    else:
        indices = [np.asarray(index, np.intp) for index, _ in hessian]
        fits = all(np.shape(block) == (len(index), len(index)) for index, block in hessian)
        fits &= sorted(i for index, _ in hessian for i in index) == list(range(size))
    if not fits:
        raise InputError(
            "the Hessian does not fit the variables",
            expected=f"an array ({size}, {size}), or (index, block) pairs whose indices divide range({size})",
        )
    if np.shape(gradient) != (size,) or np.size(value) != len(indices):
        raise InputError(
            f"the gradient has shape {np.shape(gradient)} and there are {np.size(value)} values",
            expected=f"({size},) and one value per block of the Hessian, {len(indices)}",
        )
    return indices


def _failure(parts: list[_Part], certificate: float) -> str:
    if any(part.status == "moving" for part in parts):
        return f"not converged: projected gradient {certificate:.1e} when the iterations ran out"
    return (
        f"not converged: projected gradient {certificate:.1e}, below which all is rounding (or derivatives are wrong)"
    )
