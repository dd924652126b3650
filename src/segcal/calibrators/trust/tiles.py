"""Images in tiles of rows: what ``trust`` sees of each, the same as of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from segcal.calibrators.trust.features import REACH, ImageTotals, disagreement, features, voxel_maps
from segcal.cases.device import values_at_once
from segcal.kernels import recording
from segcal.types import Case, row_slices

# Scores in a tile; a tile of an image also has a halo of REACH + 1 rows on each side.
_TILE_VALUES = 2**22
# The same on a GPU, and voxels there; the bytes that a score takes while its tile is calibrated, and a voxel besides.
_DEVICE_TILE_VALUES, _DEVICE_TILE_VOXELS, _BYTES, _VOXEL_BYTES = 2**26, 2**22, 16, 300


class Images(NamedTuple):
    """A batch of images that is read by rows.

    Attributes:
        shape: ``(N, C, *spatial)``.
        device: Where they are.
        read: Gives the logits ``(N, C, rows, ...)`` of some rows.
        members: Gives those of every member of an ensemble; None for a single model.
    """

    shape: tuple[int, ...]
    device: torch.device
    read: Callable[[slice], Tensor]
    members: Callable[[slice], Iterable[Tensor]] | None = None

    @classmethod
    def of_case(cls, case: Case) -> Images:
        """A case, with its members if it has any."""
        if not case.source.sliceable:
            _ = case.logits
        count = case.members
        members = None if count is None else lambda rows: (case.member_logits(m, rows) for m in range(count))
        return cls(case.shape, case.tensor_device, lambda rows: case.rows("logits", rows), members)


class Tile(NamedTuple):
    """Some rows of a batch of images.

    Attributes:
        rows: Which.
        logits: ``(N, C, rows, ...)`` as they came.
        winner: Their argmax ``(N, rows, ...)``.
        features: ``(N, J, rows, ...)``, those of ``NAMES`` and the members' disagreement if there are members.
        summary: What the guard sees of each whole image ``(N, 6)``.
    """

    rows: slice
    logits: Tensor
    winner: Tensor
    features: Tensor
    summary: Tensor


def by_class(maps: Tensor) -> Tensor:
    """Maps ``(N, C, ...)`` as ``(C, voxels)``, in the order of ``(N, ...)``."""
    return maps.movedim(1, 0).flatten(1)


def _tile_values(shape: Sequence[int], device: torch.device) -> int:
    most = min(_DEVICE_TILE_VALUES, _DEVICE_TILE_VOXELS * shape[1])
    return values_at_once(device, _TILE_VALUES, most, _BYTES + _VOXEL_BYTES / shape[1])


def images_at_once(shape: Sequence[int], device: torch.device) -> int:
    """How many of the images ``(N, C, *spatial)`` fit a tile, at least one."""
    return max(1, _tile_values(shape, device) // math.prod(shape[1:]))


def tiles(images: Images, beta: Tensor) -> Iterator[Tile]:
    """The tiles of images, in order. Sums over whole images take a read of their own if there is more than one tile."""
    shape, size = images.shape, math.prod(images.shape)
    # A recorded graph has one tile; a slice that named its rows would tie the graph to this number of rows.
    spans = [slice(None)] if recording() else list(row_slices(shape, _tile_values(shape, images.device)))
    if len(spans) == 1:
        logits = images.read(spans[0])
        maps = voxel_maps(logits, beta, size)
        found = _with_members(features(maps, maps.totals, size), images, spans[0])
        yield Tile(spans[0], logits, maps.winner, found, maps.totals.summary())
        return
    halo = REACH + 1 if len(shape) == 4 else 0
    parts = [voxel_maps(images.read(span), beta, size).totals for span in spans]
    totals = ImageTotals(*(sum(column[1:], column[0]) for column in zip(*parts, strict=True)))
    summary = totals.summary()
    for rows in spans:
        wide = slice(max(0, rows.start - halo), min(shape[2], rows.stop + halo))
        inner = slice(rows.start - wide.start, rows.stop - wide.start)
        logits = images.read(wide)
        maps = voxel_maps(logits, beta, size)
        found = _with_members(features(maps, totals, size)[:, :, inner], images, rows)
        yield Tile(rows, logits[:, :, inner], maps.winner[:, inner], found, summary)


def _with_members(found: Tensor, images: Images, rows: slice) -> Tensor:
    """Features of some rows, and the disagreement of the members there if there are any."""
    if images.members is None:
        return found
    return torch.cat((found, disagreement(images.members(rows)).to(found)), 1)
