"""Distances on a CUDA device, the twin of ``distance_cpu``: triton, squares in float64, the same bits every time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from segcal.kernels import cuda_distance_loops as loops
from segcal.kernels.cuda_walk import flat, launch
from segcal.types import FloatArray

# Voxels of a block, and programs that share the sums by slot: eight for each of an H200's processors.
_BLOCK, _PROGRAMS = 256, 132 * 8


def distances(boundary: Tensor, spacing: Sequence[float], threads: int | None = None) -> Tensor:
    """See ``distance_cpu.distances``. ``threads`` is not used."""
    squares = torch.where(boundary.contiguous(), 0.0, torch.tensor(math.inf, dtype=torch.float64))
    out, steps = torch.empty_like(squares), torch.tensor(spacing, dtype=torch.float64, device=boundary.device)
    for axis in range(boundary.ndim - 1, 0, -1):
        launch(
            loops.nearest_loop, -(-squares.numel() // _BLOCK),
            squares, out, steps, axis - 1, squares.numel(), squares.shape[axis],
            math.prod(squares.shape[axis + 1 :]), BLOCK=_BLOCK,
        )  # fmt: skip
        squares, out = out, squares
    return squares.sqrt_().float()


def sums_by_slot(
    distance: Tensor, keep: Tensor, slots: Tensor | None, count: int, threads: int | None = None
) -> FloatArray:
    """See ``distance_cpu.sums_by_slot``. ``threads`` is not used."""
    far, kept, places = distance.reshape(-1), keep.reshape(-1), flat(slots, distance.device)
    programs = max(1, min(_PROGRAMS, -(-len(far) // _BLOCK)))
    sums = torch.zeros(programs, count, 3, dtype=torch.float64, device=distance.device)
    launch(
        loops.slot_sums_loop, programs,
        far, kept.view(torch.uint8), kept if places is None else places, sums, len(far), count,
        BLOCK=_BLOCK, SLOTTED=places is not None,
    )  # fmt: skip
    found: FloatArray = sums.sum(0).cpu().numpy()
    return found
