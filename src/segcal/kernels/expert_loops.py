"""Compiled loops of the expert maps; ``segcal.kernels.expert_cpu`` says how they work together.

A block's voxels are ordered by expert first: its columns ``i`` are voxels ``voxel[i]``.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from segcal.kernels.apply_loops import largest, read, write_log_softmax, zeros
from segcal.kernels.compiled import elementwise, exp, inlined, log1p
from segcal.kernels.experts import IMPOSSIBLE
from segcal.kernels.tiles import ROWS, TILE, multiply_tile

MARGINS, LOGITS, LOG_PROBS, GAPS = 0, 1, 2, 3

_SORTED = 128  # voxels sorted at a time: 19 rows of int64 fill 19 kB
_ZERO, _ONE, _IMPOSSIBLE, _NEVER = np.float32(0), np.float32(1), np.float32(IMPOSSIBLE), np.float32(-np.inf)
_MAGNITUDE, _LOW = np.int32(0x7FFFFFFF), np.int64(0xFFFFFFFF)
_Index = np.uint32  # unsigned indices spare numba the test for negative ones


class Experts(NamedTuple):
    """Parameters as ``expert_cpu.pack`` makes them."""

    features: int
    weight: Any  # (E, K, J) float32
    pairs: Any  # (n, 2), the comparisons that sort C numbers


class Scratch(NamedTuple):
    """What is kept of a block besides ``apply_loops.Block``. Matrices have a tile to spare."""

    raw: Any  # (C, B), the logits
    winner: Any  # (B,), the first of the largest
    voxel: Any  # (B,)
    first: Any  # (E + 1,), the first column of each expert
    own_best: Any  # (B,), the largest logit and
    own_winner: Any  # (B,), the winner, by column
    by_expert: Any  # (C, B), the logits by column, then in falling order
    keys: Any  # (C, _SORTED) int64
    order: Any  # (C, B), the classes in falling order
    x: Any  # (J, B), features, and ones in the last row
    u: Any  # (K, B), what the experts return
    target: Any  # (B,), the label's place among the scores
    losses: Any  # (B,) float64


def new_scratch(classes: int, experts: Experts, size: int) -> Scratch:
    """Scratch memory for one thread. Tiles may reach beyond the last voxel."""
    _, outputs, inputs = experts.weight.shape
    ranks, wide = classes if experts.features == GAPS else 0, size + TILE

    def index() -> Any:
        return zeros(size, dtype=torch.int32)

    x = zeros(padded(inputs), wide)
    x[inputs - 1] = 1
    return Scratch(
        raw=zeros(classes, wide), winner=index(), voxel=index(), first=np.zeros(len(experts.weight) + 1, np.int64),
        own_best=zeros(size), own_winner=index(), by_expert=zeros(ranks, wide),
        keys=zeros(ranks, _SORTED, dtype=torch.int64), order=zeros(ranks, wide, dtype=torch.int32),
        x=x, u=zeros(outputs, wide), target=index(), losses=zeros(size, dtype=torch.float64),
    )  # fmt: skip


def padded(rows: int) -> int:
    """So many rows that tiles fit."""
    return -(-rows // ROWS) * ROWS


@elementwise
def _any_impossible(z, size, lowest):
    for v in range(size):
        lowest[v] = z[0, v]
    for k in range(1, z.shape[0]):
        row = z[k]
        for v in range(size):
            lowest[v] = row[v] if row[v] < lowest[v] else lowest[v]
    found = False
    for v in range(size):
        found |= lowest[v] == _NEVER
    return found


@elementwise
def _group(s, best, valid, size):
    """Order the voxels that count by expert. Returns how many there are."""
    first, voxel, winner = s.first, s.voxel, s.winner
    experts = first.shape[0] - 1
    every = valid.shape[0] == 0
    first[:] = 0
    for v in range(size):
        e = winner[v] if experts > 1 else 0
        first[e + 1] += 1 if every or valid[v] else 0
    for e in range(experts):
        first[e + 1] += first[e]
    for v in range(size):
        if every or valid[v]:
            e = winner[v] if experts > 1 else 0
            voxel[first[e]] = v
            first[e] += 1
    for e in range(experts, 0, -1):
        first[e] = first[e - 1]
    first[0] = 0
    count = first[experts]
    for i in range(count):
        s.own_best[i] = best[_Index(voxel[i])]
        s.own_winner[i] = winner[_Index(voxel[i])]
    return count


@inlined
def _in_place(s, count, size):
    """Whether all voxels count and have one expert, so that columns are voxels."""
    return count == size and (s.first.shape[0] == 2 or s.own_winner[0] == s.own_winner[size - 1])


@elementwise
def _margins(z, best, voxel, size, in_place, x):
    """Rows ``best - z`` by column; an impossible class is as far below as one can be."""
    for k in range(z.shape[0]):
        row, target = z[k], x[k]
        if in_place:
            for i in range(size):
                target[i] = _IMPOSSIBLE if row[i] == _NEVER else best[i] - row[i]
        else:
            for i in range(size):
                value = row[_Index(voxel[i])]
                target[i] = _IMPOSSIBLE if value == _NEVER else best[i] - value


@elementwise
def _common(features, best, size, margins, rest, target):
    """What all inputs have in common: the best logit, or the best log-probability."""
    if features == LOGITS:
        for i in range(size):
            target[i] = best[i]
        return
    for i in range(size):
        rest[i] = -_ONE
    for k in range(margins.shape[0]):
        row = margins[k]
        for i in range(size):
            rest[i] += exp(-row[i])
    for i in range(size):
        rest[i] = _ZERO if rest[i] < _ZERO else rest[i]
        target[i] = np.float32(-log1p(np.float64(rest[i])))


@elementwise
def _sort(z, best, size, pairs, keys, order):
    """Put scores in falling order, in place, and find their classes; of equal ones the lower class comes first.

    A key holds the score's bits, changed so that integers have the same order, and below them the class.
    """
    classes = z.shape[0]
    for start in range(0, size, keys.shape[1]):
        part = min(keys.shape[1], size - start)
        top = best[start : start + part]
        for k in range(classes):
            row, key, last = z[k, start : start + part], keys[k], np.int64(classes - 1 - k)
            for v in range(part):
                value = top[v] - _IMPOSSIBLE if row[v] == _NEVER else row[v]
                bits = np.float32(value + _ZERO).view(np.int32)  # + 0 makes 0 of -0
                bits = bits ^ ((bits >> 31) & _MAGNITUDE)
                key[v] = (np.int64(bits) << 32) | last
        for n in range(pairs.shape[0]):
            upper, lower = keys[pairs[n, 0]], keys[pairs[n, 1]]
            for v in range(part):
                a, b = upper[v], lower[v]
                upper[v] = a if a > b else b
                lower[v] = b if a > b else a
        for k in range(classes):
            row, key, index = z[k, start : start + part], keys[k], order[k, start : start + part]
            for v in range(part):
                bits = np.int32(key[v] >> 32)
                bits = np.int32(bits ^ ((bits >> 31) & _MAGNITUDE))
                row[v] = bits.view(np.float32)
                index[v] = np.int32(classes - 1 - (key[v] & _LOW))


@elementwise
def _gaps(z, voxel, size, in_place, pairs, best, keys, falling, order, x):
    """Rows of differences between neighbours in falling order, by column."""
    for k in range(z.shape[0]):
        row, target = z[k], falling[k]
        if in_place:
            for i in range(size):
                target[i] = row[i]
        else:
            for i in range(size):
                target[i] = row[_Index(voxel[i])]
    _sort(falling, best, size, pairs, keys, order)
    for k in range(z.shape[0] - 1):
        row, next_row, target = falling[k], falling[k + 1], x[k]
        for i in range(size):
            target[i] = row[i] - next_row[i]


@elementwise
def describe_and_map(s, best, size, valid, experts, rest):
    """Fill ``s.x`` and ``s.u`` from ``s.raw``, a column for each voxel that counts. Returns how many there are."""
    count = _group(s, best, valid, size)
    in_place = _in_place(s, count, size)
    if experts.features == GAPS:
        _gaps(s.raw, s.voxel, count, in_place, experts.pairs, s.own_best, s.keys, s.by_expert, s.order, s.x)
    else:
        _margins(s.raw, s.own_best, s.voxel, count, in_place, s.x)
        if experts.features != MARGINS:
            classes = s.raw.shape[0]
            _common(experts.features, s.own_best, count, s.x[:classes], rest, s.x[classes])
    for e in range(s.first.shape[0] - 1):
        # tiles may reach into the columns of the next expert, who comes later
        for column in range(s.first[e], s.first[e + 1], TILE):
            for k in range(0, s.u.shape[0], ROWS):
                multiply_tile(experts.weight[e], s.x, s.u, k, column)
    return count


@elementwise
def _to_scores(s, size, features, running, scores):
    """Scores by class of every voxel in its place; ``running (B,)`` is scratch memory."""
    classes, u, voxel, winner = scores.shape[0], s.u, s.voxel, s.winner
    if features == GAPS:
        for i in range(size):
            running[i] = _ZERO
        for k in range(1, classes):
            row, index = u[k - 1], s.order[k]
            for i in range(size):
                running[i] += row[i]
            for i in range(size):
                scores[_Index(index[i]), _Index(voxel[i])] = running[i]
    else:
        in_place = _in_place(s, size, size)
        for k in range(classes):
            row, target = u[k], scores[k]
            if in_place:
                for i in range(size):
                    target[i] = row[i]
            else:
                for i in range(size):
                    target[_Index(voxel[i])] = row[i]
    if features in (GAPS, MARGINS):
        for v in range(size):
            scores[_Index(winner[v]), v] = _ZERO


@elementwise
def apply_range(x, start, stop, experts, keep, rounding, b, s, out, to):
    """Map columns ``start..stop`` of ``x (C, V)`` and write log-probabilities to ``out (C, W)`` from column ``to``."""
    everywhere = np.zeros(0, np.bool_)
    block = b.best.shape[0]
    for begin in range(start, stop, block):
        size = min(block, stop - begin)
        read(x, begin, size, s.raw, b.best, s.winner)
        describe_and_map(s, b.best, size, everywhere, experts, b.rest)
        _to_scores(s, size, experts.features, b.rest, b.scores)
        for v in range(size):
            first = _Index(s.winner[v])
            b.scores[first, v] += b.best[v] - b.best[v]  # NaN where the best logit is not finite, else 0
            b.own[v] = b.scores[first, v]
        if _any_impossible(s.raw, size, b.rest):
            for k in range(x.shape[0]):
                for v in range(size):
                    b.scores[k, v] = _NEVER if s.raw[k, v] == _NEVER else b.scores[k, v]
        largest(b.scores, 0, size, b.best, b.winner)
        write_log_softmax(b, b.scores, 0, size, _ONE, keep, s.winner, rounding, out, to + begin - start)
