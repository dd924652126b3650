"""Limited-memory BFGS, beside Newton's method on the same convex problems."""

import numpy as np
import pytest

from segcal.errors import InputError
from segcal.solvers import Newton, limited_memory, minimise
from solvers.problems import softmax_data, softmax_regression


@pytest.mark.parametrize("bounds", [(None, None), (0.0, 0.5), (-0.1, None)])
def test_the_minimum_is_that_of_newtons_method(bounds):
    problem = softmax_regression(*softmax_data())
    newton = minimise(Newton(problem), np.zeros(20), *bounds)
    found = limited_memory(lambda x: problem(x)[:2], np.zeros(20), *bounds, gain=1e-10)
    assert found.converged
    assert -1e-12 < found.objective - newton.objective < 1e-9
    assert found.certificate < 1e-4
    assert np.diff(found.history).max() <= 0
    value, gradient, _ = problem(found.value)
    assert found.objective == pytest.approx(value, rel=1e-12)
    lower, upper = (np.inf * sign if bound is None else bound for bound, sign in zip(bounds, (-1, 1), strict=True))
    assert found.certificate == pytest.approx(np.abs(np.clip(found.value - gradient, lower, upper) - found.value).max())


def test_too_few_evaluations_are_said():
    problem = softmax_regression(*softmax_data())
    found = limited_memory(lambda x: problem(x)[:2], np.zeros(20), gain=1e-12, max_evaluations=5)
    assert not found.converged
    assert found.message.startswith("not converged, as the evaluations ran out: projected gradient")
    assert found.objective < problem(np.zeros(20))[0]


def test_a_start_that_is_not_finite_is_refused():
    with pytest.raises(InputError, match="not finite at the start"):
        limited_memory(lambda x: (np.nan, x), np.zeros(2))


def test_it_ends_once_ten_steps_have_gained_too_little():
    curvature = np.geomspace(1.0, 1e4, 40)

    def whole(x):
        return 0.5 * float(curvature @ (x - 1) ** 2), curvature * (x - 1)

    for gain in (1.0, 1e-2, 1e-4, 1e-6):
        history = limited_memory(whole, np.zeros(40), gain=gain).history
        assert history[-11] - history[-1] <= gain
        assert history[-12] - history[-2] > gain
