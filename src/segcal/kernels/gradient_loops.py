"""Compiled loops that sum the loss of expert maps and its slopes; ``segcal.kernels.expert_cpu`` calls them."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import numpy as np

from segcal.kernels.compiled import FIRST, ONE, ZERO, Index, elementwise, exp, log1p
from segcal.kernels.expert_loops import GAPS, MARGINS, describe, gather, group, multiply
from segcal.kernels.softmax_loops import argmax
from segcal.kernels.tiles import ROWS, add_products


@elementwise
def _targets(target, size, labels, order):
    """The row of each voxel's label among the scores: its rank, where there is an ``order (C, B)`` of classes."""
    for v in range(size):
        target[v] = np.int32(labels[v])
    if order.shape[0] > 0:
        for k in range(order.shape[0]):  # found ranks are marked as negative numbers
            row, rank = order[k], np.int32(-1 - k)
            for v in range(size):
                target[v] = rank if row[v] == target[v] else target[v]
        for v in range(size):
            target[v] = np.int32(-1 - target[v])


@elementwise
def _copy(source, size, features, winner, target):
    """Copy the rows of ``target``; of margins, the winner's is 0."""
    for k in range(target.shape[0]):
        row, to = source[k], target[k]
        for i in range(size):
            to[i] = row[i]
    if features == MARGINS:
        for i in range(size):
            target[Index(winner[i]), i] = ZERO


@elementwise
def _to_scores(s, size, features, running, scores):
    """Scores by column, for gaps in falling order of the logits; ``running (B,)`` is scratch memory.

    No row is computed from the one before: the compiler would have to assume that they overlap, and use no vectors.
    """
    if features == GAPS:
        row = scores[0]
        for i in range(size):
            running[i] = ZERO
            row[i] = ZERO
        for k in range(1, scores.shape[0]):
            row, step = scores[k], s.own_u[k - 1]
            for i in range(size):
                running[i] += step[i]
                row[i] = running[i]
        return
    _copy(s.own_u, size, features, s.own_winner, scores)


@elementwise
def slopes(b, size, target, losses):
    """Replace scores by the loss's derivatives (probabilities, less 1 for the label), and write the losses."""
    z, best, winner, rest, inverse = b.scores, b.best, b.winner, b.rest, b.log_sum
    for i in range(size):
        losses[i] = np.float64(best[i]) - np.float64(z[Index(target[i]), i])
        rest[i] = ZERO
    for k in range(z.shape[0]):
        row, index = z[k], np.int32(k)
        for i in range(size):
            e = exp(row[i] - best[i])
            row[i] = e
            rest[i] += ZERO if winner[i] == index else e
    for i in range(size):
        losses[i] += log1p(np.float64(rest[i])) + (rest[i] - rest[i])  # NaN stays NaN
        inverse[i] = ONE / (ONE + rest[i])
    for k in range(z.shape[0]):
        row = z[k]
        for i in range(size):
            row[i] *= inverse[i]
    for i in range(size):
        y = Index(target[i])
        # p - 1 of the winner from the sum over the others, to keep its precision however confident the voxel is
        z[y, i] = -rest[i] * inverse[i] if winner[i] == target[i] else z[y, i] - ONE


@elementwise
def _pull_back(s, size, features, running, slopes):
    """Write the loss's derivatives by what the experts return to ``s.own_u``, from those by the scores."""
    classes, u = slopes.shape[0], s.own_u
    if features == GAPS:
        for i in range(size):
            running[i] = ZERO
        for k in range(1, classes):
            row, target = slopes[Index(classes - k)], u[Index(classes - 1 - k)]
            for i in range(size):
                running[i] += row[i]
                target[i] = running[i]
        return
    _copy(slopes, size, features, s.own_winner, u[:classes])


@elementwise
def gradient_range(x, start, stop, labels, valid, experts, scratch, nll, total):
    """Add NLL ``(E,)`` and the sums of slope times feature, ``(E, K, J)``, of columns ``start..stop`` of ``x (C, V)``.

    ``labels`` and, unless empty, ``valid`` begin at ``start``.
    """
    b, s = scratch
    block = b.best.shape[0]
    features = experts.features
    for begin in range(start, stop, block):
        size = min(block, stop - begin)
        here = slice(begin - start, begin - start + size)
        argmax(x, begin, size, b.best, s.winner)
        describe(x, begin, size, b.best, experts, s, b.rest)
        _targets(b.target, size, labels[here], s.order)
        count = group(s, valid[here] if valid.shape[0] else valid, size)
        for i in range(count):
            v = Index(s.voxel[i])
            s.own_winner[i], s.own_target[i] = s.winner[v], b.target[v]
        in_place = count == size and (s.first.shape[0] == 2 or s.own_winner[0] == s.own_winner[size - 1])
        inputs = s.x if in_place else s.own_x
        if not in_place:
            gather(s.x, s.voxel, count, s.own_x)
        multiply(experts.weight, inputs, s.first, s.own_u)
        _to_scores(s, count, features, b.rest, b.scores)
        argmax(b.scores, FIRST, count, b.best, b.winner)
        slopes(b, count, s.own_target, b.losses)
        _pull_back(s, count, features, b.rest, b.scores)
        for e in range(s.first.shape[0] - 1):
            if s.first[e + 1] > s.first[e]:
                for i in range(s.first[e], s.first[e + 1]):
                    nll[e] += b.losses[i]
                for k in range(0, s.own_u.shape[0], ROWS):
                    for j in range(0, inputs.shape[0], ROWS):
                        add_products(s.own_u, inputs, total[e], k, j, s.first[e], s.first[e + 1])
