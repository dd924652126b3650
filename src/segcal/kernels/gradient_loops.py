"""Compiled loops that sum the loss of expert maps and its slopes; ``segcal.kernels.expert_cpu`` calls them."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import numpy as np

from segcal.kernels.apply_loops import largest
from segcal.kernels.compiled import elementwise, exp, log1p
from segcal.kernels.expert_loops import GAPS, MARGINS, describe, gather, group, multiply
from segcal.kernels.tiles import ROWS, add_products

_ZERO, _ONE = np.float32(0), np.float32(1)
_Index = np.uint32  # unsigned indices spare numba the test for negative ones


@elementwise
def _targets(s, size, labels, ranked):
    """The place of each voxel's label among the scores: its rank, for gaps."""
    target = s.target
    for v in range(size):
        target[v] = np.int32(labels[v])
    if ranked:
        for k in range(s.order.shape[0]):  # marked by negative numbers, which no label is
            order, rank = s.order[k], np.int32(-1 - k)
            for v in range(size):
                target[v] = rank if order[v] == target[v] else target[v]
        for v in range(size):
            target[v] = np.int32(-1 - target[v])


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
            row, step = scores[k], s.own_u[k - 1]
            for i in range(size):
                running[i] += step[i]
                row[i] = running[i]
        return
    for k in range(scores.shape[0]):
        row, source = scores[k], s.own_u[k]
        for i in range(size):
            row[i] = source[i]
    if features == MARGINS:
        for i in range(size):
            scores[_Index(s.own_winner[i]), i] = _ZERO


@elementwise
def slopes(b, size, target, losses):
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
    """Slopes by what the experts return, into ``s.own_u``, from those by score."""
    classes, u = slopes.shape[0], s.own_u
    if features == GAPS:
        for i in range(size):
            running[i] = _ZERO
        for k in range(1, classes):
            row, target = slopes[_Index(classes - k)], u[_Index(classes - 1 - k)]
            for i in range(size):
                running[i] += row[i]
                target[i] = running[i]
        return
    for k in range(classes):
        row, target = slopes[k], u[k]
        for i in range(size):
            target[i] = row[i]
    if features == MARGINS:
        for i in range(size):
            u[_Index(s.own_winner[i]), i] = _ZERO


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
        largest(x, begin, size, b.best, s.winner)
        describe(x, begin, size, b.best, experts, s, b.rest)
        _targets(s, size, labels[here], features == GAPS)
        count = group(s, valid[here] if valid.shape[0] else valid, size)
        for i in range(count):
            v = _Index(s.voxel[i])
            s.own_winner[i], s.own_target[i] = s.winner[v], s.target[v]
        in_place = count == size and (s.first.shape[0] == 2 or s.own_winner[0] == s.own_winner[size - 1])
        inputs = s.x if in_place else s.own_x
        if not in_place:
            gather(s.x, s.voxel, count, s.own_x)
        multiply(experts.weight, inputs, s.first, s.own_u)
        _to_scores(s, count, features, b.rest, b.scores)
        largest(b.scores, 0, count, b.best, b.winner)
        slopes(b, count, s.own_target, s.losses)
        _pull_back(s, count, features, b.rest, b.scores)
        for e in range(s.first.shape[0] - 1):
            if s.first[e + 1] > s.first[e]:
                for i in range(s.first[e], s.first[e + 1]):
                    nll[e] += s.losses[i]
                for k in range(0, s.own_u.shape[0], ROWS):
                    for j in range(0, inputs.shape[0], ROWS):
                        add_products(s.own_u, inputs, total[e], k, j, s.first[e], s.first[e + 1])
