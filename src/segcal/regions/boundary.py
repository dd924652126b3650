"""Valid voxels, label boundaries, and the distance to them.

Conventions, written once. Labels and masks are ``(N, *spatial)``; ``spacing`` has one length per spatial axis.

* A voxel is *valid* if its label is not ``ignore_index`` and ``mask`` (True = valid) keeps it. Invalid voxels belong to
  no region and make no boundary: a change to or from an invalid voxel is not a label change.
* A *boundary voxel* is a valid voxel with a valid face neighbour of another label, so both sides of an edge are
  boundary voxels. The image border is no boundary.
* The *boundary region* (Ding et al., section 4) is all voxels within 2 of a label change: boundary voxels and their
  valid face neighbours, so two voxels on each side of an edge, in voxels whatever the spacing. The authors' released
  code has two on each side as well (it looks along the axes only and blanks the image margin); appendix G reads like
  three.
* The *distance* of a voxel is the Euclidean distance from its centre to the centre of the nearest boundary voxel, 0 on
  the boundary (Kirscher et al., appendix C). It is in voxels, or in the unit of ``spacing`` (mm) where that is given.
  Without any boundary it is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import distance_transform_edt
from torch import Tensor

from segcal.checks import checked_mask, holding
from segcal.errors import InputError
from segcal.kernels.dispatch import fast_distances

# Voxels to work on at once: arrays of about 32 MB, where those of whole volumes would take gigabytes.
CHUNK = 2**22


def valid_voxels(labels: Tensor, *, ignore_index: int | None = 255, mask: Tensor | None = None) -> Tensor:
    """``(N, *spatial)`` bool, True where the label is not ``ignore_index`` and ``mask`` (True = valid) keeps the voxel.

    Examples:
        >>> valid_voxels(torch.tensor([[0, 1, 255, 1]]), mask=torch.tensor([[True, True, True, False]]))
        tensor([[ True,  True, False, False]])
    """
    if labels.is_floating_point() or labels.is_complex():
        raise InputError(f"labels have dtype {labels.dtype}", expected="integers", fix="pass class indices")
    labels = holding(labels, ignore_index)
    valid = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    return valid if mask is None else valid & checked_mask(mask, labels, "mask")


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
        # Joined, not written in place: the C++ that torch.compile makes of bools written in place is refused by g++.
        none = torch.zeros_like(boundary.narrow(axis, 0, 1))
        boundary = boundary | torch.cat([change, none], axis) | torch.cat([none, change], axis)
    return boundary


def boundary_region(boundary: Tensor, valid: Tensor) -> Tensor:
    """``(N, *spatial)`` bool: boundary voxels and their valid face neighbours: all within 2 of a label change.

    Where all voxels are valid, another label can be reached from each of them in at most two face steps.

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


def distance_to(boundary: Tensor, spacing: tuple[float, ...], threads: int | None = None) -> Tensor:
    """Distance of every voxel to the nearest one of ``boundary (N, *spatial)``, float32; inf where an image has none.

    Large maps are computed by compiled loops, on a CPU shared by ``threads`` (None: torch's number), and on a GPU by
    triton; others by scipy.

    Examples:
        >>> distance_to(torch.tensor([[False, False, True]]), (2.0,))
        tensor([[4., 2., 0.]])
    """
    kernels = fast_distances(boundary) if spacing else None
    if kernels is not None:
        found: Tensor = kernels.distances(boundary, spacing, threads)
        return found
    boundaries = boundary.cpu().numpy()
    distance = np.full(boundaries.shape, np.inf, np.float32)
    for image, own in zip(distance, boundaries, strict=True):
        if own.any():
            _distance_transform(own, spacing, image)
    return torch.from_numpy(distance).to(boundary.device)


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
    """The distance of every voxel of an image to the nearest boundary voxel.

    scipy finds the nearest voxels. It could compute the same distances, but needs another 40 bytes a voxel for that.
    """
    nearest = np.empty((boundary.ndim, *boundary.shape), np.int32)
    distance_transform_edt(~boundary, sampling=spacing, return_distances=False, return_indices=True, indices=nearest)
    step = max(1, CHUNK // math.prod(boundary.shape[1:]))
    for start in range(0, len(boundary), step):
        rows = slice(start, min(start + step, len(boundary)))
        squares = np.zeros((rows.stop - start, *boundary.shape[1:]))
        for axis, length in enumerate(spacing):
            here = np.arange(boundary.shape[axis], dtype=np.int32)[rows if axis == 0 else slice(None)]
            offset = nearest[axis, rows] - here.reshape(-1, *[1] * (boundary.ndim - 1 - axis))
            squares += np.square(offset * length)
        # Computed in float64, then rounded: 30 voxels of 0.1 mm are exactly 3 mm.
        out[rows] = np.sqrt(squares)
