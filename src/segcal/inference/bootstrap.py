"""Bootstrap intervals of means over cases and repeats, and of paired differences between methods.

Resampling n of n things is drawing their multiplicities. So one table of weights, a row for every replicate, serves all
methods and metrics at once: their replicates come from the same draws, and a matrix product takes the means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from segcal.errors import InputError
from segcal.inference.arrays import FloatArray, IntArray, checked, checked_index, difference, mean, ratio

_CHUNK = 2**21  # weights drawn at a time, which take three copies of 16 MB


@dataclass(frozen=True)
class Interval:
    """Means and their bootstrap intervals, arrays of the trailing shape of the values.

    Attributes:
        estimate: Mean of all values that are not NaN.
        low: Lower end of the percentile interval; NaN where there are fewer than two values.
        high: Upper end.
        count: Number of values in the mean.
        means: The mean of every replicate, ``(replicates, ...)``, where asked for.
    """

    estimate: FloatArray
    low: FloatArray
    high: FloatArray
    count: IntArray
    means: FloatArray | None = None


@dataclass(frozen=True)
class PairedDifference:
    """Methods minus the baseline, case by case; arrays ``(methods, ...)``.

    Attributes:
        estimate: Mean difference over the cases that both have.
        low: Lower end of its percentile interval; NaN where there are fewer than two pairs.
        high: Upper end.
        count: Number of pairs in the mean.
        above: Share of replicates with a positive mean difference.
        p: Two-sided bootstrap p-value of no difference; never below ``2 / (replicates + 1)``.
    """

    estimate: FloatArray
    low: FloatArray
    high: FloatArray
    count: IntArray
    above: FloatArray
    p: FloatArray


def hierarchical_bootstrap(
    values: ArrayLike, *, replicates: int = 2000, level: float = 0.95, seed: int = 0, keep_means: bool = False
) -> Interval:
    """Two-level bootstrap of the mean: resample repeats, then cases within every chosen repeat.

    A replicate draws R of the R repeats with replacement and, for each draw of repeat r, n_r of its n_r tested cases
    with replacement; its mean is that of everything drawn,

        m* = sum_rc w_rc x_rc / sum_rc w_rc,    k ~ Multinomial(R; 1/R),    w_r ~ Multinomial(k_r n_r; 1/n_r),

    with the sums over the x that are not NaN, and the interval runs between the (1 -+ level)/2 quantiles of m* (Efron
    and Tibshirani, An Introduction to the Bootstrap, 1994, chapter 13; the two levels are those of Kirscher et al.,
    section 4.1). All entries of the trailing shape share the draws, so replicates may be subtracted from one another.

    A case is tested in a repeat if any entry is not NaN there; a repeat that tests no case is none. Replicates in which
    an entry has no value drop out of that entry's interval. With one repeat this is the bootstrap over cases.

    The cases of different repeats are taken to be different ones. Where repeats test the *same* cases, the luck of the
    cases does not average out over the repeats as the interval believes, and it is up to sqrt(R) too narrow: simulated
    95% intervals of R = 3 repeats held the mean of all possible cases in 73% (all cases shared) or 87% (each repeat
    tests a random half) of the studies, those of ``mean_over_repeats(values)[None]`` in 95%. Where the repeats
    themselves differ much, three of them say little about it: 79%.

    Args:
        values: ``(repeats, cases, ...)``, NaN where there is no value.
        replicates: How many to draw.
        level: Coverage of the interval.
        seed: Of the draws, which depend on nothing else but which cases were tested.
        keep_means: Also return the mean of every replicate.

    Examples:
        >>> ece = np.array([[0.10, 0.12, np.nan, 0.08], [0.11, np.nan, 0.15, 0.07]])
        >>> result = hierarchical_bootstrap(ece)
        >>> f"{result.estimate:.3f} [{result.low:.3f}, {result.high:.3f}] of {result.count}"
        '0.105 [0.085, 0.130] of 6'
    """
    array = checked(values, "values", ("repeats", "cases"), trailing=True)
    if replicates < 1:
        raise InputError(f"replicates is {replicates}", expected="at least 1")
    if not 0 < level < 1:
        raise InputError(f"level is {level}", expected="between 0 and 1, for example 0.95")
    estimate, count = mean(array, axis=(0, 1))
    means = _replicate_means(array.reshape(*array.shape[:2], -1), replicates, seed).reshape(replicates, *count.shape)
    low, high = (np.where(count < 2, np.nan, _quantile(means, (1 + side * level) / 2)) for side in (-1, 1))
    return Interval(estimate, low, high, count, means if keep_means else None)


def paired_difference(
    values: ArrayLike, baseline: int, *, replicates: int = 2000, level: float = 0.95, seed: int = 0
) -> PairedDifference:
    """Every method minus a baseline on the same cases, with ``hierarchical_bootstrap`` intervals and p-values.

    A pair needs both values; what the cases have in common cancels before anything is averaged. With B replicates in
    which both are defined, of the mean difference d*,

        p = min(1, 2 (1 + min(#{d* <= 0}, #{d* >= 0})) / (B + 1))

    which asks at what level the percentile interval would just reach 0, and counts the data as one more replicate as
    Davison and Hinkley do (Bootstrap Methods and their Application, 1997, chapter 4). The baseline against itself gives
    0 and p = 1.

    Args:
        values: ``(repeats, cases, methods, ...)``, NaN where there is no value.
        baseline: Index of the method to subtract.
        replicates: How many to draw.
        level: Coverage of the intervals.
        seed: Of the draws.

    Examples:
        >>> ece = np.array([[[0.20, 0.11], [0.25, 0.14], [0.22, 0.15], [0.30, 0.19]]])
        >>> result = paired_difference(ece, baseline=0)
        >>> f"{result.estimate[1]:.3f} [{result.low[1]:.3f}, {result.high[1]:.3f}], p = {result.p[1]:.3f}"
        '-0.095 [-0.110, -0.080], p = 0.001'
    """
    array = checked(values, "values", ("repeats", "cases", "methods"), trailing=True)
    index = checked_index(baseline, "baseline", array.shape[2], "methods")
    paired = difference(array, array[:, :, index : index + 1])
    result = hierarchical_bootstrap(paired, replicates=replicates, level=level, seed=seed, keep_means=True)
    means = result.means
    assert means is not None
    defined, above, not_above, not_below = (
        np.sum(chosen, axis=0) for chosen in (~np.isnan(means), means > 0, means <= 0, means >= 0)
    )
    p = np.minimum(1.0, 2 * (1 + np.minimum(not_above, not_below)) / (defined + 1))
    enough = result.count >= 2
    return PairedDifference(
        result.estimate,
        result.low,
        result.high,
        result.count,
        above=np.where(enough, ratio(above, defined), np.nan),
        p=np.where(enough, p, np.nan),
    )


def bootstrap_interval(
    values: Sequence[float], *, replicates: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over cases; NaN for fewer than two.

    Examples:
        >>> low, high = bootstrap_interval([0.1, 0.2, 0.3, 0.4])
        >>> low < 0.25 < high
        True
    """
    if len(values) < 2:
        return math.nan, math.nan
    result = hierarchical_bootstrap([values], replicates=replicates, level=level, seed=seed)
    return float(result.low), float(result.high)


def mean_over_repeats(values: ArrayLike) -> FloatArray:
    """One value per case, the mean over the repeats that have one: ``(repeats, cases, ...)`` to ``(cases, ...)``.

    Tests and ranks take cases as independent, which the same case in two repeats is not: average first.

    Examples:
        >>> mean_over_repeats([[0.1, np.nan, np.nan], [0.3, 0.4, np.nan]])
        array([0.2, 0.4, nan])
    """
    return mean(checked(values, "values", ("repeats", "cases"), trailing=True), axis=0)[0]


def _replicate_means(values: FloatArray, replicates: int, seed: int) -> FloatArray:
    """Means of the replicates, ``(replicates, entries)``, from values ``(repeats, cases, entries)``."""
    tested = ~np.isnan(values).all(axis=2)
    sizes = [int(size) for size in tested.sum(axis=1) if size > 0]
    means = np.full((replicates, values.shape[2]), np.nan)
    if not sizes:
        return means
    drawable = values[tested]  # (tested cases of all repeats, entries), repeat after repeat
    defined = (~np.isnan(drawable)).astype(np.float64)
    finite = np.where(np.isfinite(drawable), drawable, 0.0)
    random = np.random.default_rng(seed)
    repeats = random.multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), replicates)
    # The chunks must not depend on the number of entries, or one more method would change the draws of the others.
    step = max(1, _CHUNK // len(drawable))
    for start in range(0, replicates, step):
        chosen = repeats[start : start + step]
        # k_r draws of n_r cases each are k_r n_r draws of a case.
        draws = [random.multinomial(chosen[:, r] * size, np.full(size, 1 / size)) for r, size in enumerate(sizes)]
        weights = np.concatenate(draws, axis=1, dtype=np.float64)
        total = weights @ finite
        if np.isinf(drawable).any():  # 0 times infinity is NaN in a product, but not drawn is not there.
            with np.errstate(invalid="ignore"):
                total += np.where(weights @ (drawable == np.inf) > 0, np.inf, 0.0)
                total -= np.where(weights @ (drawable == -np.inf) > 0, np.inf, 0.0)
        means[start : start + step] = ratio(total, weights @ defined)
    return means


def _quantile(means: FloatArray, probability: float) -> FloatArray:
    """Quantile over axis 0, interpolated as numpy does, of what is not NaN; infinities next to each other allowed."""
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
