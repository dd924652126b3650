import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.reference import inference as reference

from segcal.errors import InputError
from segcal.inference import benjamini_hochberg, compare_pairs


def methods(seed, cases, count=3, digits=8):
    """Correlated methods with small differences; few digits make ties."""
    random = np.random.default_rng(seed)
    return np.round(random.normal(size=(cases, 1)) + 0.4 * random.normal(size=(cases, count)), digits)


@pytest.mark.parametrize("cases", [6, 30, 50, 51, 400])
def test_wilcoxon_is_that_of_scipy(cases):
    values = methods(0, cases)
    for row in compare_pairs(values):
        differences = values[:, row.first] - values[:, row.second]
        assert row.p == pytest.approx(stats.wilcoxon(differences).pvalue, rel=1e-9)
        assert row.difference == pytest.approx(np.median(differences))
        assert row.cases == cases


def test_wilcoxon_of_many_tied_differences_is_that_of_scipy():
    values = methods(1, 300, digits=1)
    for row in compare_pairs(values):
        # Tenths subtract to differences that tie only up to rounding; round them before they are ranked.
        differences = np.round(values[:, row.first] - values[:, row.second], 1)
        ours = compare_pairs(np.stack([differences, np.zeros(300)], axis=1))[0]
        assert ours.p == pytest.approx(stats.wilcoxon(differences).pvalue, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9).filter(any))
def test_wilcoxon_counts_all_signs_with_ties_and_zeros(differences):
    row = compare_pairs(np.stack([differences, np.zeros(len(differences))], axis=1))[0]
    effect, p = reference.signed_rank(differences)
    assert row.effect == pytest.approx(effect, abs=1e-12)
    assert row.p == pytest.approx(p, rel=1e-12)
    assert row.cases == len(differences)


@pytest.mark.parametrize(("cases", "digits"), [(5, 8), (7, 0), (30, 8), (30, 1), (200, 1)])
def test_mann_whitney_is_that_of_scipy(cases, digits):
    values = methods(2, cases, digits=digits)
    for row in compare_pairs(values, test="mann-whitney"):
        first, second = values[:, row.first], values[:, row.second]
        assert row.p == pytest.approx(stats.mannwhitneyu(first, second).pvalue, rel=1e-12)
        assert (1 + row.effect) / 2 == pytest.approx(reference.superiority(first, second))
        assert row.difference == pytest.approx(np.median(first) - np.median(second))


@pytest.mark.parametrize("test", ["wilcoxon", "mann-whitney"])
def test_exchanging_two_methods_changes_signs_only(test):
    values = methods(3, 40, 2)
    one, other = compare_pairs(values, test=test)[0], compare_pairs(values[:, ::-1], test=test)[0]
    assert (one.p, one.cases) == (other.p, other.cases)
    assert (one.effect, one.difference) == pytest.approx((-other.effect, -other.difference))


@pytest.mark.parametrize("test", ["wilcoxon", "mann-whitney"])
def test_the_order_of_cases_does_not_matter_and_a_common_monotone_map_leaves_mann_whitney(test):
    values = methods(4, 40, 3)
    assert compare_pairs(values, test=test) == compare_pairs(np.random.default_rng(0).permutation(values), test=test)
    if test == "mann-whitney":
        for before, after in zip(
            compare_pairs(values, test=test), compare_pairs(np.exp(values), test=test), strict=True
        ):
            assert (before.p, before.effect) == (after.p, after.effect)


def test_wilcoxon_sees_a_small_difference_that_mann_whitney_misses():
    random = np.random.default_rng(5)
    values = random.normal(size=(40, 1)) + np.array([0.0, 0.05]) + 0.02 * random.normal(size=(40, 2))
    assert compare_pairs(values)[0].p < 1e-6
    assert compare_pairs(values, test="mann-whitney")[0].p > 0.5


def test_pairs_are_all_or_those_with_the_baseline():
    values = methods(6, 20, 4)
    assert [(row.first, row.second) for row in compare_pairs(values)] == [
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 2),
        (1, 3),
        (2, 3),
    ]
    rows = compare_pairs(values, baseline=2)
    assert [(row.first, row.second) for row in rows] == [(0, 2), (1, 2), (3, 2)]
    assert [row.adjusted for row in rows] == benjamini_hochberg([row.p for row in rows]).tolist()
    assert compare_pairs(values[:, :1]) == []


@pytest.mark.parametrize("test", ["wilcoxon", "mann-whitney"])
def test_missing_values_are_left_out_and_a_missing_method_is_nan(test):
    values = methods(7, 30, 3)
    values[3:6, 0] = values[5:8, 1] = np.nan
    values[:, 2] = np.nan
    row, *missing = compare_pairs(values, test=test)
    paired = ~np.isnan(values[:, :2]).any(axis=1)
    assert row.cases == (25 if test == "wilcoxon" else 27)
    peer = (
        stats.wilcoxon(*values[paired, :2].T)
        if test == "wilcoxon"
        else stats.mannwhitneyu(*values[:, :2].T, nan_policy="omit")
    )
    assert row.p == pytest.approx(peer.pvalue, rel=1e-9)
    assert row.adjusted == row.p  # the tests that could not be made do not count
    for other in missing:
        assert other.cases == 0
        assert np.isnan(other[3:]).all()


@pytest.mark.parametrize("test", ["wilcoxon", "mann-whitney"])
@pytest.mark.parametrize("cases", [1, 7, 100])
@pytest.mark.parametrize("value", [0.3, np.inf])
def test_ties_everywhere_are_no_difference(test, cases, value):
    assert compare_pairs(np.full((cases, 2), value), test=test)[0][2:] == (cases, 0, 0, 1, 1)


def test_one_case_says_nothing():
    assert compare_pairs([[1.0, 2.0]])[0][2:] == (1, -1, -1, 1, 1)
    assert compare_pairs([[1.0, 2.0]], test="mann-whitney")[0][2:] == (1, -1, -1, 1, 1)


def test_infinite_values_are_the_largest():
    values = methods(8, 30, 2)
    infinite, large = values.copy(), values.copy()
    infinite[4, 0], large[4, 0] = np.inf, 1e9
    for test in ("wilcoxon", "mann-whitney"):
        assert compare_pairs(infinite, test=test) == compare_pairs(large, test=test)


@pytest.mark.parametrize("shape", [(1,), (40,), (5, 6)])
def test_benjamini_hochberg_is_that_of_scipy(shape):
    p = np.random.default_rng(9).random(shape) ** 3
    assert np.allclose(benjamini_hochberg(p), stats.false_discovery_control(p, axis=None).reshape(shape), rtol=1e-13)


def test_benjamini_hochberg_leaves_out_nan_and_keeps_the_order():
    p = np.array([0.2, np.nan, 0.01, 0.02, 1.0, 0.02])
    adjusted = benjamini_hochberg(p)
    assert np.isnan(adjusted[1])
    assert np.array_equal(adjusted[~np.isnan(p)], benjamini_hochberg(p[~np.isnan(p)]))
    assert adjusted[3] == adjusted[5]
    assert np.all(adjusted[~np.isnan(p)] >= p[~np.isnan(p)])
    assert benjamini_hochberg(0.04) == 0.04
    assert benjamini_hochberg([]).shape == (0,)
    assert np.isnan(benjamini_hochberg([np.nan, np.nan])).all()


def test_benjamini_hochberg_keeps_the_false_discovery_rate():
    random = np.random.default_rng(10)
    shares = []
    for _ in range(400):
        z = random.normal(size=50) + 3 * (np.arange(50) < 10)  # ten effects among fifty
        found = benjamini_hochberg(stats.norm.sf(z)) <= 0.1
        shares.append(found[10:].sum() / max(found.sum(), 1))
    assert 0.06 < np.mean(shares) < 0.1  # the theorem: 0.1 * 40 / 50


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: benjamini_hochberg([0.5, 1.2]), "p has values from 0.5 to 1.2; expected p-values in"),
        (lambda: compare_pairs([[1.0, 2.0]], test="t"), "test is 't'; expected one of wilcoxon, mann-whitney"),
        (lambda: compare_pairs([[1.0, 2.0]], baseline=2), "baseline is 2; expected a whole number from 0 to 1"),
        (lambda: compare_pairs([1.0, 2.0]), r"values has shape \(2,\); expected numbers of shape \(cases, methods\)"),
        (lambda: compare_pairs(np.zeros((0, 2))), r"values has shape \(0, 2\)"),
    ],
)
def test_bad_input_is_refused(call, says):
    with pytest.raises(InputError, match=says):
        call()
