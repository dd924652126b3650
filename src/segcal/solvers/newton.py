"""Newton's method: steps to the minimum of the quadratic model over the box, shortened until the function falls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from segcal.solvers.driver import Block, Hessian, Index, Point, Start
from segcal.solvers.quadratic import minimise_quadratic
from segcal.solvers.solution import Box, FloatArray, falls_on

#: ``x -> (value, gradient, Hessian)``; for blocks, a value and a Hessian of each.
Problem = Callable[[FloatArray], tuple[Any, FloatArray, Hessian]]

_DECREASE = 1e-4  # Armijo's constant
_MIN_NOISE, _MAX_NOISE = 1e-14, 1e-5  # the error assumed in f, relative to f: at first, and at most
_MIN_CUT, _MAX_CUT = 0.005, 0.5  # the next trial step is between these times as long as the refused one
_MAX_REFUSALS = 12  # trial points refused in a row
_MAX_STALLS = 3  # steps in a row, all changes of f being noise, that do not halve the certificate
_NO_CURVATURE = 1e-3  # the decrease, relative to f, that justifies a step along a direction without curvature
_REACH = 1e6  # times 1 + |x|: the longest first step, for functions with next to no curvature


@dataclass
class _Line:
    """The line along which a block searches.

    ``step`` leads to the minimum ``target`` of the model, ``slope`` is that of f along it, ``scale`` the share of it
    that is tried. ``reach`` is how far the last shortened step went, ``share`` how much of its slope the last step
    left. ``noise`` is the error seen in f; ``level`` says that the last step changed f by no more.
    """

    noise: float
    target: FloatArray
    step: FloatArray
    slope: float = 0.0
    scale: float = 1.0
    reach: float = np.inf
    share: float = 0.0
    level: bool = False
    certificate: float = np.inf
    stalls: int = 0


@dataclass(frozen=True)
class Newton:
    """Steps toward the minimum of the quadratic model ``g.d + d'Hd/2`` over the whole box.

    The model is minimised by ``segcal.solvers.quadratic.minimise_quadratic`` without evaluations, so bounds cost none,
    and convergence is quadratic once they are identified. Steps are shortened by cubic interpolation until f falls
    (Armijo); how far the last shortened step went limits the next. Near the minimum, where differences of f are
    rounding, the slope at the trial point decides instead (Hager and Zhang, SIAM J. Optim. 16, 2005). Trial points
    where f or a derivative is not finite are refused. Singular Hessians are allowed: of all best steps the shortest is
    taken, components being measured in units of their curvature.

    Examples:
        >>> from segcal.solvers import minimise
        >>> centre = np.array([1.0, -2.0])
        >>> def bowl(x):
        ...     return 0.5 * np.sum((x - centre) ** 2), x - centre, np.eye(2)
        >>> minimise(Newton(bowl), [5.0, 5.0]).value
        array([ 1., -2.])
        >>> solution = minimise(Newton(bowl), [5.0, 5.0], lower=0.0)
        >>> solution.value, solution.active, solution.message
        (array([1., 0.]), array([ 0, -1], dtype=int8), 'converged: projected gradient 0.0e+00, 1 bounds active')
    """

    problem: Problem

    def start(self, x: FloatArray, box: Box, blocks: Sequence[Index]) -> Start:
        """The user's."""
        return Start(x)

    def state(self, here: Point) -> _Line:
        """No line yet."""
        return _Line(_MIN_NOISE * abs(here.value), here.x, np.zeros_like(here.x))

    def evaluate(self, x: FloatArray) -> tuple[Any, FloatArray, Hessian]:
        """The problem."""
        return self.problem(x)

    def aim(self, x: FloatArray, blocks: Sequence[Block[_Line]]) -> None:
        """At the minimum of the model, each block that moved."""
        for block in blocks:
            if block.moved:
                self._aim(block)

    def _aim(self, block: Block[_Line]) -> None:
        line, here = block.state, block.here
        assert here.hessian is not None
        line.target = minimise_quadratic(
            here.hessian, here.gradient, here.x, block.box, _NO_CURVATURE * abs(here.value)
        )
        line.step = line.target - here.x
        line.slope = float(here.gradient @ line.step)
        length = float(np.linalg.norm(line.step))
        reach = min(line.reach, _REACH * (1 + float(np.linalg.norm(here.x))))
        line.scale = min(1.0, reach / length) if length else 1.0
        before, line.certificate = line.certificate, block.certificate
        line.stalls = line.stalls + 1 if line.level and line.certificate > 0.5 * before else 0
        block.left = 0.0 if block.stationary else np.inf
        block.stuck = line.slope >= 0 or line.stalls >= _MAX_STALLS
        block.flat = falls_on(line.step, here.x, line.share) and -line.slope > line.noise
        _set_trial(block)

    def judge(self, block: Block[_Line], there: Point) -> bool:
        """Take the trial point where f falls enough, or shorten the step."""
        line, here = block.state, block.here
        if not there.finite:
            return _shorten(block, _MIN_CUT)
        rise, slope = there.value - here.value, float(there.gradient @ line.step)
        # A convex f rises by at least the slope here and at most the slope there: what goes beyond is error in f.
        error = max(line.scale * line.slope - rise, rise - line.scale * slope)
        line.noise = max(line.noise, min(error, _MAX_NOISE * abs(here.value)))
        line.level = -line.slope <= 10 * line.noise
        lower = line.level and rise <= line.noise and slope <= -0.5 * line.slope
        if not (lower or rise <= _DECREASE * line.scale * line.slope):
            return _shorten(block, _cubic_minimum(rise / line.scale, line.slope, slope))
        line.reach = np.inf
        if line.scale < 1 or slope > -0.5 * line.slope:
            length = line.scale * float(np.linalg.norm(line.step))
            line.reach = length * (2.0 if slope < -0.1 * line.slope else 1.0)
        line.share = slope / line.slope
        return True


def _set_trial(block: Block[_Line]) -> None:
    line = block.state
    block.trial = line.target if line.scale == 1 else block.box.project(block.here.x + line.scale * line.step)


def _shorten(block: Block[_Line], cut: float) -> bool:
    """A shorter step; False, as the trial point is refused."""
    line = block.state
    line.scale *= min(max(cut, _MIN_CUT), _MAX_CUT)
    tiny = -line.scale * line.slope <= _MIN_NOISE * abs(block.here.value)
    block.stuck = block.refusals >= _MAX_REFUSALS or tiny
    _set_trial(block)
    return False


def _cubic_minimum(rise: float, slope: float, end_slope: float) -> float:
    """The minimum in (0, 1) of the cubic with ``slope`` < 0 at 0, ``end_slope`` at 1, and this rise in between."""
    largest = max(abs(rise), abs(slope), abs(end_slope))  # whose square may overflow
    rise, slope, end_slope = rise / largest, slope / largest, end_slope / largest
    middle = slope + end_slope - 3 * rise
    root = math.sqrt(max(middle * middle - slope * end_slope, 0.0))
    return 1 - (end_slope + root - middle) / (end_slope - slope + 2 * root)
