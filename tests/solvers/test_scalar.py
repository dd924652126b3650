from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from segcal.errors import InputError
from segcal.solvers import newton_1d
from solvers.problems import Witness, softmax_data, temperature

BETA = (1e-4, 1e4)


def exponential(x: float) -> tuple[float, float, float]:
    return math.exp(-x), -math.exp(-x), math.exp(-x)


def barrier(x: float) -> tuple[float, float, float]:
    """x - log x, infinite for x <= 0."""
    return (x - math.log(x), 1 - 1 / x, 1 / x**2) if x > 0 else (math.inf, math.nan, math.nan)


@given(st.floats(-9, 9), st.floats(1e-3, 1e3), st.floats(-10, 10))
def test_a_quadratic_takes_one_step(centre, curvature, start):
    function = Witness(lambda x: (0.5 * curvature * (x - centre) ** 2, curvature * (x - centre), curvature))
    solution = newton_1d(function, start, (-10, 10))
    assert solution.converged
    assert curvature * abs(solution.value - centre) <= 1e-8
    # A second step only where rounding of the first leaves a derivative above the tolerance.
    assert solution.evaluations == len(function.points) <= 3
    assert not function.asked_twice()


@pytest.mark.parametrize("scale", [0.1, 0.5, 1.0, 2.0, 5.0, 50.0])
def test_no_point_of_a_fine_grid_is_lower(scale):
    features, labels = softmax_data(scale=scale)
    function = Witness(temperature(features[:, :-1], labels))
    solution = newton_1d(function, 1.0, BETA)
    lowest = min(function.function(beta)[0] for beta in solution.value * np.linspace(0.5, 2, 301))
    assert solution.converged
    assert not solution.flat
    assert solution.objective <= lowest
    assert solution.certificate == abs(function.function(solution.value)[1]) <= 1e-8
    assert solution.evaluations == len(function.points) <= 9
    assert not function.asked_twice()


def test_a_good_start_takes_a_handful_of_passes():
    features, labels = softmax_data(rows=2000)
    function = temperature(features[:, :-1], labels)
    best = newton_1d(function, 1.0, BETA).value
    sample = newton_1d(temperature(features[:200, :-1], labels[:200]), 1.0, BETA).value
    assert newton_1d(function, sample, BETA).evaluations <= 5
    assert newton_1d(function, best, BETA).evaluations == 1


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-50, 50), st.floats(0.05, 20), st.floats(0.1, 3)), min_size=1, max_size=5),
    st.floats(-100, 100),
)
def test_sums_of_soft_absolute_values(terms, start):
    """sum w log cosh(k (x - c)) / k: linear far away, steep or flat near its minimum, and of any scale."""

    def function(x: float) -> tuple[float, float, float]:
        u = [k * (x - c) for c, k, _ in terms]
        soft = [abs(a) + math.log1p(math.exp(-2 * abs(a))) for a in u]
        return (
            math.fsum(w * s / k for s, (_, k, w) in zip(soft, terms, strict=True)),
            math.fsum(w * math.tanh(a) for a, (_, _, w) in zip(u, terms, strict=True)),
            math.fsum(w * k * (1 - math.tanh(a) ** 2) for a, (_, k, w) in zip(u, terms, strict=True)),
        )

    witness = Witness(function)
    solution = newton_1d(witness, start, (-100, 100))
    peer = minimize_scalar(lambda x: function(x)[0], bounds=(-100, 100), method="bounded", options={"xatol": 1e-9})
    assert solution.converged
    # A convex f rises by at most the slope here times the way.
    assert solution.objective <= peer.fun + 1e-9 + solution.certificate * abs(solution.value - peer.x)
    assert solution.evaluations == len(witness.points) <= 60
    assert not witness.asked_twice()


@pytest.mark.parametrize(("centre", "bound", "side"), [(20.0, 10.0, 1), (-20.0, -10.0, -1)])
def test_a_minimum_outside_ends_at_the_bound(centre, bound, side):
    solution = newton_1d(
        lambda x: (math.cosh(x - centre), math.sinh(x - centre), math.cosh(x - centre)), 0.0, (-10, 10)
    )
    assert solution.value == bound
    assert solution.active == side
    assert solution.converged
    assert solution.certificate == 0
    assert "bound" in solution.message


@pytest.mark.parametrize("slope", [-3.0, 3.0, -1e-3, 1e-3])
def test_a_straight_line_ends_at_the_bound(slope):
    solution = newton_1d(lambda x: (slope * x, slope, 0.0), 1.0, BETA)
    assert solution.value == BETA[slope < 0]
    assert solution.evaluations == 3


def test_a_constant_leaves_the_start_and_says_so():
    solution = newton_1d(lambda x: (2.0, 0.0, 0.0), 1.0, BETA)
    assert (solution.value, solution.evaluations, solution.flat) == (1.0, 1, True)
    assert "flat" in solution.message


def test_a_minimum_at_infinity_ends_at_the_bound():
    """Perfectly separable logits: the best beta is as large as it may be."""
    features, _ = softmax_data()
    logits = features[:, :-1] - features[:, :-1].max(1, keepdims=True)
    labels = logits.argmax(1)
    logits[np.arange(len(labels)), labels] += 0.5
    solution = newton_1d(temperature(logits, labels), 1.0, BETA)
    assert (solution.value, solution.active) == (BETA[1], 1)
    assert solution.evaluations <= 12
    assert newton_1d(exponential, 0.0, (0.0, 100.0)).value == 100.0


def test_a_wrong_model_ends_at_the_other_bound():
    features, labels = softmax_data()
    solution = newton_1d(temperature(-features[:, :-1], labels), 1.0, BETA)
    assert (solution.value, solution.active) == (BETA[0], -1)


@pytest.mark.parametrize("start", [1e-3, 0.7, 5.0, 700.0])
def test_infinite_values_lie_beyond_the_minimum(start):
    solution = newton_1d(barrier, start, (-1e3, 1e3))
    assert solution.value == pytest.approx(1, abs=1e-7)
    assert solution.evaluations <= 25


@pytest.mark.parametrize("start", [-900.0, 0.1, 5.0])
def test_a_kink_is_found_to_the_last_bit(start):
    def kink(x: float) -> tuple[float, float, float]:
        return abs(x - 1 / 3), math.copysign(1.0, x - 1 / 3), 0.0

    solution = newton_1d(kink, start, (-1e3, 1e3))
    assert solution.converged
    assert abs(solution.value - 1 / 3) <= 2 * np.spacing(1 / 3)
    assert "last bit" in solution.message


@pytest.mark.parametrize("scale", [0.2, 1.0, 5.0, 20.0])
def test_single_precision_costs_no_passes_and_is_said(scale):
    features, labels = softmax_data(rows=4000, scale=scale)
    exact = newton_1d(temperature(features[:, :-1], labels), 1.0, BETA)
    solution = newton_1d(temperature(features[:, :-1], labels, np.float32), 1.0, BETA, tolerance=1e-12)
    assert solution.value == pytest.approx(exact.value, rel=1e-6)
    assert solution.evaluations <= exact.evaluations + 4
    assert not solution.converged
    assert "rounding" in solution.message


def test_running_out_of_iterations_is_said():
    solution = newton_1d(lambda x: (abs(x - 1 / 3), math.copysign(1.0, x - 1 / 3), 0.0), 0.0, (-1e3, 1e3), 1e-10, 7)
    assert not solution.converged
    assert (solution.iterations, solution.evaluations) == (7, 8)
    assert "after 7 iterations" in solution.message
    assert solution.objective == min(solution.history)


def test_bad_input():
    with pytest.raises(InputError, match="not finite at the start"):
        newton_1d(lambda x: (math.nan, 0.0, 0.0), 0.0, (-1, 1))
    for bounds in [(1.0, 0.0), (0.0, math.inf), (math.nan, 1.0)]:
        with pytest.raises(InputError, match="bounds"):
            newton_1d(exponential, 0.0, bounds)


@pytest.mark.parametrize(("away", "flat"), [(0.5e-3, False), (1.5e-3, True), (3e-3, True)])
def test_a_stationary_point_with_a_long_newton_step_is_flat(away, flat):
    solution = newton_1d(lambda x: (1.0, 1e-9 * (x / away - 1), 1e-9 / away), 0.0, (-1.0, 1.0))
    assert solution.converged
    assert solution.flat == flat
    assert ("flat" in solution.message) == flat


def told(*slopes):
    """A function of curvature 1 that is asked in this order for its slope, close to the minimum."""
    left = iter(slopes)
    return lambda x: (1.0, next(left), 1.0)


def test_of_close_steps_that_gain_little_one_is_forgiven():
    solution = newton_1d(told(-1e-7, -0.5e-7, 0.0), 0.0, BETA, tolerance=1e-12)
    assert (solution.converged, solution.evaluations) == (True, 3)
    solution = newton_1d(told(-1e-7, -0.5e-7, -0.4e-7), 0.0, BETA, tolerance=1e-12)
    assert (solution.converged, solution.evaluations) == (False, 3)
    assert solution.certificate == 0.4e-7
    assert "the rest is rounding" in solution.message
