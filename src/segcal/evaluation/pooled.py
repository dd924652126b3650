"""What each case adds to the pooled values, and their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from segcal.evaluation.plan import Plan, parse_metric
from segcal.evaluation.results import Key
from segcal.inference import Pooled, pooled_intervals
from segcal.inference.arrays import mean
from segcal.metrics import Column
from segcal.metrics.additive import ADDITIVE, MOST_SUMS
from segcal.statistics import VoxelStatistics

FloatArray = NDArray[np.float64]


def summed_columns(plan: Plan, empty: VoxelStatistics) -> list[Column]:
    """The columns whose pooled value gets an interval; ``empty`` are statistics of nothing."""
    known = (column for column in plan.columns_of("pooled") if column.metric in ADDITIVE)
    return [column for column in known if _sums(column, empty).size <= MOST_SUMS]


def case_sums(columns: Sequence[Column], statistics: VoxelStatistics) -> dict[tuple[str, str], FloatArray]:
    """What a case adds to the pooled value of each column, by metric and region."""
    return {column.key: _sums(column, statistics) for column in columns}


def _sums(column: Column, statistics: VoxelStatistics) -> FloatArray:
    return ADDITIVE[column.metric].sums(statistics, region=column.region, **column.options)


def pooled_of(metric: str, sums: FloatArray) -> Pooled:
    """The pooled value of a metric, from the sums of every case ``(cases, ...)``.

    Between the cases and the sums there may be more axes, of repeats or channels: the value is the mean over them.
    """
    id, options = parse_metric(metric)
    additive = ADDITIVE[id]

    def value(total: FloatArray) -> FloatArray:
        values = additive.value(total, **options)
        while values.ndim > 1:
            values = mean(values, -1)[0]
        return values

    return Pooled(sums, value, additive.error)


def intervals(sums: Mapping[Key, FloatArray], groups: Sequence[str] | None) -> dict[Key, tuple[float, float]]:
    """The intervals of pooled values that have one, by channel, region and metric; also of means over channels."""
    channels: dict[tuple[str, str], list[FloatArray]] = {}
    for (channel, *column), own in sums.items():
        if channel:
            channels.setdefault((column[0], column[1]), []).append(own)
    both = {**sums, **{("", *column): np.stack(own, 1) for column, own in channels.items()}}
    found = pooled_intervals([pooled_of(metric, own) for (_, _, metric), own in both.items()], groups=groups)
    return {key: (float(low), float(high)) for key, (low, high) in zip(both, found, strict=True) if low == low}
