"""From the values of all methods, repeats and cases to tables: means with intervals, differences, ranks.

The repeats of a study test some of the same cases. A bootstrap that took them for different cases would give intervals
that are too narrow (73 to 87% coverage instead of 95%; see ``segcal.inference.hierarchical_bootstrap``). So the values
of a case are averaged over the repeats first, and everything here resamples, tests and ranks *cases*, or groups of
cases if the data have groups.

Some fits fall back to a simpler method or to the identity. Their values differ from its by rounding only, and a rank
test would find even that significant if it has the same sign in every case. So methods that are the same map are found
here, shown as what they are, and not tested.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal import inference
from segcal.evaluation.plan import metric_spec, parse_metric
from segcal.evaluation.pooled import pooled_of
from segcal.metrics import MetricSpec
from segcal.study.settings import UNCALIBRATED
from segcal.study.work.run import Repeats
from segcal.study.work.tasks import Evaluation

FloatArray = NDArray[np.float64]
Columns = Sequence[tuple[str, str]]


# The relative rounding error of calibrators and metrics, whichever loops compute them.
_RELATIVE = 1e-6
# Means over voxels. Binned metrics are not compared: rounding may move a voxel from one bin into the next.
_SMOOTH = ("nll", "brier", "entropy", "accuracy", "flip")


@dataclass(frozen=True)
class Table:
    """The values of methods in cases: ``values (cases, methods, columns)``, means over the repeats, NaN for none.

    ``groups`` has the group of every case, None if each case is its own. ``same`` maps a method to the simpler one that
    is the same map.
    """

    methods: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    values: FloatArray
    groups: tuple[str, ...] | None = None
    same: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        repeats: Repeats,
        columns: Columns,
        groups: Mapping[str, str] | None = None,
        same: Mapping[str, str] | None = None,
    ) -> Table:
        """Collect the values of all tested cases. Methods that are the same map get the same values."""
        methods = tuple(repeats[0])
        tested = _tested(repeats, columns)
        place = {case: index for index, case in enumerate(tested)}
        values = np.full((len(repeats), len(tested), len(methods), len(columns)), np.nan)
        for r, found in enumerate(repeats):
            for m, method in enumerate(methods):
                for k, (metric, region) in enumerate(columns):
                    for case, value in found[method].values(metric, region).items():
                        values[r, place[case], m, k] = value
        means = inference.mean_over_repeats(values)
        twins = {key: twin for key, twin in (same or {}).items() if key in methods and twin in methods}
        smooth = [k for k, (metric, _) in enumerate(columns) if _has_baseline(_spec(metric))]
        for key, twin in twins.items():
            means[:, methods.index(key), smooth] = means[:, methods.index(twin), smooth]
        own = None if groups is None else tuple(groups[case] for case in tested)
        return cls(methods, tuple(columns), means, own, twins)

    def part(self, columns: Columns) -> Table:
        """Only some of the columns."""
        chosen = [self.columns.index(column) for column in columns]
        return replace(self, columns=tuple(columns), values=self.values[:, :, chosen])

    def losses(self, values: FloatArray) -> FloatArray:
        """Values ``(..., columns)`` with signs such that lower is better."""
        better = np.array([_spec(metric).better for metric, _ in self.columns])
        return np.where(better == "higher", -1, 1) * np.where(better == "zero", np.abs(values), values)


def _tested(repeats: Repeats, columns: Columns) -> list[str]:
    """The cases that any repeat tests."""
    return sorted({case for found in repeats for case in next(iter(found.values())).values(*columns[0])})


def summary(table: Table, repeats: Repeats, seed: int) -> list[dict[str, Any]]:
    """Mean over cases with its 95% interval, and the mean over repeats of the pooled value with its own."""
    found = inference.hierarchical_bootstrap(table.values[None], groups=table.groups, seed=seed)
    pooled = _pooled_intervals(table, repeats, seed)
    return [
        {
            "method": method,
            "region": region,
            "metric": metric,
            "mean": float(found.estimate[m, k]),
            "low": float(found.low[m, k]),
            "high": float(found.high[m, k]),
            "n": int(found.count[m, k]),
            "pooled": mean([own[method].pooled(metric, region)[0] for own in repeats]),
            "pooled_low": pooled.get((method, metric, region), (math.nan, math.nan))[0],
            "pooled_high": pooled.get((method, metric, region), (math.nan, math.nan))[1],
        }
        for m, method in enumerate(table.methods)
        for k, (metric, region) in enumerate(table.columns)
    ]


def _pooled_intervals(table: Table, repeats: Repeats, seed: int) -> dict[tuple[str, str, str], FloatArray]:
    """The intervals of pooled values by method, metric and region.

    A replicate draws cases, or groups, and takes the pooled value of those that each repeat tests, then the mean over
    the repeats.
    """
    place = {case: index for index, case in enumerate(_tested(repeats, table.columns))}
    found: dict[tuple[str, str, str], inference.Pooled] = {}
    for method in table.methods:
        for metric, region in table.columns:
            own = [each[method].case_sums(metric, region) for each in repeats]
            if own[0] is None:
                continue
            sums = np.zeros((len(place), len(repeats), *own[0][1].shape[1:]))
            for repeat, (cases, values) in enumerate(one for one in own if one is not None):
                sums[[place[case] for case in cases], repeat] = values
            found[method, metric, region] = pooled_of(metric, sums)
    intervals = inference.pooled_intervals(list(found.values()), groups=table.groups, seed=seed)
    return dict(zip(found, intervals, strict=True))


def differences(table: Table, seed: int, baseline: str = UNCALIBRATED) -> list[dict[str, Any]]:
    """Every method minus the baseline on the same cases: bootstrap interval, Wilcoxon p adjusted over the methods.

    ``lower`` and ``higher`` count the cases where the method is lower or higher. ``verdict`` says what the interval
    shows: better, worse or unclear; None if neither direction is better, or if one case gives no interval. Methods that
    are the same map as another are not tested: they have no p-value and do not count in the adjustment.
    """
    other = table.methods.index(baseline)
    found = inference.paired_difference(table.values[None], other, groups=table.groups, seed=seed)
    is_baseline = {baseline, table.same.get(baseline)}
    tested = [m for m, key in enumerate(table.methods) if key not in table.same and key not in is_baseline]
    rows = []
    for k, (metric, region) in enumerate(table.columns):
        if not _has_baseline(_spec(metric)):
            continue
        pairs = inference.compare_pairs(table.values[:, [*tested, other], k], groups=table.groups, baseline=len(tested))
        p = {tested[pair.first]: pair for pair in pairs}
        for m, method in enumerate(table.methods):
            if m == other:
                continue
            low, high = float(found.low[m, k]), float(found.high[m, k])
            rows.append(
                {
                    "method": method,
                    "baseline": baseline,
                    "region": region,
                    "metric": metric,
                    "mean": float(found.estimate[m, k]),
                    "low": low,
                    "high": high,
                    "lower": int(np.sum(table.values[:, m, k] < table.values[:, other, k])),
                    "higher": int(np.sum(table.values[:, m, k] > table.values[:, other, k])),
                    "verdict": _verdict(low, high, _spec(metric).better),
                    "p": p[m].p if m in p else math.nan,
                    "p_adjusted": p[m].adjusted if m in p else math.nan,
                    "n": int(found.count[m, k]),
                }
            )
    return rows


def rankings(table: Table) -> dict[str, Any]:
    """Ranks of the methods, over all columns by which they can be ranked.

    ``ranks`` has, for every column, Friedman's test, mean ranks over cases, and which methods are not distinguishable.
    ``sum_rank`` adds up the ranks by the mean of every column. ``mean_case_rank`` averages the ranks in every case.
    """
    specs = {column: _spec(column[0]) for column in table.columns}
    table = table.part([own for own, spec in specs.items() if spec.better != "neither" and _has_baseline(spec)])
    if not table.columns:
        return {"ranks": [], "sum_rank": {}, "mean_case_rank": {}}
    losses = table.losses(table.values)
    rows = []
    for k, (metric, region) in enumerate(table.columns):
        friedman = inference.friedman(losses[:, :, k], groups=table.groups)
        distance = inference.critical_difference(friedman.mean_ranks, friedman.count)
        alike = inference.groups(friedman.mean_ranks, distance)
        rows.append(
            {
                "metric": metric,
                "region": region,
                "friedman": {"statistic": friedman.statistic, "p": friedman.p, "n": friedman.count},
                "mean_rank": _by_method(table, friedman.mean_ranks),
                "critical_difference": distance,
                "groups": [[table.methods[m] for m in group] for group in alike],
            }
        )
    means = table.losses(inference.mean_over_repeats(table.values))
    return {
        "ranks": rows,
        "sum_rank": _by_method(table, inference.sum_rank(means).ranks),
        "mean_case_rank": _by_method(table, inference.mean_case_rank(losses, groups=table.groups).ranks),
    }


def mean(values: Iterable[float]) -> float:
    """Mean of the values that are not NaN; NaN for none."""
    defined = [float(value) for value in values if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else math.nan


def _verdict(low: float, high: float, better: str) -> str | None:
    if math.isnan(low) or better not in ("lower", "higher"):
        return None
    if better == "higher":
        low, high = -high, -low
    return "better" if high < 0 else "worse" if low > 0 else "unclear"


def _spec(metric: str) -> MetricSpec:
    return metric_spec(parse_metric(metric)[0])


def _has_baseline(spec: MetricSpec) -> bool:
    """Whether uncalibrated scores have a value. Metrics that compare with them (flips) have none."""
    return "uncalibrated" not in spec.needs


def _by_method(table: Table, values: FloatArray) -> dict[str, float]:
    return {name: float(value) for name, value in zip(table.methods, values, strict=True) if not math.isnan(value)}


def same_maps(repeats: Repeats, sizes: dict[str, int]) -> dict[str, str]:
    """Method to the simplest one with the same values in every case of every repeat; ``sizes`` are parameters."""
    keys = sorted(repeats[0], key=lambda key: sizes[key])
    found: dict[str, str] = {}
    for place, key in enumerate(keys):
        simpler = (other for other in keys[:place] if other not in found)
        twin = next((other for other in simpler if all(_same(own[key], own[other]) for own in repeats)), None)
        if twin is not None:
            found[key] = twin
    return found


def _same(one: Evaluation, other: Evaluation) -> bool:
    """Whether the values are equal up to rounding, in every channel if there are several."""
    for mine, theirs in zip(one.parts, other.parts, strict=True):
        for metric, region in mine.columns:
            id = parse_metric(metric)[0]
            if id in _SMOOTH:
                first, second = (np.array(list(part.values(metric, region).values())) for part in (mine, theirs))
                if id == "flip":  # Uncalibrated scores have NaN, which stands for 0.
                    first, second = np.nan_to_num(first), np.nan_to_num(second)
                if not np.isclose(first, second, rtol=_RELATIVE, atol=0, equal_nan=True).all():
                    return False
    return True
