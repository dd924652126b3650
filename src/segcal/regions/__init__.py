"""Where in an image to look: boundaries, distance bands, local patches and masks.

``segcal.regions.boundary`` defines valid voxels, boundaries and distances. The distance map is the expensive part:
``CaseRegions`` computes it once per case, when a band is first needed.

Examples:
    >>> CaseRegions(torch.tensor([[0, 0, 0, 0, 1, 1]])).mask("interior")
    tensor([[ True,  True, False, False, False, False]])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal.checks import checked_mask
from segcal.errors import InputError, check_name
from segcal.regions.boundary import CHUNK, boundary_region, checked_spacing, distance_to, label_boundary, valid_voxels

#: Distances between which the bands lie (Kirscher et al., appendix C), and the ids of the bands.
BAND_EDGES = (0.0, 3.0, 7.0, 15.0, math.inf)
BANDS = tuple(f"band-{low:g}-{high:g}" for low, high in pairwise(BAND_EDGES))
#: Random patches per image, and voxels along their sides (Ding et al., section 4).
PATCH_COUNT, PATCH_SIZE = 10, 72

Window = tuple[slice, ...]


def boundary_distance(
    labels: Tensor, *, spacing: Sequence[float] | None = None, ignore_index: int = 255, mask: Tensor | None = None
) -> Tensor:
    """Exact Euclidean distance of every voxel to the nearest boundary voxel: ``(N, *spatial)`` float32.

    Args:
        labels: Class indices ``(N, *spatial)``, on any device; the result is on the same. Without spatial axes there
            are no neighbours and so no boundary.
        spacing: Voxel size per spatial axis; None means that distances are in voxels.
        ignore_index: The label that makes a voxel invalid.
        mask: ``(N, *spatial)`` bool, True where the voxel is valid.

    Examples:
        >>> boundary_distance(torch.tensor([[0, 0, 0, 1, 1]]))
        tensor([[2., 1., 0., 0., 1.]])
        >>> boundary_distance(torch.tensor([[0, 0, 0, 255, 1]]))
        tensor([[inf, inf, inf, inf, inf]])
    """
    return CaseRegions(labels, spacing=spacing, ignore_index=ignore_index, mask=mask).distance


def band_index(distance: Tensor, valid: Tensor) -> Tensor:
    """Distance band of every voxel: ``(N, *spatial)`` int8, 0..3 for [0, 3), [3, 7), [7, 15), [15, inf], -1 if invalid.

    Kirscher et al., appendix C. Voxels of an image without boundary are infinitely far away, so in the last band.

    Examples:
        >>> band_index(torch.tensor([[0.0, 2.9, 3.0, 15.0, torch.inf, 1.0]]), torch.tensor([[True] * 5 + [False]]))
        tensor([[ 0,  0,  1,  3,  3, -1]], dtype=torch.int8)
    """
    inner = torch.tensor(BAND_EDGES[1:-1], dtype=distance.dtype, device=distance.device)
    index = torch.empty(distance.shape, dtype=torch.int8, device=distance.device)
    flat, values = index.view(-1), distance.reshape(-1)
    for start in range(0, len(flat), CHUNK):
        part = slice(start, start + CHUNK)
        flat[part] = torch.bucketize(values[part], inner, right=True, out_int32=True)
    return index.masked_fill_(~valid, -1)


def local_patches(
    spatial: Sequence[int], *, count: int = PATCH_COUNT, size: int = PATCH_SIZE, seed: int = 0
) -> list[Window]:
    """``count`` random windows of ``size`` voxels along every axis, inside the image, drawn uniformly.

    Ding et al., section 4: metrics are computed in each patch, then averaged (Local-Avg) and maximised (Local-Max).
    Along an axis shorter than ``size`` every window spans the whole axis. In an image no larger than a patch all
    windows are the whole image, and so mean and maximum are those of the image. The same seed gives the same windows.

    Examples:
        >>> local_patches((100, 50), count=2, seed=1)
        [(slice(13, 85, None), slice(0, 50, None)), (slice(14, 86, None), slice(0, 50, None))]
    """
    if count < 1 or size < 1:
        raise InputError(f"count is {count} and size is {size}", expected="at least 1 each")
    random = np.random.default_rng(seed)
    widths = [min(size, length) for length in spatial]
    last = [length - width for length, width in zip(spatial, widths, strict=True)]
    starts = random.integers(0, last, size=(count, len(last)), endpoint=True).tolist()
    return [tuple(slice(a, a + width) for a, width in zip(start, widths, strict=True)) for start in starts]


class CaseRegions:
    """The regions of one case (or batch), derived from one boundary and one distance map, each computed when needed.

    Args:
        labels: Class indices ``(N, *spatial)``.
        spacing: Voxel size per spatial axis; None means that all lengths are in voxels.
        ignore_index: The label that makes a voxel invalid.
        mask: ``(N, *spatial)`` bool, True where the voxel is valid.
        background: The class that is not foreground; None if every class is.
        seed: Seed of the local patches, which are shared by the N images; give every case its own.
        distance: The distances to the boundary, if they are known: those of a part of an image depend on the rest.

    Examples:
        >>> regions = CaseRegions(torch.tensor([[0, 0, 0, 0, 1, 1]]))
        >>> regions.mask("boundary")
        tensor([[False, False,  True,  True,  True,  True]])
        >>> regions.mask("foreground")
        tensor([[False, False, False, False,  True,  True]])
        >>> regions.bands
        tensor([[1, 0, 0, 0, 0, 0]], dtype=torch.int8)
    """

    def __init__(
        self,
        labels: Tensor,
        *,
        spacing: Sequence[float] | None = None,
        ignore_index: int = 255,
        mask: Tensor | None = None,
        background: int | None = 0,
        seed: int = 0,
        distance: Tensor | None = None,
    ) -> None:
        self.labels, self.background, self._distance = labels, background, distance
        self.spacing = checked_spacing(spacing, labels)
        self.valid = valid_voxels(labels, ignore_index=ignore_index, mask=mask)
        self.seed = seed

    @cached_property
    def boundary(self) -> Tensor:
        """``(N, *spatial)`` bool boundary voxels; see ``label_boundary``."""
        return label_boundary(self.labels, self.valid)

    @property
    def foreground(self) -> Tensor:
        """``(N, *spatial)`` bool: where the label is not the background."""
        return self.valid if self.background is None else self.labels != self.background

    @cached_property
    def distance(self) -> Tensor:
        """``(N, *spatial)`` float32 distance to the nearest boundary voxel, of invalid voxels too; inf without any."""
        return distance_to(self.boundary, self.spacing) if self._distance is None else self._distance

    @cached_property
    def bands(self) -> Tensor:
        """``(N, *spatial)`` int8 band index, -1 where invalid; see ``band_index``."""
        return band_index(self.distance, self.valid)

    def mask(self, region: str | Tensor) -> Tensor:
        """``(N, *spatial)`` bool: the valid voxels in a region of ``REGIONS`` (not ``local``) or in any user mask.

        Examples:
            >>> CaseRegions(torch.tensor([[0, 1, 255]])).mask(torch.tensor([[False, True, True]]))
            tensor([[False,  True, False]])
        """
        if isinstance(region, Tensor):
            return self.valid & checked_mask(region, self.labels, "region")
        check_name("region", region, REGIONS, expected=f"a bool mask or one of {', '.join(REGIONS)}")
        select = REGIONS[region].select
        if select is None:
            raise InputError(f"region {region!r} has many masks", fix=f"iterate over CaseRegions.parts({region!r})")
        return self.valid & select(self)

    def parts(self, region: str | Tensor) -> list[Part]:
        """The windows of a region and the masks in them: ten for ``local``, one for all others.

        Examples:
            >>> regions = CaseRegions(torch.zeros(1, 90, 80, dtype=torch.int64))
            >>> [part.mask.shape for part in regions.parts("local")][:2]
            [torch.Size([1, 72, 72]), torch.Size([1, 72, 72])]
        """
        if isinstance(region, Tensor) or region != "local":
            return [Part(tuple(slice(0, length) for length in self.labels.shape[1:]), self.mask(region))]
        patches = []
        for window in local_patches(self.labels.shape[1:], seed=self.seed):
            index = (slice(None), *window)
            patches.append(Part(window, self.valid[index]))
        return patches


class Part(NamedTuple):
    """A part of a region: a window of the image, and the ``(N, *window)`` bool mask of its voxels in that window.

    ``labels[(slice(None), *part.window)][part.mask]`` are its labels.
    """

    window: Window
    mask: Tensor


@dataclass(frozen=True)
class Region:
    """An entry of ``REGIONS``: what the region is, and which voxels of a case are in it; None for local patches.

    Examples:
        >>> REGIONS["foreground"].description
        'label is not the background'
    """

    id: str
    description: str
    select: Callable[[CaseRegions], Tensor] | None


def _band(index: int) -> Region:
    low, high = BAND_EDGES[index : index + 2]
    return Region(BANDS[index], f"distance to the boundary in [{low:g}, {high:g})", lambda case: case.bands == index)


def _boundary(case: CaseRegions) -> Tensor:
    return boundary_region(case.boundary, case.valid)


_ALL_REGIONS = (
    Region("everything", "all valid voxels", lambda case: case.valid),
    Region("foreground", "label is not the background", lambda case: case.foreground),
    Region("all", "foreground plus its boundary ring", lambda case: case.foreground | _boundary(case)),
    Region("boundary", "within 2 voxels of a label change", _boundary),
    Region("interior", "further than 2 voxels from any label change", lambda case: ~_boundary(case)),
    *map(_band, range(len(BANDS))),
    Region("local", f"{PATCH_COUNT} random patches of {PATCH_SIZE} voxels a side: mean and maximum", None),
)

#: Region id to region. ``all``, ``boundary`` and ``local`` are Ding et al. (LTS, section 4), bands Kirscher et al.
REGIONS: dict[str, Region] = {region.id: region for region in _ALL_REGIONS}
