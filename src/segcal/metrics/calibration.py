"""Calibration metrics: small reductions of ``segcal.statistics.VoxelStatistics``.

Every metric takes the statistics and a region (a name, or several for their intersection) and returns a
``segcal.metrics.measure.Measure``, a float with a ``count``; NaN with count 0 where there is nothing to average.
In formulas n is the number of voxels, B_b the voxels in bin b, conf and acc the means of confidence and correctness.
Bins are equally wide, ``(lo, hi]``. Equal-mass binnings are in ``segcal.metrics.equal_mass``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.fft import dct, idct

from segcal.errors import InputError, check_name
from segcal.kernels import FINE_BINS
from segcal.metrics.measure import Measure, divided
from segcal.metrics.reliability import class_bins, reliability
from segcal.regions import BANDS
from segcal.statistics import EVERYTHING, Region, VoxelStatistics

__all__ = [
    "ace",
    "ba_ece",
    "brier",
    "cece",
    "cece_per_class",
    "confidence_balance",
    "ece",
    "ece_right",
    "ece_wrong",
    "entropy",
    "free_energy_std",
    "mce",
    "nll",
    "sce",
    "smece",
]

Reduction = Literal["mean", "sum"]


def nll(stats: VoxelStatistics, *, region: Region = EVERYTHING) -> Measure:
    """Negative log-likelihood, the mean of ``-log p_y`` over voxels; inf if an impossible label occurs.

    Examples:
        >>> import torch
        >>> float(nll(VoxelStatistics(2).update(torch.zeros(3, 2), torch.tensor([0, 1, 1])))) == math.log(2)
        True
    """
    return _mean_loss(stats, region, 0)


def brier(stats: VoxelStatistics, *, region: Region = EVERYTHING) -> Measure:
    """Brier score, the mean over voxels of ``sum_k (p_k - [k = y])^2``, over all classes (Brier 1950): 0 to 2.

    Examples:
        >>> import torch
        >>> brier(VoxelStatistics(2).update(torch.zeros(3, 2), torch.tensor([0, 1, 1])))
        0.5
    """
    return _mean_loss(stats, region, 1)


def entropy(stats: VoxelStatistics, *, region: Region = EVERYTHING) -> Measure:
    """Entropy of the prediction, the mean over voxels of ``-sum_k p_k log p_k``.

    Examples:
        >>> import torch
        >>> float(entropy(VoxelStatistics(2).update(torch.zeros(3, 2), torch.tensor([0, 1, 1])))) == math.log(2)
        True
    """
    return _mean_loss(stats, region, 2)


def confidence_balance(stats: VoxelStatistics, *, region: Region = EVERYTHING, predicted: int | None = None) -> Measure:
    """NLL minus entropy: above 0 overconfident, below 0 underconfident (Ding et al. 2021, definitions 4 to 6).

    Zero in expectation for a calibrated model, also among the voxels ``predicted`` as one class; zero on the fit data
    after temperature scaling.

    Examples:
        >>> import torch
        >>> float(confidence_balance(VoxelStatistics(2).update(torch.tensor([[9.0, 0.0]]), torch.tensor([1])))) > 0
        True
    """
    if predicted is not None:
        if not 0 <= predicted < stats.num_classes:
            raise InputError(f"predicted is {predicted}", expected=f"a class, 0 to {stats.num_classes - 1}")
        return class_balances(stats, region=region)[predicted]
    total = stats.total(region)
    return Measure.ratio(float((total.losses[:, 0] - total.losses[:, 2]).sum()), int(total.confusion.sum()))


def class_balances(stats: VoxelStatistics, *, region: Region = EVERYTHING) -> list[Measure]:
    """``confidence_balance`` among the voxels predicted as each class.

    Examples:
        >>> import torch
        >>> [one.count for one in class_balances(VoxelStatistics(2).update(torch.zeros(3, 2), torch.tensor([0, 1, 1])))]
        [3, 0]
    """
    total = stats.total(region)
    excess, count = total.losses[:, 0] - total.losses[:, 2], total.confusion.sum(0)
    return [Measure.ratio(float(gap), int(voxels)) for gap, voxels in zip(excess, count, strict=True)]


def ece(stats: VoxelStatistics, *, num_bins: int = 15, region: Region = EVERYTHING) -> Measure:
    """Expected calibration error of the top label: ``sum_b |B_b| / n |acc_b - conf_b|`` (Naeini 2015, Guo 2017).

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]))
        >>> round(ece(stats), 4)
        0.3808
    """
    return _error(stats, region, ece_gaps(stats, num_bins=num_bins, region=region))


def ece_gaps(stats: VoxelStatistics, *, num_bins: int = 15, region: Region = EVERYTHING) -> NDArray[np.float64]:
    """Sums of confidence minus correctness in every bin: ``ece`` is the sum of their absolute values, per voxel."""
    bins = reliability(stats, num_bins, region=region)
    return bins.confidence - bins.correct


def mce(stats: VoxelStatistics, *, num_bins: int = 15, region: Region = EVERYTHING) -> Measure:
    """Maximum calibration error: the largest ``|acc_b - conf_b|`` of the non-empty bins (Naeini 2015).

    ``count`` is the number of non-empty bins.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[2.0, 0.0], [0.5, 0.0]]), torch.tensor([0, 1]))
        >>> round(mce(stats), 4), mce(stats).count
        (0.6225, 2)
    """
    gaps = _gaps(stats, num_bins, region)
    return Measure(float(gaps.max()) if gaps.size else math.nan, gaps.size)


def ace(stats: VoxelStatistics, *, num_bins: int = 15, region: Region = EVERYTHING) -> Measure:
    """Average calibration error: ``|acc_b - conf_b|`` averaged uniformly over the non-empty bins (Kirscher et al.).

    ``count`` is the number of non-empty bins. Bins of a single case can hold few voxels: better pool the cases.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[2.0, 0.0], [0.5, 0.0]]), torch.tensor([0, 1]))
        >>> round(ace(stats), 4)
        0.3708
    """
    gaps = _gaps(stats, num_bins, region)
    return Measure.ratio(float(gaps.sum()), gaps.size)


def sce(stats: VoxelStatistics, *, num_bins: int = 15, region: Region = EVERYTHING, divide: bool = False) -> Measure:
    """Static calibration error: ``sum_c sum_b |B_cb| / n |acc_cb - conf_cb|``, B_cb the voxels *predicted* as c.

    Ding et al. 2021, F.5, which divides by C (``divide=True``) where the paper's tables do not.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]))
        >>> round(sce(stats), 4)
        0.5
    """
    return _error(stats, region, sce_gaps(stats, num_bins=num_bins, region=region, divide=divide))


def sce_gaps(
    stats: VoxelStatistics, *, num_bins: int = 15, region: Region = EVERYTHING, divide: bool = False
) -> NDArray[np.float64]:
    """The gaps of ``sce``, as ``ece_gaps``."""
    total = stats.total(region)
    gaps = total.predicted_confidence.sum(1) - total.predicted_count[:, 1]
    return class_bins(stats, gaps, num_bins).reshape(-1) / (stats.num_classes if divide else 1)


def cece(
    stats: VoxelStatistics, *, num_bins: int = 15, region: Region = EVERYTHING, reduction: Reduction = "mean"
) -> Measure:
    """Classwise ECE: ``mean_c sum_b |B_cb| / n |freq_cb - conf_cb|`` over the probabilities of every class (Kull 2019).

    B_cb are all voxels by their probability of class c, freq_cb is the share of them with label c.
    ``reduction="sum"`` is the formula printed by Murugesan et al. 2023 (their code takes the mean).

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]))
        >>> round(cece(stats), 4)
        0.5
    """
    return _error(stats, region, cece_gaps(stats, num_bins=num_bins, region=region, reduction=reduction))


def cece_gaps(
    stats: VoxelStatistics, *, num_bins: int = 15, region: Region = EVERYTHING, reduction: Reduction = "mean"
) -> NDArray[np.float64]:
    """The gaps of ``cece``, as ``ece_gaps``."""
    check_name("reduction", reduction, get_args(Reduction))
    total = stats.total(region)
    gaps = class_bins(stats, total.class_confidence - total.class_positive, num_bins)
    return gaps.reshape(-1) / (stats.num_classes if reduction == "mean" else 1)


def cece_per_class(stats: VoxelStatistics, *, num_bins: int = 15, region: Region = EVERYTHING) -> NDArray[np.float64]:
    """The ECE of each class against the rest ``(C,)``, whose mean is ``cece``; NaN without voxels.

    Each is a share of all voxels, not of those of its class: that of a rare class is small.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]))
        >>> cece_per_class(stats).round(4)
        array([0.5, 0.5])
    """
    gaps = cece_gaps(stats, num_bins=num_bins, region=region, reduction="sum").reshape(stats.num_classes, num_bins)
    return divided(np.abs(gaps).sum(1), np.full(stats.num_classes, stats.count(region)))


def ece_wrong(stats: VoxelStatistics, *, region: Region = EVERYTHING) -> Measure:
    """ECE of the mispredicted voxels: their mean confidence, whatever the bins, as none is correct (Wang 2023).

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]))
        >>> round(ece_wrong(stats), 4), ece_wrong(stats).count
        (0.8808, 1)
    """
    total = stats.total(region)
    return Measure.ratio(float(total.top_confidence[0].sum()), int(total.top_count[0].sum()))


def ece_right(stats: VoxelStatistics, *, region: Region = EVERYTHING) -> Measure:
    """ECE of the correctly predicted voxels: 1 - their mean confidence, whatever the bins (Wang 2023).

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]))
        >>> round(ece_right(stats), 4), ece_right(stats).count
        (0.1192, 1)
    """
    total = stats.total(region)
    count = int(total.top_count[1].sum())
    return Measure.ratio(count - float(total.top_confidence[1].sum()), count)


def ba_ece(stats: VoxelStatistics, *, region: Region = EVERYTHING, bands: Sequence[str] = BANDS) -> Measure:
    """Boundary-aware ECE: ``sum_k w_k |acc_k - conf_k| / sum_k w_k`` over distance bands, ``w_k = 1 / (mean d_k + 1)``.

    Zeevi et al. 2025, Kirscher et al. appendix C; d is the distance to the nearest label boundary. Empty bands and
    bands without any finite distance are left out; ``count`` is the number of bands left. The statistics need the
    bands as regions, and ``distance``.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2, regions=("near", "far"))
        >>> near = torch.tensor([True, True, False])
        >>> distance = torch.tensor([0.0, 0.0, 9.0])
        >>> logits, labels = torch.tensor([[2.0, 0.0]] * 3), torch.tensor([0, 1, 0])
        >>> _ = stats.update(logits, labels, regions={"near": near, "far": ~near}, distance=distance)
        >>> round(ba_ece(stats, bands=("near", "far")), 4)
        0.357
    """
    sums = ba_ece_sums(stats, region=region, bands=bands)
    return Measure(float(ba_ece_value(sums)), int(np.sum(sums[:, 3] > 0)))


def ba_ece_sums(
    stats: VoxelStatistics, *, region: Region = EVERYTHING, bands: Sequence[str] = BANDS
) -> NDArray[np.float64]:
    """Of every band ``(bands, 4)``: confidence minus correctness, voxels, finite distances, how many of these."""
    outer, rows = (region,) if isinstance(region, str) else tuple(region), []
    for band in bands:
        total = stats.total((*outer, band))
        count = int(total.top_count.sum())
        distance_sum, finite, given = (float(value) for value in total.distance)
        if given < count:
            raise InputError("some voxels came without a distance", fix="pass distance= to VoxelStatistics.update")
        rows.append([float(total.top_confidence.sum()) - int(total.top_count[1].sum()), count, distance_sum, finite])
    return np.array(rows)


def ba_ece_value(sums: NDArray[np.float64], **_: Any) -> NDArray[np.float64]:
    """``ba_ece`` of sums ``(..., bands, 4)``."""
    gap, count, distance, finite = np.moveaxis(sums, -1, 0)
    there = finite > 0
    weight = there / (distance / np.maximum(finite, 1) + 1)
    return divided((weight * np.abs(gap) / np.maximum(count, 1)).sum(-1), weight.sum(-1))


def smece(stats: VoxelStatistics, *, region: Region = EVERYTHING) -> Measure:
    """Smooth ECE of the top label (Blasiok & Nakkiran 2024): no bins, and a bandwidth that the data determine.

    ``smECE_s = int_0^1 |sum_i K_s(t, conf_i) (conf_i - right_i) / n| dt`` with the Gaussian kernel reflected at 0 and
    1; the value is the s with ``smECE_s = s``. From the histogram of 4096 bins: each confidence is moved by at most
    1/8192, which changes the integral by less than 1e-4 / s times itself.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]))
        >>> round(smece(stats), 3)
        0.381
    """
    bins = reliability(stats, FINE_BINS, region=region)
    count = int(bins.count.sum())
    if not count:
        return Measure(math.nan, 0)
    # Convolution with a reflected Gaussian is a product in the cosine basis.
    spectrum = dct((bins.confidence - bins.correct) / count, norm="ortho")
    frequencies = np.pi * np.arange(FINE_BINS)

    def smoothed(width: float) -> float:
        return float(np.abs(idct(spectrum * np.exp(-0.5 * (width * frequencies) ** 2), norm="ortho")).sum())

    low, high = 0.0, 1.0  # smoothed(width) - width falls from >= 0 at 0 to <= 0 at 1
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if smoothed(middle) > middle else (low, middle)
    return Measure(smoothed((low + high) / 2), count)


def free_energy_std(stats: VoxelStatistics, *, region: Region = EVERYTHING) -> Measure:
    """Standard deviation over voxels of the free energy ``F = logsumexp(z)``: how much logit offsets vary.

    Kirscher et al., Table 3, report its mean over images. It is 0 for probabilities and for the output of any
    calibrator, which are log-probabilities.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[1.0, 1.0], [3.0, 3.0]]), torch.tensor([0, 0]))
        >>> round(free_energy_std(stats), 6)
        1.0
    """
    total = stats.total(region)
    count = int(total.confusion.sum())
    return Measure(float(spread(np.array([count, *total.energy]))), count)


def energy_sums(stats: VoxelStatistics, *, region: Region = EVERYTHING) -> NDArray[np.float64]:
    """Voxels, and the sums of the free energy and of its square, from the origin 0, which all cases share."""
    total, shift = stats.total(region), stats.energy_shift
    count, (first, second) = int(total.confusion.sum()), total.energy
    return np.array([count, first + count * shift, second + 2 * shift * first + count * shift**2])


def spread(sums: NDArray[np.float64], **_: Any) -> NDArray[np.float64]:
    """The standard deviation from count, sum and sum of squares ``(..., 3)``."""
    count, first, second = np.moveaxis(sums, -1, 0)
    variance = divided(second, count) - divided(first, count) ** 2
    return np.sqrt(np.maximum(0.0, variance))


def _mean_loss(stats: VoxelStatistics, region: Region, column: int) -> Measure:
    total = stats.total(region)
    return Measure.ratio(float(total.losses[:, column].sum()), int(total.confusion.sum()))


def _error(stats: VoxelStatistics, region: Region, gaps: NDArray[np.float64]) -> Measure:
    """The sum of absolute gaps, per voxel."""
    return Measure.ratio(float(np.abs(gaps).sum()), stats.count(region))


def _gaps(stats: VoxelStatistics, num_bins: int, region: Region) -> NDArray[np.float64]:
    """|acc - conf| of the non-empty bins."""
    bins = reliability(stats, num_bins, region=region)
    gaps = np.abs(bins.mean_confidence - bins.accuracy)
    return gaps[bins.count > 0]
