"""Isotonic regression and histogram binning, from fine histograms: one pass to fit, one to measure."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.calibrators.base import Calibrator
from segcal.cases import CaseSet
from segcal.errors import InputError, SegcalError
from segcal.fitting.cost import FitCost
from segcal.fitting.data import FitData, Fitted
from segcal.fitting.limits import SHARE, Limits
from segcal.fitting.measured import compared, mean_loss
from segcal.kernels.fine_histogram import FineHistogram, logit_centres, logit_edges
from segcal.kernels.grid import LOGIT_BINS
from segcal.scores import log_probabilities

__all__ = ["HistogramBinning", "IsotonicRegression"]

FloatArray = NDArray[np.float64]

# Of p, added to the isotonic map so that it rises strictly.
_SLOPE = 1e-9
# The edges of binning are higher, in log p, by this share: there float32 would decide by its rounding.
_ABOVE = 1e-6
# Bytes a second at which memory is filled, roughly.
_MEMORY_SPEED = 1e9


def histogram_over(cases: CaseSet, *, classwise: bool) -> FineHistogram:
    """One pass over all valid voxels, which also checks the data; memory does not grow with their number."""
    histogram = FineHistogram(cases.num_classes, classwise=classwise)
    for case in cases:
        try:
            for chunk in case.chunks():
                histogram.add(chunk.logits, chunk.labels, ignore_index=case.ignore_index, mask=chunk.mask)
        except SegcalError as error:
            raise error.at(case=case.id) from None
        del case
    if not histogram.voxels:
        raise InputError("no valid voxel", expected="labels that are neither ignored nor masked")
    return histogram


def pool_adjacent_violators(values: FloatArray, weights: FloatArray) -> FloatArray:
    """The non-decreasing sequence of least weighted squared distance to ``values (n,)``; weights are positive.

    Ayer et al. 1955: blocks merge with the one before as long as their mean is not above it. Linear time.

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


class IsotonicRegression(Calibrator):
    """``isotonic``: one rising map of all class probabilities, fitted to all of them at once, then renormalised.

    ``p_k' = (g(p_k) + 1e-9 p_k) / sum_j (...)`` with g the isotonic regression of ``[y = k]`` on ``p_k`` over all
    voxels and classes (Zhang, Kailkhura and Han, ICML 2020). Translation invariant, keeps the order.

    The regression is made from 16384 bins equally wide in logit(p), between -30 and 30; what is beyond is in the outer
    ones. So it is the exact regression of probabilities rounded to the centre of their bin, which moves a logit by at
    most 0.0019 (p and 1 - p by 0.19 %). Its squared error exceeds that of the exact regression g* of the unrounded ones
    by at most ``2 sum_j w_j D_j``: w_j is the share of the probabilities in bin j, D_j by how much g* rises inside it.
    Between centres the map is linear in log p and log g.

    Falls back to the identity where renormalising makes the NLL of the fit data worse.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), plant=[segcal.synthetic.Temperature(2.0)])
        >>> report = IsotonicRegression().fit(cases).fit_report
        >>> report.nll_after < report.nll_before
        True
    """

    id = "isotonic"
    title = "Isotonic regression"
    translation_invariant = True
    preserves = "order"
    centres: Tensor  # log p in the middle of every fine bin
    values: Tensor  # g there
    fitted: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.from_numpy(logit_centres()), persistent=False)
        self.register_buffer("values", torch.zeros(LOGIT_BINS, dtype=torch.float64))
        self.register_buffer("fitted", torch.zeros((), dtype=torch.float64))  # 1, or 0 for the identity

    def limits(self) -> dict[str, Limits]:
        """A rising map of probabilities."""
        return {"values": Limits(0.0, 1.0, rising=True), "fitted": SHARE}

    def _fit(self, data: FitData) -> Fitted:
        histogram = histogram_over(data.cases, classwise=False)
        count, positive = histogram.counts[0], histogram.positive[0]
        seen = np.flatnonzero(count)
        fitted = pool_adjacent_violators(positive[seen] / count[seen], count[seen].astype(float))
        self.values.copy_(torch.from_numpy(np.interp(np.arange(LOGIT_BINS), seen, fitted)))
        self.fitted.fill_(1.0)
        return _measured(self, data, histogram)

    def _scores(self, logits: Tensor) -> Tensor:
        log_p = log_probabilities(logits)
        # Everything that could round unevenly happens at the centres. From there on there are only sums, products and
        # comparisons, which never turn an order round.
        knots, centres = self._knots().to(log_p), self.centres.to(log_p)
        inside = log_p.clamp(centres[0], centres[-1])
        lower = (torch.searchsorted(centres, inside.contiguous()) - 1).clamp(0, LOGIT_BINS - 2)
        start, low, high = centres[lower], knots[lower], knots[lower + 1]
        scores = torch.minimum(low + (high - low) * ((inside - start) / (centres[lower + 1] - start)), high)
        scores = torch.where(self.fitted.to(log_p) > 0, scores, log_p)
        return scores.masked_fill(log_p == -torch.inf, -torch.inf)

    def _knots(self) -> Tensor:
        """The logarithm of the map at the centres."""
        return (self.values + _SLOPE * self.centres.exp()).log().cummax(0).values

    def _fast(self, kernels: Any, logits: Tensor) -> Tensor:
        log_probs: Tensor = (
            kernels.apply_knots(logits, self.centres, self._knots())
            if float(self.fitted)
            else kernels.apply_temperature(logits, 1.0)
        )
        return log_probs


class HistogramBinning(Calibrator):
    """``histogram``: each class probability becomes the share of its bin that has the class; renormalised.

    Zadrozny and Elkan, ICML 2001, one against all others (Guo et al., ICML 2017). Every class has bins of equal mass,
    whose edges are those of a fine histogram (16384 bins equally wide in logit(p)), so that an edge is off by at most
    0.0037 in logit. Each bin is given one more voxel that is as the network says, so that no probability becomes 0 for
    lack of data. Translation invariant; may change labels. Falls back to the identity where the NLL gets worse.

    Args:
        num_bins: For each class.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(4, size=(48, 64), plant=[segcal.synthetic.Temperature(2.0)])
        >>> report = HistogramBinning().fit(cases).fit_report
        >>> report.nll_after <= report.nll_before
        True
    """

    id = "histogram"
    title = "Histogram binning"
    translation_invariant = True
    preserves = None
    edges: Tensor
    values: Tensor
    fitted: Tensor

    def __init__(self, num_bins: int = 15) -> None:
        super().__init__()
        if not 1 <= num_bins <= LOGIT_BINS:
            raise InputError(f"num_bins is {num_bins}", expected=f"1 to {LOGIT_BINS}")
        self.num_bins = num_bins
        self.register_buffer("edges", torch.zeros(0, num_bins - 1, dtype=torch.float64))
        self.register_buffer("values", torch.zeros(0, num_bins, dtype=torch.float64))
        self.register_buffer("fitted", torch.zeros((), dtype=torch.float64))  # 1, or 0 for the identity

    def allocate(self, num_classes: int) -> None:
        """Edges and values for every class."""
        self.edges = self.edges.new_zeros(num_classes, self.num_bins - 1)
        self.values = self.values.new_ones(num_classes, self.num_bins)

    def shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """Of edges and values, and the mark of the identity."""
        return {"edges": (num_classes, self.num_bins - 1), "values": (num_classes, self.num_bins), "fitted": ()}

    def limits(self) -> dict[str, Limits]:
        """Rising edges in log p, and probabilities."""
        return {"edges": Limits(-torch.inf, 0.0, rising=True), "values": SHARE, "fitted": SHARE}

    def cost(self, num_classes: int) -> FitCost:
        """That of the fine histograms: three tables of 8 bytes a bin, for each class."""
        memory = float(3 * 8 * LOGIT_BINS * num_classes)
        return FitCost(memory, memory / _MEMORY_SPEED, f"{num_classes:,} fine histograms")

    def _fit(self, data: FitData) -> Fitted:
        histogram = histogram_over(data.cases, classwise=True)
        lower_edges = np.concatenate(([np.finfo(float).min], logit_edges(), [0.0]))
        for k in range(data.cases.num_classes):
            count, positive, probability = histogram.counts[k], histogram.positive[k], histogram.probability[k]
            # Each fine bin goes where the middle of its mass lies; one with much mass leaves the next bins empty.
            middle = (np.cumsum(count) - count / 2) / count.sum()
            bins = np.minimum(middle * self.num_bins, self.num_bins - 1).astype(np.int64)
            total, hits, sums = (np.bincount(bins, own, self.num_bins) for own in (count, positive, probability))
            values = (hits + sums / np.maximum(total, 1)) / (total + 1)
            seen = np.flatnonzero(total)  # the others take the value of their neighbours
            first = np.searchsorted(bins, np.arange(1, self.num_bins))
            self.edges[k] = torch.from_numpy(lower_edges[first] * (1 - _ABOVE))
            self.values[k] = torch.from_numpy(np.interp(np.arange(self.num_bins), seen, values[seen]))
        self.fitted.fill_(1.0)
        return _measured(self, data, histogram)

    def _scores(self, logits: Tensor) -> Tensor:
        log_p = log_probabilities(logits)
        by_class = log_p.transpose(0, 1).flatten(1).contiguous()
        bins = torch.searchsorted(self.edges.to(log_p), by_class)
        binned = self.values.to(log_p).log().gather(1, bins)
        scores = binned.view(log_p.transpose(0, 1).shape).transpose(0, 1)
        scores = torch.where(self.fitted.to(log_p) > 0, scores, log_p)
        return scores.masked_fill(log_p == -torch.inf, -torch.inf)

    def _fast(self, kernels: Any, logits: Tensor) -> Tensor:
        log_probs: Tensor = (
            kernels.apply_bins(logits, self.edges, self.values.log())
            if float(self.fitted)
            else kernels.apply_temperature(logits, 1.0)
        )
        return log_probs


def _measured(calibrator: IsotonicRegression | HistogramBinning, data: FitData, histogram: FineHistogram) -> Fitted:
    """What to report; the identity where the map is worse than that."""
    before, after = histogram.nll / histogram.voxels, mean_loss(data.cases, calibrator).nll
    notes = []
    if not after <= before:
        calibrator.fitted.fill_(0.0)
        notes.append(f"renormalising gives an NLL of {compared(after, before)} that of the identity, which is kept")
        after = before
    return Fitted(
        before, after, converged=True, certificate=0.0, iterations=1, voxels_used=histogram.voxels, notes=notes
    )
