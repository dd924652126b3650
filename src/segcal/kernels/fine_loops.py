"""The compiled loop of ``segcal.kernels.fine_histogram``.

Log-probabilities are float64, so that bins are exactly those of the definition. A probability's bin is first estimated
from its approximate logit, by vector instructions, and then corrected by comparison with the two nearest edges.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from segcal.kernels.compiled import ONE, ZERO, elementwise, exp64, inlined
from segcal.kernels.grid import LIMIT, LOGIT_BINS, WIDTH
from segcal.kernels.scratch import DOUBLE, FLOAT, INDEX, PerClass
from segcal.kernels.softmax_loops import argmax, check_labels

_LIMIT, _INVERSE, _LAST = np.float32(LIMIT), np.float32(1 / WIDTH), np.float32(LOGIT_BINS - 1)
_LOWEST = -1e300  # used for -inf, which would not lie above the lowest edge
# Series of -log(1 - p); the last coefficient makes it exact at p = 1/2.
_SECOND, _THIRD, _FOURTH = np.float32(1 / 2), np.float32(1 / 3), np.float32(1 / 4)
_FIFTH = np.float32((math.log(2) - (1 / 2 + 1 / 8 + 1 / 24 + 1 / 64)) * 32)
_Index = np.uint64  # unsigned indices spare numba the test for negative ones


class Tables(NamedTuple):
    """``(R, bins)`` each, as ``FineHistogram`` has them."""

    counts: Any
    positive: Any
    probability: Any


class Block(NamedTuple):
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
def fill_range(x, start, stop, labels, edges, group, groups, b, out, sums):
    """Add voxels ``start..stop`` of ``x (C, V)`` to ``out``, and their number and NLL to ``sums (2,)``.

    Only classes ``group``, ``group + groups`` and so on are added, and ``sums`` only has voxels with these labels.
    ``edges`` are the bins' in log p, with infinities at both ends. Returns the first unfit voxel, counted from
    ``start``, or -1.
    """
    classes, step, rows = x.shape[0], len(b.best), out.counts.shape[0]
    for offset in range(0, stop - start, step):
        size, here = min(step, stop - start - offset), start + offset
        argmax(x, here, size, b.best, b.winner)
        _softmax_terms(x, here, size, b.best, b.winner, b.terms, b.others)
        bad = check_labels(labels, offset, x, here, size, b.best, b.others, b.target)
        if bad >= 0:
            return bad
        for v in range(size):
            b.log_sum[v] = math.log1p(b.others[v])
            b.inverse[v] = 1.0 / (1.0 + b.others[v])
            b.logit[v] = -math.log(b.others[v])
        for k in range(group, classes, groups):
            _place(x, here, size, k, b)
            row = _Index(k if rows > 1 else 0)
            _count(k, size, b, edges, out.counts[row], out.positive[row], out.probability[row], sums)
    return -1
