"""Calibrated log-probabilities of large CPU inputs, by one read of the logits and one write; numba, as ``cpu`` says.

A block of voxels is small enough to stay in the core's cache; largest score, exp, log and what decides ties are loops
over its voxels with unit stride. float16 and bfloat16 are converted piece by piece, and rounded once at the end.

What must keep the argmax does so exactly: whatever would reach the winner's value in the type of the output gets the
next smaller number of that type instead, as ``segcal.scores.keep_argmax`` has it. A voxel with a NaN, with +inf or
without any possible class has no softmax, and gets NaN for every class.

Values err by at most 5e-7 (temperature) or 1e-6 (experts) of 1 + the voxel's largest |log-probability|, before they are
rounded to a smaller type. The winner's are relatively precise, to 3e-7, however sure the voxel is.

Threads take pieces of 2^15 voxels in turn, of large batches 2^17. Which of them writes a voxel does not matter to its
bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels import apply_loops, binned_loops, expert_loops, vector_loops
from segcal.kernels.expert_cpu import pack
from segcal.kernels.experts import ExpertMap
from segcal.kernels.pieces_cpu import FLOATS, as_voxels, block_size, matrix, workers
from segcal.kernels.pool import in_threads
from segcal.kernels.vector_loops import Vector
from segcal.kernels.voxels import PIECE_VOXELS

# Scores in a block: while one is worked on, memory is asked for the next, and both shall be in the second cache.
_SCORES = 10240
# Voxels in a piece of large batches, which need not be divided so finely: every piece costs a call.
_LONG_PIECE = 2**17
# Maps columns start..stop of a matrix (C, V) to another matrix, from a column on.
Loop = Callable[[NDArray[Any], int, int, NDArray[Any], int], None]


def apply_temperature(logits: Tensor, beta: float, threads: int | None = None) -> Tensor:
    """``log S(beta z)`` of logits ``(N, C, *spatial)``, with exactly their argmax and in their dtype.

    Examples:
        >>> apply_temperature(torch.tensor([[2.0, 0.0]]), 0.5).exp()
        tensor([[0.7311, 0.2689]])
    """
    classes = logits.shape[1]

    def new_loop(rounding: int) -> Loop:
        block = apply_loops.new_block(classes, block_size(classes, _SCORES))
        return lambda x, start, stop, out, to: apply_loops.temperature_range(
            x, start, stop, np.float32(beta), rounding, block, out, to
        )

    return _map(logits, new_loop, threads)


def apply_experts(logits: Tensor, expert_map: ExpertMap, *, keep: bool, threads: int | None = None) -> Tensor:
    """``log S(expert_map(z))`` of logits ``(N, C, *spatial)`` in their dtype; ``keep`` keeps exactly their argmax.

    Examples:
        >>> identity = ExpertMap("margins", torch.eye(2)[None], torch.zeros(1, 2))
        >>> apply_experts(torch.tensor([[2.0, 0.0]]), identity, keep=True).exp()
        tensor([[0.8808, 0.1192]])
    """
    classes = logits.shape[1]
    if expert_map.features == "own-logit":
        return _apply_vector(logits, Vector.of(expert_map, classes), keep, threads)
    experts = pack(expert_map, classes)

    def new_loop(rounding: int) -> Loop:
        size = block_size(classes, _SCORES)
        block, scratch = apply_loops.new_block(classes, size), expert_loops.new_scratch(classes, experts, size)
        return lambda x, start, stop, out, to: expert_loops.apply_range(
            x, start, stop, experts, keep, rounding, block, scratch, out, to
        )

    return _map(logits, new_loop, threads)


def _apply_vector(logits: Tensor, vector: Vector, keep: bool, threads: int | None) -> Tensor:
    classes, size = logits.shape[1], block_size(logits.shape[1], _SCORES)

    def new_loop(rounding: int) -> Loop:
        block, kept = apply_loops.new_block(classes, size), np.zeros(size, np.int32)
        return lambda x, start, stop, out, to: vector_loops.apply_range(
            x, start, stop, vector, keep, rounding, block, kept, out, to
        )

    return _map(logits, new_loop, threads)


def apply_knots(logits: Tensor, centres: Tensor, knots: Tensor, threads: int | None = None) -> Tensor:
    """``log S(g(log S(z)))`` of logits ``(N, C, *spatial)`` in their dtype and with their argmax.

    g rises and is linear between ``knots (bins,)`` at ``centres (bins,)``, which are those of ``fine_histogram``.

    Examples:
        >>> from segcal.kernels.fine_histogram import logit_centres
        >>> centres = torch.from_numpy(logit_centres())
        >>> apply_knots(torch.tensor([[2.0, 0.0]]), centres, centres).exp()
        tensor([[0.8808, 0.1192]])
    """
    classes, size = logits.shape[1], block_size(logits.shape[1], _SCORES)
    at, values = (np.ascontiguousarray(array.float().cpu().numpy()) for array in (centres, knots))

    def new_loop(rounding: int) -> Loop:
        block, place = apply_loops.new_block(classes, size), np.zeros(size, np.int32)
        return lambda x, start, stop, out, to: binned_loops.isotonic_range(
            x, start, stop, at, values, rounding, block, place, out, to
        )

    return _map(logits, new_loop, threads)


def apply_bins(logits: Tensor, edges: Tensor, values: Tensor, threads: int | None = None) -> Tensor:
    """Log-probabilities whose scores are ``values (C, bins)`` of the bin that log S(z) is in, by class.

    Bins are ``(lo, hi]``, their inner ``edges (C, bins - 1)`` in log p.

    Examples:
        >>> edges, values = torch.tensor([[-0.7], [-0.7]]), torch.tensor([[0.2, 0.8], [0.2, 0.8]]).log()
        >>> apply_bins(torch.tensor([[2.0, 0.0]]), edges, values).exp()
        tensor([[0.8000, 0.2000]])
    """
    classes, bins = values.shape
    steps = (bins - 1).bit_length()
    limits = np.full((classes, 2**steps - 1), np.inf, np.float32)
    limits[:, : bins - 1] = edges.float().cpu().numpy()
    scores = np.ascontiguousarray(values.float().cpu().numpy())

    def new_loop(rounding: int) -> Loop:
        block = apply_loops.new_block(classes, block_size(classes, _SCORES))
        return lambda x, start, stop, out, to: binned_loops.histogram_range(
            x, start, stop, steps, limits, scores, rounding, block, out, to
        )

    return _map(logits, new_loop, threads)


def _map(logits: Tensor, new_loop: Callable[[int], Loop], threads: int | None) -> Tensor:
    """Take all pieces through a loop, each thread with its own, into a new tensor."""
    voxels = as_voxels(logits)
    classes, per_image = logits.shape[1], math.prod(logits.shape[2:])
    # numpy asks for huge pages, which halves the time that large results take to allocate.
    wide = logits.dtype == torch.float32
    out = (
        torch.from_numpy(np.empty(logits.shape, np.float32)) if wide else torch.empty(logits.shape, dtype=logits.dtype)
    )
    count = workers(voxels, threads)
    many = wide and voxels.labels.numel() >= 8 * count * _LONG_PIECE
    piece_size = _LONG_PIECE if many else PIECE_VOXELS

    def work(turn: int) -> None:
        loop = new_loop(FLOATS.index(out.dtype))
        for piece in itertools.islice(voxels.pieces(piece_size), turn, None, count):
            x, columns = matrix(voxels, piece)
            size = columns.stop - columns.start
            if isinstance(piece.images, int):
                rows, first = out[piece.images].view(classes, -1), piece.offset - piece.images * per_image
                if out.dtype == torch.float32:
                    loop(x, columns.start, columns.stop, rows.numpy(), first)
                    continue
                place = rows[:, first : first + size]
            else:
                place = out[piece.images].movedim(1, 0)
            mapped = torch.empty(classes, size)
            loop(x, columns.start, columns.stop, mapped.numpy(), 0)
            place.copy_(mapped.view(place.shape))

    in_threads(work, count)
    return out
