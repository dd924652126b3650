"""Compiled loops that find the bins of probabilities, for ``FineHistogram`` and the maps of ``apply_cpu`` with bins.

Histograms take log-probabilities in float64, so that bins are exactly those of the definition. A probability's bin is
first estimated from its approximate logit, by vector instructions, and then corrected by comparison with the two
nearest edges.

In maps, all scores of a voxel go through the same float32 comparisons and products, none of which can reverse an order.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from segcal.kernels.compiled import DEEP, FIRST, MINUS_INF, NO, ONE, YES, ZERO, Index, elementwise, exp, exp64, inlined
from segcal.kernels.grid import LIMIT, LOGIT_BINS, WIDTH
from segcal.kernels.scratch import DOUBLE, FLOAT, INDEX, PerClass
from segcal.kernels.softmax_loops import argmax, check_labels, log_sums, sum_others, write_log_softmax

_LIMIT, _INVERSE, _LAST = np.float32(LIMIT), np.float32(1 / WIDTH), np.float32(LOGIT_BINS - 1)
_LOWEST = -1e300  # used for -inf, which would not lie above the lowest edge
# Series of -log(1 - p); the last coefficient makes it exact at p = 1/2.
_SECOND, _THIRD, _FOURTH = np.float32(1 / 2), np.float32(1 / 3), np.float32(1 / 4)
_FIFTH = np.float32((math.log(2) - (1 / 2 + 1 / 8 + 1 / 24 + 1 / 64)) * 32)
_HALF = np.float32(0.5)
_Index = np.uint64  # unsigned indices spare numba the test for negative ones


class FineBlock(NamedTuple):
    """Scratch memory for one block; see ``segcal.kernels.scratch``."""

    terms: Any = PerClass(DOUBLE)  # exp(score - best)
    best: Any = FLOAT
    winner: Any = INDEX
    target: Any = INDEX  # the label, negative where the voxel does not count
    others: Any = DOUBLE  # sum of the terms of the classes that did not win
    log_sum: Any = DOUBLE
    inverse: Any = DOUBLE  # the winner's probability
    logit: Any = DOUBLE  # and its logit
    log_p: Any = DOUBLE  # log-probability of the current class
    p: Any = DOUBLE
    place: Any = INDEX  # its estimated bin


@elementwise
def _softmax_terms(x, start, size, best, winner, terms, others):
    for v in range(size):
        others[v] = 0.0
    for k in range(x.shape[0]):
        row, target, index = x[k, start : start + size], terms[k], np.int32(k)
        for v in range(size):
            e = exp64(np.float64(row[v]) - np.float64(best[v]))
            target[v] = e
            others[v] += 0.0 if winner[v] == index else e


@inlined
def surplus(p):
    """``logit(p) - log(p) = -log(1 - p)`` for p up to 1/2, within a seventh of a bin."""
    return p * (ONE + p * (_SECOND + p * (_THIRD + p * (_FOURTH + p * _FIFTH))))


@inlined
def bin_place(logit):
    """Where a logit lies among the bins, between 0 and the last."""
    place = (logit + _LIMIT) * _INVERSE
    place = place if place > ZERO else ZERO
    return place if place < _LAST else _LAST


@elementwise
def _place(x, start, size, k, b):
    """Log-probabilities and probabilities of class k, and their estimated bins."""
    row, terms, index = x[k, start : start + size], b.terms[k], np.int32(k)
    best, winner, log_sum, inverse, logit = b.best, b.winner, b.log_sum, b.inverse, b.logit
    out_log_p, out_p, place = b.log_p, b.p, b.place
    for v in range(size):
        log_p = (np.float64(row[v]) - np.float64(best[v])) - log_sum[v]
        out_log_p[v] = log_p if log_p > _LOWEST else _LOWEST
        out_p[v] = terms[v] * inverse[v]
    for v in range(size):
        place[v] = np.int32(bin_place(logit[v] if winner[v] == index else out_log_p[v] + surplus(out_p[v])))


@inlined
def _corrected(place, log_p, edges):
    """The bin of a log-probability, from an estimate that is off by one at most."""
    i = _Index(place)
    i += _Index(log_p > edges[i + _Index(1)])
    i -= _Index(log_p <= edges[i])
    return i


@elementwise
def _count(k, size, b, edges, counts, positive, probability, sums):
    """Add the valid voxels to the bins of class k."""
    target, place, log_p, p = b.target, b.place, b.log_p, b.p
    for v in range(size):
        if target[v] < 0:
            continue
        i = _corrected(place[v], log_p[v], edges)
        counts[i] += 1
        probability[i] += p[v]
        if target[v] == k:
            positive[i] += 1
            sums[0] += 1.0
            sums[1] -= log_p[v]


@elementwise
def fill_range(x, start, stop, given, edges, group, groups, tables, b, sums):
    """Add voxels ``start..stop`` of ``x (C, V)`` to ``tables``, and their number and NLL to ``sums (2,)``.

    ``tables`` are counts, positive and probability of a ``FineHistogram``. Only classes ``group``, ``group + groups``
    and so on are added, and ``sums`` only has voxels with these labels. ``edges`` are the bins' in log p, with
    infinities at both ends. Returns the first unfit voxel, counted from ``start``, or -1.
    """
    counts, positive, probability = tables
    classes, step, rows = x.shape[0], len(b.best), counts.shape[0]
    for offset in range(0, stop - start, step):
        size, here = min(step, stop - start - offset), start + offset
        argmax(x, here, size, b.best, b.winner)
        _softmax_terms(x, here, size, b.best, b.winner, b.terms, b.others)
        bad = check_labels(given, offset, x, here, size, b.best, b.others, b.target)
        if bad >= 0:
            return bad
        for v in range(size):
            b.log_sum[v] = math.log1p(b.others[v])
            b.inverse[v] = 1.0 / (1.0 + b.others[v])
            b.logit[v] = -math.log(b.others[v])
        for k in range(group, classes, groups):
            _place(x, here, size, k, b)
            row = _Index(k if rows > 1 else 0)
            _count(k, size, b, edges, counts[row], positive[row], probability[row], sums)
    return -1


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
def _place_centres(row, size, k, winner, logit, place):
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
            _place_centres(b.scores[k], size, k, b.winner, b.own, b.place)
            _interpolate(b.scores[k], size, b.place, centres, knots)
        for v in range(size):
            b.own[v] = b.scores[Index(b.winner[v]), v]
            b.best[v] = b.own[v]
        write_log_softmax(b, b.scores, FIRST, size, ONE, YES, b.winner, rounding, out, to + first - start)


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
        argmax(b.scores, FIRST, size, b.best, b.winner)
        write_log_softmax(b, b.scores, FIRST, size, ONE, NO, b.winner, rounding, out, to + first - start)
