"""The unit of f does not matter: in another one, all solvers take the same steps, and with a power of 4 to the bit."""

import numpy as np
import pytest

from segcal.solvers import DampedNewton, Newton, SampledNewton, minimise, newton_1d
from solvers.problems import softmax_data, softmax_regression

FACTORS = (4.0**12, 4.0**-12)


def in_units(problem, factor):
    return lambda x: tuple(factor * part for part in problem(x))


def solved(name, factor, start):
    problem = in_units(softmax_regression(*softmax_data(60, 3)), factor)
    sample = in_units(softmax_regression(*softmax_data(40, 3, seed=1)), factor)
    policies = {
        "newton": lambda: Newton(problem),
        "damped": lambda: DampedNewton(lambda x: problem(x)[:2], lambda x, _: [problem(x)[2]]),
        "sampled": lambda: SampledNewton(sample, lambda x: problem(x)[:2]),
    }
    return minimise(policies[name](), start, -9.0, 9.0, gain=1e-9 * factor, tolerance=0.0)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("spread", [0.5, 6.0])
@pytest.mark.parametrize("name", ["newton", "damped", "sampled"])
def test_steps_are_the_same_in_every_unit(name, spread, factor):
    start = spread * np.random.default_rng(0).normal(size=12)
    plain, other = solved(name, 1.0, start), solved(name, factor, start)
    assert np.array_equal(other.value, plain.value)
    assert [value / factor for value in other.history] == list(plain.history)
    assert (other.evaluations, other.iterations) == (plain.evaluations, plain.iterations)


@pytest.mark.parametrize("factor", FACTORS)
def test_steps_along_a_line_are_the_same_in_every_unit(factor):
    def hill(x):
        return np.logaddexp(0, 4 * x) - x, 4 / (1 + np.exp(-4 * x)) - 1, 16 / (2 + np.exp(4 * x) + np.exp(-4 * x))

    plain = newton_1d(hill, 3.0, (-50.0, 50.0), tolerance=1e-10)
    other = newton_1d(in_units(hill, factor), 3.0, (-50.0, 50.0), tolerance=1e-10 * factor)
    assert (other.value, other.evaluations) == (plain.value, plain.evaluations)
    assert plain.value == pytest.approx(-np.log(3) / 4)
