"""The compiled loop of ``segcal.kernels.survey``."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import numpy as np

from segcal.kernels.compiled import DEEP, ONE, elementwise, log1p
from segcal.kernels.softmax_loops import argmax, check_labels, sum_others


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
def survey_range(x, start, stop, labels, edges, b, strata, true, sums):
    """Write the strata of columns ``start..stop`` of ``x (C, V)``, and add to ``true (C,)`` and to ``sums (2,)``.

    The sums are the NLL and the number of voxels with impossible classes. ``labels`` and ``strata`` begin at ``start``.
    Returns the first unfit voxel, counted from there, or -1.
    """
    block, levels = b.best.shape[0], edges.shape[0] + 1
    for first in range(start, stop, block):
        size, offset = min(block, stop - first), first - start
        argmax(x, first, size, b.best, b.winner)
        sum_others(x, first, size, b.best, b.winner, ONE, b.rest)
        _lowest(x, first, size, b.own)
        level = strata[offset : offset + size]
        for v in range(size):
            level[v] = 0
        for edge in edges:
            for v in range(size):
                level[v] += ONE / (ONE + b.rest[v]) > edge
        bad = check_labels(labels, offset, x, first, size, b.best, b.rest, b.target)
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
