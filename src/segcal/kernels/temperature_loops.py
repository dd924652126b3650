"""The compiled loop of ``segcal.kernels.temperature``."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from segcal.kernels.compiled import DEEP, SMALLEST, ZERO, elementwise, exp, log1p, reduction
from segcal.kernels.scratch import FLOAT, INDEX
from segcal.kernels.softmax_loops import argmax, check_labels


class Block(NamedTuple):
    """Scratch memory for one block; see ``segcal.kernels.scratch``."""

    best: Any = FLOAT
    winner: Any = INDEX
    target: Any = INDEX  # the label, -1 where the voxel does not count
    rest: Any = FLOAT  # sums over the other classes of e = exp(d), with d = beta (score - best),
    mean: Any = FLOAT  # of e d
    square: Any = FLOAT  # and of e d^2
    own: Any = FLOAT  # d of the label
    factors: Any = FLOAT  # 1 where the voxel counts, else 0


@elementwise
def _add_classes(x, start, size, best, winner, beta, rest, mean, square):
    """Sums over the classes other than the winner of ``e = exp(d)``, ``e d`` and ``e d^2``, ``d = beta (x - best)``."""
    for v in range(size):
        rest[v] = ZERO
        mean[v] = ZERO
        square[v] = ZERO
    for k in range(x.shape[0]):
        row, index = x[k, start : start + size], np.int32(k)
        for v in range(size):
            gap = row[v] - best[v]
            d = gap * beta
            e = exp(d)
            e = ZERO if winner[v] == index or gap < -DEEP else e
            d = SMALLEST if d < SMALLEST else d  # -inf times zero would be NaN
            rest[v] += e
            mean[v] += e * d
            square[v] += e * d * d


@reduction
def _add_voxels(size, factors, own, rest, mean, square, sums):
    """Add the voxels that count, by a factor instead of a branch, so that vector instructions can be used."""
    number, nll, slope, curvature = 0.0, 0.0, 0.0, 0.0
    for v in range(size):
        others, factor, label = np.float64(rest[v]), np.float64(factors[v]), np.float64(own[v])
        p = 1.0 / (1.0 + others)
        average = np.float64(mean[v]) * p
        first = average - label
        number += factor
        nll += factor * (log1p(others) - label)
        slope += factor * first
        curvature += factor * (np.float64(square[v]) * p - average * average + first)
    sums[0] += number
    sums[1] += nll
    sums[2] += slope
    sums[3] += curvature


@elementwise
def temperature_range(x, start, stop, labels, beta, b, sums):
    """Add count, NLL, its slope and its curvature by log beta of voxels ``start..stop`` to ``sums (4,)``.

    Returns the first unfit voxel, counted from ``start``, or -1.
    """
    best, winner, target, rest, mean, square, own, factors = b
    step = len(best)
    for offset in range(0, stop - start, step):
        size, here = min(step, stop - start - offset), start + offset
        argmax(x, here, size, best, winner)
        _add_classes(x, here, size, best, winner, beta, rest, mean, square)
        bad = check_labels(labels, offset, x, here, size, best, rest, target)
        if bad >= 0:
            return bad
        for v in range(size):
            valid = target[v] >= 0
            factors[v] = np.float32(valid)
            own[v] = (x[max(target[v], 0), here + v] - best[v]) * beta if valid else ZERO
            rest[v] = rest[v] if valid else ZERO  # NaN times zero would be NaN
            mean[v] = mean[v] if valid else ZERO
            square[v] = square[v] if valid else ZERO
        _add_voxels(size, factors, own, rest, mean, square, sums)
    return -1
