"""Statistics of studies: bootstrap intervals, tests of pairs, ranks. Arrays in, numbers out; needs no torch.

Axes come in one order, ``(repeats, cases, methods, metrics)``, and a function names those of them that it takes. NaN is
no value: a case that a repeat did not test, a metric undefined in a case, a method that failed. It is left out, results
say how many values stayed, and a result of no values is NaN. Infinities (a surface distance to a class that is not
there) are values: they make means infinite, rank at the end, and two equal ones differ by 0. ``groups`` are names of
what cases belong to (patients), where cases of one are not independent. Nothing here warns.

``scipy.stats`` takes half a second to import and every import of segcal comes by here: it is imported where used.
"""

from __future__ import annotations

from segcal.inference.bootstrap import (
    FEW_GROUPS,
    Interval,
    PairedDifference,
    bootstrap_interval,
    hierarchical_bootstrap,
    mean_over_repeats,
    paired_difference,
    standard_error,
)
from segcal.inference.pairs import PairTest, benjamini_hochberg, compare_pairs
from segcal.inference.ranks import Friedman, Ranking, critical_difference, friedman, groups, mean_case_rank, sum_rank

__all__ = [
    "FEW_GROUPS",
    "Friedman",
    "Interval",
    "PairTest",
    "PairedDifference",
    "Ranking",
    "benjamini_hochberg",
    "bootstrap_interval",
    "compare_pairs",
    "critical_difference",
    "friedman",
    "groups",
    "hierarchical_bootstrap",
    "mean_case_rank",
    "mean_over_repeats",
    "paired_difference",
    "standard_error",
    "sum_rank",
]
