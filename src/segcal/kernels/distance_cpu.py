"""Distances on the CPU by compiled loops that threads share, to the same bits for any number of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels import distance_loops as loops
from segcal.kernels.pieces_cpu import in_turn
from segcal.types import FloatArray

# Voxels that a thread takes at a time.
_PART = 2**15


def distances(boundary: Tensor, spacing: Sequence[float], threads: int | None = None) -> Tensor:
    """Of every voxel to the nearest one of ``boundary (N, *spatial)``, float32; inf where an image has none.

    Computed in float64, then rounded: 30 voxels of 0.1 mm are exactly 3 mm.
    """
    squares = squared_distances(boundary.numpy(), spacing, threads)
    return torch.from_numpy(roots(squares, threads))


def squared_distances(boundary: NDArray[np.bool_], spacing: Sequence[float], threads: int | None = None) -> FloatArray:
    """Squares of the distances along the last axes, as many as have a spacing; inf where there is no boundary."""
    if not spacing:
        return np.where(boundary, 0.0, np.inf)
    boundary = np.ascontiguousarray(boundary)
    squares = np.empty(boundary.shape)
    lines, out = (own.reshape(-1, boundary.shape[-1]) for own in (boundary, squares))
    step = max(1, _PART // boundary.shape[-1])
    in_turn(
        lambda start: loops.within_lines(lines, float(spacing[-1]), start, min(start + step, len(lines)), out),
        range(0, len(lines), step),
        threads,
    )
    for axis in range(boundary.ndim - 2, boundary.ndim - 1 - len(spacing), -1):
        along(squares, axis, spacing[axis - boundary.ndim], threads)
    return squares


def along(squares: FloatArray, axis: int, step: float, threads: int | None = None) -> None:
    """Squares of distances with the nearest voxel along one more axis, in place."""
    length, width = squares.shape[axis], math.prod(squares.shape[axis + 1 :])
    images = squares.reshape(-1, length, width)
    columns, part = len(images) * width, max(1, _PART // length)
    in_turn(
        lambda start: loops.across_lines(images, float(step), start, min(start + part, columns)),
        range(0, columns, part),
        threads,
    )


def roots(squares: FloatArray, threads: int | None = None) -> NDArray[np.float32]:
    """Float32 roots."""
    found, flat = np.empty(squares.shape, np.float32), squares.reshape(-1)
    in_turn(
        lambda start: loops.roots(flat, start, min(start + _PART, len(flat)), found.reshape(-1)),
        range(0, len(flat), _PART),
        threads,
    )
    return found


def sums_by_slot(
    distance: Tensor, keep: Tensor, slots: Tensor | None, count: int, threads: int | None = None
) -> FloatArray:
    """Sum and number of finite distances, and number of all, of the voxels to keep, by slot ``(count, 3)``."""
    values = distance if distance.dtype in (torch.float32, torch.float64) else distance.float()
    given = values.reshape(-1).numpy(), keep.reshape(-1).numpy()
    places = np.empty(0, np.uint8) if slots is None else slots.reshape(-1).numpy()

    def part(start: int) -> FloatArray:
        own = np.zeros((count, 3))
        loops.add_by_slot(*given, places, start, min(start + _PART, len(given[0])), own)
        return own

    # Added in this order: the sums do not depend on the number of threads.
    return sum(in_turn(part, range(0, len(given[0]), _PART), threads), start=np.zeros((count, 3)))
