"""Isotonic regression and histogram binning, from fine histograms: one pass to fit, one to measure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.calibrators.base import Calibrator, FitData, Fitted
from segcal.calibrators.measured import mean_loss
from segcal.cases import CaseSet
from segcal.errors import InputError

FloatArray = NDArray[np.float64]

#: The fine histogram has this many bins, equally wide in logit(p) between these limits.
FINE_BINS, LIMIT = 2**14, 30.0
_WIDTH = 2 * LIMIT / FINE_BINS
# Of p, added to the isotonic map so that it rises strictly.
_SLOPE = 1e-9
_PIECE = 2**20


class FineHistogram(NamedTuple):
    """Of every class probability: ``counts``, ``positive`` (the class is the label), sum of p; each ``(C, bins)``."""

    counts: NDArray[np.int64]
    positive: NDArray[np.int64]
    probability: FloatArray

    @classmethod
    def over(cls, cases: CaseSet) -> FineHistogram:
        """One pass over all valid voxels; memory does not grow with their number."""
        shape = (cases.num_classes, FINE_BINS)
        found = cls(np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape))
        for case in cases:
            for chunk in case.chunks():
                found.add(chunk.logits, chunk.labels, chunk.valid)
            del case
        return found

    def add(self, logits: Tensor, labels: Tensor, valid: Tensor) -> None:
        """Add voxels: ``logits (N, C, *spatial)``, ``labels`` and ``valid (N, *spatial)``."""
        step = max(1, _PIECE // logits.shape[1])
        for scores, own_labels, own_valid in zip(logits.flatten(2), labels.flatten(1), valid.flatten(1), strict=True):
            for start in range(0, scores.shape[1], step):
                here = own_valid[start : start + step].nonzero()[:, 0] + start
                self._add(scores[:, here].double().cpu(), own_labels[here].long().cpu())

    def _add(self, scores: Tensor, labels: Tensor) -> None:
        log_p = log_probabilities(scores[None])[0]
        bins = fine_bin(log_p)
        flat = (bins + FINE_BINS * torch.arange(len(bins))[:, None]).flatten()
        self.counts.reshape(-1)[:] += np.bincount(flat, minlength=self.counts.size)
        self.probability.reshape(-1)[:] += np.bincount(flat, log_p.exp().flatten(), self.counts.size)
        own = (bins.gather(0, labels[None])[0] + FINE_BINS * labels).numpy()
        self.positive.reshape(-1)[:] += np.bincount(own, minlength=self.counts.size)


def fine_edges() -> FloatArray:
    """``log p`` at the inner edges of the fine bins ``(bins - 1,)``."""
    return _log_sigmoid(_WIDTH, FINE_BINS - 1)


def _log_sigmoid(offset: float, count: int) -> FloatArray:
    """``log p`` at ``count`` logits a bin apart, the first one ``offset`` above the lower limit."""
    logit = -LIMIT + offset + _WIDTH * np.arange(count)
    return np.asarray(-np.logaddexp(0, -logit))


def fine_bin(log_p: Tensor) -> Tensor:
    """The fine bin of every log-probability; it never falls as that rises."""
    edges = torch.from_numpy(fine_edges()).to(log_p)
    return torch.searchsorted(edges, log_p.contiguous())


def log_probabilities(logits: Tensor) -> Tensor:
    """``log S(z)``, ``(N, C, *spatial)``, that keeps the order exactly and 1 - p of the winner to its last digit."""
    best, winner = logits.max(1, keepdim=True)
    gap = logits - best
    others = gap.exp().scatter(1, winner, 0.0).sum(1, keepdim=True)
    return gap - torch.log1p(others)


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
    translation_invariant = True
    preserves = "order"
    centres: Tensor  # log p in the middle of every fine bin
    values: Tensor  # g there
    fitted: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.from_numpy(_log_sigmoid(_WIDTH / 2, FINE_BINS)), persistent=False)
        self.register_buffer("values", torch.zeros(FINE_BINS, dtype=torch.float64))
        self.register_buffer("fitted", torch.zeros((), dtype=torch.float64))  # 1, or 0 for the identity

    def _fit(self, data: FitData) -> Fitted:
        before = mean_loss(data.cases)
        count, positive, _ = (array.sum(0) for array in FineHistogram.over(data.cases))
        seen = np.flatnonzero(count)
        fitted = pool_adjacent_violators(positive[seen] / count[seen], count[seen].astype(float))
        self.values.copy_(torch.from_numpy(np.interp(np.arange(FINE_BINS), seen, fitted)))
        self.fitted.fill_(1.0)
        return _measured(self, data, before.nll, before.voxels)

    def _scores(self, logits: Tensor) -> Tensor:
        log_p = log_probabilities(logits)
        # Everything that could round unevenly happens at the centres. From there on there are only sums, products and
        # comparisons, which never turn an order round.
        knots = (self.values + _SLOPE * self.centres.exp()).log().cummax(0).values.to(log_p)
        centres = self.centres.to(log_p)
        inside = log_p.clamp(centres[0], centres[-1])
        lower = (torch.searchsorted(centres, inside.contiguous()) - 1).clamp(0, FINE_BINS - 2)
        start, low, high = centres[lower], knots[lower], knots[lower + 1]
        scores = torch.minimum(low + (high - low) * ((inside - start) / (centres[lower + 1] - start)), high)
        scores = torch.where(self.fitted.to(log_p) > 0, scores, log_p)
        return scores.masked_fill(log_p == -torch.inf, -torch.inf)


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
    translation_invariant = True
    preserves = None
    edges: Tensor
    values: Tensor
    fitted: Tensor

    def __init__(self, num_bins: int = 15) -> None:
        super().__init__()
        if not 1 <= num_bins <= FINE_BINS:
            raise InputError(f"num_bins is {num_bins}", expected=f"1 to {FINE_BINS}")
        self.num_bins = num_bins
        self.register_buffer("edges", torch.zeros(0, num_bins - 1, dtype=torch.float64))
        self.register_buffer("values", torch.zeros(0, num_bins, dtype=torch.float64))
        self.register_buffer("fitted", torch.zeros((), dtype=torch.float64))  # 1, or 0 for the identity

    def allocate(self, num_classes: int) -> None:
        """Edges and values for every class."""
        self.edges = self.edges.new_zeros(num_classes, self.num_bins - 1)
        self.values = self.values.new_ones(num_classes, self.num_bins)

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"num_bins": self.num_bins}

    def _fit(self, data: FitData) -> Fitted:
        before = mean_loss(data.cases)
        histogram = FineHistogram.over(data.cases)
        lower_edges = np.concatenate(([np.finfo(float).min], fine_edges(), [0.0]))
        for k, (count, positive, probability) in enumerate(zip(*histogram, strict=True)):
            # Each fine bin goes where the middle of its mass lies; one with much mass leaves the next bins empty.
            middle = (np.cumsum(count) - count / 2) / count.sum()
            bins = np.minimum(middle * self.num_bins, self.num_bins - 1).astype(np.int64)
            total, hits, sums = (np.bincount(bins, own, self.num_bins) for own in (count, positive, probability))
            values = (hits + sums / np.maximum(total, 1)) / (total + 1)
            seen = np.flatnonzero(total)  # the others take the value of their neighbours
            first = np.searchsorted(bins, np.arange(1, self.num_bins))
            self.edges[k] = torch.from_numpy(lower_edges[first])
            self.values[k] = torch.from_numpy(np.interp(np.arange(self.num_bins), seen, values[seen]))
        self.fitted.fill_(1.0)
        return _measured(self, data, before.nll, before.voxels)

    def _scores(self, logits: Tensor) -> Tensor:
        log_p = log_probabilities(logits)
        by_class = log_p.transpose(0, 1).flatten(1).contiguous()
        bins = torch.searchsorted(self.edges.to(log_p), by_class)
        binned = self.values.to(log_p).log().gather(1, bins)
        scores = binned.view(log_p.transpose(0, 1).shape).transpose(0, 1)
        scores = torch.where(self.fitted.to(log_p) > 0, scores, log_p)
        return scores.masked_fill(log_p == -torch.inf, -torch.inf)


def _measured(calibrator: IsotonicRegression | HistogramBinning, data: FitData, before: float, voxels: int) -> Fitted:
    """What to report; the identity where the map is worse than that."""
    after = mean_loss(data.cases, calibrator).nll
    notes = []
    if not after <= before:
        calibrator.fitted.fill_(0.0)
        notes.append(f"renormalising gives an NLL of {after:.6g}, worse than that of the identity, which is kept")
        after = before
    return Fitted(before, after, converged=True, certificate=0.0, iterations=1, voxels_used=voxels, notes=notes)
