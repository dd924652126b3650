"""Intervals of pooled values: cases or groups are drawn, their sums added up, and the value taken of the whole."""

import math

import numpy as np
import pytest
from tests.reference import inference as reference

from segcal.errors import InputError
from segcal.inference import Pooled, bootstrap, bootstrap_interval, pooled_intervals


def ratio(total):
    return np.where(total[:, 1] > 0, total[:, 0] / np.maximum(total[:, 1], 1), np.nan)


def gaps(total):
    return np.abs(total[:, :-1]).sum(1) / total[:, -1]


def example(cases=30, seed=0):
    """Gaps of three bins and a count for each case; cases differ in size. Three cases are a group."""
    random = np.random.default_rng(seed)
    count = random.integers(50, 500, cases)
    level = np.repeat(random.normal(size=(cases // 3, 3)), 3, axis=0)
    sums = np.column_stack([count[:, None] * (0.5 + 0.2 * level + 0.1 * random.normal(size=(cases, 3))), count])
    return sums, [f"patient {i // 3}" for i in range(cases)]


@pytest.mark.parametrize("grouped", [False, True])
def test_the_interval_is_that_of_a_plain_bootstrap_of_the_sums(grouped):
    sums, names = example()
    drawn = names if grouped else [str(i) for i in range(len(sums))]
    values = reference.pooled_values(
        sums.tolist(),
        drawn,
        lambda total: sum(map(abs, total[:-1])) / total[-1],
        20_000,
        np.random.default_rng(1),
    )
    ((low, high),) = pooled_intervals([Pooled(sums, gaps)], groups=drawn if grouped else None)
    assert [low, high] == pytest.approx(np.quantile(values, [0.025, 0.975]), abs=0.05 * (high - low))


def test_of_cases_of_one_size_the_pooled_mean_has_the_interval_of_the_mean():
    values = np.random.default_rng(0).gamma(2.0, size=25)
    groups = [str(i // 2) for i in range(25)]
    for own in (None, groups):
        ((low, high),) = pooled_intervals([Pooled(np.column_stack([7 * values, np.full(25, 7.0)]), ratio)], groups=own)
        assert (low, high) == pytest.approx(bootstrap_interval(list(values), groups=own), rel=1e-12)


def test_columns_share_the_draws_and_do_not_change_each_other():
    sums, _ = example()
    alone = pooled_intervals([Pooled(sums, gaps)])
    doubled = pooled_intervals([Pooled(sums[:, 2:], ratio), Pooled(2 * sums, gaps), Pooled(sums, gaps)])
    assert doubled[2] == pytest.approx(alone[0], rel=1e-12)
    assert doubled[1] == pytest.approx(alone[0], rel=1e-12)


def test_draws_and_sums_in_pieces_give_the_same_interval(monkeypatch):
    sums, _ = example()
    whole = pooled_intervals([Pooled(sums, gaps)], replicates=300)
    monkeypatch.setattr(bootstrap, "_CHUNK", 200)  # six draws of 30 cases at a time
    assert pooled_intervals([Pooled(sums, gaps)], replicates=300) == pytest.approx(whole, rel=1e-12)
    monkeypatch.setattr(bootstrap, "_CHUNK", 7)  # one draw at a time, and one sum
    assert pooled_intervals([Pooled(sums, gaps)], replicates=300) == pytest.approx(whole, rel=1e-12)


def test_an_error_that_is_noise_only_has_an_interval_down_to_zero_and_a_large_one_has_the_percentiles():
    random = np.random.default_rng(3)
    noise = np.column_stack([100 * random.normal(size=(12, 15)), np.full(12, 1000.0)])
    (plain, corrected) = pooled_intervals([Pooled(noise, gaps), Pooled(noise, gaps, error=True)])
    assert plain[0] > 0  # The truth is 0.
    assert corrected[0] == 0
    assert corrected[1] < plain[1]
    sums, _ = example()
    large = np.abs(sums)  # All gaps have one sign, whatever is drawn: no bias.
    (plain, corrected) = pooled_intervals([Pooled(large, gaps), Pooled(large, gaps, error=True)])
    assert corrected == pytest.approx(plain, rel=0.02)


def test_fewer_than_two_cases_or_groups_that_add_something_have_no_interval():
    one = np.array([[3.0, 10.0]])
    assert np.isnan(pooled_intervals([Pooled(one, ratio)])).all()
    alone = np.array([[3.0, 10.0], [0.0, 0.0], [0.0, 0.0]])
    assert np.isnan(pooled_intervals([Pooled(alone, ratio)])).all()
    two = np.array([[3.0, 10.0], [1.0, 10.0]])
    assert np.isnan(pooled_intervals([Pooled(two, ratio)], groups=["a", "a"])).all()
    assert not np.isnan(pooled_intervals([Pooled(two, ratio)], groups=["a", "b"])).any()
    assert pooled_intervals([]).shape == (0, 2)


def test_replicates_without_a_value_do_not_count():
    sums = np.array([[3.0, 10.0], [1.0, 10.0], *[[0.0, 0.0]] * 8])
    ((low, high),) = pooled_intervals([Pooled(sums, ratio)])
    assert (low, high) == pytest.approx((0.1, 0.3))


def test_an_infinite_sum_is_infinite_only_in_the_replicates_that_have_it():
    sums = np.column_stack([np.full(40, 2.0), np.full(40, 10.0)])
    sums[0, 0] = math.inf
    ((low, high),) = pooled_intervals([Pooled(sums, ratio)])
    assert (low, high) == (pytest.approx(0.2), math.inf)


def test_wrong_options_are_named():
    sums, names = example()
    for options, says in (
        ({"level": 95}, "level is 95"),
        ({"replicates": 0}, "replicates"),
        ({"seed": -1}, "seed"),
        ({"groups": names[:3]}, "groups has shape"),
    ):
        with pytest.raises(InputError, match=says):
            pooled_intervals([Pooled(sums, gaps)], **options)
    with pytest.raises(InputError, match="columns of 3, 30 cases"):
        pooled_intervals([Pooled(sums, gaps), Pooled(sums[:3], gaps)])
