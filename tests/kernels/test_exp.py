import math

import numba
import numpy as np
import pytest

from segcal.kernels.compiled import exp, log1p


@numba.njit(fastmath={"contract"})
def worst_exp(first, last, step):
    """Largest relative error over the float32 numbers whose bits lie in a range."""
    worst = 0.0
    for bits in range(first, last, step):
        x = np.uint32(bits).view(np.float32)
        truth = math.exp(np.float64(x))
        worst = max(worst, abs(np.float64(exp(x)) - truth) / truth)
    return worst


@numba.njit
def logarithms(x):
    return np.array([log1p(value) for value in x])


@numba.njit
def exponentials(x):
    return np.array([exp(value) for value in x])


def bits(x):
    return int(np.float32(x).view(np.uint32))


@pytest.mark.parametrize("low", [1e-30, 1e-3, 1, 8, 32])
def test_exp_is_within_1e7_of_the_truth(low):
    """A prime step through all of [-87, 0]; benchmarks/metrics.py --exp tries every number."""
    assert worst_exp(bits(-low), bits(-min(87, low * 1e3)), 101) < 1e-7


def test_exp_of_special_values():
    values = np.array([0.0, -0.0, -87.0, -1000.0, -np.inf, np.nan], np.float32)
    e = exponentials(values)
    assert e[0] == e[1] == 1
    assert 0 < e[2] == e[3] == e[4] < 2e-38
    assert np.isnan(e[5])


def test_log1p_keeps_its_precision_down_to_nothing():
    x = np.concatenate(([0.0], 10.0 ** np.linspace(-37, 4, 20001)))
    assert np.allclose(logarithms(x), np.log1p(x), rtol=2e-12, atol=0)
