"""Compiled loops of ``segcal.fitting.expert_sums``: losses, gradients, and the products that curvatures are made of.

All in float64: the terms of a curvature nearly cancel along some directions. The loops hold no lock of the interpreter,
so threads that share the voxels do not wait for each other, as they do between numpy's many short calls.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math

import numpy as np

from segcal.kernels.compiled import elementwise, exp64, reduction
from segcal.kernels.expert_loops import FEATURES, GAPS, MARGINS

__all__ = ["FEATURES", "add_part"]


@elementwise
def _write_products(values, weight, out, start):
    """Write ``weight`` times the products of all pairs of values to ``out``, in the order of ``expert_sums``."""
    for k in range(values.shape[0]):
        own = weight * values[k]
        for other in range(k, values.shape[0]):
            out[start] = own * values[other]
            start += 1
    return start


@reduction
def _to_scores(row, theta, features, winner, never, scores):
    """Write the scores ``(C,)`` of a voxel, for gaps in falling order of the logits; returns the best."""
    outputs, inputs = theta.shape
    first = scores.shape[0] - outputs
    for k in range(outputs):
        total = 0.0
        for j in range(inputs):
            total += theta[k, j] * row[j]
        scores[first + k] = total
    if features == GAPS:
        scores[0] = 0.0
        for k in range(1, scores.shape[0]):
            scores[k] = scores[k - 1] - scores[k]
    elif features == MARGINS:
        for k in range(outputs):
            scores[k] = 0.0 if k == winner else -scores[k]
    for k in range(never.shape[0]):
        if never[k]:
            scores[k] = -np.inf
    best = scores[0]
    for k in range(1, scores.shape[0]):
        best = max(best, scores[k])
    return best


@elementwise
def _add_rows(x, target, weight, winner, impossible, theta, features, gradient, across, within):
    """Add the gradient of all rows ``x (n, J + 1)`` to ``gradient (K, J + 1)``; returns the sum of their losses.

    ``target``, ``weight`` and ``winner (n,)`` are as in ``expert_sums.Rows``, and so is ``impossible (n, C)``, which
    has no rows where there are none. ``across (n, K (K + 3) / 2)`` gets the products of probabilities as the expert
    sees them, with the weight, and ``within (n, ...)`` those of features, unless they are empty.
    """
    outputs, inputs = theta.shape
    p = np.empty(outputs + (1 if features == GAPS else 0))
    q, slope = np.empty(outputs), np.empty(outputs)
    nothing, losses = np.empty(0, np.bool_), 0.0
    for v in range(x.shape[0]):
        row, y, w = x[v], target[v], weight[v]
        never = impossible[v] if impossible.shape[0] else nothing
        best = _to_scores(row, theta, features, winner[v], never, p)
        gap, total = best - p[y], 0.0
        for k in range(p.shape[0]):
            p[k] = exp64(p[k] - best)
        for k in range(p.shape[0]):
            total += p[k]
        losses += w * (math.log(total) + gap)
        for k in range(p.shape[0]):
            p[k] /= total
        # From the scores back to what the expert returns: q of the probabilities, slope of the loss's derivatives.
        if features == GAPS:
            beyond = 0.0
            for k in range(outputs - 1, -1, -1):
                beyond += p[k + 1]
                q[k], slope[k] = -beyond, (1.0 if y > k else 0.0) - beyond
        elif features == MARGINS:
            for k in range(outputs):
                q[k], slope[k] = -p[k], (1.0 if k == y else 0.0) - p[k]
            q[winner[v]] = slope[winner[v]] = 0.0
        else:
            for k in range(outputs):
                q[k], slope[k] = p[k], p[k] - (1.0 if k == y else 0.0)
        for k in range(outputs):
            step = w * slope[k]
            for j in range(inputs):
                gradient[k, j] += step * row[j]
        if across.shape[0]:
            end = _write_products(q, w, across[v], 0)
            for k in range(outputs):
                across[v, end + k] = abs(q[k]) * w
            _write_products(row, 1.0, within[v], 0)
    return losses


@elementwise
def add_part(x, target, weight, winner, impossible, theta, features, rows, gradient, across, within, product, products):
    """``_add_rows`` for ``rows`` at a time, whose products of probabilities times products of features are added, too.

    ``across`` and ``within`` have so many rows, or none where ``products`` are not asked for. ``product`` is scratch
    memory of their shape. One call for many rows: threads hold the interpreter's lock between calls.
    """
    losses = 0.0
    for start in range(0, x.shape[0], rows):
        stop = min(start + rows, x.shape[0])
        never = impossible[start:stop] if impossible.shape[0] else impossible
        count = min(stop - start, across.shape[0])
        own, features_of = across[:count], within[:count]
        losses += _add_rows(
            x[start:stop], target[start:stop], weight[start:stop], winner[start:stop], never, theta, features,
            gradient, own, features_of,
        )  # fmt: skip
        if count:
            np.dot(own.T, features_of, product)
            for k in range(products.shape[0]):
                for j in range(products.shape[1]):
                    products[k, j] += product[k, j]
    return losses
