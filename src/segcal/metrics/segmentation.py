"""Segmentation metrics from the confusion matrix, and flips: labels that calibration changed.

TP, FP, FN are the entries of one class's own confusion matrix. A class that occurs neither in the labels nor in the
prediction is undefined: NaN, left out of means (``absent="one"`` counts it as 1 instead).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from segcal.errors import check_name
from segcal.metrics.measure import Absent, Measure
from segcal.statistics import EVERYTHING, Region, VoxelStatistics

__all__ = ["accuracy", "dice_per_class", "dsc", "flip", "miou", "volume_dice"]

Flips = Literal["all", "harmful", "beneficial", "neutral"]


def dice_per_class(
    stats: VoxelStatistics, *, region: Region = EVERYTHING, absent: Absent = "nan"
) -> NDArray[np.float64]:
    """``2 TP / (2 TP + FP + FN)`` of every class ``(C,)``.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(3).update(torch.eye(3)[[0, 0, 1]], torch.tensor([0, 1, 1]))
        >>> dice_per_class(stats)
        array([0.66666667, 0.66666667,        nan])
    """
    confusion = stats.total(region).confusion
    return _ratio(2 * np.diagonal(confusion), confusion.sum(0) + confusion.sum(1), absent)


def dsc(
    stats: VoxelStatistics, *, region: Region = EVERYTHING, absent: Absent = "nan", background: bool = True
) -> Measure:
    """Dice similarity coefficient, the mean over classes of ``2 TP / (2 TP + FP + FN)`` (Dice 1945).

    ``background=False`` leaves the statistics' background out. ``count`` is the number of classes averaged.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(3).update(torch.eye(3)[[0, 0, 1]], torch.tensor([0, 1, 1]))
        >>> round(dsc(stats), 4), dsc(stats).count
        (0.6667, 2)
    """
    return _mean(stats, dice_per_class(stats, region=region, absent=absent), background)


def volume_dice(stats: VoxelStatistics, *, region: Region = EVERYTHING, absent: Absent = "nan") -> Measure:
    """Volume Dice, ``dsc`` over the classes but the statistics' background (Ding et al. 2021, F.10).

    Examples:
        >>> import torch
        >>> volume_dice(VoxelStatistics(2).update(torch.eye(2)[[0, 0, 1]], torch.tensor([0, 0, 1])))
        1.0
    """
    return dsc(stats, region=region, absent=absent, background=False)


def miou(
    stats: VoxelStatistics, *, region: Region = EVERYTHING, absent: Absent = "nan", background: bool = True
) -> Measure:
    """Mean over classes of the intersection over union, ``TP / (TP + FP + FN)`` (Jaccard 1901).

    ``background=False`` leaves the statistics' background out. ``count`` is the number of classes averaged.

    Examples:
        >>> import torch
        >>> miou(VoxelStatistics(3).update(torch.eye(3)[[0, 0, 1]], torch.tensor([0, 1, 1])))
        0.5
    """
    confusion = stats.total(region).confusion
    hits = np.diagonal(confusion)
    return _mean(stats, _ratio(hits, confusion.sum(0) + confusion.sum(1) - hits, absent), background)


def overlap_sums(
    stats: VoxelStatistics, *, region: Region = EVERYTHING, background: bool = True, **_: Any
) -> NDArray[np.float64]:
    """``TP`` and ``2 TP + FP + FN`` of the classes that ``dsc`` and ``miou`` average, ``(classes, 2)``."""
    confusion = stats.total(region).confusion
    sums = np.stack((np.diagonal(confusion), confusion.sum(0) + confusion.sum(1)), 1).astype(np.float64)
    return _kept(stats, sums, background)


def accuracy(stats: VoxelStatistics, *, region: Region = EVERYTHING) -> Measure:
    """Share of voxels with the right label.

    Examples:
        >>> import torch
        >>> accuracy(VoxelStatistics(2).update(torch.eye(2)[[0, 0, 1, 1]], torch.tensor([0, 0, 0, 1])))
        0.75
    """
    confusion = stats.total(region).confusion
    return Measure.ratio(int(np.trace(confusion)), int(confusion.sum()))


def flip(stats: VoxelStatistics, *, region: Region = EVERYTHING, kind: Flips = "all") -> Measure:
    """Share of voxels whose label calibration changed (Kirscher et al.).

    ``harmful`` from right to wrong, ``beneficial`` from wrong to right, ``neutral`` from wrong to wrong; of the voxels
    whose uncalibrated prediction was known. NaN where none was.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2)
        >>> _ = stats.update(torch.eye(2), torch.tensor([0, 0]), uncalibrated=torch.tensor([0, 0]))
        >>> flip(stats), flip(stats, kind="harmful"), flip(stats, kind="beneficial")
        (0.5, 0.5, 0.0)
    """
    kinds = get_args(Flips)
    check_name("kind", kind, kinds)
    compared, *changed = (int(value) for value in stats.total(region).flips)
    return Measure.ratio(sum(changed) if kind == "all" else changed[kinds.index(kind) - 1], compared)


def _mean(stats: VoxelStatistics, values: NDArray[np.float64], background: bool) -> Measure:
    """The mean over classes ``(C,)``."""
    return Measure.mean(_kept(stats, values, background))


def _kept(stats: VoxelStatistics, values: NDArray[np.float64], background: bool) -> NDArray[np.float64]:
    """The values of the classes ``(C, ...)`` that a mean is over."""
    return values if background or stats.background is None else np.delete(values, stats.background, axis=0)


def _ratio(part: NDArray[np.int64], whole: NDArray[np.int64], absent: Absent) -> NDArray[np.float64]:
    check_name("absent", absent, get_args(Absent))
    values = np.full(len(whole), np.nan if absent == "nan" else 1.0)
    np.divide(part, whole, out=values, where=whole > 0)
    return values
