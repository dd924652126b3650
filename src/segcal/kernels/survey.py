"""The first look at data, in one read: is every voxel fit, what is the NLL, and in which stratum is each voxel?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.kernels import fast_maps
from segcal.kernels.pieces_cpu import block_size, sweep
from segcal.kernels.voxels import Voxels


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


def survey(voxels: Voxels, confidences: Sequence[float]) -> Survey:
    """Survey the valid voxels; raises if one is unfit.

    Examples:
        >>> logits, labels = torch.tensor([[4.0, 0.0], [0.0, 0.1]]), torch.tensor([0, 0])
        >>> found = survey(Voxels(logits, labels), (0.6, 0.9))
        >>> found.strata, found.true, round(found.nll, 4)
        (array([5, 6]), array([2, 0]), 0.7625)
    """
    edges = np.array(confidences, np.float32)
    return _reference(voxels, edges) if fast_maps(voxels.logits) is None else _fast(voxels, edges)


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
    from segcal.kernels.fitting_loops import survey_range
    from segcal.kernels.scratch import new_block
    from segcal.kernels.softmax_loops import Block

    classes = voxels.logits.shape[1]
    strata = np.empty(voxels.labels.numel(), np.int64)

    def new_state(turn: int) -> tuple[Any, ...]:
        block = new_block(Block, classes, block_size(classes))
        return edges, strata, block, np.zeros(classes, np.int64), np.zeros(2)

    *_, true, sums = zip(*sweep(voxels, survey_range, new_state), strict=True)
    nll, impossible = np.sum(sums, 0).tolist()
    return Survey(strata, np.sum(true, 0), nll, impossible > 0)
