"""Compiled loops of maps that take one probability at a time; ``segcal.kernels.apply_cpu`` calls them.

All scores of a voxel go through the same comparisons and products in float32, none of which turns an order round.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math

import numpy as np

from segcal.kernels.apply_loops import largest, sum_others, write_log_softmax
from segcal.kernels.compiled import elementwise, exp, log1p
from segcal.kernels.fine_loops import bin_place, surplus
from segcal.scores import DEPTH

_HALF, _ONE, _NEVER = np.float32(0.5), np.float32(1), np.float32(-np.inf)
_DEEPEST = np.float32(-DEPTH)
_Index = np.uint32  # unsigned indices spare numba the test for negative ones


@elementwise
def _log_probabilities(x, start, size, b):
    """``b.scores = log S(x)`` of columns from ``start``, -inf for impossible classes, and ``b.winner``.

    Voxels without a softmax are NaN.
    """
    best, rest, log_sum = b.best, b.rest, b.log_sum
    largest(x, start, size, best, b.winner)
    sum_others(x, start, size, best, b.winner, _ONE, rest)
    for v in range(size):
        undefined = (best[v] - best[v]) + (rest[v] - rest[v])  # NaN where one of them is not finite, else 0
        log_sum[v] = np.float32(log1p(np.float64(rest[v]))) + undefined
    for k in range(x.shape[0]):
        row, target = x[k, start : start + size], b.scores[k]
        for v in range(size):
            gap = row[v] - best[v]
            target[v] = _NEVER if gap < _DEEPEST else gap - log_sum[v]


@elementwise
def _place(row, size, k, winner, logit, place):
    """About where the log-probabilities of class k lie among the centres; ``logit (B,)`` is that of the winner."""
    index = np.int32(k)
    for v in range(size):
        about = logit[v] if winner[v] == index else row[v] + surplus(exp(row[v]))
        place[v] = np.int32(bin_place(about) - _HALF)


@elementwise
def _interpolate(row, size, place, centres, knots):
    """Scores in place of log-probabilities: linear between the knots, which are those at the centres."""
    last = _Index(len(centres) - 2)
    first, end = centres[0], centres[-1]
    for v in range(size):
        log_p = row[v]
        x = first if log_p < first else (end if log_p > end else log_p)
        i = min(_Index(place[v]), last)
        i += _Index(x > centres[i + _Index(1)])
        i -= _Index(x <= centres[i] and i > 0)
        start, low, high = centres[i], knots[i], knots[i + _Index(1)]
        score = low + (high - low) * ((x - start) / (centres[i + _Index(1)] - start))
        score = high if score > high else score
        row[v] = _NEVER if log_p == _NEVER else score


@elementwise
def isotonic_range(x, start, stop, centres, knots, rounding, b, place, out, to):
    """Map columns ``start..stop`` of ``x (C, V)`` and write log-probabilities to ``out (C, W)`` from column ``to``.

    The map of log p is linear between ``knots (bins,)`` at ``centres (bins,)``. The argmax is kept.
    """
    block = b.best.shape[0]
    for first in range(start, stop, block):
        size = min(block, stop - first)
        _log_probabilities(x, first, size, b)
        for v in range(size):
            b.own[v] = -math.log(b.rest[v])
        for k in range(x.shape[0]):
            _place(b.scores[k], size, k, b.winner, b.own, place)
            _interpolate(b.scores[k], size, place, centres, knots)
        for v in range(size):
            b.own[v] = b.scores[_Index(b.winner[v]), v]
            b.best[v] = b.own[v]
        write_log_softmax(b, b.scores, 0, size, _ONE, True, b.winner, rounding, out, to + first - start)


@elementwise
def _bin_values(row, size, steps, edges, values, log_sum):
    """Scores in place of log-probabilities: the value of their bin, found by bisection in ``2^steps - 1`` edges."""
    for v in range(size):
        log_p, i = row[v], _Index(0)
        for n in range(steps):
            step = _Index(1) << _Index(steps - 1 - n)
            i += step if edges[i + step - _Index(1)] < log_p else _Index(0)
        undefined = log_sum[v] - log_sum[v]
        row[v] = _NEVER if log_p == _NEVER else values[i] + undefined


@elementwise
def histogram_range(x, start, stop, steps, edges, values, rounding, b, out, to):
    """Map columns ``start..stop`` of ``x (C, V)`` and write log-probabilities to ``out (C, W)`` from column ``to``.

    Scores are ``values (C, bins)`` of the bins that log p is in; ``edges (C, 2^steps - 1)`` may end with infinities.
    """
    block = b.best.shape[0]
    for first in range(start, stop, block):
        size = min(block, stop - first)
        _log_probabilities(x, first, size, b)
        for k in range(x.shape[0]):
            _bin_values(b.scores[k], size, steps, edges[k], values[k], b.log_sum)
        largest(b.scores, 0, size, b.best, b.winner)
        write_log_softmax(b, b.scores, 0, size, _ONE, False, b.winner, rounding, out, to + first - start)
