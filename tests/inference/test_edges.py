"""Levels at the ends of their range, columns without an interval, and values that are all the same."""

import numpy as np
import pytest

from segcal.errors import InputError
from segcal.inference import (
    Pooled,
    arrays,
    bootstrap_interval,
    compare_pairs,
    critical_difference,
    hierarchical_bootstrap,
    pooled_intervals,
)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5])
def test_a_level_is_between_zero_and_one(level):
    with pytest.raises(InputError, match="level is"):
        bootstrap_interval([1.0, 2.0], level=level)


def test_a_column_of_one_case_has_no_interval_and_the_next_has_its_own():
    random = np.random.default_rng(0)
    full = random.random((6, 2)) + 1
    alone = np.zeros((6, 2))
    alone[3] = 1.0, 2.0

    def ratio(total):
        return total[:, 0] / np.maximum(total[:, 1], 1e-300)

    both = pooled_intervals([Pooled(alone, ratio), Pooled(full, ratio)], replicates=100)
    assert np.isnan(both[0]).all()
    assert np.array_equal(both[1], pooled_intervals([Pooled(full, ratio)], replicates=100)[0])


def test_two_cases_are_enough_for_an_interval():
    sums = np.zeros((4, 2))
    sums[1], sums[2] = (1.0, 2.0), (3.0, 2.0)
    (interval,) = pooled_intervals([Pooled(sums, lambda total: total[:, 0] / np.maximum(total[:, 1], 1))])
    assert np.isfinite(interval).all()


def test_means_of_groups_leave_out_what_is_missing():
    values = np.array([[1.0, np.nan], [3.0, np.nan], [np.nan, 5.0], [2.0, np.nan]])
    means = arrays.mean_by_group(values, np.array([0, 0, 0, 1]))
    assert np.array_equal(means, [[2.0, 5.0], [2.0, np.nan]], equal_nan=True)


def test_two_cases_have_an_interval_of_their_mean_and_one_has_none():
    assert np.isfinite(bootstrap_interval([1.0, 2.0])).all()
    assert np.isnan(bootstrap_interval([1.0])).all()
    two = hierarchical_bootstrap(np.array([[1.0, 2.0]]))
    assert np.isfinite([two.low, two.high]).all()


def test_one_case_has_a_critical_difference_and_one_method_has_none():
    assert critical_difference([1.0, 2.0], cases=1) == pytest.approx(1.96, abs=1e-3)  # sqrt(2 * 3 / 6) is 1
    assert np.isnan(critical_difference([1.0], cases=5))
    assert np.isnan(critical_difference([1.0, 2.0], cases=0))


def test_values_that_are_all_the_same_do_not_differ():
    (pair,) = compare_pairs(np.ones((6, 2)), test="mann-whitney")
    assert (pair.p, pair.effect, pair.cases) == (1, 0, 6)
