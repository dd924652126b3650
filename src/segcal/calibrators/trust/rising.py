"""A rising map from log-odds to log-odds, fitted to a stream: isotonic regression from a fine histogram."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.calibrators.nonparametric import pool_adjacent_violators
from segcal.kernels.grid import LIMIT, LOGIT_BINS, WIDTH

FloatArray = NDArray[np.float64]


class OddsHistogram:
    """How many voxels lie in each bin of log-odds, and how many of them are right; additive over cases.

    Bins are those of ``segcal.kernels.fine_histogram``: 16384 of equal width between -30 and 30.

    Examples:
        >>> histogram = OddsHistogram()
        >>> histogram.add(torch.tensor([0.0, 0.1, 9.0]), torch.tensor([False, True, True]))
        >>> int(histogram.counts.sum()), int(histogram.right.sum())
        (3, 2)
    """

    def __init__(self) -> None:
        self.counts, self.right = (np.zeros(LOGIT_BINS, np.int64) for _ in range(2))

    def add(self, log_odds: Tensor, right: Tensor) -> None:
        """Add voxels with these log-odds ``(n,)``; ``right (n,)`` bool says whether the prediction is."""
        bins = odds_bin(log_odds)
        self.counts += torch.bincount(bins, minlength=LOGIT_BINS).cpu().numpy()
        self.right += torch.bincount(bins[right], minlength=LOGIT_BINS).cpu().numpy()

    def __add__(self, other: OddsHistogram) -> OddsHistogram:
        both = OddsHistogram()
        both.counts, both.right = self.counts + other.counts, self.right + other.right
        return both

    def rising(self) -> Tensor:
        """The isotonic regression of ``right``, as log-odds at the centres of the bins ``(bins,)``.

        A block of n voxels that are all right or all wrong is given half a voxel of the other kind, as far as its
        neighbour allows, so that nobody is certain. Bins without voxels are interpolated.
        """
        seen = np.flatnonzero(self.counts)
        if not len(seen):
            return bin_centres()
        counts = self.counts[seen].astype(np.float64)
        share = pool_adjacent_violators(self.right[seen] / counts, counts)
        inside = share[(share > 0) & (share < 1)]
        lowest, highest = (inside[0], inside[-1]) if len(inside) else (1.0, 0.0)
        share[share == 0] = min(lowest, 0.5 / (counts[share == 0].sum() + 1))
        share[share == 1] = max(highest, 1 - 0.5 / (counts[share == 1].sum() + 1))
        odds = np.log(share) - np.log1p(-share)
        return torch.from_numpy(np.interp(np.arange(LOGIT_BINS), seen, odds))


def bin_centres() -> Tensor:
    """The log-odds in the middle of every bin, which is also the identity map ``(bins,)``."""
    return -LIMIT + WIDTH * (torch.arange(LOGIT_BINS, dtype=torch.float64) + 0.5)


def odds_bin(log_odds: Tensor) -> Tensor:
    """The bin of every log-odds; those beyond the limits are in the first and the last."""
    place = (log_odds.double() + LIMIT) / WIDTH
    return place.clamp(0, LOGIT_BINS - 1).long()


def apply_rising(values: Tensor, log_odds: Tensor) -> Tensor:
    """The map with these ``values (bins,)`` at the centres, linear between them.

    Examples:
        >>> apply_rising(bin_centres(), torch.tensor([1.5, -99.0]))
        tensor([  1.5000, -29.9982])
    """
    # in float64: the sum of float32 numbers would be off by a thousandth of a bin, and the map may be steep
    place = ((log_odds.double() + (LIMIT - WIDTH / 2)) / WIDTH).clamp(0, LOGIT_BINS - 1)
    lower = place.floor().clamp(max=LOGIT_BINS - 2)
    table, index = values.to(place), lower.long()
    low, high = table[index], table[index + 1]
    return (low + (high - low) * (place - lower)).to(log_odds)
