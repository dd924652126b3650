"""Compiled loops over voxels of a sample, one row ``(C,)`` each: drawing them, what an expert sees of them, their loss.

Twins of ``segcal.kernels.experts.describe``, of numpy's indexing and of torch's cross-entropy. They hold no lock of the
interpreter, so that threads share the rows.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math

import numpy as np

from segcal.kernels import expert_loops
from segcal.kernels.compiled import elementwise, exp64
from segcal.kernels.expert_loops import GAPS, MARGINS
from segcal.kernels.experts import IMPOSSIBLE
from segcal.scores import DEPTH, OFFSET_LIMIT

__all__ = ["FEATURES", "add_mixture", "add_temperature", "describe", "losses", "mixture_parts", "put", "take"]

FEATURES = (*expert_loops.FEATURES, "own-logit")
_LOG_PROBS = FEATURES.index("log-probs")
_TINY = np.finfo(np.float64).tiny


@elementwise
def take(source, item, place, start, stop, out):
    """Write ``source[item, place] (C,)`` of the voxels from ``start`` to ``stop`` to the rows of ``out``."""
    for i in range(start, stop):
        row, own = source[item[i], place[i]], out[i]
        for k in range(own.shape[0]):
            own[k] = row[k]


@elementwise
def put(rows, place, out):
    """Write ``rows (n, C)`` to the rows ``place (n,)`` of ``out``."""
    for i in range(place.shape[0]):
        row, own = rows[i], out[place[i]]
        for k in range(own.shape[0]):
            own[k] = row[k]


@elementwise
def losses(scores, labels, start, stop, out):
    """Write the cross-entropy of the rows from ``start`` to ``stop``, in float64."""
    for i in range(start, stop):
        row = scores[i]
        best, total = np.float64(row[0]), 0.0
        for k in range(1, row.shape[0]):
            best = max(best, np.float64(row[k]))
        for k in range(row.shape[0]):
            total += exp64(np.float64(row[k]) - best)
        out[i] = math.log(total) + (best - np.float64(row[labels[i]]))


@elementwise
def add_temperature(gaps, label_gap, weights, beta, start, stop):
    """Weighted sums over rows of the NLL of ``beta gaps``, its slope and its curvature by beta, in float64."""
    value, slope, curvature = 0.0, 0.0, 0.0
    for i in range(start, stop):
        row, total, mean, square = gaps[i], 0.0, 0.0, 0.0
        for k in range(row.shape[0]):
            e = exp64(beta * row[k])
            d = row[k] if e > 0 and row[k] > -np.inf else 0.0
            total += e
            mean += e * d
            square += e * d * d
        mean /= total
        value += weights[i] * (math.log(total) - beta * label_gap[i])
        slope += weights[i] * (mean - label_gap[i])
        curvature += weights[i] * (square / total - mean * mean)
    return value, slope, curvature


@elementwise
def mixture_parts(logits, labels, beta, start, stop, out):
    """Write the label's log-probability in each of the three distributions of ``ets``, of rows from ``start`` on."""
    for i in range(start, stop):
        row, scaled, plain, possible = logits[i], 0.0, 0.0, 0
        best = np.float64(row[0])
        for k in range(1, row.shape[0]):
            best = max(best, np.float64(row[k]))
        for k in range(row.shape[0]):
            gap = np.float64(row[k]) - best
            scaled += exp64(beta * gap)
            plain += exp64(gap)
            possible += gap > -np.inf
        gap = np.float64(row[labels[i]]) - best
        out[i, 0], out[i, 1], out[i, 2] = beta * gap - math.log(scaled), gap - math.log(plain), -math.log(possible)


@elementwise
def add_mixture(log_parts, weights, w, start, stop):
    """Value, gradient and Hessian of the weighted NLL of ``w``-mixtures of ``log_parts``, summed over rows."""
    value, gradient, hessian = 0.0, np.zeros(3), np.zeros((3, 3))
    for i in range(start, stop):
        a, b, c = exp64(log_parts[i, 0]), exp64(log_parts[i, 1]), exp64(log_parts[i, 2])
        mixed = max(a * w[0] + b * w[1] + c * w[2], _TINY)
        ratio = a / mixed, b / mixed, c / mixed
        value -= weights[i] * math.log(mixed)
        for k in range(3):
            gradient[k] -= weights[i] * ratio[k]
            for j in range(3):
                hessian[k, j] += weights[i] * ratio[k] * ratio[j]
    return value, gradient, hessian


@elementwise
def _sort(z, order):
    """Write the classes in falling order of their scores; of equal ones the lower class comes first."""
    for k in range(z.shape[0]):
        place = k
        while place > 0 and z[order[place - 1]] < z[k]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = k


@elementwise
def _gaps(z, impossible, best, label, order, x, never):
    """Write the gaps between sorted scores, and which are impossible, in that order; returns the label's place."""
    for k in range(z.shape[0]):
        z[k] = -np.inf if impossible[k] else z[k]
    _sort(z, order)
    target = 0
    for k in range(z.shape[0]):
        never[k] = impossible[order[k]]
        target = k if order[k] == label else target
        if k > 0:
            above, below = z[order[k - 1]], z[order[k]]
            x[k - 1] = max(IMPOSSIBLE - (best - above), 0.0) if never[k] else above - below
    return target


@elementwise
def describe(logits, order, labels, start, stop, features, x, target, winner, never):
    """Write the rows of ``segcal.fitting.expert_sums.Rows`` from ``start`` to ``stop``; whether one is impossible.

    ``order (n,)`` says which voxel of ``logits (n, C)`` and ``labels (n,)`` a row describes.
    """
    classes = logits.shape[1]
    z, margins = np.empty(classes), np.empty(classes)
    impossible, ranks, some = np.empty(classes, np.bool_), np.empty(classes, np.int64), False
    for i in range(start, stop):
        given, row, label = logits[order[i]], x[i], labels[order[i]]
        first = 0
        for k in range(classes):
            z[k] = given[k]
            first = k if z[k] > z[first] else first
        best = z[first]
        for k in range(classes):
            impossible[k] = best - z[k] > DEPTH
            some |= impossible[k]
            margins[k] = IMPOSSIBLE if impossible[k] else best - z[k]
            never[i, k] = impossible[k]
        winner[i], target[i], row[-1] = first, label, 1.0
        if features == GAPS:
            target[i] = _gaps(z, impossible, best, label, ranks, row, never[i])
        elif features == MARGINS:
            row[:-1] = margins
        elif features == _LOG_PROBS:
            total = 0.0
            for k in range(classes):
                total += exp64(-margins[k])
            logarithm = math.log(total)
            for k in range(classes):
                row[k] = -margins[k] - logarithm
        else:
            level = min(max(best, -OFFSET_LIMIT), OFFSET_LIMIT)
            for k in range(classes):
                row[k] = level - margins[k] if impossible[k] or best != level else z[k]
    return some
