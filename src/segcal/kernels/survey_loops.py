"""The compiled loop of ``segcal.kernels.survey``."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math

import numpy as np

from segcal.kernels.apply_loops import largest, sum_others
from segcal.kernels.compiled import elementwise, log1p
from segcal.scores import DEPTH

_ZERO, _ONE, _DEPTH = np.float32(0), np.float32(1), np.float32(DEPTH)


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
def survey_range(x, start, stop, labels, ignored, mask, edges, b, strata, true, sums):
    """Write the strata of columns ``start..stop`` of ``x (C, V)``, and add to ``true (C,)`` and to ``sums (2,)``.

    The sums are the NLL, and how many voxels have impossible classes. ``labels``, ``strata``, and ``mask`` unless empty
    begin at ``start``. Returns the first voxel, counted from there, that has no possible class or no softmax, or -1.
    """
    classes, block, levels = x.shape[0], b.best.shape[0], edges.shape[0] + 1
    for first in range(start, stop, block):
        size, offset = min(block, stop - first), first - start
        largest(x, first, size, b.best, b.winner)
        sum_others(x, first, size, b.best, b.winner, _ONE, b.rest)
        _lowest(x, first, size, b.own)
        level = strata[offset : offset + size]
        for v in range(size):
            level[v] = 0
        for edge in edges:
            for v in range(size):
                level[v] += _ONE / (_ONE + b.rest[v]) > edge
        for v in range(size):
            label, winner = labels[offset + v], np.int64(b.winner[v])
            if label == ignored or (mask.size > 0 and not mask[offset + v]):
                level[v] = -1
                continue
            if not (0 <= label < classes and b.rest[v] >= _ZERO and math.isfinite(b.best[v])):
                return offset + v
            gap = b.best[v] - x[label, first + v]
            if gap > _DEPTH:
                return offset + v
            level[v] += (2 * winner + (winner == label)) * levels
            true[label] += 1
            sums[0] += log1p(np.float64(b.rest[v])) + np.float64(gap)
            sums[1] += b.best[v] - b.own[v] > _DEPTH
    return -1
