"""Newton's method on a sample, corrected by gradients of everything: for sums over very many data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from segcal.solvers.damped import Whole
from segcal.solvers.driver import Block, Hessian, Index, Point, Start, blockwise, gradient_of, minimise
from segcal.solvers.newton import Newton, Problem
from segcal.solvers.quadratic import minimise_quadratic, predicted_decrease
from segcal.solvers.solution import Box, FloatArray

# Steps on the sample, at first and after every pass: its minimum is not the one wanted, so near it is enough.
_FIRST_STEPS, _STEPS = 2, 1
# Damping of a block whose step was refused; it changes by this factor and ends below the first,
_DAMPING, _FACTOR = 0.05, 4.0
# where the model was good: the decrease was at least this share of the predicted one;
_GOOD = 0.75
# and the share of the mean curvature that it adds where the sample sees none.
_EVENLY = 1e-3
# A step refused so often whose predicted decrease is below the error of f, relative to f, cannot be judged.
_REFUSALS, _NOISE = 5, 1e-7
# A sample that finds no way down from a larger certificate than this is no guide: the minimum is elsewhere.
_STATIONARY = 1e-5


@dataclass
class _Sampled:
    """The sample's curvature where a block is, and the damping of its model; 0 is none."""

    hessian: FloatArray = field(default_factory=lambda: np.empty((0, 0)))
    damping: float = 0.0


class SampledNewton:
    """Steps from the curvature of a sample and the gradient of everything.

    Newton's method finds the sample's minimum, which is near that of f. From there, with g the gradient of f at x and
    g_s that of the sample's f_s, the next point is the minimum over the box of ``f_s(y) + (g - g_s).y``, which has the
    slope of f at x and the shape of f_s everywhere (Shamir, Srebro and Zhang, ICML 2014). The distance to the minimum
    shrinks at every pass by about the relative difference of the two Hessians. A block that does not fall goes back and
    takes steps of a quadratic model with more curvature (Levenberg, Marquardt): the sample may see none where the
    others fall steeply.

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

    def __init__(self, sample: Problem, whole: Whole) -> None:
        self.sample, self.whole = _remembering(sample), whole

    def start(self, x: FloatArray, box: Box, blocks: Sequence[Index]) -> Start:
        """Near the sample's minimum."""
        found = minimise(Newton(self.sample), x, box.lower, box.upper, blocks=blocks, max_steps=_FIRST_STEPS)
        return Start(found.value, found.iterations, found.flat)

    def state(self, here: Point) -> _Sampled:
        """No damping."""
        return _Sampled()

    def evaluate(self, x: FloatArray) -> tuple[Any, FloatArray, None]:
        """Values and gradient of everything."""
        return (*self.whole(x), None)

    def aim(self, x: FloatArray, blocks: Sequence[Block[_Sampled]]) -> None:
        """At the minimum of the tilted sample, or of its damped model where that had to be used before."""
        _, sample_gradient, hessian = self.sample(x.copy())
        hessians = blockwise(hessian)
        for block, own in zip(blocks, hessians, strict=True):
            if block.moved:
                block.state.hessian = own
        targets, decreases = self._tilted_minimum(x, gradient_of(blocks, x.size), sample_gradient, hessians, blocks)
        for block, target, decrease in zip(blocks, targets, decreases, strict=True):
            if not block.moved:
                continue
            block.trial, block.predicted = block.box.project(target), decrease
            no_way_down = decrease <= 0 and block.certificate > max(block.tolerance, _STATIONARY)
            if block.state.damping or no_way_down:
                _damp(block, block.state.damping or _DAMPING)
            _set_left(block)

    def _tilted_minimum(
        self,
        x: FloatArray,
        gradient: FloatArray,
        sample_gradient: FloatArray,
        hessians: Sequence[FloatArray],
        blocks: Sequence[Block[_Sampled]],
    ) -> tuple[list[FloatArray], list[float]]:
        """For every block, the minimum of the tilted sample and the decrease that it predicts."""
        indices = [block.index for block in blocks]
        tilt = gradient - sample_gradient
        expected = []
        for block, hessian in zip(blocks, hessians, strict=True):
            here = block.here
            step = minimise_quadratic(hessian, here.gradient, here.x, block.box) - here.x
            expected.append(predicted_decrease(hessian, here.gradient, step))
        if all(decrease <= block.enough for decrease, block in zip(expected, blocks, strict=True)):
            return [x[index] for index in indices], expected  # as the quadratic model has it: no evaluation needed

        def tilted(y: FloatArray) -> tuple[Any, FloatArray, Hessian]:
            value, slope, hessian = self.sample(y)
            shares = np.array([tilt[index] @ (y[index] - x[index]) for index in indices])
            return np.asarray(value) + (shares if np.ndim(value) else shares.sum()), slope + tilt, hessian

        bounds = [np.empty_like(x), np.empty_like(x)]
        for block in blocks:
            bounds[0][block.index], bounds[1][block.index] = block.box.lower, block.box.upper
        tolerance = blocks[0].tolerance
        found = minimise(Newton(tilted), x, *bounds, blocks=indices, tolerance=tolerance, max_steps=_STEPS)
        before, after = (np.asarray(tilted(y)[0], np.float64).reshape(-1) for y in (x, found.value))
        return [found.value[index] for index in indices], (before - after).tolist()

    def judge(self, block: Block[_Sampled], there: Point) -> bool:
        """Take the trial point where f is lower; else add curvature."""
        state = block.state
        if there.finite and there.value < block.here.value:
            if block.here.value - there.value >= _GOOD * block.predicted:
                state.damping = state.damping / _FACTOR if state.damping > _DAMPING else 0.0
            return True
        _damp(block, max(_FACTOR * state.damping, _DAMPING))
        _set_left(block)
        return False


def _damp(block: Block[_Sampled], damping: float) -> None:
    """Aim at the minimum of the quadratic model with additional curvature."""
    hessian, here = block.state.hessian, block.here
    diagonal = hessian.diagonal()
    damped = hessian + np.diag(damping * (diagonal + _EVENLY * diagonal.mean()))
    block.trial = minimise_quadratic(damped, here.gradient, here.x, block.box)
    block.predicted = predicted_decrease(damped, here.gradient, block.trial - here.x)
    block.state.damping = damping


def _set_left(block: Block[_Sampled]) -> None:
    """What the step predicts, unless that is beyond judging, or the sample is no guide."""
    beyond_judging = block.refusals >= _REFUSALS and block.predicted <= _NOISE * abs(block.here.value)
    block.left = 0.0 if block.stationary or beyond_judging else block.predicted
    block.stuck = block.predicted <= 0 and block.certificate > max(block.tolerance, _STATIONARY)
    if block.stuck:
        block.left = np.inf


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
