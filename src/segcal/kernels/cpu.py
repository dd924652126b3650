"""The CPU twin of ``segcal.kernels.reference``: numba, compiled once and cached on disk.

Logits lie class by class, so a voxel's classes are far apart in memory. The kernel takes blocks of 1024 voxels, which
stay in the core's cache, through one step after the other, each a loop over voxels with unit stride that the compiler
turns into vector instructions: maximum, exp, sums over classes, log. Only binning is scalar, and it looks at no
probability of the lowest bin (most of them): those are summed by vector instructions and counted by difference.

Precision: exp has a relative error below 1e-7 (a polynomial of degree 6 within 3.1e-9 of exp on [-ln 2 / 2, ln 2 / 2];
the rest is float32 rounding, without bias beyond 1e-9; over all 1.1e9 float32 numbers in [-87, 0] the worst is 7.7e-8),
log1p one below 2e-12. Per-class terms are float32, everything summed over voxels is float64. A confidence within about
1e-7 of a bin edge may fall on the other side than in the reference; each such voxel changes an ECE by at most 2/n, and
by nothing where the two bins err in the same direction.

Threads are plain Python threads running compiled code without the interpreter lock: unlike numba's own, they may be
used from several threads and in forked workers. Work is dealt out in fixed turns, so the same call gives the same bits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels.cpu_loops import new_block, tally_range
from segcal.kernels.pool import in_threads
from segcal.kernels.tally import Tally
from segcal.kernels.voxels import PIECE_VOXELS, Piece, Voxels


def _complete(out: Tally) -> None:
    """Add the winners' probabilities to the classwise histograms, and count the lowest bin by difference."""
    if out.class_count.size:
        out.class_count[:] += out.predicted_count.sum(2)
        out.class_confidence[:] += out.predicted_confidence.sum(2)
        out.class_positive[:] += out.predicted_count[:, :, 1]
        voxels = out.confusion.sum((1, 2))
        out.class_count[:, :, 0] = voxels[:, None] - out.class_count[:, :, 1:].sum(2)


def tally(voxels: Voxels, threads: int) -> Tally:
    """All statistics of float32 (or narrower) logits on the CPU; see ``segcal.kernels.tally``."""
    classes = voxels.logits.shape[1]
    if voxels.score_map is not None and not voxels.score_map.suits(voxels.logits):
        mapped = voxels.score_map(voxels.logits.detach().float())
        voxels = dataclasses.replace(voxels, logits=mapped, score_map=None, uncalibrated=voxels.logits.argmax(1))
    top, by_class = voxels.top_grid, voxels.class_grid
    within, class_grid = np.zeros(1, np.uint16), (np.ones(1), np.zeros(1, np.uint16))
    if by_class is not None:
        within, class_grid = _narrow(top.within(by_class)), (by_class.upper, _narrow(by_class.first))
    grids = (top.upper, _narrow(top.first), within), class_grid
    mapping = _mapping(voxels)
    ignored = np.iinfo(np.int64).min if voxels.ignore_index is None else voxels.ignore_index
    workers = max(1, min(threads, math.ceil(voxels.labels.numel() / PIECE_VOXELS)))

    def work(turn: int) -> tuple[Tally, int]:
        out = Tally.zeros(voxels.num_slots, classes, len(top), 0 if by_class is None else len(by_class))
        block = new_block(classes)
        for piece in itertools.islice(voxels.pieces(), turn, None, workers):
            scores, columns = voxels.scores(piece)
            if scores.dtype != torch.float32 or not scores.is_contiguous():
                scores, columns = scores[:, columns].float().contiguous(), slice(0, columns.stop - columns.start)
            bad = tally_range(
                scores.numpy(), columns.start, columns.stop,
                _flat(voxels, voxels.labels, piece, np.int64), ignored,
                _flat(voxels, voxels.mask, piece, np.bool_),
                _flat(voxels, voxels.slots, piece, np.uint8),
                _flat(voxels, voxels.uncalibrated, piece, np.int64),
                mapping, *grids, voxels.energy_shift, block, out,
            )  # fmt: skip
            if bad >= 0:
                return out, piece.offset + bad
        return out, -1

    results = in_threads(work, workers)
    bad = [flat for _, flat in results if flat >= 0]
    if bad:
        raise voxels.bad_voxel(min(bad))
    total = results[0][0]
    for part, _ in results[1:]:
        total.add(part)
    _complete(total)
    return total


def _narrow(bins: NDArray[Any]) -> NDArray[Any]:
    """The same table of bins in fewer bytes, which leaves more of the cache to the histograms."""
    return bins.astype(np.uint16 if bins.max() < 2**16 else np.int64)


def _flat(voxels: Voxels, tensor: Tensor | None, piece: Piece, dtype: type[np.generic]) -> NDArray[Any]:
    if tensor is None:
        return np.empty(0, dtype)
    return np.ascontiguousarray(voxels.flat(tensor, piece).numpy(), dtype)


def _mapping(voxels: Voxels) -> tuple[bool, np.float32, NDArray[np.float32], NDArray[np.float32]]:
    """(compare, beta, weight, bias), with weight (C, C), (C, 1) if diagonal, or (0, 0) if there is only beta.

    A bare temperature multiplies z - max(z), which rounds less than z itself would.
    """
    score_map, classes = voxels.score_map, voxels.logits.shape[1]
    if score_map is None or score_map.is_scale:
        beta = np.float32(1 if score_map is None else float(score_map.weight))
        return voxels.compares, beta, np.zeros((0, 0), np.float32), np.zeros(0, np.float32)
    score_map.check_classes(classes)
    weight = score_map.weight.detach().float().cpu()
    weight = weight if weight.ndim == 2 else weight.expand(classes)[:, None]
    bias = torch.zeros(classes) if score_map.bias is None else score_map.bias.detach().float().cpu()
    return True, np.float32(1), weight.contiguous().numpy(), bias.contiguous().numpy()
