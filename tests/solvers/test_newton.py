from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear, minimize

from segcal.errors import InputError
from segcal.solvers import Newton, minimise
from solvers.problems import Witness, identity, least_squares, softmax_data, softmax_regression

seeds = st.integers(0, 2**32 - 1)


def assert_kkt(solution, gradient, lower, upper, tolerance):
    """Stationary inside, at the bounds the gradient points out of the box, and the reported figures are the true."""
    x, active = solution.value, solution.active
    assert (lower <= x).all()
    assert (x <= upper).all()
    assert (np.abs(gradient[(active == 0) & (lower < upper)]) <= tolerance).all()
    assert (gradient[active < 0] >= -tolerance).all()
    assert (gradient[active > 0] <= tolerance).all()
    assert solution.certificate <= tolerance
    assert solution.certificate == pytest.approx(np.abs(np.clip(x - gradient, lower, upper) - x).max(), abs=1e-12)
    np.testing.assert_array_equal(active, (x == upper).astype(int) - (x == lower))


def assert_honest(solution, witness):
    """Evaluations are counted, never repeated, and the objective never rises."""
    assert solution.evaluations == len(witness.points)
    assert not witness.asked_twice()
    assert len(solution.history) == solution.iterations + 1 <= solution.evaluations
    assert solution.objective == solution.history[-1]
    assert (np.diff(solution.history) <= 1e-14 * np.abs(solution.history[0])).all()


@settings(deadline=None)
@given(seeds, st.integers(1, 12))
def test_a_quadratic_takes_one_step(seed, size):
    random = np.random.default_rng(seed)
    matrix = random.normal(size=(size + 3, size)) + np.eye(size + 3, size)
    target = random.normal(size=size + 3)
    problem = Witness(least_squares(matrix, target))
    solution = minimise(Newton(problem), 10 * random.normal(size=size))
    expected = np.linalg.lstsq(matrix, target)[0]
    np.testing.assert_allclose(solution.value, expected, atol=1e-8)
    assert (solution.converged, solution.iterations, solution.evaluations) == (True, 1, 2)
    assert_honest(solution, problem)


@settings(deadline=None)
@given(seeds, st.integers(1, 12), st.sampled_from([0.0, 0.2, 1.0]))
def test_bounded_least_squares_as_scipy_solves_it(seed, size, width):
    """Width 0 fixes variables: their bounds are equal."""
    random = np.random.default_rng(seed)
    matrix = np.r_[random.normal(size=(size, size)), 0.3 * np.eye(size)]
    target = random.normal(size=2 * size)
    lower = np.where(random.random(size) < 0.7, 0.3 * random.normal(size=size), -np.inf)
    upper = np.where(random.random(size) < 0.7, np.maximum(lower, -1) + width, np.inf)
    problem = Witness(least_squares(matrix, target))
    solution = minimise(Newton(problem), random.normal(size=size), lower, upper, tolerance=1e-10)
    assert_kkt(solution, problem.function(solution.value)[1], lower, upper, 1e-10)
    assert_honest(solution, problem)
    assert solution.evaluations <= 3
    if width:
        peer = lsq_linear(matrix, target, (lower, upper), method="bvls", tol=1e-14, max_iter=1000)
        assert solution.objective == pytest.approx(peer.cost, abs=1e-10)
        np.testing.assert_allclose(solution.value, peer.x, atol=1e-8)


@given(seeds)
def test_a_singular_quadratic_takes_the_step_of_least_norm(seed):
    random = np.random.default_rng(seed)
    matrix = random.normal(size=(4, 3)) @ random.normal(size=(3, 7))
    target = random.normal(size=4)
    solution = minimise(Newton(least_squares(matrix, target)), np.zeros(7))
    assert solution.converged
    units = np.linalg.norm(matrix, axis=0)  # in which all curvatures are 1
    expected = np.linalg.pinv(matrix / units, rcond=1e-10) @ target / units
    np.testing.assert_allclose(solution.value, expected, atol=1e-5 * (1 + np.abs(expected).max()))


@settings(deadline=None)
@given(seeds, st.integers(2, 12))
@example(923305, 11)
def test_a_singular_quadratic_in_a_box(seed, size):
    """Fewer equations than unknowns: many minima, of which any will do."""
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(size - 1, size)), 3 * random.normal(size=size - 1)
    problem = Witness(least_squares(matrix, target))
    solution = minimise(Newton(problem), np.zeros(size), -1.0, 0.5)
    assert_kkt(solution, problem.function(solution.value)[1], np.full(size, -1.0), np.full(size, 0.5), 1e-8)
    assert_honest(solution, problem)
    # As many iterations as it has variables, scipy's default, are too few for the example above.
    peer = lsq_linear(matrix, target, (-1.0, 0.5), method="bvls", tol=1e-14, max_iter=1000)
    assert solution.objective == pytest.approx(peer.cost, abs=1e-9)


def softmax_optimum(features, labels):
    """An independent optimum: torch's cross-entropy and derivatives, the last class held at 0, scipy's trust region."""
    inputs, targets = torch.from_numpy(features), torch.from_numpy(labels)
    classes, size = labels.max() + 1, features.shape[1]

    def loss(x: torch.Tensor) -> torch.Tensor:
        weights = torch.cat([x.reshape(classes - 1, size), torch.zeros(1, size, dtype=torch.float64)])
        return torch.nn.functional.cross_entropy(inputs @ weights.T, targets)

    result = minimize(
        lambda x: loss(torch.from_numpy(x)).item(),
        np.zeros((classes - 1) * size),
        jac=lambda x: torch.autograd.functional.jacobian(loss, torch.from_numpy(x)).numpy(),
        hess=lambda x: torch.autograd.functional.hessian(loss, torch.from_numpy(x)).numpy(),
        method="trust-exact",
        options={"gtol": 1e-10},
    )
    return result.fun


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("scale", "passes"), [(0.2, 10), (1.0, 10), (5.0, 20), (20.0, 30)])
def test_softmax_regression_from_the_identity(scale, passes, seed):
    """A large scale is an overconfident start where probabilities are 0 or 1, and nearly no curvature is left."""
    features, labels = softmax_data(scale=scale, seed=seed)
    problem = Witness(softmax_regression(features, labels))
    solution = minimise(Newton(problem), identity(4))
    assert solution.converged
    assert solution.certificate <= 1e-8
    assert not solution.flat
    assert solution.objective == pytest.approx(softmax_optimum(features, labels), abs=1e-10)
    assert solution.evaluations <= passes
    assert_honest(solution, problem)


def test_directions_that_change_nothing_do_not_amplify_rounding():
    """Columns of W may be shifted freely, yet sums in another order, that is other rounding, give the same W."""
    features, labels = softmax_data()
    order = np.random.default_rng(0).permutation(len(labels))
    one = minimise(Newton(softmax_regression(features, labels)), identity(4)).value
    other = minimise(Newton(softmax_regression(features[order], labels[order])), identity(4)).value
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_separable_data_determine_all_but_those_directions():
    """Where all curvature vanishes, rounding does reach the shifts, by up to a tenth of W, and hardly anything else."""
    features, _ = softmax_data()
    labels = features[:, :4].argmax(1)
    order = np.random.default_rng(0).permutation(len(labels))
    one = minimise(Newton(softmax_regression(features, labels)), identity(4)).value.reshape(4, 5)
    other = minimise(Newton(softmax_regression(features[order], labels[order])), identity(4)).value.reshape(4, 5)
    np.testing.assert_allclose(one - one.mean(0), other - other.mean(0), atol=1e-3 * np.abs(one).max())
    assert np.abs(one - other).max() <= 0.2 * np.abs(one).max()


@pytest.mark.parametrize(("lower", "upper"), [(0.0, 0.6), (-0.3, 0.4), (-0.1, 0.9)])
def test_bounded_softmax_regression(lower, upper):
    features, labels = softmax_data(seed=3)
    problem = Witness(softmax_regression(features, labels))
    solution = minimise(Newton(problem), identity(4), lower, upper, tolerance=1e-10)
    assert np.count_nonzero(solution.active) >= 2
    assert f"{np.count_nonzero(solution.active)} bounds active" in solution.message
    assert_kkt(solution, problem.function(solution.value)[1], lower, upper, 1e-10)
    assert_honest(solution, problem)
    assert solution.evaluations <= 12
    options = {"gtol": 1e-9, "ftol": 0, "maxiter": 5000, "maxfun": 10000, "maxcor": 30}
    bounds = [(lower, upper)] * 20
    peer = minimize(lambda x: problem.function(x)[:2], np.zeros(20), jac=True, bounds=bounds, options=options)
    assert solution.objective == pytest.approx(peer.fun, abs=1e-10)


def test_separable_data_are_said_to_fall_forever():
    features, _ = softmax_data()
    labels = features[:, :4].argmax(1)
    solution = minimise(Newton(softmax_regression(features, labels)), identity(4))
    assert solution.objective <= 1e-6
    assert solution.flat
    assert "falls forever" in solution.message
    bounded = minimise(Newton(softmax_regression(features, labels)), identity(4), -5.0, 5.0)
    assert bounded.converged
    assert not bounded.flat
    assert np.count_nonzero(bounded.active) > 0


def blockwise(functions, indices):
    """Functions of different variables as one problem with a block-diagonal Hessian."""

    def problem(x: np.ndarray):
        values, gradients, hessians = zip(*(f(x[i]) for f, i in zip(functions, indices, strict=True)), strict=True)
        gradient = np.empty(x.size)
        gradient[np.concatenate(indices)] = np.concatenate(gradients)
        return np.array(values), gradient, hessians

    return problem


def test_blocks_take_as_many_evaluations_as_the_hardest_alone():
    easy = softmax_regression(*softmax_data(scale=1.0, classes=4, seed=0))
    hard = softmax_regression(*softmax_data(scale=20.0, classes=4, seed=1))
    indices = np.random.default_rng(0).permutation(40).reshape(2, 20)
    start = np.empty(40)
    start[indices] = identity(4)
    lower = np.full(40, -np.inf)
    lower[indices[0]] = 0.0
    problem = Witness(blockwise([easy, hard], indices))
    both = minimise(Newton(problem), start, lower, blocks=list(indices))
    alone = [minimise(Newton(easy), identity(4), 0.0), minimise(Newton(hard), identity(4))]
    np.testing.assert_array_equal(both.value[indices[0]], alone[0].value)
    np.testing.assert_array_equal(both.value[indices[1]], alone[1].value)
    assert both.objective == alone[0].objective + alone[1].objective
    assert both.evaluations == max(solution.evaluations for solution in alone)
    assert alone[0].evaluations < alone[1].evaluations
    assert_honest(both, problem)


def test_one_block_is_the_dense_problem():
    dense = softmax_regression(*softmax_data())

    def block(x: np.ndarray):
        value, gradient, hessian = dense(x)
        return [value], gradient, [hessian]

    np.testing.assert_array_equal(
        minimise(Newton(block), identity(4)).value, minimise(Newton(dense), identity(4)).value
    )


@pytest.mark.parametrize("start", [0.01, 1.0, 300.0])
def test_trial_points_that_are_not_finite_are_refused(start):
    """sum x - log x is infinite for negative x, where Newton's step from a large x leads."""
    refused = []

    def barrier(x: np.ndarray):
        if (x <= 0).any():
            refused.append(x)
            return math.nan, x, np.eye(x.size)
        return np.sum(x - np.log(x)), 1 - 1 / x, np.diag(1 / x**2)

    solution = minimise(Newton(barrier), np.array([start, 2.0]))
    np.testing.assert_allclose(solution.value, 1, atol=1e-7)
    assert solution.converged
    assert refused or start <= 1


def test_exponentials_overflow_and_are_tamed():
    """sum exp(x) - x from -30: no curvature, so that the first step would go to exp(1e13)."""

    def steep(x: np.ndarray):
        with np.errstate(over="ignore"):
            return np.sum(np.exp(x) - x), np.exp(x) - 1, np.diag(np.exp(x))

    solution = minimise(Newton(steep), np.full(3, -30.0))
    np.testing.assert_allclose(solution.value, 0, atol=1e-7)
    assert solution.evaluations <= 40


def test_no_curvature_at_all_leads_to_the_bounds():
    slope = np.array([1.0, -2.0, 0.0])
    solution = minimise(Newton(lambda x: (slope @ x, slope, np.zeros((3, 3)))), np.zeros(3), -1.0, 1.0)
    np.testing.assert_array_equal(solution.value, [-1, 1, 0])
    np.testing.assert_array_equal(solution.active, [-1, 1, 0])
    assert solution.converged


def test_a_problem_may_reuse_its_arrays():
    inner = softmax_regression(*softmax_data())
    gradient, hessian = np.empty(20), np.empty((20, 20))

    def problem(x: np.ndarray):
        value, gradient[:], hessian[:] = inner(x)
        x[:] = np.nan  # and its argument
        return value, gradient, hessian

    expected = minimise(Newton(inner), identity(4))
    np.testing.assert_array_equal(minimise(Newton(problem), identity(4)).value, expected.value)


@pytest.mark.parametrize("scale", [0.2, 1.0, 5.0])
def test_single_precision_costs_few_passes_and_is_said(scale):
    features, labels = softmax_data(rows=4000, scale=scale)
    exact = minimise(Newton(softmax_regression(features, labels)), identity(4))
    solution = minimise(Newton(softmax_regression(features, labels, np.float32)), identity(4), tolerance=1e-12)
    assert softmax_regression(features, labels)(solution.value)[0] == pytest.approx(exact.objective, abs=1e-10)
    assert solution.evaluations <= exact.evaluations + 6
    assert not solution.converged
    assert "rounding" in solution.message


def test_the_start_is_moved_into_the_box_and_may_be_the_solution():
    problem = Witness(least_squares(np.eye(2), np.array([3.0, 3.0])))
    solution = minimise(Newton(problem), [9.0, 9.0], upper=1.0)
    np.testing.assert_array_equal(solution.value, [1, 1])
    assert (solution.iterations, solution.evaluations, solution.converged) == (0, 1, True)


def test_running_out_of_iterations_is_said():
    problem = softmax_regression(*softmax_data())
    solution = minimise(Newton(problem), identity(4), max_steps=2)
    assert not solution.converged
    assert solution.iterations == 2
    assert "iterations ran out" in solution.message
    assert solution.certificate == np.abs(problem(solution.value)[1]).max()


def test_wrong_derivatives_are_said():
    solution = minimise(Newton(lambda x: (x @ x, -2 * x, np.eye(2))), np.ones(2))
    assert not solution.converged
    assert "derivatives are wrong" in solution.message
    assert solution.objective == 2.0


@pytest.mark.parametrize(
    ("problem", "match"),
    [
        (lambda x: (math.nan, x, np.eye(2)), "not finite at the start"),
        (lambda x: (1.0, x, np.full((2, 2), np.inf)), "not finite at the start"),
        (lambda x: (1.0, x, np.eye(3)), "Hessian does not fit"),
        (lambda x: ([1.0, 1.0], x, np.eye(2)), "one value per block"),
        (lambda x: (1.0, x[:1], np.eye(2)), "gradient has shape"),
    ],
)
def test_bad_problems(problem, match):
    with pytest.raises(InputError, match=match):
        minimise(Newton(problem), np.ones(2))


@pytest.mark.parametrize("blocks", [[[0]], [[0], [0, 1]], [[0], [2]]])
def test_blocks_that_do_not_divide_the_variables(blocks):
    with pytest.raises(InputError, match="blocks do not fit"):
        minimise(Newton(least_squares(np.eye(2), np.zeros(2))), np.ones(2), blocks=blocks)


def test_blocks_of_which_one_has_a_hessian_of_another_size():
    with pytest.raises(InputError, match="Hessian does not fit"):
        minimise(Newton(lambda x: ([1.0, 1.0], x, [np.eye(1), np.eye(2)])), np.ones(2), blocks=[[0], [1]])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([1.0, np.nan],), "start has shape"),
        (([[1.0, 1.0]],), "start has shape"),
        (([1.0, 1.0], 1.0, 0.0), "lower exceeds upper at 0, 1"),
        (([1.0, 1.0], [0.0, 0.0, 0.0]), "lower has shape"),
        (([1.0, 1.0], None, [np.nan, 0.0]), "upper has shape"),
    ],
)
def test_bad_arguments(arguments, match):
    with pytest.raises(InputError, match=match):
        minimise(Newton(least_squares(np.eye(2), np.zeros(2))), *arguments)


def test_a_refused_block_may_shorten_its_step_while_others_wait():
    """One step each: the first takes its own at once, the second's is too long and has to be cut several times."""

    def easy(x):
        return 0.5 * float(x @ x), x.copy(), np.eye(1)

    def steep(x):  # curvature falls away from the minimum, so that a whole Newton step from 3 goes far beyond it
        u = float(x[0])
        return math.log(math.cosh(u)), np.array([math.tanh(u)]), np.array([[1 - math.tanh(u) ** 2]])

    indices = [np.array([0]), np.array([1])]
    solution = minimise(Newton(blockwise([easy, steep], indices)), [1.0, 3.0], blocks=indices, max_steps=1)
    assert solution.value[0] == 0
    assert abs(solution.value[1]) < 3
    assert solution.evaluations > 2


def test_a_block_that_is_done_stays_where_it_is_while_others_move():
    def problem(x):
        return (
            [0.5 * x[0] ** 2, np.cosh(x[1])],
            np.array([x[0], np.sinh(x[1])]),
            [np.eye(1), np.array([[np.cosh(x[1])]])],
        )

    witness = Witness(problem)
    solution = minimise(Newton(witness), [1e-10, 3.0], blocks=[[0], [1]])
    assert solution.converged
    assert solution.evaluations > 3
    assert {point[0] for point in witness.points} == {1e-10}


def test_a_block_gives_up_after_twelve_refusals_in_a_row():
    known = {1.0: (1.0, 1.0, 2.0), 0.5: (0.0, 1.0, 2.0)}  # finite at the start and after the first step only

    def problem(x):
        value, slope, curvature = known.get(float(x[0]), (math.nan,) * 3)
        return value, np.array([slope]), np.array([[curvature]])

    solution = minimise(Newton(problem), [1.0])
    assert not solution.converged
    assert (solution.iterations, solution.evaluations) == (1, 2 + 12)
    assert solution.value == 0.5


def test_three_level_steps_that_do_not_halve_the_certificate_are_rounding():
    """The value does not change any more, and the slope is the same everywhere."""
    solution = minimise(Newton(lambda x: (1.0, np.full(1, 1e-6), np.eye(1))), [0.0])
    assert not solution.converged
    assert solution.iterations == 3
    assert "the rest is rounding" in solution.message


def test_near_the_minimum_the_slope_decides_where_values_are_rounded():
    centre = np.array([0.3, -0.2])

    def problem(x):
        return float(np.float32(1 + 0.5 * np.sum((x - centre) ** 2))), x - centre, np.eye(2)

    solution = minimise(Newton(problem), centre + 1e-5, tolerance=1e-9)
    assert solution.converged
    np.testing.assert_allclose(solution.value, centre, atol=1e-9)


@pytest.mark.parametrize("start", [1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0])
def test_how_far_a_shortened_step_went_limits_the_next(start):
    """On ``sqrt(1 + x^2)`` Newton's steps run away; after one that passed the minimum, the next is no longer."""

    def problem(x):
        root = np.sqrt(1 + x[0] ** 2)
        return root, x / root, np.array([[root**-3]])

    witness = Witness(problem)
    solution = minimise(Newton(witness), [start])
    assert solution.converged
    points = [float(point[0]) for point in witness.points]
    here, reach = points[0], math.inf
    for trial in points[1:]:
        assert abs(trial - here) <= reach * (1 + 1e-12)
        if trial**2 < here**2:  # taken
            full = -here * (1 + here**2)
            shortened, passed = abs(trial - here) < 0.999 * abs(full), trial * here < 0 and abs(trial) > 0.2
            reach = abs(trial - here) * (1 if passed else 2) if shortened else math.inf
            here = trial


def test_after_a_step_beyond_the_domain_the_next_is_at_most_twice_as_long_as_the_one_taken():
    def problem(x):
        return 0.5 * float(x[0] - 10) ** 2 if x[0] < 5 else math.nan, x - 10, np.eye(1)

    witness = Witness(problem)
    minimise(Newton(witness), [0.0], max_evaluations=4)
    start, beyond, taken, after = (float(point[0]) for point in witness.points)
    assert (start, beyond) == (0, 10)
    assert taken < after <= 3 * taken < 5


@pytest.mark.parametrize("centre", [0.1, 10.0, 1e4])
def test_a_parabola_is_not_flat_however_far_its_minimum(centre):
    solution = minimise(
        Newton(lambda x: (0.5 * float((x - centre) @ (x - centre)), x - centre, np.eye(1))), [0.0], max_steps=1
    )
    assert solution.converged
    assert not solution.flat
