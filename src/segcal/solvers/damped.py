"""Newton's method with damping, where a value costs much less than the curvature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from segcal.solvers.driver import Block, Each, Point, Policy
from segcal.solvers.quadratic import model_minimum
from segcal.solvers.solution import falls_on
from segcal.types import FloatArray

#: ``x -> (value, gradient)``; for blocks, a value of each.
Whole = Callable[[FloatArray], tuple[Any, FloatArray]]
#: ``(x, numbers of blocks) -> Hessians`` of those blocks; rough ones cost more steps.
Curvature = Callable[[FloatArray, Sequence[int]], Sequence[FloatArray]]

# Damping at first, as a share of the mean curvature. It is the same in all directions: the steps that overshoot are
# those along directions with next to no curvature.
_DAMPING = 1e-3
# The share of the predicted decrease below which damping rises, and above which it falls; by this factor. Where trial
# points are refused in a row, it rises by the factor's square, cube and so on (similar to Nielsen, IMM-REP-1999-05).
_POOR, _GOOD, _FACTOR = 0.25, 0.75, 4.0
# Trial points refused in a row before a block is stuck.
_REFUSALS = 15
# Changes of f, relative to f, that may be rounding: f may be summed in float32.
_NOISE = 1e-7
# The undamped model is only asked what is left to gain once a step predicts less than this times ``Block.enough``.
_PLENTY = 10.0
# A refused block gives up once a step predicts less than this share of ``Block.enough``.
_NOTHING = 1e-3


@dataclass(eq=False)
class DampedBlock(Block):
    """A block with its curvature and the damping of its model."""

    damping: float = _DAMPING
    hessian: FloatArray = field(init=False)

    def aim(self, added: FloatArray) -> None:
        """Aim at the minimum of the quadratic model with this curvature ``(n,)`` added to the diagonal."""
        self.trial, self.predicted = model_minimum(
            self.hessian + np.diag(added), self.here.gradient, self.here.x, self.box
        )


@dataclass(frozen=True)
class DampedNewton(Policy[DampedBlock]):
    """Steps to the minimum of the quadratic model with added curvature (Levenberg, Marquardt), block by block.

    A step that overshoots is not shortened but bent toward where the function is steep: along directions with next to
    no curvature Newton's own steps are far too long. The curvature is only computed where a block has moved and is not
    done. What is left to gain is what the undamped model predicts, once the damped model predicts little.

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
    block = DampedBlock

    def evaluate(self, x: FloatArray) -> tuple[Any, FloatArray, None]:
        """Values and gradient."""
        return (*self.whole(x), None)

    def aim(self, x: FloatArray, blocks: Sequence[DampedBlock], each: Each) -> None:
        """Compute the curvature of the blocks that moved, and aim at the minimum of the damped model."""
        for block in blocks:
            block.left = 0.0 if block.stationary else block.left
        moved = [number for number, block in enumerate(blocks) if block.moved and not block.stationary]
        for number, hessian in zip(moved, self.curvature(x.copy(), moved) if moved else (), strict=True):
            blocks[number].hessian = np.array(hessian, np.float64)
        list(each(_aim_anew, [blocks[number] for number in moved]))

    def judge(self, block: DampedBlock, there: Point) -> bool:
        """Take the trial point where f is lower, and change the damping by how good the model was."""
        here, step = block.here, there.x - block.here.x
        fall = here.value - there.value
        if block.predicted <= _NOISE * abs(here.value):  # lost in the rounding of f, but not of its slope
            fall = -0.5 * float((here.gradient + there.gradient) @ step)
        share = fall / block.predicted if there.finite and block.predicted > 0 else -np.inf
        if share < _POOR:
            block.damping *= _FACTOR**block.refusals
        elif share > _GOOD:
            block.damping /= _FACTOR
        if there.finite and fall > 0:
            before, after = float(here.gradient @ step), float(there.gradient @ step)
            block.flat = before < 0 and falls_on(step, here.x, after / before)
            return True
        _aim(block)
        block.stuck = block.refusals >= _REFUSALS or block.predicted <= _NOTHING * block.enough
        return False


def _aim_anew(block: DampedBlock) -> None:
    """Aim from a new point; once little is predicted, ask the undamped model what is left."""
    block.left = np.inf
    _aim(block)
    if block.predicted <= _PLENTY * block.enough:
        _, block.left = model_minimum(block.hessian, block.here.gradient, block.here.x, block.box)


def _aim(block: DampedBlock) -> None:
    block.aim(np.full(len(block.hessian), block.damping * block.hessian.diagonal().mean()))
