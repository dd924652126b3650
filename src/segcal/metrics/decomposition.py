"""NLL and Brier score in two parts: calibration, which a true confidence would save, and refinement, the rest.

In formulas b are equal-width bins ``(lo, hi]``, n_b their voxels, n all voxels, conf_b and acc_b the means of
confidence and correctness. Refinement is the score minus its calibration part. Only means of bins are seen, so what the
spread of confidences within a bin gains or costs is in the refinement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import rel_entr

from segcal.metrics.measure import Measure, divided
from segcal.metrics.reliability import class_bins, reliability
from segcal.statistics import EVERYTHING, Region, VoxelStatistics

__all__ = ["brier_calibration", "nll_calibration"]

FloatArray = NDArray[np.float64]
# The largest confidence below 1 that float32 holds: larger ones are rounded to 1, and then a wrong one would cost inf.
_SURE = 1 - 2.0**-24


def nll_calibration(stats: VoxelStatistics, *, num_bins: int = 15, region: Region = EVERYTHING) -> Measure:
    """Calibration part of the NLL: ``sum_b n_b / n KL(acc_b || conf_b)`` over bins of the top label (Broecker 2009).

    With the confidence q of the prediction and the shares r of the other classes, p_j = (1 - q) r_j, the NLL is that of
    "is the prediction right?" under q plus that of r in wrong voxels. This is by how much the first would fall if each
    bin had its accuracy for its confidence; the other classes keep their shares.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]))
        >>> round(nll_calibration(stats), 4)
        0.4338
    """
    sums = top_sums(stats, num_bins=num_bins, region=region)
    return Measure(float(nll_calibration_value(sums)), stats.count(region))


def brier_calibration(stats: VoxelStatistics, *, num_bins: int = 15, region: Region = EVERYTHING) -> Measure:
    """Calibration part of the Brier score: ``sum_c sum_b n_cb / n (freq_cb - conf_cb)^2`` over classes (Murphy 1973).

    Bins are those of the probability of class c over all voxels, freq_cb the share of them with label c. This is by how
    much the score would fall if each class had that share for its probability.

    Examples:
        >>> import torch
        >>> even = torch.zeros(4, 2)
        >>> [brier_calibration(VoxelStatistics(2).update(even, torch.tensor(y))) for y in ([0, 0, 1, 1], [0, 0, 0, 0])]
        [0.0, 0.5]
    """
    value = brier_calibration_value(class_sums(stats, num_bins=num_bins, region=region))
    return Measure(float(value), stats.count(region))


def top_sums(stats: VoxelStatistics, *, num_bins: int = 15, region: Region = EVERYTHING) -> FloatArray:
    """Voxels, confidence and correctness in every bin of the top label, ``(bins, 3)``."""
    bins = reliability(stats, num_bins, region=region)
    return np.stack((bins.count, bins.confidence, bins.correct), 1).astype(np.float64)


def class_sums(stats: VoxelStatistics, *, num_bins: int = 15, region: Region = EVERYTHING) -> FloatArray:
    """Voxels, probability and labels in every bin of every class, ``(classes, bins, 3)``."""
    total = stats.total(region)
    fine = np.stack((total.class_count, total.class_confidence, total.class_positive), -1)
    return class_bins(stats, fine.astype(np.float64), num_bins)


def nll_calibration_value(sums: FloatArray, **_: Any) -> FloatArray:
    """``nll_calibration`` of sums ``(..., bins, 3)``."""
    count, confidence, accuracy = _means(sums)
    confidence = np.minimum(confidence, _SURE)
    divergence = rel_entr(accuracy, confidence) + rel_entr(1 - accuracy, 1 - confidence)
    return divided((count * divergence).sum(-1), count.sum(-1))


def brier_calibration_value(sums: FloatArray, **_: Any) -> FloatArray:
    """``brier_calibration`` of sums ``(..., classes, bins, 3)``."""
    count, confidence, frequency = _means(sums)
    return divided((count * (confidence - frequency) ** 2).sum((-1, -2)), count[..., 0, :].sum(-1))


def _means(sums: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Voxels, and their mean confidence and correctness, or 0 for none."""
    count, confidence, correct = np.moveaxis(sums, -1, 0)
    there = np.maximum(count, 1)
    return count, confidence / there, correct / there
