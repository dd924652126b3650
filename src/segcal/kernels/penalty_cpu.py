"""CRaC's penalty on the CPU in one pass over the logits, where torch's operations take a dozen."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from segcal.kernels.penalty_loops import phr_range
from segcal.kernels.pool import in_threads


def phr_terms(
    logits: Tensor, counts: Tensor, total: Tensor, multipliers: Tensor, rho: Tensor, margin: float, *, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """``sum_k lambda h + rho h^2 / 2`` of every voxel ``(B, *S)`` and its derivative by ``logits (B, C, *S)``.

    ``counts (B, C, *S)`` and ``total (B or 1, 1, *S)`` are those of ``segcal.losses.patches``; ``multipliers`` and
    ``rho`` are ``(2, C)``, for patches of one label and mixed ones.
    """
    images, classes, *space = logits.shape
    z = logits.contiguous().view(images, classes, -1).numpy()
    planes = counts.view(images, classes, -1).numpy()
    totals = total.expand(images, 1, *space).reshape(images, -1).numpy()
    tables = [np.ascontiguousarray(table.detach().cpu().numpy(), np.float32) for table in (multipliers, rho)]
    value = torch.empty(images, *space)
    slopes = torch.empty_like(logits, memory_format=torch.contiguous_format) if gradient else None
    nothing = np.empty((0, 0), np.float32)
    threads = max(1, min(torch.get_num_threads(), images))

    def work(turn: int) -> None:
        for n in range(turn, images, threads):
            into = nothing if slopes is None else slopes[n].view(classes, -1).numpy()
            phr_range(z[n], planes[n], totals[n], *tables, np.float32(margin), value[n].view(-1).numpy(), into)

    in_threads(work, threads)
    return value, slopes
