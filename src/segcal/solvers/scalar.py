"""Newton's method in one dimension, within a bracket that closes in on the minimum."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from segcal.errors import InputError
from segcal.solvers.solution import Solution, refuse_start

# A Newton step longer than this share of 1 + |x| at a stationary point means that the function is flat there.
_FLAT = 1e-3
# Newton steps shorter than this share of 1 + |x| are close to the minimum: only rounding can make them fail.
_CLOSE = 1e-6
# A step that leaves more than this share of the derivative is slow. On an exponential tail Newton steps leave 1/e each
# time; near a minimum they leave far less.
_SLOW = 0.25
# Close steps in a row that are slow, after which the rest is rounding.
_MAX_STALLS = 2


class _Point(NamedTuple):
    x: float
    value: float
    slope: float
    curvature: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.value) and math.isfinite(self.slope)

    @property
    def step(self) -> float:
        curved = math.isfinite(self.curvature) and self.curvature > 0
        return -self.slope / self.curvature if curved else math.copysign(math.inf, -self.slope)

    def moves(self, share: float) -> bool:
        """Whether the Newton step is longer than this share of 1 + |x|."""
        return abs(self.step) > share * (1 + abs(self.x))


def newton_1d(
    function: Callable[[float], tuple[float, float, float]],
    start: float,
    bounds: tuple[float, float],
    tolerance: float = 1e-8,
    max_iterations: int = 100,
) -> Solution[float]:
    """The minimum of a convex function on an interval, by Newton steps ``x - f'(x) / f''(x)`` in a shrinking bracket.

    The derivative of a convex function never falls, so its sign at every evaluated point moves one end of the bracket.
    A Newton step that leaves the bracket, or that follows one which left more than a quarter of ``|f'|``, is replaced
    by bisection (Press et al., Numerical Recipes, section 9.4), or doubled while no end downhill has been evaluated. If
    two bisections in a row go toward the same bound, or f is stationary within the tolerance but still falling, the
    bound itself is tried: a minimum at infinity ends there and is reported as an active bound. Points where f is not
    finite count as beyond the minimum.

    Args:
        function: ``x -> (f, f', f'')``; each call is one evaluation.
        start: Where to begin; moved into the bounds.
        bounds: The interval; both ends are finite.
        tolerance: Converged when ``|f'|`` is at most this, a bound is the minimum, or the value is right to the last
            bit. If f is not accurate enough for that, the point with the lowest ``|f'|`` is returned.
        max_iterations: Evaluations after the first.

    Examples:
        >>> from math import cosh, exp, sinh
        >>> solution = newton_1d(lambda x: (cosh(x - 1), sinh(x - 1), cosh(x - 1)), start=0.0, bounds=(-5.0, 5.0))
        >>> round(solution.value, 12), solution.evaluations
        (1.0, 5)
        >>> falling = newton_1d(lambda x: (exp(-x), -exp(-x), exp(-x)), start=0.0, bounds=(0.0, 100.0))
        >>> falling.value, int(falling.active), falling.message
        (100.0, 1, 'converged: the minimum is at the upper bound')
    """
    low, high = bounds
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InputError(f"bounds are {bounds}", expected="two finite numbers, the lower one first")
    visited: list[_Point] = []

    def visit(x: float) -> _Point:
        visited.append(_Point(x, *(float(number) for number in function(x))))
        return visited[-1]

    def solution(point: _Point, message: str, flat: bool = False) -> Solution[float]:
        active = int(point.x == high) - int(point.x == low)
        return Solution(
            value=point.x,
            objective=point.value,
            converged=message.startswith("converged"),
            certificate=abs(min(max(-point.slope, low - point.x), high - point.x)),
            iterations=len(visited) - 1,
            evaluations=len(visited),
            message=message,
            active=np.array(active, np.int8),
            flat=flat,
            history=tuple(seen.value for seen in visited),
        )

    here = visit(min(max(float(start), low), high))
    if not here.finite:
        raise refuse_start(here.value)
    ends, known = [low, high], [False, False]
    flattest, slow, stretch, leaps, stalls = here, False, 1.0, 0, 0
    while True:
        ahead = int(here.slope < 0)  # which end lies downhill
        ends[1 - ahead], known[1 - ahead] = here.x, True
        if here.x == bounds[ahead] or (here.slope == 0 and here.x in bounds):
            return solution(here, f"converged: the minimum is at the {'upper' if here.x == high else 'lower'} bound")
        stationary = abs(here.slope) <= tolerance
        flat = here.moves(_FLAT)
        if stationary and (known[ahead] or here.slope == 0 or not flat):
            note = ", the function is flat" if flat else ""
            return solution(here, f"converged: derivative {here.slope:.1e}{note}", flat)
        if len(visited) > max_iterations:
            lowest = min((point for point in visited if point.finite), key=lambda point: point.value)
            return solution(lowest, f"not converged: derivative {lowest.slope:.1e} after {max_iterations} iterations")
        stretch = 2 * stretch if (slow or stretch > 1) and not known[ahead] else 1.0
        newton, middle = here.x + stretch * here.step, 0.5 * ends[0] + 0.5 * ends[1]
        if newton == here.x or (middle in ends and all(known)):
            return solution(here, f"converged: derivative {here.slope:.1e}, the value is right to the last bit")
        stepping = not stationary and ends[0] < newton < ends[1] and not (slow and known[ahead])
        if stalls and (stalls == _MAX_STALLS or not stepping):
            return solution(flattest, f"not converged: derivative {flattest.slope:.1e}, the rest is rounding")
        if stepping:
            trial, leaps = newton, 0
        elif not known[ahead] and (stationary or leaps or middle in ends):
            trial = ends[ahead]
        else:
            trial, leaps = middle, leaps + 1
        there = visit(trial)
        if not there.finite or (stationary and there.slope * here.slope < 0):
            ends[ahead], known[ahead], slow = trial, True, False
            continue
        close = not there.moves(_CLOSE)
        stalls = stalls + 1 if close and abs(there.slope) > _SLOW * abs(flattest.slope) else 0
        slow = stepping and not close and abs(there.slope) > _SLOW * abs(here.slope)
        leaps *= int(there.slope * here.slope > 0)
        here, flattest = there, min(flattest, there, key=lambda point: abs(point.slope))
