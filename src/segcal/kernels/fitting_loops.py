"""The compiled loops of ``segcal.kernels.fitting_passes`` and ``segcal.fitting.sampling``."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import numpy as np

from segcal.kernels.compiled import DEEP, ONE, SMALLEST, ZERO, elementwise, exp, log1p, reduction
from segcal.kernels.softmax_loops import argmax, check_labels, sum_others

_FIRST, _SECOND, _THIRD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


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
def temperature_range(x, start, stop, given, beta, b, sums):
    """Add count, NLL, its slope and its curvature by log beta of voxels ``start..stop`` to ``sums (4,)``.

    Returns the first unfit voxel, counted from ``start``, or -1.
    """
    best, target, rest, mean, square, own, factors = b.best, b.target, b.rest, b.mean, b.square, b.own, b.factors
    step = len(best)
    for offset in range(0, stop - start, step):
        size, here = min(step, stop - start - offset), start + offset
        argmax(x, here, size, best, b.winner)
        _add_classes(x, here, size, best, b.winner, beta, rest, mean, square)
        bad = check_labels(given, offset, x, here, size, best, rest, target)
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


@elementwise
def _lowest(x, start, size, lowest):
    """The lowest score of each voxel from column ``start`` of ``x (C, V)`` on."""
    for v in range(size):
        lowest[v] = x[0, start + v]
    for k in range(1, x.shape[0]):
        row = x[k, start : start + size]
        for v in range(size):
            lowest[v] = row[v] if row[v] < lowest[v] else lowest[v]


@elementwise
def survey_range(x, start, stop, given, edges, strata, b, true, sums):
    """Write the strata of columns ``start..stop`` of ``x (C, V)``, and add to ``true (C,)`` and to ``sums (2,)``.

    The sums are the NLL and the number of voxels with impossible classes. ``given`` begins at ``start``;
    ``strata`` are those of all voxels. Returns the first unfit voxel, counted from ``start``, or -1.
    """
    block, levels = b.best.shape[0], edges.shape[0] + 1
    for first in range(start, stop, block):
        size, offset = min(block, stop - first), first - start
        argmax(x, first, size, b.best, b.winner)
        sum_others(x, first, size, b.best, b.winner, ONE, b.rest)
        _lowest(x, first, size, b.own)
        level = strata[given.offset + offset : given.offset + offset + size]
        for v in range(size):
            level[v] = 0
        for edge in edges:
            for v in range(size):
                level[v] += ONE / (ONE + b.rest[v]) > edge
        bad = check_labels(given, offset, x, first, size, b.best, b.rest, b.target)
        if bad >= 0:
            return bad
        for v in range(size):
            label, winner = b.target[v], np.int64(b.winner[v])
            if label < 0:
                level[v] = -1
                continue
            gap = b.best[v] - x[label, first + v]
            level[v] += (2 * winner + (winner == label)) * levels
            true[label] += 1
            sums[0] += log1p(np.float64(b.rest[v])) + np.float64(gap)
            sums[1] += b.best[v] - b.own[v] > DEEP
    return -1


@elementwise
def choose(strata, first, highest, sizes, kept, keys):
    """Count the voxels of every stratum, and list those whose key is low enough. Returns how many there are.

    Keys are hashes of the voxels' numbers. Voxels whose stratum is negative do not count.
    """
    n = 0
    for v in range(len(strata)):
        stratum = strata[v]
        if stratum < 0:
            continue
        x = (first + np.uint64(v)) * _FIRST
        x = (x ^ (x >> _SHIFTS[0])) * _SECOND
        x = (x ^ (x >> _SHIFTS[1])) * _THIRD
        key = x ^ (x >> _SHIFTS[2])
        sizes[stratum] += 1
        kept[n] = v
        keys[n] = key
        n += key <= highest[stratum]
    return n
