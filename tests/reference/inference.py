"""Bootstrap, rank tests and rankings as naive loops, written from the formulas, not from segcal's code."""

from __future__ import annotations

import itertools
import math


def mean(values) -> float:
    values = [value for value in values if not math.isnan(value)]
    return math.fsum(values) / len(values) if values else math.nan


def hierarchical_means(values, replicates, random) -> list[float]:
    """``values[repeat][case]``; draws indices of repeats, then of the cases tested in them."""
    repeats = [tested for row in values if (tested := [value for value in row if not math.isnan(value)])]
    means = []
    for _ in range(replicates):
        drawn = []
        for repeat in random.integers(len(repeats), size=len(repeats)):
            cases = repeats[repeat]
            drawn += [cases[case] for case in random.integers(len(cases), size=len(cases))]
        means.append(mean(drawn))
    return means


def cluster_means(values, groups, replicates, random) -> list[float]:
    """``values[case]``; draws groups, each with all its cases, and averages the cases."""
    members = {name: [v for v, own in zip(values, groups, strict=True) if own == name] for name in groups}
    names = list(members)
    means = []
    for _ in range(replicates):
        drawn = []
        for place in random.integers(len(names), size=len(names)):
            drawn += members[names[place]]
        means.append(mean(drawn))
    return means


def pooled_values(sums, groups, value, replicates, random) -> list[float]:
    """Draw groups with replacement, add up the sums of all their cases, entry by entry, and take the value."""
    names = sorted(set(groups))
    found = []
    for _ in range(replicates):
        drawn = [names[index] for index in random.integers(0, len(names), len(names))]
        rows = [row for name in drawn for row, own in zip(sums, groups, strict=True) if own == name]
        found.append(value([sum(column) for column in zip(*rows, strict=True)]))
    return found


def group_means(values, groups) -> list[float]:
    """The mean of every group, in the order in which groups appear."""
    return [mean(v for v, own in zip(values, groups, strict=True) if own == name) for name in dict.fromkeys(groups)]


def ranks(values) -> list[float]:
    """1 for the lowest; ties share the mean of their ranks."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values
    ]


def signed_rank(differences) -> tuple[float, float]:
    """Rank-biserial effect and two-sided p over all signs, by listing every one of them."""
    differences = [d for d in differences if d != 0]
    sizes = ranks([abs(d) for d in differences])
    positive = sum(r for r, d in zip(sizes, differences, strict=True) if d > 0)
    negative = sum(r for r, d in zip(sizes, differences, strict=True) if d < 0)
    sums = [sum(itertools.compress(sizes, signs)) for signs in itertools.product((0, 1), repeat=len(sizes))]
    tails = sum(s <= positive for s in sums), sum(s >= positive for s in sums)
    return (positive - negative) / (positive + negative), min(1.0, 2 * min(tails) / len(sums))


def superiority(first, second) -> float:
    """A12: how often a value of the first is higher, ties counted half."""
    return mean((x > y) + (x == y) / 2 for x in first for y in second)


def mean_case_rank(values, lower_is_better) -> list[float]:
    """``values[case][method][metric]``, all there."""
    of_cases = []
    for case in values:
        of_metrics = [
            ranks([method[metric] if lower else -method[metric] for method in case])
            for metric, lower in enumerate(lower_is_better)
        ]
        of_cases.append([mean(column) for column in zip(*of_metrics, strict=True)])
    return [mean(column) for column in zip(*of_cases, strict=True)]


def groups(mean_ranks, difference) -> set[frozenset[int]]:
    """All sets of methods without a pair that differs, less those inside another."""
    sets = [
        frozenset(chosen)
        for size in range(1, len(mean_ranks) + 1)
        for chosen in itertools.combinations(range(len(mean_ranks)), size)
        if all(abs(mean_ranks[a] - mean_ranks[b]) < difference for a, b in itertools.combinations(chosen, 2))
    ]
    return {candidate for candidate in sets if not any(candidate < other for other in sets)}
