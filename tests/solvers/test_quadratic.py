"""The model's minimum over a box is one: its projected gradient is zero, wherever the search begins."""

import numpy as np
import pytest

from segcal.solvers import quadratic
from segcal.solvers.quadratic import minimise_quadratic
from segcal.solvers.solution import Box


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("at_bounds", [0.0, 0.5, 1.0])
def test_the_minimum_over_a_box(seed, at_bounds):
    """Of strongly coupled components, many of which end at a bound, from points with many at a bound."""
    random = np.random.default_rng(seed)
    size = 40
    factor = random.normal(size=(size, size)) @ np.diag(10.0 ** random.uniform(-3, 0, size))
    hessian = factor @ factor.T + 1e-6 * np.eye(size)
    box = Box(-1.0, 1.0, size)
    inside = random.uniform(-1, 1, size)
    start = np.where(random.random(size) < at_bounds, np.sign(inside), inside)
    gradient = random.normal(size=size)
    found = minimise_quadratic(hessian, gradient, start, box)
    assert 5 < np.count_nonzero(box.active(found)) < size
    assert box.certificate(found, gradient + hessian @ (found - start)) < 1e-9


def test_a_component_at_its_bound_that_is_pushed_out():
    """Both may move in by their slopes, but the Newton step of both takes the second one out."""
    hessian, box = np.array([[1.0, 0.99], [0.99, 1.0]]), Box(0.0, None, 2)
    found = minimise_quadratic(hessian, np.array([-1.0, -1e-3]), np.zeros(2), box)
    np.testing.assert_allclose(found, [1.0, 0.0], atol=1e-12)


def test_components_with_equal_bounds_stay():
    box = Box([1.0, -5.0], [1.0, 5.0], 2)
    found = minimise_quadratic(np.array([[2.0, 1.0], [1.0, 2.0]]), np.array([-3.0, -3.0]), np.array([1.0, 0.0]), box)
    np.testing.assert_allclose(found, [1.0, 1.5], atol=1e-9)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_compiled_loops_do_what_the_definition_does(seed, noise, monkeypatch):
    """Where many components end at a bound, some have equal bounds or none, and some directions have no curvature."""
    random = np.random.default_rng(seed)
    size = 90
    factor = random.normal(size=(size, size - 5)) @ np.diag(10.0 ** random.uniform(-2, 0, size - 5))
    hessian, gradient = factor @ factor.T, factor @ random.normal(size=size - 5)
    lower, upper = -random.exponential(size=size), random.exponential(size=size)
    lower[:20], upper[10:30] = -np.inf, np.inf
    upper[40:43] = lower[40:43]
    start = np.clip(random.normal(size=size), lower, upper)
    given = hessian, gradient, start, Box(lower, upper, size), noise
    compiled = minimise_quadratic(*given)
    monkeypatch.setattr(quadratic, "_loops", lambda: None)
    plain = minimise_quadratic(*given)
    box = given[3]
    assert box.certificate(compiled, gradient + hessian @ (compiled - start)) < 1e-7
    np.testing.assert_array_equal(box.active(compiled), box.active(plain))
    np.testing.assert_allclose(compiled, plain, rtol=1e-6, atol=1e-6)


def test_loops_are_compiled_once_for_either_order_in_memory():
    factor = np.random.default_rng(0).normal(size=(70, 70))
    hessian, gradient, box = factor @ factor.T, factor[0], Box(-1.0, 1.0, 70)
    by_row, by_column = (
        minimise_quadratic(order(hessian), gradient, np.zeros(70), box)
        for order in (np.ascontiguousarray, np.asfortranarray)
    )
    np.testing.assert_array_equal(by_row, by_column)
    assert len(quadratic._loops().minimise.signatures) == 1
