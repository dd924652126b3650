"""Compiled loops of vector scaling, a scale and a bias for each class; ``apply_cpu`` and ``expert_cpu`` call them.

With margins ``m = best - z`` the scores are ``a z + b = -a m + best (a - mean a) + b`` up to a constant per voxel, so
an offset of the logits costs no precision where the scales are alike.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from segcal.kernels.compiled import DEEP, FIRST, MINUS_INF, ONE, ZERO, Index, elementwise, reduction
from segcal.kernels.experts import ExpertMap
from segcal.kernels.gradient_loops import slopes
from segcal.kernels.softmax_loops import argmax, write_log_softmax
from segcal.scores import OFFSET_LIMIT

_OFFSET_LIMIT = np.float32(OFFSET_LIMIT)


class Vector(NamedTuple):
    """Scales, scales less their mean, and biases, each ``(C,)`` float32."""

    scale: Any
    tilt: Any
    bias: Any

    @classmethod
    def of(cls, expert_map: ExpertMap, classes: int) -> Vector:
        """From a map of each class's own logit."""
        expert_map.check_classes(classes)
        scale = expert_map.weight.detach().double().cpu().numpy()[0, :, 0]
        bias = expert_map.bias.detach().double().cpu().numpy()[0]
        return cls(*(values.astype(np.float32) for values in (scale, scale - scale.mean(), bias)))


@elementwise
def _scores(x, start, size, best, vector, level, scores):
    """Scores of columns from ``start`` of ``x (C, V)``; impossible classes are at -inf. ``level (B,)`` is scratch."""
    for v in range(size):
        level[v] = min(max(best[v], -_OFFSET_LIMIT), _OFFSET_LIMIT)
    for k in range(x.shape[0]):
        row, target = x[k, start : start + size], scores[k]
        scale, tilt, bias = vector.scale[k], vector.tilt[k], vector.bias[k]
        for v in range(size):
            margin = best[v] - row[v]
            target[v] = MINUS_INF if margin > DEEP else bias - scale * margin + tilt * level[v]


@elementwise
def apply_range(x, start, stop, parameters, rounding, b, out, to):
    """Map columns ``start..stop`` of ``x (C, V)`` and write log-probabilities to ``out (C, W)`` from column ``to``.

    ``parameters`` are a ``Vector`` and whether to keep the argmax.
    """
    vector, keep = parameters
    block, kept = b.best.shape[0], b.place
    for first in range(start, stop, block):
        size = min(block, stop - first)
        argmax(x, first, size, b.best, kept)
        _scores(x, first, size, b.best, vector, b.own, b.scores)
        for v in range(size):
            b.own[v] = b.scores[Index(kept[v]), v]
        argmax(b.scores, FIRST, size, b.best, b.winner)
        write_log_softmax(b, b.scores, FIRST, size, ONE, keep, kept, rounding, out, to + first - start)


@reduction
def _add_row(row, shift, slope, size, total):
    """Add the sums of slope times shifted logit, and of slopes, over the voxels whose slope is not 0."""
    first, second = 0.0, 0.0
    for v in range(size):
        own = np.float64(slope[v])
        first += own * (np.float64(row[v]) + np.float64(shift[v])) if own != 0.0 else 0.0
        second += own
    total[0] += first
    total[1] += second


@elementwise
def gradient_range(x, start, stop, labels, valid, vector, b, nll, total):
    """Add NLL ``(1,)`` and its gradient ``(1, C, 2)`` by scales and biases of columns ``start..stop`` of ``x (C, V)``.

    ``labels`` and, unless empty, ``valid`` begin at ``start``.
    """
    target, losses, level = b.target, b.losses, b.own
    block, every = b.best.shape[0], valid.shape[0] == 0
    for begin in range(start, stop, block):
        size, offset = min(block, stop - begin), begin - start
        argmax(x, begin, size, b.best, b.winner)
        _scores(x, begin, size, b.best, vector, level, b.scores)
        for v in range(size):
            level[v] -= b.best[v]  # 0 unless the best logit is beyond OFFSET_LIMIT
        for v in range(size):
            target[v] = np.int32(labels[offset + v]) if every or valid[offset + v] else np.int32(0)
        argmax(b.scores, FIRST, size, b.best, b.winner)
        slopes(b, size, target, losses)
        for v in range(size):
            nll[0] += losses[v] if every or valid[offset + v] else 0.0
        for k in range(x.shape[0]):
            row = b.scores[k]
            if not every:
                for v in range(size):
                    row[v] = row[v] if valid[offset + v] else ZERO
            _add_row(x[k, begin : begin + size], level, row, size, total[0, k])
