"""Newton's method: steps to the minimum of the quadratic model over the box, shortened until the function falls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from segcal.solvers.driver import Block, Each, Hessian, Point, Policy
from segcal.solvers.quadratic import minimise_quadratic
from segcal.solvers.solution import falls_on
from segcal.types import FloatArray

#: ``x -> (value, gradient, Hessian)``; for blocks, a value and a Hessian of each.
Problem = Callable[[FloatArray], tuple[Any, FloatArray, Hessian]]

_DECREASE = 1e-4  # Armijo's constant
_MIN_NOISE, _MAX_NOISE = 1e-14, 1e-5  # the error assumed in f, relative to f: at first, and at most
_MIN_CUT, _MAX_CUT = 0.005, 0.5  # shortest and longest next trial step, relative to the refused one
_MAX_REFUSALS = 12  # trial points refused in a row
_MAX_STALLS = 3  # steps in a row that change f by noise only and do not halve the certificate
_NO_CURVATURE = 1e-3  # the decrease, relative to f, that justifies a step along a direction without curvature
_REACH = 1e6  # times 1 + |x|: the longest first step, for functions with next to no curvature


@dataclass(eq=False)
class _Line(Block):
    """A block, and the line along which it searches.

    Attributes:
        target: The minimum of the model.
        step: From ``here`` to there.
        slope: That of f along the step.
        scale: The share of the step that is tried.
        reach: How far the last shortened step went.
        share: The share of its slope that the last step left.
        noise: The error seen in f.
        level: Whether the last step changed f by no more than noise.
        before: The certificate before the last step.
        stalls: Steps in a row that were level and did not halve the certificate.
    """

    target: FloatArray = field(init=False)
    step: FloatArray = field(init=False)
    slope: float = 0.0
    scale: float = 1.0
    reach: float = np.inf
    share: float = 0.0
    noise: float = field(init=False)
    level: bool = False
    before: float = np.inf
    stalls: int = 0

    def __post_init__(self) -> None:
        self.noise = _MIN_NOISE * abs(self.here.value)

    def aim(self) -> None:
        """Aim at the minimum of the model, no further than the last steps allow."""
        here, certificate = self.here, self.certificate
        assert here.hessian is not None
        self.target = minimise_quadratic(here.hessian, here.gradient, here.x, self.box, _NO_CURVATURE * abs(here.value))
        self.step = self.target - here.x
        self.slope = float(here.gradient @ self.step)
        length = float(np.linalg.norm(self.step))
        reach = min(self.reach, _REACH * (1 + float(np.linalg.norm(here.x))))
        self.stalls = self.stalls + 1 if self.level and certificate > 0.5 * self.before else 0
        self.before = certificate
        self.left = 0.0 if self.stationary else np.inf
        self.stuck = self.slope >= 0 or self.stalls >= _MAX_STALLS
        self.flat = falls_on(self.step, here.x, self.share) and -self.slope > self.noise
        self.try_share(min(1.0, reach / length) if length else 1.0)

    def try_share(self, scale: float) -> None:
        """Set the trial point to this share of the step."""
        self.scale = scale
        self.trial = self.target if scale == 1 else self.box.project(self.here.x + scale * self.step)

    def shorten(self, cut: float) -> bool:
        """Try a shorter step; False, as the trial point is refused."""
        self.try_share(self.scale * min(max(cut, _MIN_CUT), _MAX_CUT))
        tiny = -self.scale * self.slope <= _MIN_NOISE * abs(self.here.value)
        self.stuck = self.refusals >= _MAX_REFUSALS or tiny
        return False


@dataclass(frozen=True)
class Newton(Policy[_Line]):
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
    block = _Line

    def evaluate(self, x: FloatArray) -> tuple[Any, FloatArray, Hessian]:
        """The problem."""
        return self.problem(x)

    def aim(self, x: FloatArray, blocks: Sequence[_Line], each: Each) -> None:
        """At the minimum of the model, each block that moved."""
        list(each(_Line.aim, [block for block in blocks if block.moved]))

    def judge(self, block: _Line, there: Point) -> bool:
        """Take the trial point where f falls enough, or shorten the step."""
        if not there.finite:
            return block.shorten(_MIN_CUT)
        rise, slope = there.value - block.here.value, float(there.gradient @ block.step)
        # A convex f rises by at least the slope here and at most the slope there; the rest is error in f.
        error = max(block.scale * block.slope - rise, rise - block.scale * slope)
        block.noise = max(block.noise, min(error, _MAX_NOISE * abs(block.here.value)))
        block.level = -block.slope <= 10 * block.noise
        lower = block.level and rise <= block.noise and slope <= -0.5 * block.slope
        if not (lower or rise <= _DECREASE * block.scale * block.slope):
            return block.shorten(_cubic_minimum(rise / block.scale, block.slope, slope))
        block.reach = np.inf
        if block.scale < 1 or slope > -0.5 * block.slope:
            length = block.scale * float(np.linalg.norm(block.step))
            block.reach = length * (2.0 if slope < -0.1 * block.slope else 1.0)
        block.share = slope / block.slope
        return True


def _cubic_minimum(rise: float, slope: float, end_slope: float) -> float:
    """The minimum in (0, 1) of the cubic with ``slope`` < 0 at 0, ``end_slope`` at 1, and this rise in between."""
    largest = max(abs(rise), abs(slope), abs(end_slope))  # whose square may overflow
    rise, slope, end_slope = rise / largest, slope / largest, end_slope / largest
    middle = slope + end_slope - 3 * rise
    root = math.sqrt(max(middle * middle - slope * end_slope, 0.0))
    return 1 - (end_slope + root - middle) / (end_slope - slope + 2 * root)
