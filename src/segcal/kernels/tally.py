"""The result of one pass over voxels, as plain arrays: sums in float64, counts in int64.

``A`` is the number of slots (disjoint groups of voxels), ``C`` of classes, ``T`` and ``M`` of bins of the top-label
and the classwise grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.files.plain import packed, unpacked
from segcal.kernels.grid import BinGrid

Counts = NDArray[np.int64]
Sums = NDArray[np.float64]


class Tally(NamedTuple):
    """Additive statistics per slot. All are sums over voxels, so adding two tallies merges them.

    Examples:
        >>> Tally.zeros(1, 3, BinGrid.top_label(()), None).confusion.shape
        (1, 3, 3)
    """

    confusion: Counts  # (A, C, C): label, prediction
    losses: Sums  # (A, C, 3): NLL, Brier, entropy by predicted class
    top_count: Counts  # (A, 2, T): wrong / right, bin of the confidence
    top_confidence: Sums  # (A, 2, T)
    predicted_count: Counts  # (A, C, 2, M): predicted class, wrong / right, bin of the confidence
    predicted_confidence: Sums  # (A, C, 2, M)
    class_count: Counts  # (A, C, M): class, bin of its probability
    class_confidence: Sums  # (A, C, M)
    class_positive: Counts  # (A, C, M): those of class_count whose label is the class
    flips: Counts  # (A, 4): compared with the uncalibrated prediction, harmful, beneficial, neutral
    energy: Sums  # (A, 2): sums of F - shift and (F - shift)^2, F the free energy
    distance: Sums  # (A, 3): sum of finite boundary distances, how many, and how many given; no kernel fills this

    @classmethod
    def zeros(cls, slots: int, classes: int, top_grid: BinGrid, class_grid: BinGrid | None) -> Tally:
        """A tally of nothing. Without ``class_grid`` there are no per-class histograms."""
        a, c, t, m = slots, classes, len(top_grid), 0 if class_grid is None else len(class_grid)
        return cls(
            confusion=np.zeros((a, c, c), np.int64),
            losses=np.zeros((a, c, 3), np.float64),
            top_count=np.zeros((a, 2, t), np.int64),
            top_confidence=np.zeros((a, 2, t), np.float64),
            predicted_count=np.zeros((a, c, 2, m), np.int64),
            predicted_confidence=np.zeros((a, c, 2, m), np.float64),
            class_count=np.zeros((a, c, m), np.int64),
            class_confidence=np.zeros((a, c, m), np.float64),
            class_positive=np.zeros((a, c, m), np.int64),
            flips=np.zeros((a, 4), np.int64),
            energy=np.zeros((a, 2), np.float64),
            distance=np.zeros((a, 3), np.float64),
        )

    def add(self, other: Tally) -> None:
        """Add ``other`` in place."""
        for mine, theirs in zip(self, other, strict=True):
            np.add(mine, theirs, out=mine)

    def moved(self, by: float) -> Tally:
        """The same with energies relative to a shift that is smaller by so much."""
        count, (first, second) = self.confusion.sum((1, 2)), self.energy.T
        energy = np.stack((first + count * by, second + 2 * by * first + count * by**2), 1)
        return self._replace(energy=energy)

    def packed(self) -> dict[str, dict[str, Any]]:
        """The arrays as JSON-able values, exact to the bit."""
        return {name: packed(array) for name, array in self._asdict().items()}

    @classmethod
    def unpacked(cls, content: Mapping[str, Mapping[str, Any]]) -> Tally:
        """The inverse of ``packed``."""
        return cls(**{name: unpacked(own) for name, own in content.items()})


class Total:
    """A tally summed over some of its slots: the same arrays without their leading axis, each computed on first use.

    Metrics need one or two of the arrays, and those of a thousand classes take tens of megabytes.

    Examples:
        >>> Total(Tally.zeros(2, 3, BinGrid.top_label(()), None), np.array([True, False])).confusion.shape
        (3, 3)
    """

    def __init__(self, tally: Tally, chosen: NDArray[np.bool_]) -> None:
        self._tally, self._chosen = tally, chosen

    def __getattr__(self, name: str) -> NDArray[Any]:
        if name not in Tally._fields:
            raise AttributeError(name)
        array = getattr(self._tally, name)
        summed: NDArray[Any] = (array if self._chosen.all() else array[self._chosen]).sum(0)
        setattr(self, name, summed)
        return summed
