"""Compiled loops that turn a block of logits into log-probabilities; ``segcal.kernels.apply_cpu`` calls them.

A block is a few hundred voxels, class by class, few enough to stay in the core's cache from one loop to the next.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.kernels.compiled import elementwise, exp, inlined, log1p
from segcal.kernels.tiles import TILE, fetch

_ZERO, _ONE = np.float32(0), np.float32(1)

#: Numbers in a cache line, as many as in a tile.
LINE = TILE
# Types that values are rounded to in the end, by their place in ``pieces_cpu.FLOATS``.
_FLOAT16, _BFLOAT16 = 1, 2


class Block(NamedTuple):
    """What is kept of the voxels of one block: ``scores (C, B)``, the others ``(B,)``."""

    scores: Any
    best: Any  # the largest score
    winner: Any  # and its first index
    rest: Any  # sum of exp(score - best) over the others
    log_sum: Any
    own: Any  # score, then log-probability, of the class that must stay first
    below: Any  # the next smaller number


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> NDArray[Any]:
    """An array that begins where a cache line does, as torch's do, so that no vector reaches over two."""
    array: NDArray[Any] = torch.zeros(shape, dtype=dtype).numpy()
    return array


def new_block(classes: int, size: int) -> Block:
    """Scratch memory for one thread. Rows are not a power of 2 apart: those would share a place in the cache."""
    return Block(
        scores=zeros(classes, size + LINE), best=zeros(size), winner=zeros(size, dtype=torch.int32),
        rest=zeros(size), log_sum=zeros(size), own=zeros(size), below=zeros(size),
    )  # fmt: skip


@elementwise
def largest(z, start, size, best, winner):
    """The largest score, and its first index, of each voxel from column ``start`` of ``z (C, V)`` on.

    Two classes at a time: the best so far is read and written half as often.
    """
    classes = z.shape[0]
    row = z[0, start : start + size]
    for v in range(size):
        best[v] = row[v]
        winner[v] = 0
    for k in range(1, classes, 2):
        next_k = min(k + 1, classes - 1)  # the last class may come twice, which changes nothing
        row, index = z[k, start : start + size], np.int32(k)
        next_row, next_index = z[next_k, start : start + size], np.int32(next_k)
        for v in range(size):
            top, first = best[v], winner[v]
            value, next_value = row[v], next_row[v]
            first = index if value > top else first
            top = value if value > top else top
            winner[v] = next_index if next_value > top else first
            best[v] = next_value if next_value > top else top


@elementwise
def fetch_ahead(x, row, start, size):
    """Ask for the columns after ``size`` ones from ``start``: memory answers while the block before is worked on.

    A row of a block is a page or less, and processors look ahead no further than that.
    """
    for column in range(start + size, min(start + 2 * size, x.shape[1]), LINE):
        fetch(x, row, column)


@inlined
def _next_lower(value, rounding):
    """The number next below ``value <= 0`` once that is rounded to the type in question.

    Between float16's subnormal numbers this is too fine, but a winner so near 0 has no other near.
    """
    dropped = np.int32(13 if rounding == _FLOAT16 else (16 if rounding == _BFLOAT16 else 0))  # bits of the mantissa
    step = np.int32(1) << dropped
    bits = np.float32(-abs(value)).view(np.int32)  # a zero counts as negative
    odd = (bits >> dropped) & 1
    rounded = (bits + (step >> 1) - 1 + odd) & -step if dropped > 0 else bits
    return np.int32(rounded + step).view(np.float32)


@elementwise
def sum_others(z, start, size, best, winner, beta, rest):
    """Sum ``exp(beta (score - best))`` over the classes other than the winner.

    The winner's own term is exactly 1 and left out, so that what is left (1 - confidence) keeps its relative precision
    however confident the voxel is.
    """
    for v in range(size):
        rest[v] = _ZERO
    for k in range(z.shape[0]):
        fetch_ahead(z, k, start, size)
        row, index = z[k, start : start + size], np.int32(k)
        for v in range(size):
            e = exp((row[v] - best[v]) * beta)
            rest[v] += _ZERO if winner[v] == index else e


@elementwise
def write_log_softmax(b, z, start, size, beta, keep, kept, rounding, out, to):
    """Write ``log softmax(beta z)`` of the columns from ``start`` of ``z (C, V)`` to those from ``to`` of ``out``.

    ``b.best`` and ``b.winner`` must be those of z. ``keep`` makes ``kept`` the argmax in the end, in the type that
    values are rounded to; ``b.own`` is its score.
    """
    best, log_sum, rest = b.best, b.log_sum, b.rest
    sum_others(z, start, size, best, b.winner, beta, rest)
    for v in range(size):
        undefined = (best[v] - best[v]) + (rest[v] - rest[v])  # NaN where one of them is not finite, else 0
        log_sum[v] = np.float32(log1p(np.float64(rest[v]))) + undefined
    if keep:
        for v in range(size):
            own = (b.own[v] - best[v]) * beta - log_sum[v]
            b.own[v] = own
            b.below[v] = _next_lower(own, rounding)
    for k in range(z.shape[0]):
        row, target, index = z[k, start : start + size], out[k, to : to + size], np.int32(k)
        if keep:
            for v in range(size):
                value = (row[v] - best[v]) * beta - log_sum[v]
                value = b.below[v] if value > b.below[v] else value
                target[v] = b.own[v] if kept[v] == index else value
        else:
            for v in range(size):
                target[v] = (row[v] - best[v]) * beta - log_sum[v]


@elementwise
def temperature_range(x, start, stop, beta, rounding, b, out, to):
    """Temperature scaling of columns ``start..stop`` of ``x (C, V)``, written to ``out (C, W)`` from column ``to``."""
    block = b.best.shape[0]
    for first in range(start, stop, block):
        size = min(block, stop - first)
        largest(x, first, size, b.best, b.winner)
        for v in range(size):
            b.own[v] = b.best[v]
        write_log_softmax(b, x, first, size, beta, True, b.winner, rounding, out, to + first - start)
