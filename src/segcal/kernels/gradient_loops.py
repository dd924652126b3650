"""Compiled loops that sum the loss of expert maps and its slopes; ``segcal.kernels.expert_cpu`` calls them."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import numpy as np

from segcal.kernels.apply_loops import largest, read
from segcal.kernels.compiled import elementwise, exp, log1p
from segcal.kernels.expert_loops import GAPS, MARGINS, describe_and_map
from segcal.kernels.tiles import ROWS, add_products

_ZERO, _ONE = np.float32(0), np.float32(1)
_Index = np.uint32  # unsigned indices spare numba the test for negative ones


@elementwise
def _targets(s, size, labels, ranked):
    """The place of each column's label among the scores: its rank, for gaps."""
    target = s.target
    for i in range(size):
        target[i] = np.int32(labels[_Index(s.voxel[i])])
    if ranked:
        for k in range(s.order.shape[0]):  # marked by negative numbers, which no label is
            order, rank = s.order[k], np.int32(-1 - k)
            for i in range(size):
                target[i] = rank if order[i] == target[i] else target[i]
        for i in range(size):
            target[i] = np.int32(-1 - target[i])


@elementwise
def _to_scores(s, size, features, running, scores):
    """Scores by column, in falling order of the logits for gaps; ``running (B,)`` is scratch memory.

    A row is never computed from the one before: to a compiler they might overlap, and it would not use vectors.
    """
    if features == GAPS:
        row = scores[0]
        for i in range(size):
            running[i] = _ZERO
            row[i] = _ZERO
        for k in range(1, scores.shape[0]):
            row, step = scores[k], s.u[k - 1]
            for i in range(size):
                running[i] += step[i]
                row[i] = running[i]
        return
    for k in range(scores.shape[0]):
        row, source = scores[k], s.u[k]
        for i in range(size):
            row[i] = source[i]
    if features == MARGINS:
        for i in range(size):
            scores[_Index(s.own_winner[i]), i] = _ZERO


@elementwise
def _slopes(b, size, target, losses):
    """Turn scores into the loss's slopes by them, probabilities less 1 for the label, and give the losses."""
    z, best, winner, rest, inverse = b.scores, b.best, b.winner, b.rest, b.log_sum
    for i in range(size):
        losses[i] = np.float64(best[i]) - np.float64(z[_Index(target[i]), i])
        rest[i] = _ZERO
    for k in range(z.shape[0]):
        row, index = z[k], np.int32(k)
        for i in range(size):
            e = exp(row[i] - best[i])
            row[i] = e
            rest[i] += _ZERO if winner[i] == index else e
    for i in range(size):
        losses[i] += log1p(np.float64(rest[i])) + (rest[i] - rest[i])  # NaN stays NaN
        inverse[i] = _ONE / (_ONE + rest[i])
    for k in range(z.shape[0]):
        row = z[k]
        for i in range(size):
            row[i] *= inverse[i]
    for i in range(size):
        y = _Index(target[i])
        # for the largest what the others leave, so that slopes keep their precision however sure the voxel is
        z[y, i] = -rest[i] * inverse[i] if winner[i] == target[i] else z[y, i] - _ONE


@elementwise
def _pull_back(s, size, features, running, slopes):
    """Slopes by what the experts return, into ``s.u``, from those by score."""
    classes = slopes.shape[0]
    if features == GAPS:
        for i in range(size):
            running[i] = _ZERO
        for k in range(1, classes):
            row, target = slopes[_Index(classes - k)], s.u[_Index(classes - 1 - k)]
            for i in range(size):
                running[i] += row[i]
                target[i] = running[i]
        return
    for k in range(classes):
        row, target = slopes[k], s.u[k]
        for i in range(size):
            target[i] = row[i]
    if features == MARGINS:
        for i in range(size):
            s.u[_Index(s.own_winner[i]), i] = _ZERO


@elementwise
def gradient_range(x, start, stop, labels, valid, experts, b, s, nll, total):
    """Add NLL ``(E,)`` and the sums of slope times feature, ``(E, K, J)``, of columns ``start..stop`` of ``x (C, V)``.

    ``labels`` and, unless empty, ``valid`` begin at ``start``; ``b`` and ``s`` are scratch memory.
    """
    block = b.best.shape[0]
    features = experts.features
    for begin in range(start, stop, block):
        size = min(block, stop - begin)
        here = slice(begin - start, begin - start + size)
        read(x, begin, size, s.raw, b.best, s.winner)
        count = describe_and_map(s, b.best, size, valid[here] if valid.shape[0] else valid, experts, b.rest)
        _targets(s, count, labels[here], features == GAPS)
        _to_scores(s, count, features, b.rest, b.scores)
        largest(b.scores, 0, count, b.best, b.winner)
        _slopes(b, count, s.target, s.losses)
        _pull_back(s, count, features, b.rest, b.scores)
        for e in range(s.first.shape[0] - 1):
            if s.first[e + 1] > s.first[e]:
                for i in range(s.first[e], s.first[e + 1]):
                    nll[e] += s.losses[i]
                for k in range(0, s.u.shape[0], ROWS):
                    for j in range(0, s.x.shape[0], ROWS):
                        add_products(s.u, s.x, total[e], k, j, s.first[e], s.first[e + 1])
