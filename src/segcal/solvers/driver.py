"""The loop that runs every step policy: evaluate, judge, aim again, until no block has anything left to gain.

A sum of independent functions of different variables is minimised in blocks. They share their evaluations, but each has
its own step and rests when it is done, so that one hard block does not slow the others. Policies see one block at a
time; everything that concerns all blocks is here.

The fits of ``segcal.fitting.expert_exact`` choose among the policies; it says how each threshold was measured.

==================  ==================================  ==========================================================
policy              a step needs                        taken when
==================  ==================================  ==========================================================
``Newton``          value, gradient and Hessian         the data are in memory, and at most 3 times as many as the
                                                        curvature needs (at 4 times ``SampledNewton`` takes about
                                                        half the time)
``SampledNewton``   the Hessian of a sample, value and  there are more data, or they are streamed (2 passes over
                    gradient of all data                all data with 15 voxels per parameter in the sample, 5 to
                                                        8 passes with 5)
``DampedNewton``    value and gradient, and the         the curvature of a sample misleads, as for free experts,
                    Hessian of the blocks that moved    or ``SampledNewton`` did not converge in 12 passes
==================  ==================================  ==========================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from segcal.errors import InputError
from segcal.solvers.solution import Box, Solution, refuse_start
from segcal.types import FloatArray

#: The variables of a block.
Index = NDArray[np.intp]
#: One ``(n, n)`` array, or one for each block.
Hessian = FloatArray | Sequence[FloatArray]
#: ``(function, items) -> results``, as ``map`` has them: perhaps in threads that share the items.
Each = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]

# A block rests once its expected gain is below this share of its part of ``gain``.
_RESTING = 0.1


class Point(NamedTuple):
    """What an evaluation tells a block, and whether all these numbers are finite."""

    x: FloatArray
    value: float
    gradient: FloatArray
    hessian: FloatArray | None = None
    finite: bool = True

    @classmethod
    def of(cls, x: FloatArray, value: float, gradient: FloatArray, hessian: FloatArray | None) -> Point:
        """In copies: a function may reuse its argument and the arrays it returns."""
        curved = None if hessian is None else np.array(hessian, np.float64)
        given = x, value, np.array(gradient, np.float64), curved
        return cls(*given, all(bool(np.isfinite(numbers).all()) for numbers in given if numbers is not None))


@dataclass(eq=False)
class Block:
    """An independent function of some of the variables: where it is, and the step it tries.

    Attributes:
        index: Its variables.
        box: Their bounds.
        here: The best point so far.
        tolerance: The certificate at which it is done.
        enough: A decrease too small to be worth a step.
        trial: The next point to evaluate.
        predicted: The decrease that the model predicts for the trial point.
        left: The decrease that is still possible, as far as the policy can tell.
        moved: Whether ``here`` is new, so that the policy must aim again.
        stuck: Whether no step can be taken.
        flat: Whether the function is constant or falls forever along some direction.
        refusals: Trial points refused in a row.
        steps: Trial points taken.
    """

    index: Index
    box: Box
    here: Point
    tolerance: float
    enough: float
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
        """Whether the certificate is within the tolerance."""
        return self.certificate <= self.tolerance

    @property
    def unfinished(self) -> bool:
        """Whether there is something to gain, and a step to take."""
        return self.left > self.enough and not self.stuck


AnyBlock = TypeVar("AnyBlock", bound=Block)


class Start(NamedTuple):
    """Where to begin, the steps it took to get there, and whether the function was seen to be flat on the way."""

    x: FloatArray
    steps: int = 0
    flat: bool = False


class Policy(ABC, Generic[AnyBlock]):
    """How steps are chosen and judged; ``block`` is the type of its blocks, with what the policy keeps in them."""

    block: type[AnyBlock]

    def start(self, x: FloatArray, box: Box, blocks: Sequence[Index], each: Each) -> Start:
        """Where to begin, given the user's start."""
        return Start(x)

    @abstractmethod
    def evaluate(self, x: FloatArray) -> tuple[Any, FloatArray, Hessian | None]:
        """Values of the blocks, gradient and, where the policy gets them at every point, Hessians."""

    @abstractmethod
    def aim(self, x: FloatArray, blocks: Sequence[AnyBlock], each: Each) -> None:
        """Set ``trial``, ``predicted`` and ``left`` of the blocks that moved, by ``each`` where they take long."""

    @abstractmethod
    def judge(self, block: AnyBlock, there: Point) -> bool:
        """Whether to take the trial point; where not, set another trial, or say that the block is stuck."""


def minimise(
    policy: Policy[AnyBlock],
    start: ArrayLike,
    lower: ArrayLike | None = None,
    upper: ArrayLike | None = None,
    *,
    blocks: Sequence[ArrayLike] | None = None,
    gain: float = 0.0,
    tolerance: float = 1e-8,
    max_steps: int = 100,
    max_evaluations: int = 1000,
    each: Each = map,
) -> Solution[FloatArray]:
    """The minimum of a smooth convex function over ``lower <= x <= upper``.

    Args:
        policy: The function, and how to step.
        start: Where to begin; moved into the box.
        lower: Lower bounds: None, a number, or one per component.
        upper: Upper bounds, likewise.
        blocks: The variables of every independent function, a partition of ``range(n)``; None is one block. The policy
            then evaluates one value for each block, and f is their sum.
        gain: Converged when the policy expects to lower f by no more than this.
        tolerance: Converged also when the certificate of ``segcal.solvers.Solution`` is at most this in every block.
        max_steps: The most steps that a block may take.
        max_evaluations: The most evaluations of f.
        each: Works on every block; threads may share them, as each does what it would do alone.
    """
    x = np.array(start, np.float64)
    if x.ndim != 1 or not np.isfinite(x).all():
        raise InputError(f"start has shape {x.shape} and values such as {x.ravel()[:3]}", expected="a finite vector")
    box = Box(lower, upper, x.size)
    indices = _checked_blocks(blocks, x.size)
    begin = policy.start(box.project(x), box, indices, each)
    x = begin.x
    points = _evaluate(policy, x, indices, each)
    if not all(point.finite for point in points):
        raise refuse_start(sum(point.value for point in points))
    enough = _RESTING * gain / len(indices)
    parts = [
        policy.block(index, box[index], here, tolerance, enough) for index, here in zip(indices, points, strict=True)
    ]
    history, evaluations = [sum(part.here.value for part in parts)], 1
    while True:
        for part in parts:
            if part.steps >= max_steps:  # a step that will not be made need not be aimed
                part.moved, part.left = False, 0.0 if part.stationary else part.left
        if any(part.moved for part in parts):
            policy.aim(x, parts, each)
        for part in parts:
            part.moved = False
        moving = [part for part in parts if part.unfinished and part.steps < max_steps]
        converged = sum(part.left for part in parts) <= gain
        if not moving or converged or evaluations >= max_evaluations:
            break
        for part in moving:
            x[part.index] = part.trial
        evaluations += 1
        for part, there in zip(parts, _evaluate(policy, x, indices, each), strict=True):
            if part in moving:
                part.refusals += 1
                if policy.judge(part, there):
                    part.here, part.moved, part.refusals, part.steps = there, True, 0, part.steps + 1
            x[part.index] = part.here.x
        if any(part.moved for part in moving):
            history.append(sum(part.here.value for part in parts))
    certificate, active = max(part.certificate for part in parts), box.active(x)
    flat = begin.flat or any(part.flat for part in parts)
    message = f"converged: projected gradient {certificate:.1e}, {np.count_nonzero(active)} bounds active"
    if converged and flat:
        message += "; the function is flat or falls forever along some direction"
    if not converged:
        ran_out = any(part.unfinished for part in parts)
        reason = "when the iterations ran out" if ran_out else "the rest is rounding (or derivatives are wrong)"
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


def _evaluate(policy: Policy[Any], x: FloatArray, indices: Sequence[Index], each: Each) -> list[Point]:
    """The point of every block."""
    value, gradient, hessian = policy.evaluate(x.copy())
    values = np.asarray(value, np.float64).reshape(-1)
    if np.shape(gradient) != x.shape or len(values) != len(indices):
        raise InputError(
            f"the gradient has shape {np.shape(gradient)} and there are {len(values)} values",
            expected=f"{x.shape} and one value per block, {len(indices)}",
        )
    hessians = [None] * len(indices) if hessian is None else blockwise(hessian)
    for index, own in zip(indices, hessians, strict=True):
        if own is not None and np.shape(own) != (index.size, index.size):
            raise InputError(
                f"the Hessian does not fit the variables: it has shape {np.shape(own)}",
                expected=f"({index.size}, {index.size})",
            )

    def point(number: int) -> Point:
        index = indices[number]
        return Point.of(x[index], float(values[number]), gradient[index], hessians[number])

    return list(each(point, range(len(indices))))


def blockwise(hessian: Hessian) -> list[FloatArray]:
    """The Hessians of the blocks; a single array belongs to the only block."""
    return [hessian] if isinstance(hessian, np.ndarray) and hessian.ndim == 2 else list(hessian)


def _checked_blocks(blocks: Sequence[ArrayLike] | None, size: int) -> list[Index]:
    indices = [np.asarray(index, np.intp) for index in blocks or [range(size)]]
    if sorted(np.concatenate(indices).tolist()) != list(range(size)):
        raise InputError("the blocks do not fit the variables", expected=f"indices that divide range({size})")
    return indices
