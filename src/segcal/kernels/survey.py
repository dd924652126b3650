"""The first look at data: is every voxel fit, what is its NLL, and in which stratum does it lie; one read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels import fast_maps
from segcal.kernels.grid import BinGrid
from segcal.kernels.voxels import Voxels

_NO_GRID = BinGrid.top_label((1,))  # nothing is binned here


class Survey(NamedTuple):
    """Of the voxels that count.

    Attributes:
        strata: Of every voxel, flat: ``(2 winner + right) (n + 1) + level`` with ``level`` the number of the n
            confidences that are below the voxel's, and -1 where it does not count.
        true: How many have each label ``(C,)``.
        nll: The sum of theirs.
        impossible: Whether some class is, in some voxel.
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
    """Survey the valid voxels of logits ``(N, C, *spatial)``; raises where one is unfit.

    Examples:
        >>> found = survey(torch.tensor([[4.0, 0.0], [0.0, 0.1]]), torch.tensor([0, 0]), (0.6, 0.9))
        >>> found.strata, found.true, round(found.nll, 4)
        (array([5, 6]), array([2, 0]), 0.7625)
    """
    voxels = Voxels(logits, labels, _NO_GRID, None, ignore_index=ignore_index, mask=mask)
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
    from segcal.kernels.apply_loops import new_block
    from segcal.kernels.pieces_cpu import block_size, labelled, matrix, workers
    from segcal.kernels.pool import in_threads
    from segcal.kernels.survey_loops import survey_range

    classes, count = voxels.logits.shape[1], workers(voxels, None)
    strata = np.empty(voxels.labels.numel(), np.int64)

    def work(turn: int) -> tuple[NDArray[np.int64], NDArray[np.float64], int]:
        block, true, sums = new_block(classes, block_size(classes)), np.zeros(classes, np.int64), np.zeros(2)
        for piece in itertools.islice(voxels.pieces(), turn, None, count):
            x, columns = matrix(voxels, piece)
            bad = survey_range(
                x, columns.start, columns.stop, *labelled(voxels, piece),
                edges, block, strata[piece.offset :], true, sums,
            )  # fmt: skip
            if bad >= 0:
                return true, sums, piece.offset + bad
        return true, sums, -1

    results = in_threads(work, count)
    unfit = [place for *_, place in results if place >= 0]
    if unfit:
        raise voxels.bad_voxel(min(unfit))
    nll, impossible = np.sum([sums for _, sums, _ in results], 0).tolist()
    return Survey(strata, np.sum([true for true, _, _ in results], 0), nll, impossible > 0)
