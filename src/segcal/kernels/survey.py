"""The first look at data, in one read: is every voxel fit, what is the NLL, and in which stratum is each voxel?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels import fast_maps
from segcal.kernels.pieces_cpu import block_size, labelled, sweep, workers
from segcal.kernels.voxels import Piece, Voxels


class Survey(NamedTuple):
    """What is found in the voxels that count.

    Attributes:
        strata: The stratum of every voxel, flat: ``(2 winner + right) (n + 1) + level``, where ``level`` is how many
            of the n confidences are below the voxel's; -1 where a voxel does not count.
        true: The number of voxels with each label ``(C,)``.
        nll: The sum of their NLL.
        impossible: Whether some voxel has an impossible class.
    """

    strata: NDArray[np.int64]
    true: NDArray[np.int64]
    nll: float
    impossible: bool


def survey(
    logits: Tensor,
    labels: Tensor,
    confidences: Sequence[float],
    *,
    ignore_index: int | None = None,
    mask: Tensor | None = None,
) -> Survey:
    """Survey the valid voxels of logits ``(N, C, *spatial)``; raises if one is unfit.

    Examples:
        >>> found = survey(torch.tensor([[4.0, 0.0], [0.0, 0.1]]), torch.tensor([0, 0]), (0.6, 0.9))
        >>> found.strata, found.true, round(found.nll, 4)
        (array([5, 6]), array([2, 0]), 0.7625)
    """
    voxels = Voxels(logits, labels, ignore_index=ignore_index, mask=mask)
    edges = np.array(confidences, np.float32)
    return _reference(voxels, edges) if fast_maps(logits) is None else _fast(voxels, edges)


def _reference(voxels: Voxels, edges: NDArray[np.float32]) -> Survey:
    strata, true = np.full(voxels.labels.numel(), -1), np.zeros(voxels.logits.shape[1], np.int64)
    nll, impossible = 0.0, False
    for piece in voxels.pieces():
        z, y, valid = (tensor.cpu() for tensor in voxels.checked(piece))
        winner, log_p = z.argmax(0), z.log_softmax(0)
        level = torch.bucketize(log_p.amax(0).exp(), torch.from_numpy(edges).double())
        own = strata[piece.offset : piece.offset + len(valid)]
        own[valid.numpy()] = (winner * 2 + (winner == y)) * (len(edges) + 1) + level
        true += np.bincount(y, minlength=len(true))
        nll -= float(log_p.gather(0, y[None]).sum())
        impossible |= bool(torch.isneginf(z).any())
    return Survey(strata, true, nll, impossible)


def _fast(voxels: Voxels, edges: NDArray[np.float32]) -> Survey:
    from segcal.kernels.apply_loops import Block
    from segcal.kernels.scratch import new_block
    from segcal.kernels.survey_loops import survey_range

    classes = voxels.logits.shape[1]
    strata = np.empty(voxels.labels.numel(), np.int64)

    def new_state(turn: int) -> tuple[Any, NDArray[np.int64], NDArray[np.float64]]:
        return new_block(Block, classes, block_size(classes)), np.zeros(classes, np.int64), np.zeros(2)

    def add(state: tuple[Any, ...], piece: Piece, x: NDArray[Any], columns: slice) -> int:
        block, true, sums = state
        bad: int = survey_range(
            x, columns.start, columns.stop, labelled(voxels, piece), edges, block, strata[piece.offset :], true, sums
        )
        return bad

    _, true, sums = zip(*sweep(voxels, workers(voxels), new_state, add), strict=True)
    nll, impossible = np.sum(sums, 0).tolist()
    return Survey(strata, np.sum(true, 0), nll, impossible > 0)
