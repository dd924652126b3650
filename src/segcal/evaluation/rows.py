"""The regions of a case by rows: labels are read again where they are needed, and distances may lie in a file."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from segcal.cases.device import values_at_once
from segcal.kernels.dispatch import fast_distances
from segcal.regions import CaseRegions
from segcal.regions.boundary import checked_spacing, distance_to
from segcal.regions.distances import StreamedDistance
from segcal.types import Case

# Rows on each side that regions depend on: the boundary region is within 2 voxels of a label change.
_HALO = 2
# Larger cases keep the distances to their boundary in a file. A GPU holds more voxels, if it has so many bytes for each
# of them: labels, masks and squares of distances.
_IN_MEMORY, _MOST, _BYTES = 2**21, 2**30, 40


class CaseRows:
    """The regions of a case in some of its rows, the same as those of the whole. Memory is that of a few rows.

    ``distances`` says whether regions and metrics need them; ``threads`` compute them.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> case = scenes(1, size=(32, 40))[0]
        >>> where, inner = CaseRows(case, distances=True).regions(slice(8, 16))
        >>> whole = CaseRegions(case.labels)
        >>> [bool((part(where)[:, inner] == part(whole)[:, 8:16]).all())
        ...  for part in (lambda own: own.mask("boundary"), lambda own: own.bands)]
        [True, True]
    """

    def __init__(self, case: Case, *, distances: bool, background: int | None = 0, threads: int | None = None) -> None:
        self.case, self.background, self.threads = case, background, threads
        self.shape = (case.shape[0], *case.shape[2:])
        self._needed = distances

    def regions(self, rows: slice) -> tuple[CaseRegions, slice]:
        """The regions of some rows and those around them, and where the rows are in them."""
        wide, inner = self._around(rows)
        return self._of(wide, self._distances(wide) if self._needed else None), inner

    def _around(self, rows: slice) -> tuple[slice, slice]:
        wide = slice(max(0, rows.start - _HALO), min(self.shape[1], rows.stop + _HALO))
        return wide, slice(rows.start - wide.start, rows.stop - wide.start)

    def _of(self, rows: slice, distance: Tensor | None = None) -> CaseRegions:
        return CaseRegions(
            self.case.rows("labels", rows),
            spacing=self.case.spacing,
            ignore_index=self.case.ignore_index,
            mask=self.case.rows("mask", rows),
            background=self.background,
            distance=distance,
        )

    def _distances(self, rows: slice) -> Tensor:
        return self._map.rows(rows) if isinstance(self._map, StreamedDistance) else self._map[:, rows]

    @cached_property
    def _map(self) -> Tensor | StreamedDistance:
        """The distances of the whole case."""
        like, device = torch.empty(()).expand(self.shape), self.case.tensor_device
        spacing = checked_spacing(self.case.spacing, like)
        there = fast_distances(torch.empty(0, device=device)) is not None  # not on a CPU, for so few voxels
        if like.numel() <= (values_at_once(device, _IN_MEMORY, _MOST, _BYTES) if there else _IN_MEMORY):
            return distance_to(self._of(slice(0, self.shape[1])).boundary, spacing, self.threads)

        def boundary(rows: slice) -> Tensor:
            wide, inner = self._around(rows)
            return self._of(wide).boundary[:, inner]

        return StreamedDistance(boundary, self.shape, spacing, self.threads)
