"""The loop that runs every step policy: evaluate, judge, aim again, until no block has anything left to gain.

A sum of independent functions of different variables is minimised in blocks: they share their evaluations, but each
has its own step and rests when it is done, so that one hard block slows no other. Policies see one block at a time;
everything that concerns all of them is here.

| policy | its step needs | taken when |
|---|---|---|
| ``Newton`` | value, gradient and Hessian from every evaluation | all data are at hand, or the variables are few |
| ``SampledNewton`` | the Hessian of a sample, the gradient of everything | a pass over everything is dear |
| ``DampedNewton`` | the Hessian of everything, only where a block moved | Newton's own steps overshoot |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from segcal.errors import InputError
from segcal.solvers.solution import Box, FloatArray, Solution, checked_start, converged_message, refuse_start

#: The variables of a block.
Index = NDArray[np.intp]
#: One ``(n, n)`` array, or one for each block.
Hessian = FloatArray | Sequence[FloatArray]
State = TypeVar("State")

# A block waits for the others once it expects to gain less than this share of its part of ``gain``.
_WAITING = 0.1


class Point(NamedTuple):
    """What an evaluation tells a block."""

    x: FloatArray
    value: float
    gradient: FloatArray
    hessian: FloatArray | None = None

    @property
    def finite(self) -> bool:
        """Whether all numbers are."""
        return all(bool(np.isfinite(numbers).all()) for numbers in self if numbers is not None)


@dataclass(eq=False)
class Block(Generic[State]):
    """An independent function of some of the variables: where it is, and the step it tries.

    Attributes:
        index: Its variables.
        box: Their bounds.
        here: The best point so far.
        tolerance: The certificate at which it is done.
        enough: The decrease that is not worth a step.
        trial: The next point to evaluate.
        predicted: The decrease that the model of the step predicts.
        left: The decrease that is still to be had, as far as the policy can tell.
        moved: Whether ``here`` is new, so that the policy must aim again.
        stuck: Whether no step can be taken.
        flat: Whether the function falls forever, or is level, along some direction.
        refusals: Trial points refused in a row.
        steps: Trial points taken.
        state: What the policy keeps.
    """

    index: Index
    box: Box
    here: Point
    tolerance: float
    enough: float
    state: State
    trial: FloatArray = field(init=False)
    predicted: float = np.inf
    left: float = np.inf
    moved: bool = True
    stuck: bool = False
    flat: bool = False
    refusals: int = 0
    steps: int = 0

    @property
    def certificate(self) -> float:
        """The norm of the projected gradient."""
        return self.box.certificate(self.here.x, self.here.gradient)

    @property
    def stationary(self) -> bool:
        """Whether it is at a minimum, by the gradient."""
        return self.certificate <= self.tolerance

    @property
    def unfinished(self) -> bool:
        """Whether there is something to gain, and a way."""
        return self.left > self.enough and not self.stuck

    def take(self, there: Point) -> None:
        """Move to the trial point."""
        self.here, self.moved, self.refusals, self.steps = there, True, 0, self.steps + 1


class Start(NamedTuple):
    """Where to begin, the steps it took to find that, and whether the function was seen to be flat on the way."""

    x: FloatArray
    steps: int = 0
    flat: bool = False


class Policy(Protocol[State]):
    """How steps are chosen and judged."""

    def start(self, x: FloatArray, box: Box, blocks: Sequence[Index]) -> Start:
        """Where to begin, given the user's start."""

    def state(self, here: Point) -> State:
        """What to keep of a block that begins here."""

    def evaluate(self, x: FloatArray) -> tuple[Any, FloatArray, Hessian | None]:
        """Values of the blocks, gradient and, where the policy gets them at every point, Hessians."""

    def aim(self, x: FloatArray, blocks: Sequence[Block[State]]) -> None:
        """Set ``trial``, ``predicted`` and ``left`` of the blocks that moved."""

    def judge(self, block: Block[State], there: Point) -> bool:
        """Whether to take the trial point; where not, set another trial, or say that the block is stuck."""


def minimise(
    policy: Policy[State],
    start: ArrayLike,
    lower: ArrayLike | None = None,
    upper: ArrayLike | None = None,
    *,
    blocks: Sequence[ArrayLike] | None = None,
    gain: float = 0.0,
    tolerance: float = 1e-8,
    max_steps: int = 100,
    max_evaluations: int = 1000,
) -> Solution[FloatArray]:
    """The minimum of a smooth convex function over ``lower <= x <= upper``.

    Args:
        policy: The function, and how to step.
        start: Where to begin; moved into the box.
        lower: Lower bounds: None, a number, or one per component.
        upper: Upper bounds, likewise.
        blocks: The variables of every independent function, which divide ``range(n)`` among them; None is one block.
            The function then has a value for each block, and they add up to f.
        gain: Converged when the policy expects to lower f by no more than this.
        tolerance: Converged also when the certificate of ``segcal.solvers.Solution`` is at most this in every block.
        max_steps: Steps to take at most, by every block.
        max_evaluations: Evaluations of f at most.
    """
    x = checked_start(start)
    box = Box(lower, upper, x.size)
    indices = _checked_blocks(blocks, x.size)
    begin = policy.start(box.project(x), box, indices)
    x = begin.x
    points = _evaluate(policy, x, indices)
    if not all(point.finite for point in points):
        raise refuse_start(sum(point.value for point in points))
    parts = [
        Block(index, box[index], here, tolerance, _WAITING * gain / len(indices), policy.state(here))
        for index, here in zip(indices, points, strict=True)
    ]
    history, evaluations = [sum(part.here.value for part in parts)], 1
    while True:
        if any(part.moved for part in parts):
            policy.aim(x, parts)
        for part in parts:
            part.moved = False
        moving = [part for part in parts if part.unfinished and part.steps < max_steps]
        if not moving or _left(parts) <= gain or evaluations >= max_evaluations:
            break
        for part in moving:
            x[part.index] = part.trial
        evaluations += 1
        for part, there in zip(parts, _evaluate(policy, x, indices), strict=True):
            if part in moving:
                part.refusals += 1
                if policy.judge(part, there):
                    part.take(there)
            x[part.index] = part.here.x
        if any(part.moved for part in moving):
            history.append(sum(part.here.value for part in parts))
    return _conclude(x, box, parts, begin, history, evaluations, converged=_left(parts) <= gain)


def _left(parts: Sequence[Block[Any]]) -> float:
    return sum(part.left for part in parts)


def _conclude(
    x: FloatArray,
    box: Box,
    parts: Sequence[Block[Any]],
    begin: Start,
    history: list[float],
    evaluations: int,
    *,
    converged: bool,
) -> Solution[FloatArray]:
    certificate, active = box.certificate(x, gradient_of(parts, x.size)), box.active(x)
    flat = begin.flat or any(part.flat for part in parts)
    if converged:
        message = converged_message(certificate, active, flat)
    else:
        ran_out = any(part.unfinished for part in parts)
        reason = "when the iterations ran out" if ran_out else "below which all is rounding (or derivatives are wrong)"
        message = f"not converged: projected gradient {certificate:.1e}, {reason}"
    return Solution(
        value=x,
        objective=history[-1],
        converged=converged,
        certificate=certificate,
        iterations=begin.steps + len(history) - 1,
        evaluations=evaluations,
        message=message,
        active=active,
        flat=flat,
        history=tuple(history),
    )


def gradient_of(parts: Sequence[Block[Any]], size: int) -> FloatArray:
    """The gradient of all blocks together, each at its own point."""
    gradient = np.empty(size)
    for part in parts:
        gradient[part.index] = part.here.gradient
    return gradient


def _evaluate(policy: Policy[Any], x: FloatArray, indices: Sequence[Index]) -> list[Point]:
    """What every block is to know: copies, since a function may reuse its argument and the arrays it sums into."""
    value, gradient, hessian = policy.evaluate(x.copy())
    values = np.asarray(value, np.float64).reshape(-1)
    if np.shape(gradient) != x.shape or len(values) != len(indices):
        raise InputError(
            f"the gradient has shape {np.shape(gradient)} and there are {len(values)} values",
            expected=f"{x.shape} and one value per block, {len(indices)}",
        )
    hessians = [None] * len(indices) if hessian is None else blockwise(hessian)
    found = []
    for value, index, own in zip(values, indices, hessians, strict=True):
        here = x[index]
        if own is not None and np.shape(own) != (here.size, here.size):
            raise InputError(
                f"the Hessian does not fit the variables: it has shape {np.shape(own)}",
                expected=f"({here.size}, {here.size})",
            )
        slope = np.array(gradient[index], np.float64)
        found.append(Point(here, float(value), slope, None if own is None else np.array(own, np.float64)))
    return found


def blockwise(hessian: Hessian) -> list[FloatArray]:
    """The Hessians of the blocks; a single array is that of the only one."""
    return [hessian] if isinstance(hessian, np.ndarray) and hessian.ndim == 2 else list(hessian)


def _checked_blocks(blocks: Sequence[ArrayLike] | None, size: int) -> list[Index]:
    indices = [np.asarray(index, np.intp) for index in blocks or [range(size)]]
    if sorted(np.concatenate(indices).tolist()) != list(range(size)):
        raise InputError("the blocks do not fit the variables", expected=f"indices that divide range({size})")
    return indices
