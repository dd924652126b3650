"""The compiled loop of ``segcal.kernels.temperature``."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math
from typing import Any

import numpy as np

from segcal.kernels.compiled import SMALLEST, elementwise, exp, log1p, reduction
from segcal.kernels.cpu_loops import argmax
from segcal.scores import DEPTH

_ZERO = np.float32(0)
_DEEPEST = np.float32(-DEPTH)


@elementwise
def _add_classes(x, start, size, best, winner, beta, rest, mean, square):
    """Sums over the classes other than the winner of ``e = exp(d)``, ``e d`` and ``e d^2``, ``d = beta (x - best)``."""
    for v in range(size):
        rest[v] = _ZERO
        mean[v] = _ZERO
        square[v] = _ZERO
    for k in range(x.shape[0]):
        row, index = x[k, start : start + size], np.uint32(k)
        for v in range(size):
            gap = row[v] - best[v]
            d = gap * beta
            e = exp(d)
            e = _ZERO if winner[v] == index or gap < _DEEPEST else e
            d = SMALLEST if d < SMALLEST else d  # -inf times zero would be NaN
            rest[v] += e
            mean[v] += e * d
            square[v] += e * d * d


@reduction
def _add_voxels(size, counts, own, rest, mean, square, sums):
    """Add the voxels that count; vector instructions, as ``counts`` is a factor and no branch."""
    number, nll, slope, curvature = 0.0, 0.0, 0.0, 0.0
    for v in range(size):
        others, factor, label = np.float64(rest[v]), np.float64(counts[v]), np.float64(own[v])
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
def temperature_range(x, start, stop, labels, ignored, mask, beta, block, sums):
    """Add count, NLL, its slope and its curvature by log beta of voxels ``start..stop`` to ``sums (4,)``.

    Returns the first voxel, counted from ``start``, that has no possible class or no softmax, or -1.
    """
    best, winner, rest, mean, square, own, counts = block
    classes, step = x.shape[0], len(best)
    for offset in range(0, stop - start, step):
        size = min(step, stop - start - offset)
        here = start + offset
        argmax(x, here, size, best, winner)
        _add_classes(x, here, size, best, winner, beta, rest, mean, square)
        for v in range(size):
            label = labels[offset + v]
            valid = label != ignored and (mask.size == 0 or mask[offset + v])
            possible = 0 <= label < classes
            gap = x[label if possible else 0, here + v] - best[v]
            if valid and not (possible and gap >= _DEEPEST and rest[v] >= _ZERO and math.isfinite(best[v])):
                return offset + v
            counts[v] = np.float32(valid)
            own[v] = gap * beta if valid else _ZERO
            rest[v] = rest[v] if valid else _ZERO  # NaN times zero would be NaN
            mean[v] = mean[v] if valid else _ZERO
            square[v] = square[v] if valid else _ZERO
        _add_voxels(size, counts, own, rest, mean, square, sums)
    return -1


def new_block(size: int) -> tuple[Any, ...]:
    """Scratch memory for one thread: best, winner, three sums over classes, the label's score, and what counts."""
    return (
        np.zeros(size, np.float32),
        np.zeros(size, np.uint32),
        *(np.zeros(size, np.float32) for _ in range(5)),
    )
