"""Reliability data, which reliability diagrams draw: confidence and accuracy, bin by bin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.errors import InputError
from segcal.kernels import BinGrid
from segcal.kernels.tally import Total
from segcal.statistics import EVERYTHING, Region, VoxelStatistics

__all__ = ["Reliability", "predicted_reliability", "reliability"]


@dataclass(frozen=True)
class Reliability:
    """Counts and sums per equal-width bin ``(lo, hi]`` of the confidence, all ``(bins,)``.

    ``correct`` counts right predictions for top-label reliability, voxels of the class for classwise reliability.

    Examples:
        >>> r = Reliability(np.array([10, 0]), np.array([4.0, 0.0]), np.array([5, 0]))
        >>> r.mean_confidence, r.accuracy
        (array([0.4, nan]), array([0.5, nan]))
    """

    count: NDArray[np.int64]
    confidence: NDArray[np.float64]
    correct: NDArray[np.int64]

    @property
    def edges(self) -> NDArray[np.float64]:
        """Bin edges ``(bins + 1,)``."""
        return np.linspace(0, 1, len(self.count) + 1)

    @property
    def mean_confidence(self) -> NDArray[np.float64]:
        """Mean confidence per bin, NaN where a bin is empty."""
        return self._mean(self.confidence)

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """Share of correct voxels per bin, NaN where a bin is empty."""
        return self._mean(self.correct)

    def _mean(self, sums: NDArray[Any]) -> NDArray[np.float64]:
        mean = np.full(len(self.count), np.nan)
        np.divide(sums, self.count, out=mean, where=self.count > 0)
        return mean


def reliability(
    statistics: VoxelStatistics,
    num_bins: int = 15,
    *,
    region: Region = EVERYTHING,
    predicted: int | None = None,
    probability_of: int | None = None,
) -> Reliability:
    """Reliability of the top label; of the voxels predicted as one class; or of one class's probability.

    Args:
        statistics: Of the voxels.
        num_bins: Number of equal-width bins; one that the statistics were collected with.
        region: One region, or several for their intersection.
        predicted: Only voxels whose prediction is this class.
        probability_of: Bin the probability of this class over all voxels instead of the top label's.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[0.0, 3.0], [0.0, 3.0]]), torch.tensor([1, 0]))
        >>> float(reliability(stats).accuracy[-1])
        0.5
    """
    if predicted is not None and probability_of is not None:
        raise InputError("both predicted and probability_of are given", expected="at most one of them")
    total = statistics.total(region)
    if predicted is None and probability_of is None:
        starts = statistics.top_grid.starts(num_bins)
        return _gathered(starts, total.top_count.sum(0), total.top_confidence.sum(0), total.top_count[1])
    starts = class_grid(statistics).starts(num_bins)
    if predicted is not None:
        return _of_predicted(total, starts, predicted)
    fine = (total.class_count, total.class_confidence, total.class_positive)
    return _gathered(starts, *(values[probability_of] for values in fine))


def predicted_reliability(
    statistics: VoxelStatistics, num_bins: int = 15, *, region: Region = EVERYTHING
) -> list[Reliability]:
    """Reliability of the voxels predicted as each class: ``reliability(..., predicted=k)`` of all classes at once.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[0.0, 3.0], [0.0, 3.0]]), torch.tensor([1, 0]))
        >>> [int(one.count.sum()) for one in predicted_reliability(stats)]
        [0, 2]
    """
    total, starts = statistics.total(region), class_grid(statistics).starts(num_bins)
    return [_of_predicted(total, starts, k) for k in range(statistics.num_classes)]


def class_grid(statistics: VoxelStatistics) -> BinGrid:
    """The grid of the per-class histograms; an error where none were collected."""
    if statistics.class_grid is None:
        raise InputError("the statistics have no per-class histograms", fix="collect them with classwise=True")
    return statistics.class_grid


def class_bins(statistics: VoxelStatistics, fine: NDArray[np.float64], num_bins: int) -> NDArray[np.float64]:
    """Sums ``(C, num_bins, ...)`` in equal-width bins of values ``(C, M, ...)`` of the per-class histograms."""
    coarse: NDArray[np.float64] = np.add.reduceat(fine, class_grid(statistics).starts(num_bins), axis=1)
    return coarse


def _of_predicted(total: Total, starts: NDArray[np.int64], predicted: int) -> Reliability:
    count, confidence = total.predicted_count[predicted], total.predicted_confidence[predicted]
    return _gathered(starts, count.sum(0), confidence.sum(0), count[1])


def _gathered(starts: NDArray[np.int64], *fine: NDArray[Any]) -> Reliability:
    """Sums of the fine values within each coarse bin, in their own type."""
    return Reliability(*(np.add.reduceat(values, starts) for values in fine))
