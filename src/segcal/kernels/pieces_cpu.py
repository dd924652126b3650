"""Pieces of CPU logits for compiled loops, and the threads that take them; see ``segcal.kernels.cpu``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.errors import InputError
from segcal.kernels.pool import in_threads
from segcal.kernels.voxels import PIECE_VOXELS, Piece, Voxels

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
State = TypeVar("State")


class Labels(NamedTuple):
    """A piece's labels, the label of voxels that do not count, and the mask, which is empty where there is none."""

    values: NDArray[np.int64]
    ignored: int
    mask: NDArray[np.bool_]


def as_voxels(logits: Tensor, labels: Tensor | None = None, valid: Tensor | None = None) -> Voxels:
    """The voxels of logits ``(N, C, *spatial)``, to be taken piece by piece."""
    if logits.device.type != "cpu" or logits.dtype not in FLOATS:
        raise InputError(f"logits are {logits.dtype} on {logits.device}", expected="float32 or less on the CPU")
    return Voxels(logits, logits.select(1, 0) if labels is None else labels, mask=valid)


def matrix(voxels: Voxels, piece: Piece) -> tuple[NDArray[Any], slice]:
    """A C-contiguous float32 matrix ``(C, V)`` and the piece's columns in it: the logits themselves where possible."""
    scores, columns = voxels.scores(piece)
    if scores.dtype != torch.float32 or not scores.is_contiguous():
        scores, columns = scores[:, columns].float().contiguous(), slice(0, columns.stop - columns.start)
    return scores.numpy(), columns


def flat(voxels: Voxels, tensor: Tensor | None, piece: Piece, dtype: type[np.generic]) -> NDArray[Any]:
    """The piece's part of an ``(N, *spatial)`` tensor as a contiguous array; empty for None."""
    return np.empty(0, dtype) if tensor is None else np.ascontiguousarray(voxels.flat(tensor, piece).numpy(), dtype)


def labelled(voxels: Voxels, piece: Piece) -> Labels:
    """The piece's labels and mask."""
    return Labels(
        flat(voxels, voxels.labels, piece, np.int64), ignored_label(voxels), flat(voxels, voxels.mask, piece, np.bool_)
    )


def ignored_label(voxels: Voxels) -> int:
    """The label of voxels that do not count; where there is none, a number that is no label."""
    return int(np.iinfo(np.int64).min) if voxels.ignore_index is None else voxels.ignore_index


def block_size(classes: int, scores: int = 20480) -> int:
    """Voxels in a block of about ``scores`` numbers, 128 to 1024; six such matrices fit most second-level caches."""
    return max(128, min(1024, scores // classes // 64 * 64))


def workers(voxels: Voxels, threads: int | None = None) -> int:
    """The number of threads, at most one per piece; None means torch's number."""
    pieces = math.ceil(voxels.labels.numel() / PIECE_VOXELS)
    return max(1, min(threads or torch.get_num_threads(), pieces))


def sweep(
    voxels: Voxels,
    threads: int,
    new_state: Callable[[int], State],
    add: Callable[[State, Piece, NDArray[Any], slice], int],
    groups: int = 1,
) -> list[State]:
    """Let each thread add its share of the pieces to a state of its own; the states, in a fixed order.

    ``add`` takes a state, a piece and its matrix and columns, and returns the first unfit voxel in the piece, or -1.
    The error for the first unfit voxel of all is raised. ``groups`` threads each take the same pieces.
    """

    def work(turn: int) -> tuple[State, int]:
        state = new_state(turn)
        for piece in itertools.islice(voxels.pieces(), turn // groups, None, threads // groups):
            bad = add(state, piece, *matrix(voxels, piece))
            if bad >= 0:
                return state, piece.offset + bad
        return state, -1

    results = in_threads(work, threads)
    unfit = [place for _, place in results if place >= 0]
    if unfit:
        raise voxels.bad_voxel(min(unfit))
    return [state for state, _ in results]
