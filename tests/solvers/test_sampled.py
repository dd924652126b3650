"""Newton's method on a sample ends at the minimum of the whole, whatever the sample is like."""

import numpy as np
import pytest

from segcal.errors import InputError
from segcal.solvers import Newton, SampledNewton, minimise
from segcal.solvers.driver import Point
from segcal.solvers.solution import Box
from solvers.problems import Witness, identity, softmax_data, softmax_regression


def quadratic(seed, size=6, noise=0.0):
    """``(x - c)'H(x - c) / 2``, and the same with H and c off by about ``noise``."""
    random = np.random.default_rng(seed)

    def bowl(root, centre):
        hessian = root @ root.T + np.eye(size)
        return lambda x: (0.5 * (x - centre) @ hessian @ (x - centre), hessian @ (x - centre), hessian)

    root, centre = random.normal(size=(size, size)), random.normal(size=size)
    off = bowl(root + noise * random.normal(size=root.shape), centre + noise * random.normal(size=size))
    return bowl(root, centre), off


def without_hessian(problem):
    return Witness(lambda x: problem(x)[:2])


def scaled(problem, factor):
    """The sample's curvature times a factor; where its minimum is stays."""

    def other(x):
        value, gradient, hessian = problem(x)
        return factor * value, factor * gradient, factor * hessian

    return other


def assert_minimum(solution, problem, start, lower=None, upper=None, tolerance=1e-5, blocks=None):
    """As good as Newton's method on the whole, and the certificate is that of the point."""
    best = minimise(Newton(problem), start, lower, upper, blocks=blocks)
    value, gradient, _ = problem(solution.value)
    assert solution.converged
    assert solution.objective == pytest.approx(np.sum(value))
    assert solution.objective - best.objective < 1e-6
    box = Box(lower, upper, len(solution.value))
    assert solution.certificate == pytest.approx(box.certificate(solution.value, gradient), abs=1e-12)
    assert solution.certificate < tolerance
    assert np.array_equal(solution.active, box.active(solution.value))
    assert (np.diff(solution.history) <= 0).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bounds", [(None, None), (0.0, None), (-0.5, 0.3)])
def test_quadratics(seed, bounds):
    whole, sample = quadratic(seed, noise=0.1)
    passes = without_hessian(whole)
    solution = minimise(SampledNewton(sample, passes), np.ones(6), *bounds, gain=1e-12)
    assert_minimum(solution, whole, np.ones(6), *bounds)
    assert len(passes.points) == solution.evaluations <= 16


def test_a_sample_that_is_everything_needs_one_pass():
    whole, _ = quadratic(0)
    solution = minimise(SampledNewton(whole, without_hessian(whole)), np.zeros(6), gain=1e-7)
    assert solution.evaluations == 1
    assert_minimum(solution, whole, np.zeros(6), tolerance=1e-8)


@pytest.mark.parametrize("bounds", [(None, None), (-0.3, 0.5)])
def test_softmax_regression_from_a_twentieth_of_the_data(bounds):
    features, labels = softmax_data(rows=8000)
    whole, sample = softmax_regression(features, labels), softmax_regression(features[:400], labels[:400])
    passes = without_hessian(whole)
    solution = minimise(SampledNewton(sample, passes), identity(4), *bounds, gain=1e-9)
    assert_minimum(solution, whole, identity(4), *bounds, tolerance=1e-3)
    assert solution.evaluations <= 8
    if bounds[0] is not None:
        assert np.count_nonzero(solution.active) >= 3
    # the sample's own minimum is much worse, so the passes are what did it
    own = minimise(Newton(sample), identity(4), *bounds).value
    assert whole(own)[0] - solution.objective > 1e-3


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_a_sample_of_wrong_curvature(factor):
    for whole, start in ((quadratic(1)[0], np.ones(6)), (softmax_regression(*softmax_data()), identity(4))):
        _, gradient, _ = whole(start)
        tilt = -0.3 * factor * gradient  # a minimum elsewhere as well

        def sample(x, whole=whole, start=start, tilt=tilt):
            value, slope, hessian = scaled(whole, factor)(x)
            return value + tilt @ (x - start), slope + tilt, hessian

        solution = minimise(SampledNewton(sample, without_hessian(whole)), start, gain=1e-10, max_evaluations=80)
        assert_minimum(solution, whole, start, tolerance=1e-3)


def blocks(problems, size):
    """Independent problems of ``size`` variables each, interleaved."""
    indices = [np.arange(part, size * len(problems), len(problems)) for part in range(len(problems))]

    def problem(x):
        parts = [own(x[index]) for own, index in zip(problems, indices, strict=True)]
        gradient = np.empty_like(x)
        for index, part in zip(indices, parts, strict=True):
            gradient[index] = part[1]
        return np.array([part[0] for part in parts]), gradient, [part[2] for part in parts]

    return problem, indices


@pytest.mark.parametrize("bounds", [(None, None), (-0.2, 0.8)])
def test_blocks_are_solved_each_on_its_own(bounds):
    pairs = [quadratic(seed, noise=noise) for seed, noise in ((0, 0.02), (1, 0.1), (2, 0.2))]
    wholes, samples = zip(*pairs, strict=True)
    samples = [samples[0], scaled(samples[1], 0.3), scaled(samples[2], 3.0)]
    whole, indices = blocks(wholes, 6)
    sample, _ = blocks(samples, 6)
    solution = minimise(
        SampledNewton(sample, without_hessian(whole)),
        np.ones(18),
        *bounds,
        blocks=indices,
        gain=1e-11,
        max_evaluations=60,
    )
    assert_minimum(solution, whole, np.ones(18), *bounds, tolerance=1e-4, blocks=indices)
    for own, index in zip(wholes, indices, strict=True):
        assert own(solution.value[index])[0] - minimise(Newton(own), np.ones(6), *bounds).objective < 1e-8


def test_a_step_to_where_the_function_is_not_finite_is_refused():
    def whole(x):  # x - log x, which is infinite at 0 and undefined below
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(x[0] - np.log(x[0])), 1 - 1 / x

    def sample(x):  # of far too little curvature: its steps from 4 go below 0
        return 0.05 * float((x[0] - 4) ** 2), 0.1 * (x - 4), np.array([[0.1]])

    passes = Witness(whole)
    solution = minimise(SampledNewton(sample, passes), [4.0], gain=1e-10, max_evaluations=100)
    assert min(point[0] for point in passes.points) < 0
    assert solution.converged
    assert solution.value[0] == pytest.approx(1.0, abs=1e-4)
    assert solution.objective == pytest.approx(1.0, abs=1e-8)


def test_a_function_that_is_not_finite_at_the_samples_minimum_is_an_error():
    _, sample = quadratic(0)
    with pytest.raises(InputError, match="not finite at the start"):
        minimise(SampledNewton(sample, lambda x: (np.nan, np.zeros(6))), np.zeros(6), gain=1e-7)


def test_running_out_of_passes_is_said():
    whole, sample = quadratic(2, noise=0.3)
    solution = minimise(SampledNewton(sample, without_hessian(whole)), np.ones(6), gain=1e-14, max_evaluations=2)
    assert not solution.converged
    assert solution.evaluations == 2
    assert "not converged" in solution.message
    assert solution.certificate > 1e-8


def test_a_hopeless_sample_is_not_called_convergence():
    """Curvature a million times too small: every step is far too long, and all are refused."""
    whole, _ = quadratic(1)
    tilt = np.ones(6)

    def sample(x):
        value, slope, hessian = scaled(whole, 1e-6)(x)
        return value + tilt @ x * 1e-6, slope + tilt * 1e-6, hessian

    solution = minimise(SampledNewton(sample, without_hessian(whole)), np.ones(6), gain=1e-9, max_evaluations=30)
    best = minimise(Newton(whole), np.ones(6)).objective
    assert not solution.converged or solution.objective - best < 1e-6


def logistic(signs):
    """Mean of ``log(1 + exp(-s x))``: with one sign alone it falls forever."""
    signs = np.asarray(signs, float)

    def problem(x):
        p = 1 / (1 + np.exp(signs * x[0]))
        return (
            np.logaddexp(0, -signs * x[0]).mean(),
            np.array([-(signs * p).mean()]),
            np.array([[(p * (1 - p)).mean()]]),
        )

    return problem


@pytest.mark.parametrize("bounds", [(-100.0, 100.0), (-20.0, 20.0), (-5.0, 5.0)])
def test_a_separable_part_of_data_that_are_not_is_no_false_convergence(bounds):
    wholes = [logistic([1] * 9 + [-1]), logistic([1, 1, 1, -1])]
    whole, indices = blocks(wholes, 1)
    sample, _ = blocks([logistic([1] * 9), logistic([1, 1, -1])], 1)
    solution = minimise(
        SampledNewton(sample, without_hessian(whole)),
        np.ones(2),
        *bounds,
        blocks=indices,
        gain=1e-7,
        max_evaluations=30,
    )
    best = minimise(Newton(whole), np.ones(2), *bounds, blocks=indices).objective
    assert not solution.converged or solution.objective - best < 1e-6
    box = Box(*bounds, 2)
    assert solution.certificate == pytest.approx(box.certificate(solution.value, whole(solution.value)[1]))


def test_the_gain_ends_it_early_and_bounds_what_is_left():
    features, labels = softmax_data(rows=8000)
    whole, sample = softmax_regression(features, labels), softmax_regression(features[:400], labels[:400])
    best = minimise(Newton(whole), identity(4)).objective
    passes = []
    for gain in (1e-2, 1e-5, 1e-9):
        solution = minimise(SampledNewton(sample, without_hessian(whole)), identity(4), gain=gain)
        assert solution.converged
        assert solution.objective - best < 3 * gain
        passes.append(solution.evaluations)
    assert passes[0] < passes[1] <= passes[2]


def test_the_start_may_lie_outside_the_box_and_equal_bounds_hold():
    whole, sample = quadratic(0, noise=0.1)
    lower, upper = np.full(6, -1.0), np.full(6, 1.0)
    lower[2] = upper[2] = 0.25
    solution = minimise(SampledNewton(sample, without_hessian(whole)), np.full(6, 9.0), lower, upper, gain=1e-12)
    assert solution.value[2] == 0.25
    assert_minimum(solution, whole, np.full(6, 9.0), lower, upper)


def test_where_the_sample_sees_no_curvature():
    """The whole is steep along the second variable, of which the sample knows nothing: a bare step would be endless."""
    centre = np.array([1.0, -2.0])

    def whole(x):
        d = x - centre
        return 0.5 * d[0] ** 2 + 50 * d[1] ** 2, np.array([d[0], 100 * d[1]])

    def sample(x):
        return 0.5 * (x[0] - 1) ** 2, np.array([x[0] - 1, 0.0]), np.diag([1.0, 0.0])

    solution = minimise(SampledNewton(sample, whole), [5.0, 5.0], gain=1e-10, max_evaluations=400)
    assert solution.converged
    np.testing.assert_allclose(solution.value, centre, atol=1e-3)


def test_a_sample_of_the_same_curvature_needs_one_step_from_its_own_minimum():
    whole, _ = quadratic(0)
    tilt = np.linspace(-1, 1, 6)

    def sample(x):
        value, gradient, hessian = whole(x)
        return value + tilt @ x, gradient + tilt, hessian

    solution = minimise(SampledNewton(sample, without_hessian(whole)), np.zeros(6), gain=1e-9)
    assert solution.evaluations == 2
    assert_minimum(solution, whole, np.zeros(6), tolerance=1e-8)


def test_a_certificate_within_the_tolerance_ends_it_whatever_could_be_gained():
    whole, sample = quadratic(1, noise=0.1)
    loose, tight = (
        minimise(SampledNewton(sample, without_hessian(whole)), np.ones(6), tolerance=tolerance)
        for tolerance in (0.1, 1e-6)
    )
    assert loose.converged
    assert tight.converged
    assert 1e-3 < loose.certificate <= 0.1
    assert tight.certificate <= 1e-6
    assert loose.evaluations < tight.evaluations < 30


def test_after_five_refusals_a_gain_below_the_error_of_the_function_is_no_longer_sought():
    def bowl(x):
        return 0.5 * float(x @ x), x, np.eye(1)

    # Values that are rounded to 1, while the slope says that there is still something to gain: 5e-9.
    whole = Witness(lambda x: (1.0, x + 1e-4))
    solution = minimise(SampledNewton(bowl, whole), np.zeros(1))
    assert solution.converged
    assert (solution.evaluations, solution.iterations) == (6, 0)
    assert solution.certificate == pytest.approx(1e-4)


@pytest.mark.parametrize(("value", "damping"), [(9.1, 0.2), (9.5, 0.8)])
def test_damping_falls_after_a_step_that_was_as_good_as_predicted(value, damping):
    policy, x = SampledNewton(quadratic(0)[0], quadratic(0)[0]), np.zeros(1)
    block = policy.block(np.array([0]), Box(None, None, 1), Point(x, 10.0, x), 1e-8, 0.0)
    block.damping, block.predicted = 0.8, 1.0
    assert policy.judge(block, Point(x, value, x))
    assert block.damping == pytest.approx(damping)
