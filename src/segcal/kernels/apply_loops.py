"""Compiled loops that turn a block of logits into log-probabilities; ``segcal.kernels.apply_cpu`` calls them.

A block is a few hundred voxels, class by class: few enough to stay in the core's cache from one loop to the next.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from segcal.kernels.compiled import elementwise, inlined
from segcal.kernels.scratch import DOUBLE, FLOAT, INDEX, PerClass
from segcal.kernels.softmax_loops import argmax, log_sums, sum_others

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
    target: Any = INDEX  # the label's row among the scores
    losses: Any = DOUBLE


@inlined
def _next_lower(value, rounding):
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
        argmax(x, first, size, b.best, b.winner)
        for v in range(size):
            b.own[v] = b.best[v]
        write_log_softmax(b, x, first, size, beta, True, b.winner, rounding, out, to + first - start)
