"""CRaC's penalty on the CPU in one pass over labels and logits; torch's operations would take thirty."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from segcal.kernels.penalty_loops import add_phr_lines
from segcal.kernels.pool import in_threads

_NO_GRADIENT = np.empty((0, 0, 0, 0, 0), np.float32)


def add_phr(
    value: Tensor,
    gradient: Tensor | None,
    logits: Tensor,
    codes: Tensor,
    tables: tuple[Tensor, Tensor],
    *,
    margin: float,
    patch: int,
    scale: float,
) -> None:
    """Add ``scale sum_k lambda h + rho h^2 / 2`` of every voxel to ``value (B, *S)``, its slope to ``gradient``.

    ``logits`` and ``gradient`` are ``(B, C, *S)``, contiguous; ``codes (B, *S)`` uint8 hold C where a label is ignored;
    ``tables`` are lambda and rho ``(2, C)``.
    """
    images, classes, *space = logits.shape
    depth, height, width = (1, *space)[-3:]
    planes, volumes = (images, depth, height, width), (images, classes, depth, height, width)
    multipliers, rho = (np.ascontiguousarray(table.detach().cpu().numpy(), np.float32) for table in tables)
    arrays = logits.view(volumes).numpy(), codes.view(planes).numpy()
    totals = value.view(planes).numpy(), _NO_GRADIENT if gradient is None else gradient.view(volumes).numpy()
    lines, threads = images * depth * height, torch.get_num_threads()
    depth_radius, radius = (patch // 2 if len(space) == 3 else 0), patch // 2

    def work(turn: int) -> None:
        first, last = lines * turn // threads, lines * (turn + 1) // threads
        add_phr_lines(
            *arrays, first, last, depth_radius, radius, multipliers, rho, np.float32(margin), np.float32(scale), *totals
        )

    in_threads(work, threads)
