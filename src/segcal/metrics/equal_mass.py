"""Calibration errors over bins that hold equally many voxels, class by class.

A bin holds exactly n / R voxels. A group of voxels at the edge between two bins (tied, or in one bin of the histogram)
is shared between them in proportion, so the value does not depend on the order of voxels and can be computed from a
histogram: treating all voxels of a histogram bin as tied changes the value by at most ``Measure.bound``. For the exact
value, a second pass over the same data (``SecondPass``) splits the histogram bins that are cut by edges.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from segcal.checks import holding
from segcal.errors import InputError, check_name
from segcal.kernels import Voxels
from segcal.kernels.reference import refine
from segcal.kernels.tally import Counts, Sums
from segcal.metrics.measure import Measure
from segcal.metrics.reliability import class_grid
from segcal.statistics import EVERYTHING, Region, VoxelStatistics

__all__ = ["SecondPass", "ace_adaptive", "tace"]

_Arrays = tuple[NDArray[Any], ...]

_CELLS, _MOST_CELLS = 4096, 2**20


@dataclass(frozen=True)
class Groups:
    """Voxels of one class in groups of about the same probability, in ascending order: ``(G,)`` each."""

    count: Counts
    confidence: Sums
    positive: Counts
    width: Sums  # of the interval that holds a group's probabilities

    def cut(self, num_bins: int) -> NDArray[np.bool_]:
        """Which groups are cut by an edge between equal-mass bins."""
        ends = self.count.cumsum()
        edges = np.arange(1, num_bins) * (ends[-1] / num_bins)
        cut = np.zeros(len(ends), dtype=bool)
        inside = np.searchsorted(ends, edges, side="left")
        cut[inside[edges < ends[inside]]] = True
        return cut

    def error(self, num_bins: int) -> tuple[float, float]:
        """Mean over bins of |frequency - confidence|, and a bound on its error from treating groups as tied."""
        ends = np.concatenate(([0], self.count.cumsum()))
        edges = np.linspace(0, ends[-1], num_bins + 1)
        gap = np.concatenate(([0.0], (self.confidence - self.positive).cumsum()))
        cut = self.cut(num_bins)
        count, positive, width = self.count[cut], self.positive[cut], self.width[cut]
        # The order within a group is unknown: at most this much of the positives and of the confidences is misplaced.
        bound = (2 * positive * (1 - positive / count) + count * width / 2).sum() / ends[-1]
        return float(np.abs(np.diff(np.interp(edges, ends, gap))).sum() / ends[-1]), float(bound)


class SecondPass:
    """A second pass over the same data that splits the histogram bins with equal-mass edges, up to 4096-fold.

    It resolves confidences to about 1e-7, the rounding of float32; ``Measure.bound`` has the error that remains. The
    arguments must be those of the metric; a region is passed to ``update`` as ``mask``.

    Examples:
        >>> import torch
        >>> logits, labels = torch.randn(500, 3).mul(3), torch.randint(0, 3, (500,))
        >>> stats = VoxelStatistics(3).update(logits, labels)
        >>> exact = SecondPass(stats, num_bins=15).update(logits, labels)
        >>> ace_adaptive(stats, exact=exact).bound < ace_adaptive(stats).bound
        True
    """

    def __init__(
        self, stats: VoxelStatistics, *, num_bins: int = 15, threshold: float = 0.0, region: Region = EVERYTHING
    ) -> None:
        self.num_bins, self.threshold, self.region = num_bins, threshold, region
        self.grid = class_grid(stats)
        start = _first_bin(stats, threshold)
        self.cells = np.ones((stats.num_classes, len(self.grid)), np.int64)
        cut = np.zeros(self.cells.shape, dtype=bool)
        for row, groups in zip(cut, _groups(stats, region, start), strict=True):
            if groups.count.sum():
                row[start:] = groups.cut(num_bins)
        if cut.any():
            self.cells[cut] = max(1, min(_CELLS, _MOST_CELLS // int(cut.sum())))
        # Voxels, their probabilities, and voxels with the class as label, by cell.
        self.sums: _Arrays = tuple(np.zeros(int(self.cells.sum()), kind) for kind in (np.int64, np.float64, np.int64))

    def _add(self, sums: _Arrays) -> SecondPass:
        for mine, more in zip(self.sums, sums, strict=True):
            mine += more
        return self

    def update(self, logits: Tensor, labels: Tensor, *, ignore_index: int | None = 255, **options: Any) -> SecondPass:
        """Add voxels, the same ones as in the first pass.

        The options ``mask`` and ``score_map`` are those of ``VoxelStatistics.update``.
        """
        voxels = Voxels(logits, holding(labels, ignore_index), ignore_index=ignore_index, **options)
        return self._add(refine(voxels, self.grid, self.cells))

    def merge(self, other: SecondPass) -> SecondPass:
        """Add what ``other``, made from the same first pass, has seen."""
        if not np.array_equal(self.cells, other.cells):
            raise InputError("the second passes split different bins", expected="the same first pass and arguments")
        return self._add(other.sums)

    def empty_like(self) -> SecondPass:
        """A second pass over nothing yet, that splits the same bins."""
        other = copy.copy(self)
        other.sums = tuple(map(np.zeros_like, self.sums))
        return other

    def groups(self, threshold_bin: int) -> list[Groups]:
        """The groups of each class from the bin ``threshold_bin`` on."""
        widths = np.repeat(((self.grid.upper - self.grid.lower) / self.cells).reshape(-1), self.cells.reshape(-1))
        result, stop = [], 0
        for row in self.cells:
            start, stop = stop + int(row[:threshold_bin].sum()), stop + int(row.sum())
            arrays: _Arrays = (*self.sums, widths)
            result.append(Groups(*(own[start:stop] for own in arrays)))
        return result


def ace_adaptive(
    stats: VoxelStatistics, *, num_bins: int = 15, region: Region = EVERYTHING, exact: SecondPass | None = None
) -> Measure:
    """Adaptive calibration error: ``1/(C R) sum_c sum_r |freq_rc - conf_rc|`` over R equal-mass bins a class.

    Nixon et al. 2019; Ding et al. 2021, F.6. conf_rc is the mean probability of class c in the r-th bin of all voxels
    sorted by it, freq_rc how many of these carry the label c. ``count`` is the number of classes averaged.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]))
        >>> ace_adaptive(stats, num_bins=2)
        0.25
    """
    return _mean_over_classes(stats, num_bins, 0.0, region, exact)


def tace(
    stats: VoxelStatistics,
    *,
    num_bins: int = 15,
    region: Region = EVERYTHING,
    threshold: float | None = None,
    binning: Literal["mass", "width"] = "mass",
    exact: SecondPass | None = None,
) -> Measure:
    """Thresholded adaptive calibration error: ``ace-adaptive`` of the probabilities above the threshold alone.

    Nixon et al. 2019. ``threshold`` is that of the statistics (1e-3) unless it is another edge of their grid.
    ``binning="width"`` takes equal-width bins, weighted by their share of the class's probabilities above the
    threshold, and then the mean over classes: what the released code of Murugesan et al. 2024 computes. Classes without
    any probability above the threshold are left out; ``count`` is the number of classes averaged.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(3).update(torch.tensor([[0.0, 0.0, -99.0]] * 4), torch.tensor([0, 0, 0, 1]))
        >>> tace(stats), tace(stats).count
        (0.25, 2)
    """
    threshold = stats.threshold if threshold is None else threshold
    check_name("binning", binning, ("mass", "width"))
    if binning == "mass":
        return _mean_over_classes(stats, num_bins, threshold, region, exact)
    start = _first_bin(stats, threshold)
    coarse = class_grid(stats).coarse(num_bins)[start:]
    errors = []
    for groups in _groups(stats, region, start):
        gap = np.bincount(coarse, weights=groups.confidence - groups.positive)
        errors.append(Measure.ratio(float(np.abs(gap).sum()), int(groups.count.sum())))
    return Measure.mean(errors)


def tace_second_pass(
    stats: VoxelStatistics, *, threshold: float | None = None, binning: str = "mass", **options: Any
) -> SecondPass | None:
    """The second pass that makes ``tace`` with these arguments exact; with equal-width bins the first one is."""
    if binning != "mass":
        return None
    return SecondPass(stats, threshold=stats.threshold if threshold is None else threshold, **options)


def _mean_over_classes(
    stats: VoxelStatistics, num_bins: int, threshold: float, region: Region, exact: SecondPass | None
) -> Measure:
    start = _first_bin(stats, threshold)
    if exact is None:
        per_class = _groups(stats, region, start)
    elif not isinstance(exact, SecondPass):
        raise InputError(
            f"exact is {exact!r}",
            expected="a SecondPass: statistics no longer know the single voxels",
            fix="segcal.evaluate(..., exact=True) reads the cases twice; or see segcal.metrics.SecondPass",
        )
    else:
        asked, made = (num_bins, threshold, region), (exact.num_bins, exact.threshold, exact.region)
        if asked != made:
            raise InputError(f"the second pass was made for num_bins, threshold, region = {made}", expected=f"{asked}")
        per_class = exact.groups(start)
    results = [groups.error(num_bins) for groups in per_class if groups.count.sum()]
    if not results:
        return Measure(math.nan, 0)
    value, bound = np.mean(results, axis=0)
    return Measure(value, len(results), bound)


def _first_bin(stats: VoxelStatistics, threshold: float) -> int:
    """The first bin of the class grid above the threshold, which must be one of its edges."""
    upper = class_grid(stats).upper
    if threshold and threshold not in upper:
        raise InputError(
            f"threshold is {threshold}", expected=f"{stats.threshold}", fix=f"collect with threshold={threshold}"
        )
    return int(np.searchsorted(upper, threshold, side="right"))


def _groups(stats: VoxelStatistics, region: Region, start: int) -> list[Groups]:
    total, grid = stats.total(region), class_grid(stats)
    width = (grid.upper - grid.lower)[start:]
    by_class = zip(total.class_count, total.class_confidence, total.class_positive, strict=True)
    return [Groups(count[start:], total_p[start:], positive[start:], width) for count, total_p, positive in by_class]
