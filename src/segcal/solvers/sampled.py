"""Newton's method on a sample, corrected by gradients of all data: for sums over very many data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from segcal.solvers.damped import DampedBlock, Whole
from segcal.solvers.driver import Each, Hessian, Index, Point, Policy, Start, blockwise, minimise
from segcal.solvers.newton import Newton, Problem
from segcal.solvers.quadratic import model_minimum
from segcal.solvers.solution import Box
from segcal.types import FloatArray

# Steps on the sample, at first and after every pass. Few suffice: the sample's minimum is not the one sought.
_FIRST_STEPS, _STEPS = 2, 1
# Damping of a block after its first refused step, the factor by which it changes,
_DAMPING, _FACTOR = 0.05, 4.0
# the share of the predicted decrease from which it falls again,
_GOOD = 0.75
# and the share of the mean curvature that it adds where the sample has none.
_EVENLY = 1e-3
# After this many refusals, a step whose predicted decrease is below the error of f, relative to f, cannot be judged.
_REFUSALS, _NOISE = 5, 1e-7
# A sample that finds no way down from a larger certificate than this is no guide: the minimum is elsewhere.
_STATIONARY = 1e-5
# Points of the sample whose results are kept: the solvers return to them.
_KEPT = 3


@dataclass(eq=False)
class _SampledBlock(DampedBlock):
    """A block with the sample's curvature, and the decrease that it expects; without damping at first."""

    damping: float = 0.0
    expected: float = 0.0

    def ask_model(self) -> None:
        """Set the decrease that the undamped quadratic model expects."""
        self.expected = model_minimum(self.hessian, self.here.gradient, self.here.x, self.box)[1]

    @property
    def lost(self) -> bool:
        """Whether the sample finds no way down, although the gradient says that there is one."""
        return self.predicted <= 0 and self.certificate > max(self.tolerance, _STATIONARY)

    def damp(self, damping: float) -> None:
        """Aim at the minimum of the quadratic model with this damping."""
        self.damping, diagonal = damping, self.hessian.diagonal()
        self.aim(damping * (diagonal + _EVENLY * diagonal.mean()))

    def set_left(self) -> None:
        """What the step predicts, unless that is too little to judge, or the sample is no guide."""
        beyond_judging = self.refusals >= _REFUSALS and self.predicted <= _NOISE * abs(self.here.value)
        self.stuck = self.lost
        self.left = np.inf if self.stuck else 0.0 if self.stationary or beyond_judging else self.predicted


class SampledNewton(Policy[_SampledBlock]):
    """Steps from the curvature of a sample and the gradient of all data.

    Newton's method finds the sample's minimum, which is near that of f. From there, with g the gradient of f at x and
    g_s that of the sample's f_s, the next point is the minimum over the box of ``f_s(y) + (g - g_s).y``, which has the
    slope of f at x and the shape of f_s everywhere (Shamir, Srebro and Zhang, ICML 2014). The distance to the minimum
    shrinks at every pass by about the relative difference of the two Hessians. A block whose f does not fall goes back
    and takes steps of a quadratic model with more curvature (Levenberg, Marquardt): the sample may have none where the
    other data fall steeply.

    Args:
        sample: ``x -> (value, gradient, Hessian)`` of the sample.
        whole: ``x -> (value, gradient)`` of f, in the same units.

    Examples:
        >>> data = np.random.default_rng(0).normal(3.0, 1.0, 10_000)
        >>> def part(x, data=data[:100]):
        ...     e = np.exp(x[0] - data)
        ...     return (e - x[0]).mean(), np.array([e.mean() - 1]), np.array([[e.mean()]])
        >>> solution = minimise(SampledNewton(part, lambda x: part(x, data)[:2]), [0.0], gain=1e-7)
        >>> abs(float(solution.value[0] + np.log(np.exp(-data).mean()))) < 1e-3, solution.evaluations < 8
        (True, True)
    """

    block = _SampledBlock

    def __init__(self, sample: Problem, whole: Whole) -> None:
        at = lru_cache(_KEPT)(lambda point: sample(np.frombuffer(point).copy()))
        self.sample: Problem = lambda x: at(x.tobytes())
        self.whole = whole

    def start(self, x: FloatArray, box: Box, blocks: Sequence[Index], each: Each) -> Start:
        """Near the sample's minimum."""
        options: dict[str, Any] = {"blocks": blocks, "max_steps": _FIRST_STEPS, "each": each}
        found = minimise(Newton(self.sample), x, box.lower, box.upper, **options)
        return Start(found.value, found.iterations, found.flat)

    def evaluate(self, x: FloatArray) -> tuple[Any, FloatArray, None]:
        """Values and gradient of all data."""
        return (*self.whole(x), None)

    def aim(self, x: FloatArray, blocks: Sequence[_SampledBlock], each: Each) -> None:
        """At the minimum of the tilted sample, or of the damped model for a block that needed damping before."""
        _, sample_gradient, hessian = self.sample(x)
        tilt = -sample_gradient
        for block, own in zip(blocks, blockwise(hessian), strict=True):
            block.hessian = own
            tilt[block.index] += block.here.gradient
        # One block with something to gain is enough to know; mostly it is the one that had the most to gain before.
        first = max(blocks, key=lambda block: block.left)
        for some in ([first], [block for block in blocks if block is not first]):
            list(each(_SampledBlock.ask_model, some))
            if any(block.expected > block.enough for block in some):
                target, decreases = self._tilted_minimum(x, tilt, blocks, each)
                break
        else:
            target, decreases = x.copy(), [block.expected for block in blocks]
        for block, decrease in zip(blocks, decreases, strict=True):
            if not block.moved:
                continue
            block.trial, block.predicted = block.box.project(target[block.index]), decrease
            if block.damping or block.lost:
                block.damp(block.damping or _DAMPING)
            block.set_left()

    def _tilted_minimum(
        self, x: FloatArray, tilt: FloatArray, blocks: Sequence[_SampledBlock], each: Each
    ) -> tuple[FloatArray, list[float]]:
        """The minimum of the tilted sample, and the decrease that it predicts for every block."""
        indices = [block.index for block in blocks]

        def tilted(y: FloatArray) -> tuple[Any, FloatArray, Hessian]:
            value, slope, hessian = self.sample(y)
            shares = np.array([tilt[index] @ (y[index] - x[index]) for index in indices])
            return np.asarray(value) + (shares if np.ndim(value) else shares.sum()), slope + tilt, hessian

        lower, upper = x.copy(), x.copy()  # a block that did not move has its aim already
        for block in blocks:
            if block.moved:
                lower[block.index], upper[block.index] = block.box.lower, block.box.upper
        options: dict[str, Any] = {"tolerance": blocks[0].tolerance, "max_steps": _STEPS, "each": each}
        found = minimise(Newton(tilted), x, lower, upper, blocks=indices, **options)
        before, after = (np.asarray(tilted(y)[0], np.float64).reshape(-1) for y in (x, found.value))
        return found.value, (before - after).tolist()

    def judge(self, block: _SampledBlock, there: Point) -> bool:
        """Take the trial point where f is lower; else add curvature."""
        if there.finite and there.value < block.here.value:
            if block.here.value - there.value >= _GOOD * block.predicted:
                block.damping = block.damping / _FACTOR if block.damping > _DAMPING else 0.0
            return True
        block.damp(max(_FACTOR * block.damping, _DAMPING))
        block.set_left()
        return False
