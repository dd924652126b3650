"""Compiled loops of maps that act on each probability alone; ``segcal.kernels.apply_cpu`` calls them.

All scores of a voxel go through the same float32 comparisons and products, none of which can reverse an order.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math

import numpy as np

from segcal.kernels.apply_loops import write_log_softmax
from segcal.kernels.compiled import DEEP, MINUS_INF, ONE, Index, elementwise, exp
from segcal.kernels.fine_loops import bin_place, surplus
from segcal.kernels.softmax_loops import argmax, log_sums, sum_others

_HALF = np.float32(0.5)


@elementwise
def _log_probabilities(x, start, size, b):
    """``b.scores = log S(x)`` of columns from ``start``, -inf for impossible classes, and ``b.winner``.

    Voxels without a softmax are NaN.
    """
    best, rest, log_sum = b.best, b.rest, b.log_sum
    argmax(x, start, size, best, b.winner)
    sum_others(x, start, size, best, b.winner, ONE, rest)
    log_sums(size, best, rest, log_sum)
    for k in range(x.shape[0]):
        row, target = x[k, start : start + size], b.scores[k]
        for v in range(size):
            gap = row[v] - best[v]
            target[v] = MINUS_INF if gap < -DEEP else gap - log_sum[v]


@elementwise
def _place(row, size, k, winner, logit, place):
    """Roughly where the log-probabilities of class k lie among the centres; ``logit (B,)`` is that of the winner."""
    index = np.int32(k)
    for v in range(size):
        about = logit[v] if winner[v] == index else row[v] + surplus(exp(row[v]))
        place[v] = np.int32(bin_place(about) - _HALF)


@elementwise
def _interpolate(row, size, place, centres, knots):
    """Replace log-probabilities by scores: linear between the knots at the centres."""
    last = Index(len(centres) - 2)
    first, end = centres[0], centres[-1]
    for v in range(size):
        log_p = row[v]
        x = first if log_p < first else (end if log_p > end else log_p)
        i = min(Index(place[v]), last)
        i += Index(x > centres[i + Index(1)])
        i -= Index(x <= centres[i] and i > 0)
        start, low, high = centres[i], knots[i], knots[i + Index(1)]
        score = low + (high - low) * ((x - start) / (centres[i + Index(1)] - start))
        score = high if score > high else score
        row[v] = MINUS_INF if log_p == MINUS_INF else score


@elementwise
def isotonic_range(x, start, stop, curve, rounding, b, out, to):
    """Map columns ``start..stop`` of ``x (C, V)`` and write log-probabilities to ``out (C, W)`` from column ``to``.

    ``curve`` is (centres, knots), ``(bins,)`` each: the map of log p is linear between the knots at the centres. The
    argmax is kept.
    """
    centres, knots = curve
    block = b.best.shape[0]
    for first in range(start, stop, block):
        size = min(block, stop - first)
        _log_probabilities(x, first, size, b)
        for v in range(size):
            b.own[v] = -math.log(b.rest[v])
        for k in range(x.shape[0]):
            _place(b.scores[k], size, k, b.winner, b.own, b.place)
            _interpolate(b.scores[k], size, b.place, centres, knots)
        for v in range(size):
            b.own[v] = b.scores[Index(b.winner[v]), v]
            b.best[v] = b.own[v]
        write_log_softmax(b, b.scores, 0, size, ONE, True, b.winner, rounding, out, to + first - start)


@elementwise
def _bin_values(row, size, steps, edges, values, log_sum):
    """Replace log-probabilities by the value of their bin, found by bisection in ``2^steps - 1`` edges."""
    for v in range(size):
        log_p, i = row[v], Index(0)
        for n in range(steps):
            step = Index(1) << Index(steps - 1 - n)
            i += step if edges[i + step - Index(1)] < log_p else Index(0)
        undefined = log_sum[v] - log_sum[v]
        row[v] = MINUS_INF if log_p == MINUS_INF else values[i] + undefined


@elementwise
def histogram_range(x, start, stop, table, rounding, b, out, to):
    """Map columns ``start..stop`` of ``x (C, V)`` and write log-probabilities to ``out (C, W)`` from column ``to``.

    ``table`` is (steps, edges, values): scores are the ``values (C, bins)`` of the bin that log p is in. ``edges (C,
    2^steps - 1)`` may end with infinities.
    """
    steps, edges, values = table
    block = b.best.shape[0]
    for first in range(start, stop, block):
        size = min(block, stop - first)
        _log_probabilities(x, first, size, b)
        for k in range(x.shape[0]):
            _bin_values(b.scores[k], size, steps, edges[k], values[k], b.log_sum)
        argmax(b.scores, 0, size, b.best, b.winner)
        write_log_softmax(b, b.scores, 0, size, ONE, False, b.winner, rounding, out, to + first - start)
