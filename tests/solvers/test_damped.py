import numpy as np
import pytest

from segcal.errors import SegcalError
from segcal.solvers import DampedNewton, Newton, minimise
from segcal.solvers.solution import Box
from solvers.problems import Witness, identity, softmax_data, softmax_regression


def parts_of(problem):
    return lambda x: problem(x)[:2], lambda x, _: [problem(x)[2]]


@pytest.mark.parametrize("factor", [0.7, 1.0, 5.0])
@pytest.mark.parametrize("bounds", [(None, None), (0.0, None), (-0.5, 0.3)])
def test_the_minimum_is_found_whatever_is_said_of_the_curvature(factor, bounds):
    problem = softmax_regression(*softmax_data())
    best = minimise(Newton(problem), identity(4), *bounds)
    value, curvature = parts_of(problem)
    witness = Witness(value)
    policy = DampedNewton(witness, lambda x, n: [factor * curvature(x, n)[0]])
    solution = minimise(policy, identity(4), *bounds, gain=1e-12)
    assert solution.converged
    assert solution.objective - best.objective < 1e-8
    assert len(witness.points) == solution.evaluations
    assert (np.diff(solution.history) <= 0).all()
    box = Box(*bounds, len(solution.value))
    slope = problem(solution.value)[1]
    assert solution.certificate == pytest.approx(box.certificate(solution.value, slope), abs=1e-12)


def test_steps_where_newton_goes_astray():
    """softplus(-t) for features of 1 and of 80: Newton's own step from far out is millions long, and makes f rise."""
    features, labels = np.array([[1.0, 80.0], [1.0, 79.0], [-80.0, 1.0], [79.0, 2.0]]), np.array([1.0, -1.0, 1.0, -1.0])

    def problem(x):
        margin = labels * (features @ x)
        p = 0.5 * (1 - np.tanh(margin / 2))
        value = np.logaddexp(0, -margin).sum() + 1e-6 * x @ x
        gradient = -features.T @ (labels * p) + 2e-6 * x
        return value, gradient, (features.T * (p * (1 - p))) @ features + 2e-6 * np.eye(2)

    start = np.array([0.5, -0.4])
    here, slope, hessian = problem(start)
    assert problem(start - np.linalg.solve(hessian, slope))[0] > 10 * here
    solution = minimise(DampedNewton(*parts_of(problem)), start, gain=1e-12)
    assert solution.converged
    assert solution.objective == pytest.approx(minimise(Newton(problem), [0.0, 0.0]).objective, rel=1e-6)


def test_steps_that_the_rounding_of_values_hides_are_judged_by_the_slope():
    problem = softmax_regression(*softmax_data())
    best = minimise(Newton(problem), identity(4)).objective
    calls = []

    def whole(x):  # every value seems higher than the one before, by a part in a thousand million
        calls.append(x)
        value, gradient, _ = problem(x)
        return value + 1e4 + 1e-5 * len(calls), gradient

    solution = minimise(DampedNewton(whole, lambda x, _: [problem(x)[2]]), identity(4), gain=1e-13)
    assert solution.converged
    assert problem(solution.value)[0] - best < 1e-12


def test_it_is_said_where_the_function_falls_forever():
    def bowl(x):
        return 0.5 * x @ x - x.sum(), x - 1

    def slope(x):
        return np.exp(-x).sum(), -np.exp(-x)

    found = minimise(DampedNewton(bowl, lambda x, _: [np.eye(2)]), [5.0, 3.0], gain=1e-12)
    endless = minimise(DampedNewton(slope, lambda x, _: [np.diag(np.exp(-x))]), [0.0, 1.0], gain=1e-12)
    assert found.converged
    assert endless.converged
    assert (found.flat, endless.flat) == (False, True)
    assert "falls forever" in endless.message


def test_blocks_are_solved_each_on_its_own():
    """As many passes as the slowest alone, the same points, and no curvature of those that are done."""
    problems = [softmax_regression(*softmax_data(seed=seed)) for seed in range(3)]
    size = len(identity(4))
    indices = [np.arange(part, 3 * size, 3) for part in range(3)]
    asked = []

    def whole(x):
        found = [own(x[index]) for own, index in zip(problems, indices, strict=True)]
        gradient = np.empty(3 * size)
        for index, (_, slope, _) in zip(indices, found, strict=True):
            gradient[index] = slope
        return np.array([value for value, _, _ in found]), gradient

    def curvature(x, blocks):
        asked.append(list(blocks))
        return [problems[n](x[indices[n]])[2] for n in blocks]

    start = np.repeat(identity(4), 3)
    together = minimise(DampedNewton(whole, curvature), start, blocks=indices, gain=3e-10)
    alone = [minimise(DampedNewton(*parts_of(own)), identity(4), gain=1e-10) for own in problems]
    assert together.evaluations == max(solution.evaluations for solution in alone)
    for index, solution in zip(indices, alone, strict=True):
        np.testing.assert_allclose(together.value[index], solution.value, atol=1e-9)
    assert asked[0] == [0, 1, 2]
    for n, solution in enumerate(alone):
        assert sum(n in blocks for blocks in asked) <= solution.evaluations


def test_too_few_passes_are_admitted():
    solution = minimise(
        DampedNewton(*parts_of(softmax_regression(*softmax_data()))), identity(4), gain=1e-7, max_evaluations=2
    )
    assert not solution.converged
    assert "not converged" in solution.message


def test_a_start_without_a_value_is_refused():
    with pytest.raises(SegcalError):
        minimise(DampedNewton(lambda x: (np.nan, x), lambda x, _: [np.eye(1)]), [1.0])


def test_a_step_beyond_the_domain_is_taken_back():
    def whole(x):
        with np.errstate(invalid="ignore"):
            return float(np.sum(-np.log(1 - x) - 10 * x)), 1 / (1 - x) - 10

    policy = DampedNewton(whole, lambda x, _: [np.diag(1 / (1 - x) ** 2)])
    solution = minimise(policy, np.array([-1.0, 0.0]))  # a full step would go to 19, and the value is NaN from 1 on
    assert solution.converged
    np.testing.assert_allclose(solution.value, 0.9, atol=1e-8)
