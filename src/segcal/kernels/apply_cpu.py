"""Calibrated log-probabilities of large CPU inputs, from one read of the logits and one write; numba, see ``cpu``.

A block of voxels is small enough to stay in the core's cache. Largest score, exp, log and the treatment of ties are
loops over its voxels with unit stride. float16 and bfloat16 are converted piece by piece, and rounded once at the end.

Maps that must keep the argmax do so exactly: scores that would reach the winner's value in the output type get the next
smaller number of that type instead, as in ``segcal.scores.keep_argmax``. A voxel with a NaN, with +inf or without any
possible class has no softmax, and gets NaN for every class.

The error of a value is at most 5e-7 (temperature) or 1e-6 (experts) of 1 + the voxel's largest |log-probability|,
before rounding to a smaller type. The winner's value has a relative error of at most 3e-7, however confident it is.

Threads take pieces of 2^15 voxels in turn, or up to 2^17 in large batches. A voxel's bits do not depend on the thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.kernels import bin_loops, expert_loops, vector_loops
from segcal.kernels.expert_cpu import pack, sorting_pairs
from segcal.kernels.experts import ExpertMap
from segcal.kernels.pieces_cpu import (
    FLOATS,
    SHORT_PIECE,
    as_voxels,
    block_size,
    in_threads,
    matrix,
    piece_size,
    workers,
)
from segcal.kernels.scratch import new_block
from segcal.kernels.softmax_loops import Block, temperature_range
from segcal.kernels.vector_loops import Vector

# Scores in a block. The block after it is prefetched, and both must fit the second-level cache.
_SCORES = 10240
# ``loop(x, start, stop, parameters, rounding, scratch, out, to)`` maps columns start..stop of ``x (C, V)`` and writes
# them to a matrix ``out``, from column ``to`` on.
Loop = Callable[..., None]


def apply_temperature(logits: Tensor, beta: float, threads: int | None = None) -> Tensor:
    """``log S(beta z)`` of logits ``(N, C, *spatial)``, with exactly their argmax and in their dtype.

    Examples:
        >>> apply_temperature(torch.tensor([[2.0, 0.0]]), 0.5).exp()
        tensor([[0.7311, 0.2689]])
    """
    return _map(logits, temperature_range, np.float32(beta), threads)


def apply_experts(logits: Tensor, expert_map: ExpertMap, *, keep: bool, threads: int | None = None) -> Tensor:
    """``log S(expert_map(z))`` of logits ``(N, C, *spatial)`` in their dtype; ``keep`` keeps exactly their argmax.

    Examples:
        >>> identity = ExpertMap("margins", torch.eye(2)[None], torch.zeros(1, 2))
        >>> apply_experts(torch.tensor([[2.0, 0.0]]), identity, keep=True).exp()
        tensor([[0.8808, 0.1192]])
    """
    classes = logits.shape[1]
    if expert_map.features == "own-logit":
        return _map(logits, vector_loops.apply_range, (Vector.of(expert_map, classes), keep), threads)
    experts = pack(expert_map, classes)
    scratch = partial(expert_loops.new_scratch, classes, experts)
    return _map(logits, expert_loops.apply_range, (experts, keep), threads, scratch)


def apply_knots(logits: Tensor, centres: Tensor, knots: Tensor, threads: int | None = None) -> Tensor:
    """``log S(g(log S(z)))`` of logits ``(N, C, *spatial)`` in their dtype and with their argmax.

    g rises and is linear between ``knots (bins,)`` at ``centres (bins,)``, which are those of a ``FineHistogram``.

    Examples:
        >>> from segcal.kernels.fitting_passes import logit_centres
        >>> centres = torch.from_numpy(logit_centres())
        >>> apply_knots(torch.tensor([[2.0, 0.0]]), centres, centres).exp()
        tensor([[0.8808, 0.1192]])
    """
    curve = tuple(np.ascontiguousarray(array.float().cpu().numpy()) for array in (centres, knots))
    return _map(logits, bin_loops.isotonic_range, curve, threads)


def apply_bins(logits: Tensor, edges: Tensor, values: Tensor, threads: int | None = None) -> Tensor:
    """Log-probabilities from scores: the ``values (C, bins)`` of the bin that log S(z) is in, by class.

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
    return _map(logits, bin_loops.histogram_range, (steps, limits, scores), threads)


def keep_order(scores: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 scores whose falling order is that of the logits, both ``(N, C, *spatial)``, and the argmax of these.

    A score above that of a class with a larger logit is lowered to it; the others stay as they are.

    Examples:
        >>> keep_order(torch.tensor([[-1.0, -3.0, -2.9]]), torch.tensor([[5.0, 2.0, 1.0]]))
        (tensor([[-1., -3., -3.]]), tensor([0]))
    """
    classes = logits.shape[1]
    x, s = (tensor.movedim(1, 0).reshape(classes, -1).float().contiguous() for tensor in (logits, scores))
    pairs, winner = sorting_pairs(classes), torch.zeros(x.shape[1], dtype=torch.int64)
    threads = torch.get_num_threads()
    share = -(-x.shape[1] // (threads * expert_loops.SORTED)) * expert_loops.SORTED

    def work(turn: int) -> None:
        keys, last = np.zeros((classes, expert_loops.SORTED), np.int64), np.zeros(expert_loops.SORTED, np.float32)
        stop = min((turn + 1) * share, x.shape[1])
        expert_loops.lower_range(x.numpy(), turn * share, stop, pairs, keys, last, s.numpy(), winner.numpy())

    in_threads(work, threads)
    batch, _, *spatial = logits.shape
    return s.view(classes, batch, *spatial).movedim(0, 1), winner.view(batch, *spatial)


def _map(
    logits: Tensor, loop: Loop, parameters: Any, threads: int | None, new_scratch: Callable[[int], Any] | None = None
) -> Tensor:
    """Take all pieces through a loop into a new tensor. Each thread has its own scratch memory for a block."""
    voxels = as_voxels(logits)
    classes, per_image = logits.shape[1], math.prod(logits.shape[2:])
    # numpy asks for huge pages, which halves the time it takes to allocate a large result.
    wide = logits.dtype == torch.float32
    out = (
        torch.from_numpy(np.empty(logits.shape, np.float32)) if wide else torch.empty(logits.shape, dtype=logits.dtype)
    )
    count = workers(voxels, threads, SHORT_PIECE)
    pieces = piece_size(voxels, count, least=SHORT_PIECE)

    def work(turn: int) -> None:
        size, rounding = block_size(classes, _SCORES), FLOATS.index(out.dtype)
        scratch = new_block(Block, classes, size) if new_scratch is None else new_scratch(size)
        for piece in itertools.islice(voxels.pieces(pieces), turn, None, count):
            x, start, stop = matrix(voxels, piece)
            size, source = stop - start, (x, start, stop, parameters, rounding, scratch)
            if isinstance(piece.images, int):
                rows, first = out[piece.images].view(classes, -1), piece.offset - piece.images * per_image
                if out.dtype == torch.float32:
                    loop(*source, rows.numpy(), first)
                    continue
                place = rows[:, first : first + size]
            else:
                place = out[piece.images].movedim(1, 0)
            mapped = torch.empty(classes, size)
            loop(*source, mapped.numpy(), 0)
            place.copy_(mapped.view(place.shape))

    in_threads(work, count)
    return out
