"""The compiled loop of ``segcal.kernels.fine_histogram``.

Log-probabilities are float64, so that bins are those of the definition. A probability's bin is first computed from its
approximate logit, by vector instructions, and then put right by comparison with the two edges next to it.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.kernels.compiled import elementwise, exp64, inlined
from segcal.kernels.cpu_loops import argmax
from segcal.kernels.grid import LIMIT, LOGIT_BINS, WIDTH
from segcal.scores import DEPTH

_ZERO, _ONE = np.float32(0), np.float32(1)
_DEPTH = np.float32(DEPTH)
_LIMIT, _INVERSE, _LAST = np.float32(LIMIT), np.float32(1 / WIDTH), np.float32(LOGIT_BINS - 1)
_LOWEST = -1e300  # stands for -inf, which would not be above the lowest edge
# Of -log(1 - p): the series, whose end is such that it is right at p = 1/2.
_SECOND, _THIRD, _FOURTH = np.float32(1 / 2), np.float32(1 / 3), np.float32(1 / 4)
_FIFTH = np.float32((math.log(2) - (1 / 2 + 1 / 8 + 1 / 24 + 1 / 64)) * 32)
_Index = np.uint64  # unsigned indices spare numba the test for negative ones


class Tables(NamedTuple):
    """``(R, bins)`` each, as ``FineHistogram`` has them."""

    counts: Any
    positive: Any
    probability: Any


class _Block(NamedTuple):
    """What is kept of the voxels of one block: ``terms (C, B)``, the others ``(B,)``; float64 but for what is said."""

    terms: Any  # exp(score - best)
    best: Any  # float32
    winner: Any  # uint32
    target: Any  # int32, the label, -1 where the voxel does not count
    others: Any  # sum of the terms of the classes that did not win
    log_sum: Any
    inverse: Any  # the winner's probability
    logit: Any  # and its logit
    log_p: Any  # of the class at hand
    p: Any
    place: Any  # int32, about its bin


def new_block(classes: int, size: int) -> _Block:
    """Scratch memory for one thread. Rows are not a power of 2 apart: those would share a place in the cache."""

    def double() -> NDArray[np.float64]:
        return np.zeros(size)

    return _Block(
        terms=np.zeros((classes, size + 8)), best=np.zeros(size, np.float32), winner=np.zeros(size, np.uint32),
        target=np.zeros(size, np.int32), others=double(), log_sum=double(), inverse=double(), logit=double(),
        log_p=double(), p=double(), place=np.zeros(size, np.int32),
    )  # fmt: skip


@elementwise
def _softmax_terms(x, start, size, best, winner, terms, others):
    for v in range(size):
        others[v] = 0.0
    for k in range(x.shape[0]):
        row, target, index = x[k, start : start + size], terms[k], np.uint32(k)
        for v in range(size):
            e = exp64(np.float64(row[v]) - np.float64(best[v]))
            target[v] = e
            others[v] += 0.0 if winner[v] == index else e


@inlined
def surplus(p):
    """logit(p) - log(p), that is ``-log(1 - p)``, for p up to 1/2, within a seventh of a bin."""
    return p * (_ONE + p * (_SECOND + p * (_THIRD + p * (_FOURTH + p * _FIFTH))))


@inlined
def bin_place(logit):
    """Where a logit lies among the bins, between 0 and the last."""
    place = (logit + _LIMIT) * _INVERSE
    place = place if place > _ZERO else _ZERO
    return place if place < _LAST else _LAST


@elementwise
def _place(x, start, size, k, b):
    """Log-probabilities of class k, probabilities and about their bins."""
    row, terms, index = x[k, start : start + size], b.terms[k], np.uint32(k)
    best, winner, log_sum, inverse, logit = b.best, b.winner, b.log_sum, b.inverse, b.logit
    out_log_p, out_p, place = b.log_p, b.p, b.place
    for v in range(size):
        log_p = (np.float64(row[v]) - np.float64(best[v])) - log_sum[v]
        out_log_p[v] = log_p if log_p > _LOWEST else _LOWEST
        out_p[v] = terms[v] * inverse[v]
    for v in range(size):
        place[v] = np.int32(bin_place(logit[v] if winner[v] == index else out_log_p[v] + surplus(out_p[v])))


@inlined
def _exactly(place, log_p, edges):
    """The bin of a log-probability, from a place that is off by one at most."""
    i = _Index(place)
    i += _Index(log_p > edges[i + _Index(1)])
    i -= _Index(log_p <= edges[i])
    return i


@elementwise
def _count(k, size, b, edges, counts, positive, probability, sums):
    """Add the voxels that count to the bins of class k."""
    target, place, log_p, p = b.target, b.place, b.log_p, b.p
    for v in range(size):
        if target[v] < 0:
            continue
        i = _exactly(place[v], log_p[v], edges)
        counts[i] += 1
        probability[i] += p[v]
        if target[v] == k:
            positive[i] += 1
            sums[0] += 1.0
            sums[1] -= log_p[v]


@elementwise
def fill_range(x, start, stop, labels, ignored, mask, edges, group, groups, b, out, sums):
    """Add voxels ``start..stop`` of ``x (C, V)`` to ``out``, and their number and NLL to ``sums (2,)``.

    Only classes ``group``, ``group + groups`` and so on are added, and voxels counted that have these as labels.
    ``edges`` are those of the bins in log p, with infinities at both ends. Returns the first voxel, counted from
    ``start``, that has no possible class or no softmax, or -1.
    """
    classes, step, rows = x.shape[0], len(b.best), out.counts.shape[0]
    for offset in range(0, stop - start, step):
        size, here = min(step, stop - start - offset), start + offset
        argmax(x, here, size, b.best, b.winner)
        _softmax_terms(x, here, size, b.best, b.winner, b.terms, b.others)
        for v in range(size):
            label = labels[offset + v]
            valid = label != ignored and (mask.size == 0 or mask[offset + v])
            possible = 0 <= label < classes
            depth = b.best[v] - x[label if possible else 0, here + v]
            if valid and not (possible and depth <= _DEPTH and b.others[v] >= 0.0 and math.isfinite(b.best[v])):
                return offset + v
            b.target[v] = np.int32(label) if valid else np.int32(-1)
            b.log_sum[v] = math.log1p(b.others[v])
            b.inverse[v] = 1.0 / (1.0 + b.others[v])
            b.logit[v] = -math.log(b.others[v])
        for k in range(group, classes, groups):
            _place(x, here, size, k, b)
            row = _Index(k if rows > 1 else 0)
            _count(k, size, b, edges, out.counts[row], out.positive[row], out.probability[row], sums)
    return -1
