"""From the values of all methods, repeats and cases to tables: means with intervals, differences, ranks, bins, flips.

The cases of different repeats overlap, and a bootstrap that takes them for different ones gives intervals that are too
narrow (``segcal.inference.hierarchical_bootstrap`` says how much: 73 to 87% coverage instead of 95%). So a case's
values are averaged over the repeats first, and everything here resamples, tests and ranks *cases*, or groups of cases
where the data have some. Counts of voxels are of every case once, in one of the repeats that tested it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal import inference
from segcal.evaluation.plan import metric_spec, parse_metric
from segcal.metrics import MetricSpec
from segcal.regions import BANDS
from segcal.statistics import EVERYTHING
from segcal.study.measuring import Evaluation
from segcal.study.settings import FLIPS, UNCALIBRATED

FloatArray = NDArray[np.float64]
Columns = Sequence[tuple[str, str]]
#: Evaluations by method, one mapping for each repeat.
Repeats = Sequence[Mapping[str, Evaluation]]


@dataclass(frozen=True)
class Table:
    """The values of methods in cases: ``values (cases, methods, columns)``, means over the repeats, NaN for none.

    ``groups`` are those of the cases, None where each is its own; ``same`` are methods that are the map of another.
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
        """Collect the values; cases that no repeat tested have no row, and equal maps have equal values."""
        methods = tuple(repeats[0])
        tested = sorted({case for found in repeats for case in found[methods[0]].values(*columns[0])})
        place = {case: index for index, case in enumerate(tested)}
        values = np.full((len(repeats), len(tested), len(methods), len(columns)), np.nan)
        for r, found in enumerate(repeats):
            for m, method in enumerate(methods):
                for k, (metric, region) in enumerate(columns):
                    for case, value in found[method].values(metric, region).items():
                        values[r, place[case], m, k] = value
        means = inference.mean_over_repeats(values)
        twins = {key: twin for key, twin in (same or {}).items() if key in methods and twin in methods}
        for k, (metric, _) in enumerate(columns):
            if _has_baseline(metric):
                for key, twin in twins.items():
                    means[:, methods.index(key), k] = means[:, methods.index(twin), k]
        own = None if groups is None else tuple(groups[case] for case in tested)
        return cls(methods, tuple(columns), means, own, twins)


def summary(table: Table, repeats: Repeats, seed: int) -> list[dict[str, Any]]:
    """Mean over cases with its 95% interval, and the mean over repeats of the pooled value."""
    found = inference.hierarchical_bootstrap(table.values[None], groups=table.groups, seed=seed)
    return [
        {
            "method": method,
            "region": region,
            "metric": metric,
            "mean": float(found.estimate[m, k]),
            "low": float(found.low[m, k]),
            "high": float(found.high[m, k]),
            "n": int(found.count[m, k]),
            "pooled": _mean([own[method].pooled(metric, region)[0] for own in repeats]),
        }
        for m, method in enumerate(table.methods)
        for k, (metric, region) in enumerate(table.columns)
    ]


def differences(table: Table, seed: int, baseline: str = UNCALIBRATED) -> list[dict[str, Any]]:
    """Every method minus another on the same cases: bootstrap interval, Wilcoxon p adjusted over the methods.

    ``lower`` and ``higher`` count the cases in which the method's value is; ``verdict`` is what the interval says:
    better, worse or unclear, and None where neither way is better or one case has no interval. Methods that are the
    same map as another are not tested: they have no p-value and no part in the adjustment.
    """
    other = table.methods.index(baseline)
    found = inference.paired_difference(table.values[None], other, groups=table.groups, seed=seed)
    is_baseline = {baseline, table.same.get(baseline)}
    tested = [m for m, key in enumerate(table.methods) if key not in table.same and key not in is_baseline]
    rows = []
    for k, (metric, region) in enumerate(table.columns):
        if not _has_baseline(metric):
            continue
        pairs = inference.compare_pairs(table.values[:, [*tested, other], k], groups=table.groups, baseline=len(tested))
        p = {tested[pair.first]: (pair.p, pair.adjusted) for pair in pairs}
        for m, method in enumerate(table.methods):
            if m == other:
                continue
            ends = float(found.low[m, k]), float(found.high[m, k])
            rows.append(
                {
                    "method": method,
                    "baseline": baseline,
                    "region": region,
                    "metric": metric,
                    "mean": float(found.estimate[m, k]),
                    "low": ends[0],
                    "high": ends[1],
                    "lower": int(np.sum(table.values[:, m, k] < table.values[:, other, k])),
                    "higher": int(np.sum(table.values[:, m, k] > table.values[:, other, k])),
                    "verdict": _verdict(*ends, _spec(metric).better),
                    **dict(zip(("p", "p_adjusted"), p.get(m, (math.nan, math.nan)), strict=True)),
                    "n": int(found.count[m, k]),
                }
            )
    return rows


def ranks(table: Table) -> list[dict[str, Any]]:
    """Friedman's test, mean ranks over cases, and which methods cannot be told apart, for every ranked column."""
    rows = []
    for k, (metric, region) in _ranked(table):
        friedman = inference.friedman(_losses(metric, table.values[:, :, k]), groups=table.groups)
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
    return rows


def sum_rank(table: Table) -> dict[str, float]:
    """Ranks by the mean of every ranked column, added up."""
    means = inference.hierarchical_bootstrap(table.values[None], replicates=1).estimate
    chosen = [_losses(metric, means[:, k]) for k, (metric, _) in _ranked(table)]
    return _by_method(table, inference.sum_rank(np.stack(chosen, 1)).ranks) if chosen else {}


def mean_case_rank(table: Table) -> dict[str, float]:
    """Ranks in every case by every ranked column, averaged."""
    chosen = [_losses(metric, table.values[:, :, k]) for k, (metric, _) in _ranked(table)]
    if not chosen:
        return {}
    return _by_method(table, inference.mean_case_rank(np.stack(chosen, 2), groups=table.groups).ranks)


def flips(repeats: Repeats) -> list[dict[str, Any]]:
    """Labels that calibration changed, over the test cases of all repeats, each counted once."""
    rows = []
    for method in repeats[0]:
        counts = dict.fromkeys(("compared", *FLIPS), 0)
        for found in repeats:
            for kind, part in itertools.product(FLIPS, found[method].parts):
                changed, compared = part.counted(f"flip[kind={kind}]")
                counts[kind] += round(changed)
                counts["compared"] += compared if kind == FLIPS[0] else 0
        rows.append({"method": method, **counts})
    return rows


def reliability(
    repeats: Repeats, regions: Sequence[str], *, classes: bool = True, bands: bool = True
) -> list[dict[str, Any]]:
    """Bins of the top label in every region, of each predicted class in those asked for; every case counted once.

    Of multi-label data they are of the top label in each channel.
    """
    rows: list[dict[str, Any]] = []
    for name in channel_names(repeats):
        own = reliability(of_channel(repeats, name), regions, classes=False, bands=bands)
        rows += [{**row, "channel": name} for row in own]
    if rows:
        return rows
    for method, first in repeats[0].items():
        for region in first.reliability:
            if region not in regions and not (bands and region in BANDS):
                continue
            tops = [found[method].reliability[region]["top"] for found in repeats]
            rows.append({"method": method, "region": region, "channel": "", "class": None, **_added(tops)})
            for k in range(len(first.reliability[region]["classes"]) if classes and region in regions else 0):
                bins = _added([found[method].reliability[region]["classes"][k] for found in repeats])
                if any(bins["count"]):
                    rows.append({"method": method, "region": region, "channel": "", "class": k, **bins})
    return rows


def bands(repeats: Repeats, unit: str) -> list[dict[str, Any]]:
    """Calibration against the distance to the nearest label boundary, all test cases together, each counted once.

    Of multi-label data they are means over the channels.
    """
    if names := channel_names(repeats):
        per_channel = [bands(of_channel(repeats, name), unit) for name in names]
        return [_mean_band(own) for own in zip(*per_channel, strict=True)]
    rows = []
    for method, first in repeats[0].items():
        for band in BANDS:
            if band not in first.reliability:
                continue
            low, high = band.removeprefix("band-").split("-")
            bins = _added([found[method].reliability[band]["top"] for found in repeats])
            count, confidence, correct = (np.array(bins[name]) for name in ("count", "confidence", "correct"))
            total = int(count.sum())
            losses = [found[method].counted("nll", band)[0] for found in repeats]
            rows.append(
                {
                    "method": method,
                    "band": band,
                    "low": float(low),
                    "high": None if high == "inf" else float(high),
                    "unit": unit,
                    "count": total,
                    "ece": _ratio(float(np.abs(confidence - correct).sum()), total),
                    "nll": _ratio(math.fsum(losses), total),
                    "confidence": _ratio(float(confidence.sum()), total),
                    "accuracy": _ratio(float(correct.sum()), total),
                }
            )
    return rows


def _mean_band(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = {name: _mean([row[name] for row in rows]) for name in ("ece", "nll", "confidence", "accuracy")}
    return {**rows[0], "count": sum(row["count"] for row in rows), **means}


def channel_names(repeats: Repeats) -> list[str]:
    """The channels of multi-label data; none of ordinary data."""
    return list(next(iter(repeats[0].values())).channels)


def of_channel(repeats: Repeats, name: str) -> Repeats:
    """The evaluations of one channel."""
    return [{method: own.channels[name] for method, own in found.items()} for found in repeats]


def bin_sensitivity(table: Table, counts: Sequence[int]) -> list[dict[str, Any]]:
    """The mean ECE over cases for several numbers of bins."""
    rows = []
    for count in counts:
        k = table.columns.index((f"ece[num_bins={count}]", EVERYTHING))
        rows += [
            {"method": method, "bins": count, "ece": _mean(table.values[:, m, k])}
            for m, method in enumerate(table.methods)
        ]
    return rows


def _ranked(table: Table) -> list[tuple[int, tuple[str, str]]]:
    """The columns in which one method, or the uncalibrated scores, can be better than another."""
    return [
        (k, column)
        for k, column in enumerate(table.columns)
        if _spec(column[0]).better != "neither" and _has_baseline(column[0])
    ]


def _losses(metric: str, values: FloatArray) -> FloatArray:
    """The values so that lower is better."""
    better = _spec(metric).better
    return -values if better == "higher" else np.abs(values) if better == "zero" else values


def _verdict(low: float, high: float, better: str) -> str | None:
    if math.isnan(low) or better not in ("lower", "higher"):
        return None
    sign = 1 if better == "lower" else -1
    ends = sorted((sign * low, sign * high))
    return "better" if ends[1] < 0 else "worse" if ends[0] > 0 else "unclear"


def _spec(metric: str) -> MetricSpec:
    return metric_spec(parse_metric(metric)[0])


def _has_baseline(metric: str) -> bool:
    """Whether uncalibrated scores have a value: a metric that compares with them (flips) does not."""
    return "uncalibrated" not in _spec(metric).needs


def _by_method(table: Table, values: FloatArray) -> dict[str, float]:
    return {name: float(value) for name, value in zip(table.methods, values, strict=True) if not math.isnan(value)}


def _added(bins: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    sums = {name: np.sum([one[name] for one in bins], axis=0).tolist() for name in ("count", "confidence", "correct")}
    return {"bins": len(sums["count"]), **sums}


def _mean(values: Sequence[float] | FloatArray) -> float:
    defined = [float(value) for value in values if not math.isnan(value)]
    return _ratio(math.fsum(defined), len(defined))


def _ratio(total: float, count: int) -> float:
    return total / count if count else math.nan
