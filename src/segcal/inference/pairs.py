"""Is one method better than another? Rank tests of pairs, adjusted for their number."""

from __future__ import annotations

from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr

from segcal.errors import InputError, check_name, check_whole
from segcal.inference import arrays
from segcal.inference.arrays import FloatArray, IntArray, checked, checked_groups, mean_by_group

__all__ = ["PairTest", "benjamini_hochberg", "compare_pairs"]

# Up to this many pairs, the signed-rank distribution is enumerated; 2^50 is exact in float64.
_EXACT = 50
# Cases, difference, effect and p of a pair.
_Outcome = tuple[int, float, float, float]
_UNDEFINED = (0, np.nan, np.nan, np.nan)


class PairTest(NamedTuple):
    """``first`` against ``second``, the indices of two methods.

    ``cases`` is the number of pairs compared, of groups if given (Mann-Whitney: the smaller sample). ``difference`` is
    the median of the paired differences first - second (Mann-Whitney: the difference of the medians). ``effect`` is the
    rank-biserial correlation, from -1 (first always lower) to 1 (first always higher); for Mann-Whitney,
    (1 + effect) / 2 is A12. ``p`` is the two-sided p-value, and ``adjusted`` the same after Benjamini-Hochberg over all
    pairs.
    """

    first: int
    second: int
    cases: int
    difference: float
    effect: float
    p: float
    adjusted: float


def compare_pairs(
    values: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    test: Literal["wilcoxon", "mann-whitney"] = "wilcoxon",
    baseline: int | None = None,
) -> list[PairTest]:
    """Test all pairs of methods, or all others against a baseline, and adjust the p-values for their number.

    ``wilcoxon`` is the signed-rank test, the right one for methods on the same cases. Differences of 0 are left out,
    the rest are ranked by size with mean ranks for ties, and

        effect = (W+ - W-) / (W+ + W-),

    with W+ and W- the rank sums of the positive and negative differences (Wilcoxon, Biometrics Bulletin 1, 1945;
    Kerby, Comprehensive Psychology 3, 2014). Up to 50 differences, p is exact, ties included; beyond, it is the normal
    approximation. ``mann-whitney`` treats the methods as independent samples, as Ding et al. (2021) do. It suits
    methods on different cases; on the same cases it ignores the pairing:

        effect = 2 U / (n m) - 1,    U = #{x > y} + #{x = y} / 2

    (Mann and Whitney, Annals of Mathematical Statistics 18, 1947; Vargha and Delaney, J. Educ. Behav. Stat. 25, 2000).

    With ``groups``, whose cases are not independent, the tests compare group means: of the differences (Wilcoxon), or
    of each method (Mann-Whitney).

    If nothing differs, effect is 0 and p is 1. A method without values has 0 cases and NaN, and does not count in the
    adjustment.

    Args:
        values: ``(cases, methods)``, NaN where there is no value; several repeats go through ``mean_over_repeats``.
        groups: ``(cases,)``, the groups that cases belong to; None if each case is its own.
        test: Which test.
        baseline: Index of the method that all others (``first``) are compared with (``second``); None for all pairs.

    Examples:
        >>> ece = np.array([[0.20, 0.11], [0.25, 0.14], [0.22, 0.15], [0.30, 0.19], [0.18, 0.19], [0.21, 0.1]])
        >>> compare_pairs(ece)
        [PairTest(first=0, second=1, cases=6, difference=0.1, effect=0.90..., p=0.0625, adjusted=0.0625)]
    """
    array = checked(values, "values", ("cases", "methods"))
    group = checked_groups(groups, len(array))
    tests = {"wilcoxon": _wilcoxon, "mann-whitney": _mann_whitney}
    check_name("test", test, tests)
    methods = range(array.shape[1])
    if baseline is None:
        pairs = list(combinations(methods, 2))
    else:
        check_whole("baseline", baseline, 0, len(methods) - 1)
        pairs = [(method, baseline) for method in methods if method != baseline]
    outcomes = [tests[test](array[:, first], array[:, second], group) for first, second in pairs]
    adjusted = benjamini_hochberg([outcome[-1] for outcome in outcomes])
    rows = zip(pairs, outcomes, adjusted.tolist(), strict=True)
    return [PairTest(first, second, *outcome, q) for (first, second), outcome, q in rows]


def benjamini_hochberg(p: ArrayLike) -> FloatArray:
    """P-values adjusted so that rejecting those up to alpha keeps the false discovery rate at alpha.

    With the m p-values in rising order, the i-th becomes ``min over j >= i of p_j m / j`` (Benjamini and Hochberg,
    J. R. Stat. Soc. B 57, 1995). The whole array is one family. NaN marks a test that was not made: it stays NaN and
    does not count.

    Args:
        p: P-values of any shape.

    Examples:
        >>> benjamini_hochberg([0.01, np.nan, 0.04, 0.03])
        array([0.03, nan, 0.04, 0.04])
    """
    array = checked(p, "p", (), trailing=True)
    made = ~np.isnan(array)
    tests = array[made]
    if np.any((tests < 0) | (tests > 1)):
        raise InputError(f"p has values from {tests.min():.4g} to {tests.max():.4g}", expected="p-values in [0, 1]")
    falling = np.argsort(-tests)
    scaled = tests[falling] * tests.size / np.arange(tests.size, 0, -1)
    tests[falling] = np.minimum.accumulate(scaled)  # The first, the largest p, is at most 1.
    adjusted = np.full(array.shape, np.nan)
    adjusted[made] = tests
    return adjusted


def _wilcoxon(first: FloatArray, second: FloatArray, group: IntArray) -> _Outcome:
    from scipy.stats import rankdata

    differences = mean_by_group(arrays.difference(first, second), group)
    differences = differences[~np.isnan(differences)]
    if differences.size == 0:
        return _UNDEFINED
    nonzero = differences[differences != 0]
    ranks = rankdata(np.abs(nonzero))
    positive, total = float(ranks[nonzero > 0].sum()), float(ranks.sum())
    effect, p = 0.0, 1.0
    if nonzero.size:
        effect = (2 * positive - total) / total
        p = _exact_p(ranks, positive) if nonzero.size <= _EXACT else _normal_p(ranks, positive)
    return differences.size, _median(differences), effect, p


def _exact_p(ranks: FloatArray, positive: float) -> float:
    """Two-sided p over all 2^n signs: add rank after rank and count the ways to reach every sum."""
    steps = np.rint(2 * ranks).astype(np.int64)  # Mean ranks are multiples of 1/2.
    ways = np.zeros(int(steps.sum()) + 1)
    ways[0] = 1.0
    for step in steps:
        ways[step:] = ways[step:] + ways[:-step]
    reached = round(2 * positive)
    tail = min(ways[: reached + 1].sum(), ways[reached:].sum())
    return min(1.0, 2 * float(tail) / 2.0 ** len(steps))


def _normal_p(ranks: FloatArray, positive: float) -> float:
    """Under random signs the sum has mean sum(r) / 2 and variance sum(r^2) / 4, ties included."""
    z = (positive - ranks.sum() / 2) / (np.sqrt(np.sum(ranks**2)) / 2)
    return float(2 * ndtr(-abs(z)))


def _mann_whitney(first: FloatArray, second: FloatArray, group: IntArray) -> _Outcome:
    from scipy.stats import mannwhitneyu, rankdata

    first, second = mean_by_group(first, group), mean_by_group(second, group)
    first, second = first[~np.isnan(first)], second[~np.isnan(second)]
    n, m = first.size, second.size
    if min(n, m) == 0:
        return _UNDEFINED
    ranks = rankdata(np.concatenate([first, second]))
    u = ranks[:n].sum() - n * (n + 1) / 2
    p = 1.0 if np.all(ranks == ranks[0]) else float(mannwhitneyu(ranks[:n], ranks[n:]).pvalue)
    shift = arrays.difference(np.asarray(_median(first)), np.asarray(_median(second)))
    return min(n, m), float(shift), float(2 * u / (n * m) - 1), p


def _median(values: FloatArray) -> float:
    with np.errstate(invalid="ignore"):  # opposite infinities
        return float(np.median(values))
