"""Where in an image to look: boundaries, distance bands, local patches and masks.

Conventions, written once. Labels and masks are ``(N, *spatial)``; ``spacing`` has one length per spatial axis.

* A voxel is *valid* when its label is not ``ignore_index`` and ``mask`` (True = valid) keeps it. Invalid voxels are in
  no region, and they make no boundary: a change to or from an invalid voxel is not a label change.
* A *boundary voxel* is a valid voxel with a valid face neighbour of another label, so both sides of an edge are
  boundary voxels. The image border is no boundary.
* The *boundary region* (Ding et al., section 4) holds the voxels within 2 of a label change: boundary voxels and their
  valid face neighbours, so two voxels on each side of an edge, in voxels whatever the spacing. The authors' released
  code has two a side as well (it looks along the axes only and blanks the image margin); appendix G reads like three.
* The *distance* of a voxel is the Euclidean distance from its centre to the centre of the nearest boundary voxel, 0 on
  the boundary (Kirscher et al., appendix C), in voxels, or in the unit of ``spacing`` (mm) where it is given: then the
  band edges are lengths in that unit too. Without any boundary it is infinite.

The distance map is the expensive thing. ``CaseRegions`` computes it once per case, when a band is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt
from torch import Tensor

from segcal.errors import InputError, check_name

BAND_EDGES = (0.0, 3.0, 7.0, 15.0, math.inf)
PATCH_COUNT = 10
PATCH_SIZE = 72
# Voxels turned into distances and bands at once: a few arrays of 32 MB, where whole volumes would take gigabytes.
_PART = 2**22

Window = tuple[slice, ...]


def valid_voxels(labels: Tensor, *, ignore_index: int | None = 255, mask: Tensor | None = None) -> Tensor:
    """``(N, *spatial)`` bool, True where the label is not ``ignore_index`` and ``mask`` (True = valid) keeps the voxel.

    Examples:
        >>> valid_voxels(torch.tensor([[0, 1, 255, 1]]), mask=torch.tensor([[True, True, True, False]]))
        tensor([[ True,  True, False, False]])
    """
    if labels.is_floating_point() or labels.is_complex():
        raise InputError(f"labels have dtype {labels.dtype}", expected="integers", fix="pass class indices")
    valid = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    return valid if mask is None else valid & _checked_mask(mask, labels, "mask")


def label_boundary(labels: Tensor, valid: Tensor) -> Tensor:
    """``(N, *spatial)`` bool: valid voxels with a valid face neighbour of another label, on both sides of an edge.

    Examples:
        >>> label_boundary(torch.tensor([[0, 0, 1, 1]]), torch.ones(1, 4, dtype=torch.bool))
        tensor([[False,  True,  True, False]])
    """
    boundary = torch.zeros_like(valid)
    for axis in range(1, labels.ndim):
        pairs = labels.shape[axis] - 1
        change = labels.narrow(axis, 0, pairs) != labels.narrow(axis, 1, pairs)
        change &= valid.narrow(axis, 0, pairs) & valid.narrow(axis, 1, pairs)
        boundary.narrow(axis, 0, pairs).logical_or_(change)
        boundary.narrow(axis, 1, pairs).logical_or_(change)
    return boundary


def boundary_region(boundary: Tensor, valid: Tensor) -> Tensor:
    """``(N, *spatial)`` bool: boundary voxels and their valid face neighbours, i.e. all within 2 of a label change.

    Where all voxels are valid, these are the voxels from which two face steps or fewer lead to another label.

    Examples:
        >>> valid = torch.ones(1, 6, dtype=torch.bool)
        >>> boundary_region(label_boundary(torch.tensor([[0, 0, 0, 1, 1, 1]]), valid), valid)
        tensor([[False,  True,  True,  True,  True, False]])
    """
    region = boundary.clone()
    for axis in range(1, boundary.ndim):
        pairs = boundary.shape[axis] - 1
        region.narrow(axis, 0, pairs).logical_or_(boundary.narrow(axis, 1, pairs))
        region.narrow(axis, 1, pairs).logical_or_(boundary.narrow(axis, 0, pairs))
    return region & valid


def boundary_distance(
    labels: Tensor, *, spacing: Sequence[float] | None = None, ignore_index: int = 255, mask: Tensor | None = None
) -> Tensor:
    """Exact Euclidean distance of every voxel to the nearest boundary voxel: ``(N, *spatial)`` float32.

    By scipy, where the ``edt`` package is about three times faster: see ``benchmarks/results/surfaces.txt``.

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

    Kirscher et al., appendix C. Voxels of an image without boundary are infinitely far: in the last band.

    Examples:
        >>> band_index(torch.tensor([[0.0, 2.9, 3.0, 15.0, torch.inf, 1.0]]), torch.tensor([[True] * 5 + [False]]))
        tensor([[ 0,  0,  1,  3,  3, -1]], dtype=torch.int8)
    """
    inner = torch.tensor(BAND_EDGES[1:-1], dtype=distance.dtype, device=distance.device)
    index = torch.empty(distance.shape, dtype=torch.int8, device=distance.device)
    flat, values = index.view(-1), distance.reshape(-1)
    for start in range(0, len(flat), _PART):
        part = slice(start, start + _PART)
        flat[part] = torch.bucketize(values[part], inner, right=True, out_int32=True)
    return index.masked_fill_(~valid, -1)


@dataclass(frozen=True)
class BandTotals:
    """What boundary-aware ECE needs to know of the distances in each band; additive over cases and shards.

    Both cover voxels at a finite distance: an image without boundary adds nothing, so it cannot spoil the others.

    Attributes:
        counts: ``(bands,)`` int64, voxels.
        distance_sums: ``(bands,)`` float64, the sum of their distances.

    Examples:
        >>> totals = CaseRegions(torch.tensor([[0, 0, 0, 0, 1]])).band_totals
        >>> totals.counts, totals.distance_sums
        (tensor([4, 1, 0, 0]), tensor([3., 3., 0., 0.], dtype=torch.float64))
        >>> (totals + totals).mean_distance
        tensor([0.7500, 3.0000,    inf,    inf], dtype=torch.float64)
    """

    counts: Tensor
    distance_sums: Tensor

    def __add__(self, other: BandTotals) -> BandTotals:
        return BandTotals(self.counts + other.counts, self.distance_sums + other.distance_sums)

    @property
    def mean_distance(self) -> Tensor:
        """``(bands,)`` float64; inf where no voxel of the band is at a finite distance, which means weight 0."""
        return torch.where(self.counts > 0, self.distance_sums / self.counts, math.inf)


def local_patches(
    spatial: Sequence[int], *, count: int = PATCH_COUNT, size: int = PATCH_SIZE, seed: int = 0
) -> list[Window]:
    """``count`` random windows of ``size`` voxels along every axis, inside the image, drawn uniformly.

    Ding et al., section 4: metrics are computed in each patch, then averaged (Local-Avg) and maximised (Local-Max).
    Along an axis shorter than ``size`` every window spans the whole axis; an image no larger than the patch gives
    ``count`` times itself, so that mean and maximum are those of the image. The same seed gives the same windows.

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
        background: The class that is no foreground; None where there is none.
        seed: Seed of the local patches, which are shared by the N images; give every case its own.

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
    ) -> None:
        self.labels, self.background = labels, background
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
        boundaries = self.boundary.cpu().numpy()
        distance = np.full(boundaries.shape, np.inf, np.float32)
        for image, boundary in zip(distance, boundaries, strict=True):
            if boundary.any():
                _distance_transform(boundary, self.spacing, image)
        return torch.from_numpy(distance).to(self.labels.device)

    @cached_property
    def bands(self) -> Tensor:
        """``(N, *spatial)`` int8 band index, -1 where invalid; see ``band_index``."""
        return band_index(self.distance, self.valid)

    @cached_property
    def band_totals(self) -> BandTotals:
        """Counts and distance sums per band over all valid voxels at a finite distance."""
        measured = self.valid & self.distance.isfinite()
        # One reduction per band, because a weighted bincount on CUDA adds in a different order every time.
        bands = [self.distance[measured & (self.bands == index)] for index in range(len(BAND_EDGES) - 1)]
        counts = torch.tensor([band.numel() for band in bands], device=self.labels.device)
        return BandTotals(counts, torch.stack([band.sum(dtype=torch.float64) for band in bands]))

    def mask(self, region: str | Tensor) -> Tensor:
        """``(N, *spatial)`` bool: the valid voxels in a region of ``REGIONS`` (not ``local``) or in any user mask.

        Examples:
            >>> CaseRegions(torch.tensor([[0, 1, 255]])).mask(torch.tensor([[False, True, True]]))
            tensor([[False,  True, False]])
        """
        if isinstance(region, Tensor):
            return self.valid & _checked_mask(region, self.labels, "region")
        if region == "local":
            raise InputError("region 'local' has many masks", fix="iterate over CaseRegions.parts('local')")
        return next(iter(self.parts(region))).mask

    def parts(self, region: str | Tensor) -> Iterator[Part]:
        """The windows of a region and the masks in them, one after the other: ten for ``local``, one for all others.

        Examples:
            >>> regions = CaseRegions(torch.zeros(1, 90, 80, dtype=torch.int64))
            >>> [part.mask.shape for part in regions.parts("local")][:2]
            [torch.Size([1, 72, 72]), torch.Size([1, 72, 72])]
        """
        if isinstance(region, Tensor):
            return iter([Part(self._whole, self.mask(region))])
        check_name("region", region, REGIONS, expected=f"a bool mask or one of {', '.join(REGIONS)}")
        return REGIONS[region].parts(self)

    @property
    def _whole(self) -> Window:
        return tuple(slice(0, length) for length in self.labels.shape[1:])


class Part(NamedTuple):
    """A piece of a region: its window in the image and the ``(N, *window)`` bool mask of its voxels in there.

    ``labels[(slice(None), *part.window)][part.mask]`` are its labels.
    """

    window: Window
    mask: Tensor


@dataclass(frozen=True)
class Region:
    """An entry of ``REGIONS``: what the region is, and its parts in a case.

    Examples:
        >>> REGIONS["foreground"].description
        'label is not the background'
        >>> next(REGIONS["foreground"].parts(CaseRegions(torch.tensor([[0, 2, 255]])))).mask
        tensor([[False,  True, False]])
    """

    id: str
    description: str
    parts: Callable[[CaseRegions], Iterator[Part]]


def _one_mask(id: str, description: str, select: Callable[[CaseRegions], Tensor]) -> Region:
    def parts(case: CaseRegions) -> Iterator[Part]:
        yield Part(case._whole, case.valid & select(case))

    return Region(id, description, parts)


def _band(index: int) -> Region:
    low, high = (f"{edge:g}" for edge in BAND_EDGES[index : index + 2])
    description = f"distance to the boundary in [{low}, {high})"
    return _one_mask(f"band-{low}-{high}", description, lambda case: case.bands == index)


def _patches(case: CaseRegions) -> Iterator[Part]:
    for window in local_patches(case.labels.shape[1:], seed=case.seed):
        index = (slice(None), *window)
        yield Part(window, case.valid[index])


def _boundary(case: CaseRegions) -> Tensor:
    return boundary_region(case.boundary, case.valid)


_ALL_REGIONS = (
    _one_mask("everything", "all valid voxels", lambda case: case.valid),
    _one_mask("foreground", "label is not the background", lambda case: case.foreground),
    _one_mask("all", "foreground plus its boundary ring", lambda case: case.foreground | _boundary(case)),
    _one_mask("boundary", "within 2 voxels of a label change", _boundary),
    _one_mask("interior", "further than 2 voxels from any label change", lambda case: ~_boundary(case)),
    *(_band(index) for index in range(len(BAND_EDGES) - 1)),
    Region("local", f"{PATCH_COUNT} random patches of {PATCH_SIZE} voxels a side: mean and maximum", _patches),
)

#: Region id to what it is. ``all``, ``boundary`` and ``local`` are Ding et al. (LTS, section 4), bands Kirscher et al.
REGIONS: dict[str, Region] = {region.id: region for region in _ALL_REGIONS}


def checked_spacing(spacing: Sequence[float] | None, labels: Tensor) -> tuple[float, ...]:
    """The spacing as one positive float per spatial axis of ``labels (N, *spatial)``; ones for None.

    Examples:
        >>> checked_spacing(None, torch.zeros(1, 4, 5))
        (1.0, 1.0)
    """
    axes = labels.ndim - 1
    if axes < 0 or 0 in labels.shape[1:]:
        raise InputError(f"labels have shape {tuple(labels.shape)}", expected="(N, *spatial) with at least one voxel")
    lengths = (1.0,) * axes if spacing is None else tuple(float(length) for length in spacing)
    if len(lengths) != axes or not all(0 < length < math.inf for length in lengths):
        raise InputError(
            f"spacing is {lengths} for labels of shape {tuple(labels.shape)}",
            expected=f"{axes} positive lengths, one per spatial axis",
            fix="leave spacing out to measure in voxels",
        )
    return lengths


def _distance_transform(boundary: NDArray[np.bool_], spacing: tuple[float, ...], out: NDArray[np.float32]) -> None:
    """The distance of every voxel of an image to the nearest one of the boundary.

    scipy finds the nearest voxels; its own distances are the same but take another 40 bytes a voxel on the way.
    """
    nearest = np.empty((boundary.ndim, *boundary.shape), np.int32)
    distance_transform_edt(~boundary, sampling=spacing, return_distances=False, return_indices=True, indices=nearest)
    step = max(1, _PART // math.prod(boundary.shape[1:]))
    for start in range(0, len(boundary), step):
        rows = slice(start, min(start + step, len(boundary)))
        squares = np.zeros((rows.stop - start, *boundary.shape[1:]))
        for axis, length in enumerate(spacing):
            here = np.arange(boundary.shape[axis], dtype=np.int32)[rows if axis == 0 else slice(None)]
            offset = nearest[axis, rows] - here.reshape(-1, *[1] * (boundary.ndim - 1 - axis))
            squares += np.square(offset * length)
        # In float64, then rounded: 30 voxels of 0.1 mm are 3 mm then, and not just above or below.
        out[rows] = np.sqrt(squares)


def _checked_mask(mask: Tensor, labels: Tensor, name: str) -> Tensor:
    if mask.shape != labels.shape or mask.dtype != torch.bool:
        raise InputError(
            f"{name} has shape {tuple(mask.shape)} and dtype {mask.dtype}",
            expected=f"shape {tuple(labels.shape)} as the labels have, dtype torch.bool",
            fix=f"pass {name} as (N, *spatial), True where a voxel belongs",
        )
    return mask.to(labels.device)
