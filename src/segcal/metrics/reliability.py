"""Reliability data: how confident and how right, bin by bin. What reliability diagrams draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.errors import InputError
from segcal.statistics import EVERYTHING, VoxelStatistics


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
    region: str | Sequence[str] = EVERYTHING,
    predicted: int | None = None,
    probability_of: int | None = None,
) -> Reliability:
    """Reliability of the top label; of the voxels predicted as one class; or of one class's probability.

    Args:
        statistics: What was collected.
        num_bins: Equal-width bins; one of the numbers the statistics were told of.
        region: Where.
        predicted: Only voxels whose prediction is this class.
        probability_of: Bin the probability of this class over all voxels instead of the top label's.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[0.0, 3.0], [0.0, 3.0]]), torch.tensor([1, 0]))
        >>> reliability(stats).accuracy[-1]
        np.float64(0.5)
    """
    total = statistics.total(region)
    if predicted is not None and probability_of is not None:
        raise InputError("both predicted and probability_of are given", expected="at most one of them")
    if predicted is None and probability_of is None:
        coarse = statistics.top_grid.coarse(num_bins)
        count, confidence, correct = total.top_count.sum(0), total.top_confidence.sum(0), total.top_count[1]
    else:
        if statistics.class_grid is None:
            raise InputError("statistics without classes", fix="collect them with classwise=True")
        coarse = statistics.class_grid.coarse(num_bins)
        if predicted is not None:
            count, correct = total.predicted_count[predicted].sum(0), total.predicted_count[predicted][1]
            confidence = total.predicted_confidence[predicted].sum(0)
        else:
            count, correct = total.class_count[probability_of], total.class_positive[probability_of]
            confidence = total.class_confidence[probability_of]
    return Reliability(*(_gather(values, coarse, num_bins) for values in (count, confidence, correct)))


def _gather(values: NDArray[Any], bins: NDArray[np.int64], num_bins: int) -> NDArray[Any]:
    """Sums of the fine values within each coarse bin, in their own type."""
    result = np.zeros(num_bins, values.dtype)
    np.add.at(result, bins, values)
    return result
