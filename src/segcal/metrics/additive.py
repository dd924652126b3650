"""What a case adds to a pooled value: a few sums, so that intervals can resample cases without their voxels.

A pooled value is ``value(sum over cases of sums(case))``. ``ADDITIVE`` has both functions by metric. Metrics that are
not in it have no interval of the pooled value: ``smece``, ``ace-adaptive`` and ``tace`` need histograms of thousands of
bins a case, ``mce`` and ``ace`` hang on bins of few voxels, which resampled cases miss: their intervals would hold the
truth too rarely (``benchmarks/pooled.py``). Metrics of surfaces have no pooled value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.metrics import calibration, decomposition, segmentation
from segcal.metrics.measure import Absent, Measure, divided
from segcal.statistics import Region, VoxelStatistics

FloatArray = NDArray[np.float64]
# Numbers a case may keep for a column, 40 KB: 300 classes with 15 bins. Beyond it, there is no interval.
MOST_SUMS = 5000


class Additive(NamedTuple):
    """How a metric comes from sums over cases.

    Attributes:
        sums: From the arguments of the metric to what these voxels add, in a shape that depends on the options only.
        value: From sums ``(..., *shape)``, and the options of the metric, to values ``(...)``; NaN where undefined.
        error: Whether the value adds up absolute gaps (``segcal.inference.Pooled``).
    """

    sums: Callable[..., FloatArray]
    value: Callable[..., FloatArray]
    error: bool = False


def _mean_sums(function: Callable[..., Measure], stats: VoxelStatistics, **options: Any) -> FloatArray:
    """Of a mean over voxels: its sum and its count."""
    mean = function(stats, **options)
    return np.array([mean * mean.count if mean.count else 0.0, mean.count])


def _mean(total: FloatArray, **_: Any) -> FloatArray:
    return divided(total[..., 0], total[..., 1])


def _gap_sums(gaps: Callable[..., FloatArray], stats: VoxelStatistics, *, region: Region, **options: Any) -> FloatArray:
    """Of a sum of absolute gaps per voxel: the gaps, and the count."""
    return np.append(gaps(stats, region=region, **options), stats.count(region))


def _gaps(total: FloatArray, **_: Any) -> FloatArray:
    return divided(np.abs(total[..., :-1]).sum(-1), total[..., -1])


def _dice(total: FloatArray, *, absent: Absent = "nan", **_: Any) -> FloatArray:
    return _class_mean(divided(2 * total[..., 0], total[..., 1]), absent)


def _iou(total: FloatArray, *, absent: Absent = "nan", **_: Any) -> FloatArray:
    return _class_mean(divided(total[..., 0], total[..., 1] - total[..., 0]), absent)


def _class_mean(ratios: FloatArray, absent: Absent) -> FloatArray:
    """The mean over classes ``(..., classes)``, without those that are absent (NaN) or with 1 for them."""
    if absent == "one":
        ratios = np.where(np.isnan(ratios), 1.0, ratios)
    return divided(np.nansum(ratios, -1), np.sum(~np.isnan(ratios), -1))


def _of_mean(function: Callable[..., Measure]) -> Additive:
    return Additive(partial(_mean_sums, function), _mean)


def _of_gaps(gaps: Callable[..., FloatArray]) -> Additive:
    return Additive(partial(_gap_sums, gaps), _gaps, error=True)


#: Metric id to how its pooled value comes from sums over cases.
ADDITIVE: dict[str, Additive] = {
    "nll": _of_mean(calibration.nll),
    "brier": _of_mean(calibration.brier),
    "entropy": _of_mean(calibration.entropy),
    "confidence-balance": _of_mean(calibration.confidence_balance),
    "ece-wrong": _of_mean(calibration.ece_wrong),
    "ece-right": _of_mean(calibration.ece_right),
    "accuracy": _of_mean(segmentation.accuracy),
    "flip": _of_mean(segmentation.flip),
    "ece": _of_gaps(calibration.ece_gaps),
    "sce": _of_gaps(calibration.sce_gaps),
    "cece": _of_gaps(calibration.cece_gaps),
    "ba-ece": Additive(calibration.ba_ece_sums, calibration.ba_ece_value, error=True),
    "nll-calibration": Additive(decomposition.top_sums, decomposition.nll_calibration_value, error=True),
    "brier-calibration": Additive(decomposition.class_sums, decomposition.brier_calibration_value, error=True),
    "dsc": Additive(segmentation.overlap_sums, _dice),
    "volume-dice": Additive(partial(segmentation.overlap_sums, background=False), _dice),
    "miou": Additive(segmentation.overlap_sums, _iou),
    "free-energy-std": Additive(calibration.energy_sums, calibration.spread),
}
