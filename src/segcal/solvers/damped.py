"""Newton's method with damping, where a value costs much less than the curvature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from segcal.solvers.driver import Block, Index, Point, Start
from segcal.solvers.quadratic import minimise_quadratic, predicted_decrease
from segcal.solvers.solution import Box, FloatArray, falls_on

#: ``x -> (value, gradient)``; for blocks, a value of each.
Whole = Callable[[FloatArray], tuple[Any, FloatArray]]
#: ``(x, numbers of blocks) -> Hessians`` of those blocks; they may be rough, which costs steps.
Curvature = Callable[[FloatArray, Sequence[int]], Sequence[FloatArray]]

# Damping at first, in shares of the mean curvature. It is alike in all directions: the steps that overshoot are those
# along which there is next to no curvature.
_DAMPING = 1e-3
# The share of the predicted decrease below which there is more damping, and above which there is less; by this factor.
# Where trial points are refused in a row, its square, its cube and so on (similar to Nielsen, IMM-REP-1999-05).
_POOR, _GOOD, _FACTOR = 0.25, 0.75, 4.0
_REFUSALS = 15  # trial points refused in a row
_NOISE = 1e-7  # changes of f, relative to f, that may be rounding, for f may be summed in float32
_PLENTY = 10.0  # times that, a block's share of ``gain``: as long as a damped step predicts more, it need not be asked
_NOTHING = 1e-3  # of a decrease that is not worth a step: refused steps that predict less are given up


@dataclass
class _Damped:
    """A block's damping, and its curvature where it is."""

    damping: float = _DAMPING
    hessian: FloatArray = field(default_factory=lambda: np.empty((0, 0)))


@dataclass(frozen=True)
class DampedNewton:
    """Steps to the minimum of the quadratic model with added curvature (Levenberg, Marquardt), block by block.

    A step that overshoots is not shortened but bent toward where the function is steep: along directions with next to
    no curvature Newton's own steps are far too long. The curvature is asked for only where a block has moved and goes
    on. What is left to gain is what the undamped model predicts; it is asked for once the damped one predicts little.

    Args:
        whole: ``x -> (value, gradient)``.
        curvature: The Hessians of some blocks.

    Examples:
        >>> from segcal.solvers import minimise
        >>> def whole(x):
        ...     return np.sum(np.exp(x) - 3 * x), np.exp(x) - 3
        >>> policy = DampedNewton(whole, lambda x, blocks: [np.diag(np.exp(x))])
        >>> solution = minimise(policy, [5.0, -2.0], gain=1e-7)
        >>> np.exp(solution.value).round(3), solution.converged
        (array([3., 3.]), True)
    """

    whole: Whole
    curvature: Curvature

    def start(self, x: FloatArray, box: Box, blocks: Sequence[Index]) -> Start:
        """The user's."""
        return Start(x)

    def state(self, here: Point) -> _Damped:
        """A little damping."""
        return _Damped()

    def evaluate(self, x: FloatArray) -> tuple[Any, FloatArray, None]:
        """Values and gradient."""
        return (*self.whole(x), None)

    def aim(self, x: FloatArray, blocks: Sequence[Block[_Damped]]) -> None:
        """Ask for the curvature of the blocks that moved, and aim at the minimum of the damped model."""
        for block in blocks:
            block.left = 0.0 if block.stationary else block.left
        moved = [number for number, block in enumerate(blocks) if block.moved and not block.stationary]
        for number, hessian in zip(moved, self.curvature(x.copy(), moved) if moved else (), strict=True):
            block, here = blocks[number], blocks[number].here
            block.state.hessian = np.array(hessian, np.float64)
            _aim(block)
            block.left = np.inf
            if block.predicted <= _PLENTY * block.enough:
                target = minimise_quadratic(block.state.hessian, here.gradient, here.x, block.box)
                block.left = predicted_decrease(block.state.hessian, here.gradient, target - here.x)

    def judge(self, block: Block[_Damped], there: Point) -> bool:
        """Take the trial point where f is lower, and change the damping by how good the model was."""
        here, step, state = block.here, there.x - block.here.x, block.state
        fall = here.value - there.value
        if block.predicted <= _NOISE * abs(here.value):  # lost in the rounding of f, but not of its slope
            fall = -0.5 * float((here.gradient + there.gradient) @ step)
        share = fall / block.predicted if there.finite and block.predicted > 0 else -np.inf
        if share < _POOR:
            state.damping *= _FACTOR**block.refusals
        elif share > _GOOD:
            state.damping /= _FACTOR
        if there.finite and fall > 0:
            before, after = float(here.gradient @ step), float(there.gradient @ step)
            block.flat = before < 0 and falls_on(step, here.x, after / before)
            return True
        _aim(block)
        block.stuck = block.refusals >= _REFUSALS or block.predicted <= _NOTHING * block.enough
        return False


def _aim(block: Block[_Damped]) -> None:
    hessian, here = block.state.hessian, block.here
    damped = hessian + block.state.damping * hessian.diagonal().mean() * np.eye(len(hessian))
    block.trial = minimise_quadratic(damped, here.gradient, here.x, block.box)
    block.predicted = predicted_decrease(damped, here.gradient, block.trial - here.x)
