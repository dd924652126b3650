"""Bootstrap intervals of means over cases and repeats, and of paired differences between methods.

Cases of one group (one patient's scans) are not independent. So groups are resampled, each with all its cases; the
estimate is still the mean over cases. If every case is its own group, this is the bootstrap over cases.

Resampling n of n things means drawing how often each occurs. So one table of weights, a row for every replicate, serves
all methods and metrics at once, and a matrix product gives the means. All replicates come from the same draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import ArrayLike
from typing_extensions import Unpack

from segcal.errors import InputError, check_seed, check_whole
from segcal.inference import arrays
from segcal.inference.arrays import FloatArray, IntArray, checked, checked_groups

__all__ = [
    "FEW_GROUPS",
    "Interval",
    "PairedDifference",
    "Pooled",
    "bootstrap_interval",
    "hierarchical_bootstrap",
    "mean_over_repeats",
    "paired_difference",
    "pooled_intervals",
    "standard_error",
]

#: With fewer groups, bootstrap intervals are clearly too narrow.
FEW_GROUPS = 8
# Weights drawn, or sums computed, at a time; they take three copies of 16 MB.
_CHUNK = 2**21


@dataclass(frozen=True)
class Interval:
    """Means and their bootstrap intervals, arrays of the trailing shape of the values.

    Attributes:
        estimate: Mean of all values that are not NaN.
        low: Lower end of the percentile interval; NaN if fewer than two groups have a value.
        high: Upper end.
        count: Number of values in the mean.
        groups: Number of groups with values, over all repeats; without groups, of cases.
        means: The mean of every replicate, ``(replicates, ...)``, if asked for.
    """

    estimate: FloatArray
    low: FloatArray
    high: FloatArray
    count: IntArray
    groups: IntArray
    means: FloatArray | None = None


@dataclass(frozen=True, kw_only=True)
class PairedDifference(Interval):
    """The interval of methods minus the baseline, paired by case; arrays ``(methods, ...)``.

    Attributes:
        above: Share of replicates with a positive mean difference.
        p: Two-sided bootstrap p-value of no difference; never below ``2 / (replicates + 1)``.
    """

    above: FloatArray
    p: FloatArray


class BootstrapOptions(TypedDict, total=False):
    """The options of ``hierarchical_bootstrap`` that the other intervals take as well."""

    groups: ArrayLike | None
    replicates: int
    level: float
    seed: int


def hierarchical_bootstrap(
    values: ArrayLike,
    *,
    groups: ArrayLike | None = None,
    replicates: int = 2000,
    level: float = 0.95,
    seed: int = 0,
    keep_means: bool = False,
) -> Interval:
    """Two-level bootstrap of the mean: resample repeats, then groups of cases within every chosen repeat.

    A replicate draws R of the R repeats with replacement and, for each draw of repeat r, n_r of its n_r tested groups
    with replacement, each with all its cases; its mean is that of all cases drawn,

        m* = sum_rgc w_rg x_rgc / sum_rgc w_rg,   k ~ Multinomial(R; 1/R),   w_r ~ Multinomial(k_r n_r; 1/n_r),

    with the sums over the x that are not NaN, and the interval runs between the (1 -+ level)/2 quantiles of m* (Efron
    and Tibshirani, An Introduction to the Bootstrap, 1994, chapter 13; the two levels are those of Kirscher et al.,
    section 4.1). All entries of the trailing shape share the draws, so replicates may be subtracted from one another.

    A case is tested in a repeat if any entry is not NaN there; repeats that test no case are ignored. Replicates in
    which an entry has no value do not count for that entry's interval. With one repeat this is the bootstrap over
    cases.

    The cases of different repeats are assumed to be different. If repeats test the *same* cases, the interval is up to
    sqrt(R) too narrow, as the variation between cases does not average out over the repeats. In simulations with R = 3,
    95% intervals held the mean of all possible cases in 73% (all cases shared) or 87% (each repeat tests a random half)
    of the studies, those of ``mean_over_repeats(values)[None]`` in 95%. If the repeats themselves differ much, three of
    them say little about that: 79%.

    Args:
        values: ``(repeats, cases, ...)``, NaN where there is no value.
        groups: ``(cases,)``, names or numbers of the groups that cases belong to; None if each case is its own. With
            fewer than ``FEW_GROUPS`` the interval is too narrow.
        replicates: The number of replicates.
        level: Coverage of the interval.
        seed: Seed of the draws, which otherwise depend only on which cases were tested.
        keep_means: Also return the mean of every replicate.

    Examples:
        >>> ece = np.array([[0.10, 0.12, np.nan, 0.08], [0.11, np.nan, 0.15, 0.07]])
        >>> result = hierarchical_bootstrap(ece)
        >>> f"{result.estimate:.3f} [{result.low:.3f}, {result.high:.3f}] of {result.count}"
        '0.105 [0.085, 0.130] of 6'
    """
    array = checked(values, "values", ("repeats", "cases"), trailing=True)
    _check(replicates, level, seed)
    estimate, count = arrays.mean(array, axis=(0, 1))
    group = checked_groups(groups, array.shape[1])
    found = _replicate_means(array.reshape(*array.shape[:2], -1), group, replicates, seed)
    means, held = found[0].reshape(replicates, *count.shape), found[1].reshape(count.shape)
    low, high = (np.where(held < 2, np.nan, _quantile(means, (1 + side * level) / 2)) for side in (-1, 1))
    return Interval(estimate, low, high, count, held, means if keep_means else None)


def paired_difference(values: ArrayLike, baseline: int, **options: Unpack[BootstrapOptions]) -> PairedDifference:
    """Every method minus a baseline on the same cases, with ``hierarchical_bootstrap`` intervals and p-values.

    A pair needs both values; the difficulty of a case cancels before anything is averaged. With B replicates of the
    mean difference d* in which both are defined,

        p = min(1, 2 (1 + min(#{d* <= 0}, #{d* >= 0})) / (B + 1))

    which is the level at which the percentile interval would just reach 0, with the data counted as one more replicate
    (Davison and Hinkley, Bootstrap Methods and their Application, 1997, chapter 4). The baseline against itself gives 0
    and p = 1.

    Args:
        values: ``(repeats, cases, methods, ...)``, NaN where there is no value.
        baseline: Index of the method to subtract.
        **options: ``groups``, ``replicates``, ``level`` and ``seed`` of ``hierarchical_bootstrap``.

    Examples:
        >>> ece = np.array([[[0.20, 0.11], [0.25, 0.14], [0.22, 0.15], [0.30, 0.19]]])
        >>> result = paired_difference(ece, baseline=0)
        >>> f"{result.estimate[1]:.3f} [{result.low[1]:.3f}, {result.high[1]:.3f}], p = {result.p[1]:.3f}"
        '-0.095 [-0.110, -0.080], p = 0.001'
    """
    array = checked(values, "values", ("repeats", "cases", "methods"), trailing=True)
    check_whole("baseline", baseline, 0, array.shape[2] - 1)
    paired = arrays.difference(array, array[:, :, baseline : baseline + 1])
    result = hierarchical_bootstrap(paired, keep_means=True, **options)
    means = result.means
    assert means is not None
    defined, above, not_above, not_below = (
        np.sum(chosen, axis=0) for chosen in (~np.isnan(means), means > 0, means <= 0, means >= 0)
    )
    p = np.minimum(1.0, 2 * (1 + np.minimum(not_above, not_below)) / (defined + 1))
    enough = result.groups >= 2
    above = np.where(enough, arrays.ratio(above, defined), np.nan)
    return PairedDifference(**{**vars(result), "means": None}, above=above, p=np.where(enough, p, np.nan))


def bootstrap_interval(values: Sequence[float], **options: Unpack[BootstrapOptions]) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over cases, by groups if given; NaN for fewer than two.

    Takes ``groups``, ``replicates``, ``level`` and ``seed`` of ``hierarchical_bootstrap``.

    Examples:
        >>> low, high = bootstrap_interval([0.1, 0.2, 0.3, 0.4])
        >>> low < 0.25 < high
        True
    """
    if len(values) < 2:
        return math.nan, math.nan
    result = hierarchical_bootstrap([values], **options)
    return float(result.low), float(result.high)


class Pooled(NamedTuple):
    """A value of sums over cases, such as the ECE of all voxels.

    Attributes:
        sums: What each case adds, ``(cases, ...)``; zeros where a case has nothing to add.
        value: From sums ``(n, ...)`` to n values, NaN where one is undefined.
        error: Whether the value adds up absolute gaps, and so is larger than the truth on average.
    """

    sums: FloatArray
    value: Callable[[FloatArray], FloatArray]
    error: bool = False


def pooled_intervals(columns: Sequence[Pooled], **options: Unpack[BootstrapOptions]) -> FloatArray:
    """Bootstrap intervals of pooled values, ``(columns, 2)``: draw cases or groups, add up their sums, take the value.

    The interval runs between the (1 -+ level)/2 quantiles of the replicates v*, which are the draws of
    ``bootstrap_interval``. NaN if fewer than two groups add anything.

    An ``error`` of a sum of gaps is biased upward, as noise of either sign adds to it, and that of a replicate has the
    noise of the cases and that of the draw. So with b = max(0, mean v* - v), the bias that the draw added, the interval
    of an error is ``[max(0, low - 2 b), high - b]``: replicates are taken back by b, and the lower end once more, as v
    itself has a bias like b. Where the error is large against its noise, b is 0 and these are the quantiles.
    ``benchmarks/pooled.py`` counts how often the truth is inside.

    Args:
        columns: Of the same cases.
        **options: ``groups``, ``replicates``, ``level`` and ``seed`` of ``hierarchical_bootstrap``.

    Examples:
        >>> sums = np.array([[4.0, 10.0], [1.0, 10.0], [9.0, 30.0], [2.0, 10.0]])  # wrong voxels, voxels
        >>> (low, high), = pooled_intervals([Pooled(sums, lambda total: total[:, 0] / total[:, 1])])
        >>> bool(low < 16 / 60 < high)
        True
    """
    replicates, level, seed = options.get("replicates", 2000), options.get("level", 0.95), options.get("seed", 0)
    _check(replicates, level, seed)
    found = np.full((len(columns), 2), np.nan)
    if not columns:
        return found
    if len(cases := {len(column.sums) for column in columns}) > 1:
        raise InputError(f"columns of {', '.join(map(str, sorted(cases)))} cases", expected="the same cases in each")
    group = checked_groups(options.get("groups"), len(columns[0].sums))
    sums = [arrays.sum_by_group(column.sums.reshape(len(group), -1), group) for column in columns]
    values = np.empty((len(columns), replicates))
    start = 0
    for weights in _weights([len(sums[0])], replicates, seed):
        for column, own, into in zip(columns, sums, values, strict=True):
            step = max(1, _CHUNK // max(1, own.shape[1]))
            for first in range(0, len(weights), step):
                some = weights[first : first + step]
                total = _weighted(some, own).reshape(len(some), *column.sums.shape[1:])
                into[start + first : start + first + len(some)] = column.value(total)
        start += len(weights)
    for k, (column, own) in enumerate(zip(columns, sums, strict=True)):
        if np.sum(own.any(1)) < 2:
            continue
        low, high = (float(_quantile(values[k, :, None], (1 + side * level) / 2)[0]) for side in (-1, 1))
        if column.error:
            with np.errstate(invalid="ignore"):
                total = np.asarray(column.sums.sum(0, keepdims=True))
            bias = max(0.0, float(arrays.mean(values[k], 0)[0]) - float(column.value(total)[0]))
            low, high = max(0.0, low - 2 * bias), high - bias
        found[k] = low, high
    return found


def standard_error(values: Sequence[float], *, groups: Sequence[str] | None = None) -> float:
    """Standard error of the mean over cases; cases of one group are not independent.

        se^2 = G / (G - 1) sum_g (sum_{c in g} (x_c - m))^2 / n^2,

    with the mean m of n values in G groups (Cameron and Miller, J. Human Resources 50, 2015). If every case is its own
    group, this is the usual s / sqrt(n). NaN for fewer than two groups, and if a value is infinite.

    Examples:
        >>> round(standard_error([1.0, 2.0, 3.0]), 6), round(standard_error([1.0, 2.0, 3.0], groups=["a", "b", "b"]), 6)
        (0.57735, 0.666667)
    """
    array = checked(values, "values", ("cases",))
    group = checked_groups(groups, len(array))
    there = ~np.isnan(array)
    array, group = array[there], group[there]
    count = len(np.unique(group))
    if count < 2 or not np.isfinite(array).all():
        return math.nan
    sums = arrays.sum_by_group(array - array.mean(), group)
    return math.sqrt(count / (count - 1) * float(np.sum(sums**2))) / len(array)


def mean_over_repeats(values: ArrayLike) -> FloatArray:
    """One value per case, the mean over the repeats that have one: ``(repeats, cases, ...)`` to ``(cases, ...)``.

    Average before testing or ranking: both assume independent cases, and the same case in two repeats is not.

    Examples:
        >>> mean_over_repeats([[0.1, np.nan, np.nan], [0.3, 0.4, np.nan]])
        array([0.2, 0.4, nan])
    """
    return arrays.mean(checked(values, "values", ("repeats", "cases"), trailing=True), axis=0)[0]


def _check(replicates: int, level: float, seed: int) -> None:
    check_whole("replicates", replicates, 1)
    check_seed(seed)
    if not 0 < level < 1:
        raise InputError(f"level is {level}", expected="between 0 and 1, for example 0.95")


def _replicate_means(values: FloatArray, groups: IntArray, replicates: int, seed: int) -> tuple[FloatArray, IntArray]:
    """Means of the replicates, ``(replicates, entries)``, and how many units have a value of each entry.

    Units are what is resampled: the groups of tested cases, repeat after repeat. ``values`` are ``(repeats, cases,
    entries)``, ``groups (cases,)``.
    """
    tested = np.asarray(~np.isnan(values).all(axis=2))
    own = [checked_groups(groups[here], int(here.sum())) for here in tested if here.any()]
    sizes = [int(group.max()) + 1 for group in own]  # units of every repeat
    before = np.cumsum([0, *sizes])
    numbered = [start + group for start, group in zip(before[:-1], own, strict=True)]
    unit = np.concatenate([np.zeros(0, np.int64), *numbered])
    found = values[tested]  # (tested cases of all repeats, entries), repeat after repeat
    there = ~np.isnan(found)
    sums, counts = (arrays.sum_by_group(part.astype(np.float64), unit) for part in (np.where(there, found, 0.0), there))
    means: FloatArray = np.full((replicates, values.shape[2]), np.nan)
    held: IntArray = np.asarray(np.sum(counts > 0, axis=0, dtype=np.int64))
    if not sizes:
        return means, held
    start = 0
    for weights in _weights(sizes, replicates, seed):
        means[start : start + len(weights)] = arrays.ratio(_weighted(weights, sums), weights @ counts)
        start += len(weights)
    return means, held


def _weights(sizes: Sequence[int], replicates: int, seed: int) -> Iterator[FloatArray]:
    """How often each unit occurs in every replicate, ``(some replicates, units)``; ``sizes`` has units by repeat."""
    random = np.random.default_rng(seed)
    repeats = random.multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), replicates)
    # The chunks must not depend on the number of entries, or one more method would change the draws of all.
    step = max(1, _CHUNK // sum(sizes))
    for start in range(0, replicates, step):
        chosen = repeats[start : start + step]
        # k_r times n_r draws of a unit.
        draws = [random.multinomial(chosen[:, r] * size, np.full(size, 1 / size)) for r, size in enumerate(sizes)]
        yield np.concatenate(draws, axis=1, dtype=np.float64)


def _weighted(weights: FloatArray, sums: FloatArray) -> FloatArray:
    """``weights @ sums``, where 0 times infinity is 0."""
    total: FloatArray = weights @ np.where(np.isfinite(sums), sums, 0.0)
    for infinity in (np.inf, -np.inf):
        there = (sums == infinity) | np.isnan(sums)  # NaN is a sum of opposite infinities.
        if there.any():
            with np.errstate(invalid="ignore"):
                total += np.where(weights @ there > 0, infinity, 0.0)
    return total


def _quantile(means: FloatArray, probability: float) -> FloatArray:
    """Quantile over axis 0 without NaN, interpolated as numpy does, but correct between equal infinities."""
    ordered = np.sort(means, axis=0)  # NaN last
    last = np.maximum(np.sum(~np.isnan(means), axis=0) - 1, 0)
    position = probability * last
    lower = np.floor(position).astype(np.int64)
    fraction = position - lower
    here, there = (
        np.take_along_axis(ordered, index[np.newaxis], axis=0)[0] for index in (lower, np.minimum(lower + 1, last))
    )
    with np.errstate(invalid="ignore"):
        between: FloatArray = np.where((here == there) | (fraction == 0), here, here + fraction * (there - here))
    return between
