"""Pieces of CPU logits for compiled loops; see ``segcal.kernels.cpu``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.errors import InputError
from segcal.kernels.grid import BinGrid
from segcal.kernels.voxels import PIECE_VOXELS, Piece, Voxels

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_NO_GRID = BinGrid.top_label((1,))  # nothing is binned here


def as_voxels(logits: Tensor, labels: Tensor | None = None, valid: Tensor | None = None) -> Voxels:
    """The voxels of logits ``(N, C, *spatial)``, to be taken piece by piece."""
    if logits.device.type != "cpu" or logits.dtype not in FLOATS:
        raise InputError(f"logits are {logits.dtype} on {logits.device}", expected="float32 or less on the CPU")
    return Voxels(logits, logits.select(1, 0) if labels is None else labels, _NO_GRID, None, mask=valid)


def matrix(voxels: Voxels, piece: Piece) -> tuple[NDArray[Any], slice]:
    """A C-contiguous float32 matrix ``(C, V)`` and the piece's columns in it: the logits themselves where possible."""
    scores, columns = voxels.scores(piece)
    if scores.dtype != torch.float32 or not scores.is_contiguous():
        scores, columns = scores[:, columns].float().contiguous(), slice(0, columns.stop - columns.start)
    return scores.numpy(), columns


def labelled(voxels: Voxels, piece: Piece) -> tuple[NDArray[np.int64], int, NDArray[np.bool_]]:
    """The piece's labels, the label of voxels that do not count, and the mask, which is empty where there is none."""
    labels = np.ascontiguousarray(voxels.flat(voxels.labels, piece).numpy(), np.int64)
    ignored = int(np.iinfo(np.int64).min) if voxels.ignore_index is None else voxels.ignore_index
    if voxels.mask is None:
        return labels, ignored, np.empty(0, np.bool_)
    return labels, ignored, np.ascontiguousarray(voxels.flat(voxels.mask, piece).numpy())


def block_size(classes: int, scores: int = 20480) -> int:
    """Voxels to work on at once: some hundreds, with so many scores; six such matrices fit most second caches."""
    return max(128, min(1024, scores // classes // 64 * 64))


def workers(voxels: Voxels, threads: int | None) -> int:
    """How many threads have something to do; None asks for torch's number."""
    pieces = math.ceil(voxels.labels.numel() / PIECE_VOXELS)
    return max(1, min(threads or torch.get_num_threads(), pieces))
