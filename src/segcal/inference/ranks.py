"""Ranks of methods over cases, metrics and datasets, and which methods differ significantly.

Rank 1 is best, and ties share the mean of their ranks. A *block* is what is ranked together: a case, or a metric on a
dataset. A method without any value is left out (its rank is NaN). So is a block in which another method lacks a value:
otherwise, failing on hard blocks would improve a rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import chdtrc

from segcal.errors import InputError
from segcal.inference.arrays import FloatArray, checked, checked_groups, mean, mean_by_group

__all__ = ["Friedman", "Ranking", "critical_difference", "friedman", "groups", "mean_case_rank", "sum_rank"]

Direction = bool | Sequence[bool] | NDArray[np.bool_]


@dataclass(frozen=True)
class Friedman:
    """Friedman test of whether the methods differ at all.

    Attributes:
        statistic: Chi-squared with one degree of freedom less than there are methods with values.
        p: Its p-value.
        mean_ranks: ``(methods,)``, the Friedman rank; lower is better.
        count: Number of blocks ranked.
    """

    statistic: float
    p: float
    mean_ranks: FloatArray
    count: int


@dataclass(frozen=True)
class Ranking:
    """Ranks ``(methods,)``, lower is better, and the number of blocks or cases they come from."""

    ranks: FloatArray
    count: int


def friedman(values: ArrayLike, *, groups: ArrayLike | None = None, lower_is_better: Direction = True) -> Friedman:
    """Friedman's test and mean ranks over blocks: the cases of a metric, or metrics on datasets.

    With ranks r_ij of k methods in n blocks and mean ranks R_j,

        statistic = (k - 1) n^2 sum_j (R_j - (k + 1)/2)^2 / (sum_ij r_ij^2 - n k (k + 1)^2 / 4),

    which without ties is the textbook's 12 n / (k (k + 1)) sum_j (R_j - (k + 1)/2)^2 (Friedman, J. Am. Stat. Assoc. 32,
    1937; ties as in Conover, Practical Nonparametric Statistics, 1999). Over metrics x datasets the mean ranks are the
    Friedman rank of Murugesan et al. (CRaC). Ties everywhere give statistic 0 and p = 1; no complete block, or fewer
    than two methods, gives NaN.

    Args:
        values: ``(blocks, methods)``, NaN where there is no value.
        groups: ``(blocks,)``, the groups that blocks belong to, if these are not independent. A group is one block: the
            mean of those of its blocks in which all methods have a value.
        lower_is_better: For all blocks, or one for every block.

    Examples:
        >>> ece = np.array([[0.20, 0.11, 0.15], [0.25, 0.14, 0.16], [0.22, 0.15, 0.12], [0.30, 0.19, 0.21]])
        >>> result = friedman(ece)
        >>> result.mean_ranks, round(result.statistic, 6), round(result.p, 3)
        (array([3.  , 1.25, 1.75]), 6.5, 0.039)
    """
    array = checked(values, "values", ("blocks", "methods"))
    ranks = _block_ranks(array, "blocks", lower_is_better, groups)
    mean_ranks, count = mean(ranks, axis=0)
    blocks, methods = int(count.max()), int(np.sum(count > 0))
    if blocks == 0 or methods < 2:
        return Friedman(math.nan, math.nan, mean_ranks, blocks)
    centre = (methods + 1) / 2
    spread = float(np.nansum((ranks - centre) ** 2))
    between = float(np.nansum((mean_ranks - centre) ** 2)) * blocks**2
    statistic = (methods - 1) * between / spread if spread > 0 else 0.0
    return Friedman(statistic, float(chdtrc(methods - 1, statistic)), mean_ranks, blocks)


def sum_rank(values: ArrayLike, *, lower_is_better: Direction = True) -> Ranking:
    """Rank the methods by every metric's overall value and add the ranks up.

    ``R_j = sum over settings s of rank_sj`` (Murugesan et al., NACL, Fig. 1, after the challenges of MICCAI); a
    setting is a metric, or a metric on a dataset.

    Args:
        values: ``(methods, settings)``, such as the ``estimate`` of a ``hierarchical_bootstrap``.
        lower_is_better: For all settings, or one for every setting.

    Examples:
        >>> dice, ece = [0.90, 0.90, 0.89], [0.12, 0.05, 0.07]
        >>> sum_rank(np.stack([dice, ece], axis=1), lower_is_better=[False, True]).ranks
        array([4.5, 2.5, 5. ])
    """
    array = checked(values, "values", ("methods", "settings"))
    means, count = mean(_block_ranks(array.T, "settings", lower_is_better), axis=0)
    return Ranking(means * count, int(count.max()))


def mean_case_rank(values: ArrayLike, *, groups: ArrayLike | None = None, lower_is_better: Direction = True) -> Ranking:
    """Rank the methods in every case by every metric; average over metrics, then over cases.

    ``R_j = 1/n sum_i 1/|M_i| sum_{m in M_i} rank_ijm`` with M_i the metrics all methods have in case i (Murugesan et
    al., NACL, Fig. 1). Cases without such a metric are left out.

    Args:
        values: ``(cases, methods, metrics)``, NaN where there is no value.
        groups: ``(cases,)``, the groups that cases belong to: a group is ranked by its means, as in ``friedman``.
        lower_is_better: For all metrics, or one for every metric.

    Examples:
        >>> dice = np.array([[0.9, 0.8], [0.7, 0.9], [0.6, np.nan]])
        >>> ece = np.array([[0.1, 0.2], [0.3, 0.2], [0.3, 0.1]])
        >>> mean_case_rank(np.stack([dice, ece], axis=2), lower_is_better=[False, True])
        Ranking(ranks=array([1.666..., 1.333...]), count=3)
    """
    array = checked(values, "values", ("cases", "methods", "metrics"))
    ranks = _block_ranks(np.moveaxis(array, 1, 2), "metrics", lower_is_better, groups)
    ranks, count = mean(mean(ranks, axis=1)[0], axis=0)
    return Ranking(ranks, int(count.max()))


def critical_difference(mean_ranks: ArrayLike, cases: int, *, alpha: float = 0.05) -> float:
    """The difference of mean ranks at which two methods differ significantly (Nemenyi's test).

        CD = q_alpha sqrt(k (k + 1) / (6 n)),

    with q_alpha the studentised range of k groups and infinite degrees of freedom, divided by sqrt(2) (Nemenyi, 1963;
    Demsar, J. Mach. Learn. Res. 7, 2006). Use it after a significant ``friedman``. NaN for fewer than two methods or no
    case.

    Args:
        mean_ranks: ``(methods,)``; NaN for methods that were not ranked. They do not count.
        cases: Number of blocks ranked.
        alpha: Level of the test, over all pairs together.

    Examples:
        >>> round(critical_difference([1.2, 2.1, 3.0, 3.7], cases=14), 3)
        1.254
    """
    from scipy.stats import studentized_range

    if not 0 < alpha < 1:
        raise InputError(f"alpha is {alpha}", expected="between 0 and 1, for example 0.05")
    methods = int(np.sum(~np.isnan(checked(mean_ranks, "mean_ranks", ("methods",)))))
    if methods < 2 or cases < 1:
        return math.nan
    quantile = float(studentized_range.ppf(1 - alpha, methods, np.inf)) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * cases))


def groups(mean_ranks: ArrayLike, difference: float) -> list[tuple[int, ...]]:
    """The largest sets of methods in which no two differ by ``difference`` or more: the bars of a rank diagram.

    A method may be in several sets. Every ranked method is in at least one, alone if it differs from all others.

    Args:
        mean_ranks: ``(methods,)``; methods with NaN are in no set.
        difference: Such as ``critical_difference``. NaN means that no methods differ, and gives one set of all.

    Examples:
        >>> groups([1.2, 3.7, 2.1, 2.9], difference=1.254)
        [(0, 2), (2, 3), (3, 1)]
    """
    if difference <= 0:
        raise InputError(f"difference is {difference}", expected="a positive number, such as critical_difference gives")
    ranks = checked(mean_ranks, "mean_ranks", ("methods",))
    order = [int(method) for method in np.argsort(ranks, kind="stable") if not math.isnan(ranks[method])]
    found: list[tuple[int, ...]] = []
    end = 0
    for start, best in enumerate(order):
        reach = start
        while reach < len(order) and not ranks[order[reach]] - ranks[best] >= difference:
            reach += 1
        if reach > end or not found:
            found.append(tuple(order[start:reach]))
            end = reach
    return found


def _block_ranks(
    values: FloatArray, name: str, lower_is_better: Direction, groups: ArrayLike | None = None
) -> FloatArray:
    """Ranks of group means along the last axis, the methods; NaN if no block is complete.

    ``lower_is_better`` has one value, or one for each entry of the axis before, whose name is for the error.
    """
    from scipy.stats import rankdata

    lower, length = np.asarray(lower_is_better), values.shape[-2]
    if lower.dtype != np.bool_ or lower.shape not in ((), (length,)):
        expected = f"True or False, or one of them for each of {length} {name}"
        raise InputError(f"lower_is_better is {lower_is_better!r}", expected=expected)
    values = values * np.where(lower, 1.0, -1.0)[..., np.newaxis]
    missing = np.isnan(values)
    present = np.asarray(~missing.all(axis=tuple(range(values.ndim - 1))))
    complete = np.asarray(~missing[..., present].any(axis=-1))
    means = mean_by_group(np.where(complete[..., np.newaxis], values, np.nan), checked_groups(groups, len(values)))
    ranks = np.full(means.shape, np.nan)
    there = ~np.isnan(means[..., present]).any(axis=-1, keepdims=True)
    ranks[..., present] = np.where(there, rankdata(means[..., present], axis=-1), np.nan)
    return ranks
