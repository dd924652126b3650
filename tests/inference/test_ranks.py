import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.reference import inference as reference

from segcal.errors import InputError
from segcal.inference import critical_difference, friedman, groups, mean_case_rank, sum_rank


def blocks(seed, count=25, methods=5, digits=8):
    random = np.random.default_rng(seed)
    return np.round(random.normal(size=(count, methods)) + 0.2 * np.arange(methods), digits)


@pytest.mark.parametrize("digits", [8, 0])
def test_friedman_is_that_of_scipy(digits):
    values = blocks(0, digits=digits)
    result = friedman(values)
    peer = stats.friedmanchisquare(*values.T)
    assert (result.statistic, result.p) == pytest.approx((peer.statistic, peer.pvalue), rel=1e-12)
    assert np.allclose(result.mean_ranks, np.mean([reference.ranks(row) for row in values.tolist()], axis=0))
    assert result.count == 25


def test_ranks_do_not_see_monotone_maps_of_a_block_and_direction_mirrors_them():
    values = blocks(1)
    scales = np.random.default_rng(0).random((25, 1))
    assert np.array_equal(friedman(np.exp(scales * values)).mean_ranks, friedman(values).mean_ranks)
    higher = friedman(values, lower_is_better=False)
    assert np.allclose(higher.mean_ranks, 6 - friedman(values).mean_ranks)
    assert higher.statistic == pytest.approx(friedman(values).statistic)
    assert np.array_equal(friedman(-values, lower_is_better=False).mean_ranks, friedman(values).mean_ranks)


def test_every_block_may_have_its_own_direction():
    values = blocks(2, count=4)
    lower = np.array([True, False, False, True])
    turned = np.where(lower[:, np.newaxis], values, -values)
    assert np.array_equal(friedman(values, lower_is_better=lower).mean_ranks, friedman(turned).mean_ranks)


def test_incomplete_blocks_and_missing_methods_are_left_out():
    values = blocks(3)
    complete = friedman(values[2:, [0, 1, 3, 4]])
    values[0, 1] = values[1, 3] = np.nan
    values[:, 2] = np.nan
    result = friedman(values)
    assert (result.statistic, result.p, result.count) == (complete.statistic, complete.p, 23)
    assert np.array_equal(np.delete(result.mean_ranks, 2), complete.mean_ranks)
    assert np.isnan(result.mean_ranks[2])


def test_degenerate_tables_are_nan_or_no_difference():
    ties = friedman(np.ones((6, 4)))
    assert (ties.statistic, ties.p, ties.mean_ranks.tolist()) == (0, 1, [2.5] * 4)
    for values, count in (
        (np.full((3, 4), np.nan), 0),
        ([[1.0, np.nan], [np.nan, 1.0]], 0),
        ([[1.0], [2.0]], 2),
    ):
        result = friedman(values)
        assert np.isnan([result.statistic, result.p]).all()
        assert result.count == count
    one = friedman([[1.0, 2.0, 3.0]])
    assert (one.statistic, one.mean_ranks.tolist(), one.count) == (2, [1, 2, 3], 1)
    assert friedman([[1.0, np.inf, np.inf]]).mean_ranks.tolist() == [1, 2.5, 2.5]


def test_sum_rank_is_the_friedman_rank_times_the_settings():
    values, lower = blocks(5, count=8), [True, False] * 4
    result = sum_rank(values.T, lower_is_better=lower)
    assert np.allclose(result.ranks, 8 * friedman(values, lower_is_better=lower).mean_ranks)
    assert result.count == 8
    assert result.ranks.sum() == pytest.approx(8 * 5 * 6 / 2)


def test_sum_rank_leaves_out_settings_that_a_method_lacks():
    values = blocks(6, count=6).T
    values[1, 2] = np.nan
    result = sum_rank(values)
    assert np.array_equal(result.ranks, sum_rank(np.delete(values, 2, axis=1)).ranks)
    assert result.count == 5
    nothing = sum_rank(np.full((3, 2), np.nan))
    assert np.isnan(nothing.ranks).all()
    assert nothing.count == 0


def test_mean_case_rank_is_that_of_the_loops():
    values = np.random.default_rng(7).integers(0, 6, size=(15, 4, 3)).astype(float)
    lower = [True, False, True]
    result = mean_case_rank(values, lower_is_better=lower)
    assert np.allclose(result.ranks, reference.mean_case_rank(values.tolist(), lower))
    assert result.count == 15


def test_mean_case_rank_of_one_metric_is_the_friedman_rank():
    values = blocks(8)
    assert np.allclose(mean_case_rank(values[:, :, np.newaxis]).ranks, friedman(values).mean_ranks)


def test_mean_case_rank_weighs_cases_alike_however_many_metrics_they_have():
    values = np.random.default_rng(9).random((10, 3, 2))
    values[:4, 0, 1] = np.nan  # the second metric does not exist for all methods in four cases
    values[4, 0, :] = np.nan
    result = mean_case_rank(values)
    per_case = [reference.mean_case_rank([case.tolist()], [True, True]) for case in values[5:]]
    per_case += [reference.mean_case_rank([case[:, :1].tolist()], [True]) for case in values[:4]]
    assert np.allclose(result.ranks, np.mean(per_case, axis=0))
    assert result.count == 9


def test_the_critical_difference_is_that_of_the_tables():
    # Demsar 2006, Table 5 (a): q_0.05 and q_0.10 for two to ten methods.
    tables = {
        0.05: [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164],
        0.10: [1.645, 2.052, 2.291, 2.459, 2.589, 2.693, 2.780, 2.855, 2.920],
    }
    for alpha, quantiles in tables.items():
        for methods, q in enumerate(quantiles, start=2):
            difference = critical_difference(np.arange(methods), 30, alpha=alpha)
            assert difference / np.sqrt(methods * (methods + 1) / 180) == pytest.approx(q, abs=2e-3)


def test_the_critical_difference_keeps_its_level():
    random = np.random.default_rng(10)
    spans = [np.ptp(friedman(random.normal(size=(40, 5))).mean_ranks) for _ in range(1000)]
    assert 0.03 < np.mean(np.array(spans) >= critical_difference(np.arange(5), 40)) < 0.07


def test_methods_that_were_not_ranked_do_not_count():
    assert critical_difference([1, np.nan, 2, 3], 10) == critical_difference([1, 2, 3], 10)
    assert np.isnan(critical_difference([1, np.nan], 10))
    assert np.isnan(critical_difference([1, 2], 0))
    assert groups([2.0, np.nan, 1.0], 0.5) == [(2,), (0,)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 24), min_size=1, max_size=7), st.integers(1, 20))
def test_groups_are_the_largest_sets_without_a_difference(halves, difference):
    ranks = [half / 2 for half in halves]
    found = groups(ranks, difference / 2)
    assert {frozenset(group) for group in found} == reference.groups(ranks, difference / 2)
    assert len(found) == len(set(found))
    assert [[ranks[m] for m in group] for group in found] == [sorted(ranks[m] for m in group) for group in found]


def test_groups_of_an_unknown_difference_are_one():
    assert groups([2.0, 1.0, 3.0], np.nan) == [(1, 0, 2)]
    assert groups([np.nan], 1.0) == []


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: friedman([1.0, 2.0]), r"values has shape \(2,\); expected numbers of shape \(blocks, methods\)"),
        (lambda: friedman(np.ones((3, 2)), lower_is_better=[True, False]), "lower_is_better is .* each of 3 blocks"),
        (lambda: sum_rank(np.ones((3, 2)), lower_is_better="yes"), "lower_is_better is 'yes'"),
        (lambda: mean_case_rank(np.ones((3, 2))), "expected numbers of shape \\(cases, methods, metrics\\)"),
        (lambda: critical_difference([1.0, 2.0], 5, alpha=5), "alpha is 5"),
        (lambda: groups([1.0, 2.0], 0.0), "difference is 0.0; expected a positive number"),
    ],
)
def test_bad_input_is_refused(call, says):
    with pytest.raises(InputError, match=says):
        call()
