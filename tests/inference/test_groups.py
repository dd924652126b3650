"""Cases of one group are not independent: groups are resampled, tested and ranked; alone they are what cases were."""

import numpy as np
import pytest
from scipy import stats
from tests.reference import inference as reference

from segcal.errors import InputError
from segcal.inference import (
    bootstrap_interval,
    compare_pairs,
    friedman,
    hierarchical_bootstrap,
    mean_case_rank,
    paired_difference,
    standard_error,
)


def clustered(seed, sizes, *trailing, spread=1.0):
    """Groups of these sizes with a level of their own; their names are in no order."""
    random = np.random.default_rng(seed)
    names = random.permutation(len(sizes)).astype(str)
    groups = np.repeat(names, sizes)
    level = np.repeat(random.normal(size=(len(sizes), *trailing)), sizes, axis=0)
    values = spread * level + random.normal(size=(len(groups), *trailing))
    order = random.permutation(len(groups))
    return values[order], groups[order]


def with_gaps(seed, shape):
    random = np.random.default_rng(seed)
    values = random.normal(size=shape)
    values[random.random(shape) < 0.1] = np.nan
    values.flat[0] = np.inf
    return values


def test_groups_of_one_case_are_as_no_groups():
    values = with_gaps(0, (3, 30, 4, 2))
    alone = [f"case {30 - i}" for i in range(30)]
    one, other = (hierarchical_bootstrap(values, groups=groups, keep_means=True) for groups in (None, alone))
    for name in ("estimate", "low", "high", "count", "groups", "means"):
        assert np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True)
    one, other = (paired_difference(values, 1, groups=groups) for groups in (None, alone))
    for name in ("estimate", "low", "high", "count", "above", "p"):
        assert np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True)
    table = values[0, :, :, 1]
    for test in ("wilcoxon", "mann-whitney"):
        assert compare_pairs(table, test=test) == compare_pairs(table, test=test, groups=alone)
    assert np.array_equal(friedman(table).mean_ranks, friedman(table, groups=alone).mean_ranks)
    assert friedman(table).p == friedman(table, groups=alone).p
    assert np.array_equal(mean_case_rank(values[0]).ranks, mean_case_rank(values[0], groups=alone).ranks)
    assert bootstrap_interval(table[1:9, 0]) == bootstrap_interval(table[1:9, 0], groups=alone[1:9])
    assert standard_error(table[1:9, 0]) == pytest.approx(stats.sem(table[1:9, 0], nan_policy="omit"))


def test_the_replicates_have_the_distribution_of_drawing_groups():
    values, groups = clustered(1, [1, 2, 3, 5, 8, 8, 3])
    values[:2] = np.nan
    found = hierarchical_bootstrap(values[None], groups=groups, replicates=4000, keep_means=True)
    loops = reference.cluster_means(values.tolist(), groups.tolist(), 4000, np.random.default_rng(2))
    assert stats.ks_2samp(found.means, loops).pvalue > 0.01
    assert stats.ks_2samp(found.means, hierarchical_bootstrap(values[None], keep_means=True).means).pvalue < 1e-6
    assert found.estimate == pytest.approx(np.nanmean(values))  # still the mean over cases
    assert (found.count, found.groups) == (28, len(set(groups[2:])))


def test_the_standard_error_is_that_of_the_replicates():
    values, groups = clustered(3, np.random.default_rng(0).integers(1, 9, 60))
    means = hierarchical_bootstrap(values[None], groups=groups, keep_means=True, replicates=20_000).means
    assert standard_error(values, groups=groups) == pytest.approx(means.std(), rel=0.05)


def test_repeats_may_test_different_groups():
    values, groups = clustered(4, [4, 4, 4], 2)
    both = np.full((2, 12, 2), np.nan)
    both[0, groups != "0"], both[1, groups != "1"] = values[groups != "0"], values[groups != "1"]
    assert hierarchical_bootstrap(both, groups=groups).groups.tolist() == [4, 4]


def test_tests_and_ranks_are_those_of_group_means():
    values, groups = clustered(5, [1, 4, 2, 6, 3, 3, 5, 2], 3)
    values[0, 0] = values[5, 2] = np.nan
    names = groups.tolist()
    for row in compare_pairs(values, groups=groups):
        means = reference.group_means((values[:, row.first] - values[:, row.second]).tolist(), names)
        effect, p = reference.signed_rank(means)
        assert (row.effect, row.p, row.cases) == (pytest.approx(effect), pytest.approx(p), 8)
    for row in compare_pairs(values, groups=groups, test="mann-whitney"):
        first, second = (reference.group_means(values[:, k].tolist(), names) for k in (row.first, row.second))
        assert (1 + row.effect) / 2 == pytest.approx(reference.superiority(first, second))
    complete = ~np.isnan(values).any(1)
    own = groups[complete].tolist()
    means = np.stack([reference.group_means(column.tolist(), own) for column in values[complete].T], axis=1)
    expected = friedman(means)
    found = friedman(values, groups=groups)
    assert (found.p, found.count) == (pytest.approx(expected.p), len(set(own)))
    assert np.allclose(found.mean_ranks, expected.mean_ranks)
    metrics = np.stack([values, -values], axis=2)
    ranks = reference.mean_case_rank(np.stack([means, -means], axis=2).tolist(), [True, False])
    assert np.allclose(mean_case_rank(metrics, groups=groups, lower_is_better=[True, False]).ranks, ranks)


def test_repeating_a_case_of_a_group_tells_the_tests_nothing_new():
    values, groups = clustered(6, [3] * 10, 2)
    twice = np.concatenate([values, values]), np.concatenate([groups, groups])
    assert compare_pairs(values, groups=groups)[0].p == compare_pairs(twice[0], groups=twice[1])[0].p
    assert friedman(values, groups=groups).p == friedman(twice[0], groups=twice[1]).p
    assert standard_error(values[:, 0], groups=groups) == pytest.approx(standard_error(twice[0][:, 0], groups=twice[1]))


def test_intervals_over_groups_cover_the_truth_and_those_over_cases_do_not():
    values, groups = clustered(7, [5] * 30, 1000)
    over = [hierarchical_bootstrap(values[None], groups=own, replicates=1000) for own in (groups, None)]
    grouped, alone = (float(np.mean((found.low <= 0) & (found.high >= 0))) for found in over)
    assert 0.92 < grouped < 0.98
    assert alone < 0.8


def test_one_group_says_nothing_of_the_next():
    found = paired_difference(np.random.default_rng(8).random((1, 5, 2)), 0, groups=["a"] * 5)
    assert np.isnan([found.low[1], found.high[1], found.p[1]]).all()
    assert np.isnan(bootstrap_interval([1.0, 2.0, 3.0], groups=["a"] * 3)).all()
    assert np.isnan(standard_error([1.0, 2.0], groups=["a", "a"]))


@pytest.mark.parametrize("groups", [["a", "b"], [["a"], ["b"], ["c"]], [0.5, 1.5, 2.5]])
def test_groups_are_one_name_for_every_case(groups):
    with pytest.raises(
        InputError, match="groups has shape .* expected the name or the number of a group for each of 3"
    ):
        hierarchical_bootstrap([[1.0, 2.0, 3.0]], groups=groups)
