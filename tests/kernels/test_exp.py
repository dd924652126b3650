import math

import numba
import numpy as np
import pytest

from segcal.kernels import compiled, expert_loops, gradient_loops
from segcal.kernels.compiled import exp, exp64, log, log1p


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
    return np.array([log1p(value) for value in x]), np.array([log(value) for value in x])


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


def test_logarithms_keep_their_precision_down_to_nothing_and_near_one():
    near_one = 1 + np.concatenate((-(0.5 ** np.arange(1, 50)), 0.5 ** np.arange(1, 50)))
    x = np.concatenate((10.0 ** np.linspace(-37, 4, 20001), near_one))
    assert np.allclose(logarithms(x), (np.log1p(x), np.log(x)), rtol=2e-12, atol=0)
    assert logarithms(np.zeros(1))[0] == 0


@numba.njit(fastmath={"contract"})
def doubles(x):
    return np.array([exp64(value) for value in x])


def test_exp_of_float64_is_right_to_its_last_digits():
    x = -np.concatenate((10.0 ** np.linspace(-30, 0, 5001), np.linspace(1, 708, 50_001), [0.0]))
    assert np.allclose(doubles(x), np.exp(x), rtol=4e-16, atol=0)
    special = doubles(np.array([-1000.0, -np.inf, np.nan]))
    assert 0 < special[0] == special[1] < 1e-307
    assert np.isnan(special[2])


def test_compiled_code_is_kept_as_long_as_all_its_sources_are_the_same():
    # gradient_range calls loops of other files; by its own file alone it would keep theirs as they once were.
    for loop in (gradient_loops.gradient_range, expert_loops.apply_range):
        cache_file = loop._cache._cache_file
        assert cache_file._source_stamp == cache_file._version == compiled._STAMP
