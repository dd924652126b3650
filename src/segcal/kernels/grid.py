"""Bins on [0, 1]: ``(lo, hi]``, with 0 in the first and 1 in the last.

One grid holds the edges of every requested equal-width binning, so a voxel is looked up once and every coarser binning
is an exact sum of the grid's bins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from segcal.errors import InputError

FINE_BINS = 4096
# More bins than fine ones make no sense, and the memory of histograms grows with them.
MAX_BINS = 4096
#: Bins of a ``FineHistogram``, equally wide in logit(p) from -LIMIT to LIMIT; the outer bins also hold all beyond.
LOGIT_BINS, LIMIT = 2**14, 30.0
WIDTH = 2 * LIMIT / LOGIT_BINS


@dataclass(frozen=True, eq=False)
class BinGrid:
    """Bins with upper edges ``upper (M,)``; bin ``i`` is ``(upper[i - 1], upper[i]]``.

    ``first (4096,)`` is the lookup table: a value in ``(j/4096, (j+1)/4096]`` lies in bin ``first[j]`` or a few above.

    Examples:
        >>> grid = BinGrid.top_label(bins=(15,))
        >>> int(grid.coarse(15).max()), int(grid.coarse(16).max())
        (14, 15)
    """

    upper: NDArray[np.float64]
    first: NDArray[np.int32]

    @classmethod
    def from_edges(cls, edges: Iterable[float]) -> BinGrid:
        """The grid with these inner edges; 0 and 1 are always edges."""
        upper = np.unique(np.append(np.fromiter(edges, np.float64), 1.0))
        upper = upper[upper > 0]
        cells = np.arange(FINE_BINS) / FINE_BINS
        return cls(upper, np.searchsorted(upper, cells, side="right").astype(np.int32))

    @classmethod
    def top_label(cls, bins: Iterable[int], also: BinGrid | None = None) -> BinGrid:
        """4096 equal-width bins, cut further at the edges of each requested number of bins and of the grid ``also``."""
        edges = [edge for count in (FINE_BINS, *bins) for edge in _equal_width(count)]
        return cls.from_edges(edges if also is None else [*edges, *also.upper])

    @classmethod
    def classwise(cls, bins: Iterable[int], thresholds: Iterable[float]) -> BinGrid:
        """About 300 bins: one from 0 to the lowest requested edge, then narrow near 0 and 1 and wider between.

        The requested edges are the thresholds and those of each number of equal-width bins.

        Except for the first, a bin is at most as wide as a sixteenth of its distance to the nearer end, or 1/4096:
        class probabilities crowd at both ends, and a grid this small stays in the cache for all classes.
        """
        ticks = [0]
        while ticks[-1] < FINE_BINS // 2:
            ticks.append(ticks[-1] + max(1, 2 ** (ticks[-1].bit_length() - 5)))
        edges = {k / FINE_BINS for k in ticks} | {1 - k / FINE_BINS for k in ticks}
        asked = {edge for count in bins for edge in _equal_width(count)} | set(thresholds)
        return cls.from_edges(edge for edge in edges | asked if edge >= min(asked))

    def __len__(self) -> int:
        return len(self.upper)

    @property
    def lower(self) -> NDArray[np.float64]:
        """Lower edges ``(M,)``."""
        return np.concatenate(([0.0], self.upper[:-1]))

    @property
    def steps(self) -> int:
        """How far above ``first`` a bin can be."""
        return int(np.diff(np.append(self.first, len(self))).max())

    def within(self, coarser: BinGrid) -> NDArray[np.int64]:
        """Which bin of ``coarser``, whose edges are all edges of this grid, each bin lies in ``(M,)``."""
        return np.searchsorted(coarser.upper, self.upper, side="left")

    def coarse(self, num_bins: int) -> NDArray[np.int64]:
        """Which of ``num_bins`` equal-width bins each bin of the grid lies in ``(M,)``."""
        return np.searchsorted(self.starts(num_bins), np.arange(len(self)), side="right") - 1

    def starts(self, num_bins: int) -> NDArray[np.int64]:
        """The first bin of the grid in each of ``num_bins`` equal-width bins ``(num_bins,)``."""
        return _starts(self, num_bins)


@lru_cache(maxsize=64)
def _starts(grid: BinGrid, num_bins: int) -> NDArray[np.int64]:
    """Looked up once: metrics of small images would take longer to find them than to add up."""
    edges = np.array(_equal_width(num_bins))
    last = np.searchsorted(grid.upper, edges)
    if not np.array_equal(grid.upper[last], edges):
        raise InputError(
            f"num_bins = {num_bins} cannot be derived from these statistics",
            expected="a number of bins that they were collected with",
            fix=f"collect them with bins=(..., {num_bins})",
        )
    found = np.append(0, last[:-1] + 1)
    found.flags.writeable = False
    return found


def _equal_width(count: int) -> list[float]:
    """Upper edges of ``count`` equal-width bins, the last being exactly 1."""
    if not 1 <= count <= MAX_BINS:
        raise InputError(f"num_bins = {count}", expected=f"a whole number from 1 to {MAX_BINS}")
    return [k / count for k in range(1, count + 1)]
