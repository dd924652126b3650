"""Compiled loops that all passes share: largest scores, sums of exponentials, log-softmax, and whether a voxel is fit.

Columns are voxels, from column ``start`` of ``x (C, V)`` on; arrays of one number per voxel are ``(B,)``.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from segcal.kernels.compiled import DEEP, MINUS_INF, YES, ZERO, elementwise, exp, inlined, log1p
from segcal.kernels.scratch import DOUBLE, FLOAT, INDEX, PerClass
from segcal.kernels.tiles import TILE, fetch

# Types that results are rounded to in the end, by their place in ``pieces_cpu.FLOATS``.
_FLOAT16, _BFLOAT16 = 1, 2


class Block(NamedTuple):
    """Scratch memory for one block; see ``segcal.kernels.scratch``."""

    scores: Any = PerClass()
    best: Any = FLOAT  # the largest score
    winner: Any = INDEX  # its first index
    rest: Any = FLOAT  # sum of exp(score - best) over the other classes
    log_sum: Any = FLOAT
    own: Any = FLOAT  # score, then log-probability, of the class that must stay first
    below: Any = FLOAT  # the next smaller number
    place: Any = INDEX  # an index that a loop needs
    target: Any = INDEX  # the label, or its row among the scores
    losses: Any = DOUBLE
    mean: Any = FLOAT  # sums like ``rest``: of e d, with e = exp(d) and d = beta (score - best),
    square: Any = FLOAT  # and of e d^2
    factors: Any = FLOAT  # 1 where the voxel counts, else 0


@inlined
def _larger(score, index, top, first):
    """The larger of two scores and its index."""
    above = score > top
    return score if above else top, index if above else first


@elementwise
def argmax(x, start, size, best, winner):
    """Each voxel's largest score and its first index.

    Four classes at a time: four rows come from memory faster side by side than one after the other, and the largest
    score so far is read and written less often.
    """
    last, columns = x.shape[0] - 1, slice(start, start + size)
    for v in range(size):
        best[v] = MINUS_INF
        winner[v] = 0
    for k in range(0, x.shape[0], 4):
        k2, k3, k4 = min(k + 1, last), min(k + 2, last), min(k + 3, last)  # the last class may repeat: no matter
        row, row2, row3, row4 = x[k, columns], x[k2, columns], x[k3, columns], x[k4, columns]
        i, i2, i3, i4 = np.int32(k), np.int32(k2), np.int32(k3), np.int32(k4)
        for v in range(size):
            top, first = _larger(row[v], i, best[v], winner[v])
            top, first = _larger(row2[v], i2, top, first)
            top, first = _larger(row3[v], i3, top, first)
            best[v], winner[v] = _larger(row4[v], i4, top, first)


@elementwise
def _fetch_next_block(x, row, start, size):
    """Ask memory for the next block of a row while this one is worked on.

    A row of a block is a page or less, and processors read ahead no further than that.
    """
    for column in range(start + size, min(start + 2 * size, x.shape[1]), TILE):
        fetch(x, row, column)


@elementwise
def sum_others(x, start, size, best, winner, beta, rest):
    """Sum ``exp(beta (score - best))`` over the classes other than the winner.

    The winner's own term is exactly 1. Without it the sum keeps its relative precision however confident the voxel is.
    """
    for v in range(size):
        rest[v] = ZERO
    for k in range(x.shape[0]):
        _fetch_next_block(x, k, start, size)
        row, index = x[k, start : start + size], np.int32(k)
        for v in range(size):
            e = exp((row[v] - best[v]) * beta)
            rest[v] += ZERO if winner[v] == index else e


@elementwise
def log_sums(size, best, rest, log_sum):
    """``log_sum = log(1 + rest)``, NaN where ``best`` or ``rest`` is not finite."""
    for v in range(size):
        undefined = (best[v] - best[v]) + (rest[v] - rest[v])  # NaN or 0
        log_sum[v] = np.float32(log1p(np.float64(rest[v]))) + undefined


@elementwise
def check_labels(given, offset, x, start, size, best, rest, target):
    """Write labels from ``offset`` on to ``target``, -1 for voxels that do not count. Returns the first unfit, or -1.

    ``given`` is a ``pieces_cpu.Given``. A voxel that counts is unfit if its label is no class or an impossible class,
    or if its scores have no softmax.
    """
    labels, ignored, mask = given.labels, given.ignored, given.mask
    for v in range(size):
        label = labels[offset + v]
        counts = label != ignored and (mask.size == 0 or mask[offset + v])
        known = 0 <= label < x.shape[0]
        possible = best[v] - x[label if known else 0, start + v] <= DEEP
        if counts and not (known and possible and rest[v] >= 0 and math.isfinite(best[v])):
            return offset + v
        target[v] = np.int32(label) if counts else np.int32(-1)
    return -1


@inlined
def next_lower(value, rounding):
    """The number just below ``value <= 0`` after rounding that to the output type.

    Between float16's subnormal numbers the step is too small, but a winner this close to 0 has no close rival.
    """
    dropped = np.int32(13 if rounding == _FLOAT16 else (16 if rounding == _BFLOAT16 else 0))  # bits of the mantissa
    step = np.int32(1) << dropped
    bits = np.float32(-abs(value)).view(np.int32)  # a zero counts as negative
    odd = (bits >> dropped) & 1
    rounded = (bits + (step >> 1) - 1 + odd) & -step if dropped > 0 else bits
    return np.int32(rounded + step).view(np.float32)


@elementwise
def write_log_softmax(b, z, start, size, beta, keep, kept, rounding, out, to):
    """Write ``log softmax(beta z)`` of the columns from ``start`` of ``z (C, V)`` to those from ``to`` of ``out``.

    ``b.best`` and ``b.winner`` must be those of z. ``keep`` makes ``kept`` the argmax of the output after rounding;
    ``b.own`` is its score.
    """
    best, log_sum, rest = b.best, b.log_sum, b.rest
    sum_others(z, start, size, best, b.winner, beta, rest)
    log_sums(size, best, rest, log_sum)
    if keep:
        for v in range(size):
            own = (b.own[v] - best[v]) * beta - log_sum[v]
            b.own[v] = own
            b.below[v] = next_lower(own, rounding)
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
        argmax(x, first, size, b.best, b.winner)
        for v in range(size):
            b.own[v] = b.best[v]
        write_log_softmax(b, x, first, size, beta, YES, b.winner, rounding, out, to + first - start)
