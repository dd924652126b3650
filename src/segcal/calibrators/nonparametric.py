"""Isotonic regression and histogram binning, fitted to fine histograms: one pass to fit, one to measure."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators.base import Calibrator
from segcal.cases import CaseSet
from segcal.cases.shares import in_shares
from segcal.errors import check_whole
from segcal.fitting.cost import FitCost
from segcal.fitting.data import FitData, Fitted, check_voxels, in_groups
from segcal.fitting.limits import SHARE, Limits
from segcal.fitting.measured import compared, mean_loss
from segcal.kernels.fitting_passes import FineHistogram, logit_centres, logit_edges
from segcal.kernels.grid import LOGIT_BINS
from segcal.scores import log_probabilities
from segcal.types import FloatArray

__all__ = ["HistogramBinning", "IsotonicRegression"]

# This multiple of p is added to the isotonic map, which then rises strictly.
_SLOPE = 1e-9
# Edges of bins are raised by this share of log p, so that the rounding of float32 does not decide.
_ABOVE = 1e-6
# Roughly the bytes that are written per second.
_MEMORY_SPEED = 1e9


def histogram_over(cases: CaseSet, *, classwise: bool) -> FineHistogram:
    """One pass over all valid voxels, which also checks the data. Memory does not depend on their number."""
    histogram = in_shares(_histogram, cases, classwise, merge=FineHistogram.merge)
    check_voxels(histogram.voxels)
    return histogram


def _histogram(cases: CaseSet, classwise: bool) -> FineHistogram:
    histogram = FineHistogram(cases.num_classes, classwise=classwise)
    for _ in in_groups(cases, histogram.add):
        pass
    return histogram


def pool_adjacent_violators(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The non-decreasing sequence of least weighted squared distance to ``values (n,)``; weights are positive.

    A block merges with the one before while its mean is not above that one's (Ayer et al. 1955). Linear time.

    Examples:
        >>> pool_adjacent_violators(np.array([1.0, 3.0, 2.0]), np.ones(3))
        array([1. , 2.5, 2.5])
    """
    means: list[float] = []
    totals: list[float] = []
    sizes: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, size = value, weight, 1
        while means and means[-1] >= mean:
            before, own = means.pop(), totals.pop()
            mean = (own * before + total * mean) / (own + total)
            total += own
            size += sizes.pop()
        means.append(mean)
        totals.append(total)
        sizes.append(size)
    return np.repeat(means, sizes)


class _HistogramCalibrator(Calibrator):
    """A map of log-probabilities that is fitted to fine histograms, or the identity if that has a lower NLL."""

    translation_invariant = True
    fitted: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fitted", torch.zeros((), dtype=torch.float64))  # 1, or 0 for the identity

    @abstractmethod
    def _mapped(self, log_p: Tensor) -> Tensor:
        """Scores of log-probabilities ``(N, C, *spatial)``."""

    @abstractmethod
    def _fast_mapped(self, kernels: Any, logits: Tensor) -> Any:
        """Calibrated log-probabilities by compiled loops."""

    def _scores(self, logits: Tensor) -> Tensor:
        log_p = log_probabilities(logits)
        scores = torch.where(self.fitted.to(log_p) > 0, self._mapped(log_p), log_p)
        return scores.masked_fill(log_p == -torch.inf, -torch.inf)

    def _fast(self, kernels: Any, logits: Tensor) -> Any:
        return self._fast_mapped(kernels, logits) if float(self.fitted) else kernels.apply_temperature(logits, 1.0)

    def _measured(self, data: FitData, histogram: FineHistogram) -> Fitted:
        """The report of the fitted map; falls back to the identity if that has a lower NLL."""
        self.fitted.fill_(1.0)
        before, after = histogram.nll / histogram.voxels, mean_loss(data.cases, self).nll
        notes = []
        if not after <= before:
            self.fitted.fill_(0.0)
            notes.append(f"renormalising gives an NLL of {compared(after, before)} that of the identity, which is kept")
            after = before
        return Fitted(before, after, True, 0.0, 1, histogram.voxels, notes)


class IsotonicRegression(_HistogramCalibrator):
    """``isotonic``: one rising map of all class probabilities, fitted to all of them at once, then renormalised.

    ``p_k' = (g(p_k) + 1e-9 p_k) / sum_j (...)`` with g the isotonic regression of ``[y = k]`` on ``p_k`` over all
    voxels and classes (Zhang, Kailkhura and Han, ICML 2020). Translation invariant, keeps the order.

    The regression uses 16384 bins of equal width in logit(p) between -30 and 30; the outer bins hold all values beyond.
    It is the exact regression of probabilities rounded to the centre of their bin, which moves a logit by at most
    0.0019 (p and 1 - p by 0.19 %). Its squared error exceeds that of the exact regression g* of unrounded probabilities
    by at most ``2 sum_j w_j D_j``, where w_j is the share of the probabilities in bin j and D_j the rise of g* inside
    it. Between centres the map is linear in log p and log g.

    Falls back to the identity if renormalising makes the NLL of the fit data worse.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), plant=[segcal.synthetic.Temperature(2.0)])
        >>> report = IsotonicRegression().fit(cases).fit_report
        >>> report.nll_after < report.nll_before
        True
    """

    id = "isotonic"
    title = "Isotonic regression"
    preserves = "order"
    centres: Tensor  # log p in the middle of every fine bin
    values: Tensor  # g there

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.from_numpy(logit_centres()), persistent=False)
        self.register_buffer("values", torch.zeros(LOGIT_BINS, dtype=torch.float64))

    def limits(self) -> dict[str, Limits]:
        """Probabilities that do not fall."""
        return {"values": Limits(0.0, 1.0, rising=True), "fitted": SHARE}

    def _fit(self, data: FitData) -> Fitted:
        histogram = histogram_over(data.cases, classwise=False)
        count, positive = histogram.counts[0], histogram.positive[0]
        seen = np.flatnonzero(count)
        fitted = pool_adjacent_violators(positive[seen] / count[seen], count[seen].astype(float))
        self.values.copy_(torch.from_numpy(np.interp(np.arange(LOGIT_BINS), seen, fitted)))
        return self._measured(data, histogram)

    def _mapped(self, log_p: Tensor) -> Tensor:
        # All operations whose rounding could break the order are done once, at the centres. What follows are sums,
        # products and comparisons, which keep it.
        knots, centres = self._knots().to(log_p), self.centres.to(log_p)
        inside = log_p.clamp(centres[0], centres[-1])
        lower = (torch.searchsorted(centres, inside.contiguous()) - 1).clamp(0, LOGIT_BINS - 2)
        start, low, high = centres[lower], knots[lower], knots[lower + 1]
        return torch.minimum(low + (high - low) * ((inside - start) / (centres[lower + 1] - start)), high)

    def _knots(self) -> Tensor:
        """The logarithm of the map at the centres."""
        return (self.values + _SLOPE * self.centres.exp()).log().cummax(0).values

    def _fast_mapped(self, kernels: Any, logits: Tensor) -> Any:
        return kernels.apply_knots(logits, self.centres, self._knots())


class HistogramBinning(_HistogramCalibrator):
    """``histogram``: each class probability becomes the share of its bin that has the class; renormalised.

    Zadrozny and Elkan, ICML 2001, one class against the others (Guo et al., ICML 2017). Every class has bins of equal
    mass. Their edges are edges of a fine histogram (16384 bins of equal width in logit(p)), so they are off by at most
    0.0037 in logit. Each bin gets one extra voxel with the network's own probability, so that no probability becomes 0
    for lack of data. Translation invariant; may change labels. Falls back to the identity if the NLL gets worse.

    Args:
        num_bins: Bins per class.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), plant=[segcal.synthetic.Temperature(2.0)])
        >>> report = HistogramBinning().fit(cases).fit_report
        >>> report.nll_after <= report.nll_before
        True
    """

    id = "histogram"
    title = "Histogram binning"
    preserves = None
    edges: Tensor
    values: Tensor

    def __init__(self, num_bins: int = 15) -> None:
        super().__init__()
        check_whole("num_bins", num_bins, 1, LOGIT_BINS)
        self.num_bins = num_bins
        self.register_buffer("edges", torch.zeros(0, num_bins - 1, dtype=torch.float64))
        self.register_buffer("values", torch.zeros(0, num_bins, dtype=torch.float64))

    def allocate(self, num_classes: int) -> None:
        """Edges and values for every class."""
        self.edges = self.edges.new_zeros(num_classes, self.num_bins - 1)
        self.values = self.values.new_ones(num_classes, self.num_bins)

    def shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """The shapes of edges, values and the mark of the identity."""
        return {"edges": (num_classes, self.num_bins - 1), "values": (num_classes, self.num_bins), "fitted": ()}

    def limits(self) -> dict[str, Limits]:
        """Rising edges in log p, and shares."""
        return {"edges": Limits(-torch.inf, 0.0, rising=True), "values": SHARE, "fitted": SHARE}

    def cost(self, num_classes: int) -> FitCost:
        """The fine histograms: three tables per class, 8 bytes per bin."""
        memory = float(3 * 8 * LOGIT_BINS * num_classes)
        return FitCost(memory, memory / _MEMORY_SPEED, f"{num_classes:,} fine histograms")

    def _fit(self, data: FitData) -> Fitted:
        histogram = histogram_over(data.cases, classwise=True)
        lower_edges = np.concatenate(([np.finfo(float).min], logit_edges(), [0.0]))
        for k in range(data.cases.num_classes):
            count, positive, probability = histogram.counts[k], histogram.positive[k], histogram.probability[k]
            # A fine bin belongs to the bin that holds the middle of its mass; a heavy one leaves the next bins empty.
            middle = (np.cumsum(count) - count / 2) / count.sum()
            bins = np.minimum(middle * self.num_bins, self.num_bins - 1).astype(np.int64)
            total, hits, sums = (np.bincount(bins, own, self.num_bins) for own in (count, positive, probability))
            values = (hits + sums / np.maximum(total, 1)) / (total + 1)
            seen = np.flatnonzero(total)  # empty bins are interpolated
            first = np.searchsorted(bins, np.arange(1, self.num_bins))
            self.edges[k] = torch.from_numpy(lower_edges[first] * (1 - _ABOVE))
            self.values[k] = torch.from_numpy(np.interp(np.arange(self.num_bins), seen, values[seen]))
        return self._measured(data, histogram)

    def _mapped(self, log_p: Tensor) -> Tensor:
        by_class = log_p.transpose(0, 1).flatten(1).contiguous()
        bins = torch.searchsorted(self.edges.to(log_p), by_class)
        binned = self.values.to(log_p).log().gather(1, bins)
        return binned.view(log_p.transpose(0, 1).shape).transpose(0, 1)

    def _fast_mapped(self, kernels: Any, logits: Tensor) -> Any:
        return kernels.apply_bins(logits, self.edges, self.values.log())
