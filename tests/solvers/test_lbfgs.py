from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from segcal.errors import InputError
from segcal.solvers import projected_lbfgs, projected_newton
from solvers.problems import Witness, identity, least_squares, softmax_data, softmax_regression


def first_order(problem):
    return Witness(lambda x: problem(x)[:2])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8))
def test_bounded_least_squares(seed, size):
    random = np.random.default_rng(seed)
    matrix = np.r_[random.normal(size=(size, size)), np.eye(size)]
    target = random.normal(size=2 * size)
    function = first_order(least_squares(matrix, target))
    solution = projected_lbfgs(function, random.normal(size=size), lower=0.0, upper=0.3)
    assert solution.converged
    assert solution.certificate <= 1e-6
    peer = lsq_linear(matrix, target, (0.0, 0.3), method="bvls", tol=1e-14)
    assert solution.objective == pytest.approx(peer.cost, abs=1e-10)
    assert solution.evaluations == len(function.points)
    assert not function.asked_twice()
    assert len(solution.history) == solution.iterations + 1
    assert (np.diff(solution.history) <= 0).all()


@pytest.mark.parametrize("lower", [None, 0.0])
def test_it_agrees_with_newton(lower):
    problem = softmax_regression(*softmax_data())
    function = first_order(problem)
    solution = projected_lbfgs(function, identity(4), lower, tolerance=1e-7)
    newton = projected_newton(problem, identity(4), lower)
    assert solution.converged
    assert solution.objective == pytest.approx(newton.objective, abs=1e-10)
    assert solution.evaluations == len(function.points) > 3 * newton.evaluations
    assert not function.asked_twice()


def test_trial_points_that_are_not_finite_are_refused():
    refused = []

    def barrier(x: np.ndarray):
        if (x <= 0).any():
            refused.append(x)
            return math.inf, np.full(x.size, math.nan)
        return np.sum(x - 1e-3 * np.log(x)), 1 - 1e-3 / x

    solution = projected_lbfgs(barrier, np.array([3.0, 0.5]))
    np.testing.assert_allclose(solution.value, 1e-3, rtol=1e-4)
    assert refused


def test_failures_are_said():
    problem = softmax_regression(*softmax_data())
    short = projected_lbfgs(first_order(problem), identity(4), max_iterations=3)
    assert (short.converged, short.iterations) == (False, 3)
    assert "iterations ran out" in short.message
    exact = projected_lbfgs(first_order(problem), identity(4), tolerance=1e-16)
    assert not exact.converged
    assert "rounding" in exact.message
    assert exact.certificate < 1e-6


def test_a_start_that_is_the_solution_takes_one_evaluation():
    solution = projected_lbfgs(lambda x: (x @ x, 2 * x), np.array([-1.0, -2.0]), lower=0.0)
    np.testing.assert_array_equal(solution.value, 0)
    np.testing.assert_array_equal(solution.active, -1)
    assert (solution.iterations, solution.evaluations, solution.converged) == (0, 1, True)


def test_bad_input():
    with pytest.raises(InputError, match="not finite at the start"):
        projected_lbfgs(lambda x: (math.nan, x), np.ones(2))
    with pytest.raises(InputError, match="gradient has shape"):
        projected_lbfgs(lambda x: (1.0, x[:1]), np.ones(2))
