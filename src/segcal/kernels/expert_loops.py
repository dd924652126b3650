"""Compiled loops of the expert maps; ``segcal.kernels.expert_cpu`` explains how they work together.

The features of a block's voxels are computed in place. Where neighbours have different experts, the voxels are then
ordered by expert: column ``i`` is voxel ``voxel[i]``.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from segcal.kernels.compiled import DEEP, FIRST, MINUS_INF, ONE, ZERO, Index, elementwise, exp, inlined, log1p
from segcal.kernels.experts import IMPOSSIBLE
from segcal.kernels.scratch import INDEX, new_block, zeros
from segcal.kernels.softmax_loops import Block, argmax, write_log_softmax
from segcal.kernels.tiles import ROWS, TILE, exchange_rows, fetch, fetch_to_write, multiply_tall_tile, multiply_tile
from segcal.scores import OFFSET_LIMIT

FEATURES = ("margins", "logits", "log-probs", "gaps")
MARGINS, LOGITS, LOG_PROBS, GAPS = 0, 1, 2, 3  # their places in ``FEATURES``

_MIXED = 3  # with this many times the least number of tiles, ordering the voxels by expert is faster
SORTED = 128  # voxels sorted at a time: 19 rows of int64 take 19 kB
_IMPOSSIBLE, _OFFSET_LIMIT = np.float32(IMPOSSIBLE), np.float32(OFFSET_LIMIT)
_MAGNITUDE, _LOW = np.int32(0x7FFFFFFF), np.int64(0xFFFFFFFF)


class Experts(NamedTuple):
    """Parameters as ``expert_cpu.pack`` makes them."""

    features: int
    weight: Any  # (E, K, J) float32
    pairs: Any  # (n, 2), the comparisons that sort C numbers


class Scratch(NamedTuple):
    """Scratch memory for one block besides ``softmax_loops.Block``. Matrices have a tile to spare."""

    keys: Any  # (C, SORTED) int64
    order: Any  # (C, B), the classes in falling order
    x: Any  # (J, B), features, and ones in the last row
    u: Any  # (K, B), what the experts return
    own_x: Any  # as x and u, by column
    own_u: Any
    run: Any  # (B + 1,), the first voxel of each run of one winner
    first: Any  # (E + 1,), the first column of each expert
    winner: Any = INDEX  # the first of the largest logits
    voxel: Any = INDEX
    own_winner: Any = INDEX  # by column
    own_target: Any = INDEX  # by column


def new_scratch(classes: int, experts: Experts, size: int) -> tuple[Block, Scratch]:
    """Scratch memory for one thread. Tiles may reach beyond the last voxel."""
    count, outputs, inputs = experts.weight.shape
    ranks, wide = classes if experts.features == GAPS else 0, size + TILE
    x, own_x = zeros(padded(inputs), wide), zeros(padded(inputs), wide)
    x[inputs - 1] = own_x[inputs - 1] = 1
    scratch = new_block(
        Scratch, classes, size, x=x, own_x=own_x, u=zeros(outputs, wide), own_u=zeros(outputs, wide),
        keys=zeros(ranks, SORTED, dtype=torch.int64), order=zeros(ranks, wide, dtype=torch.int32),
        run=np.zeros(size + 1, np.int64), first=np.zeros(count + 1, np.int64),
    )  # fmt: skip
    return new_block(Block, classes, size), scratch


def padded(rows: int) -> int:
    """The number of rows rounded up to whole tiles."""
    return -(-rows // ROWS) * ROWS


@elementwise
def _margins(z, start, size, best, x):
    """Rows ``best - z``, ``IMPOSSIBLE`` for impossible classes. Returns whether there are any."""
    found = False
    for k in range(z.shape[0]):
        row, target = z[k, start : start + size], x[k]
        for v in range(size):
            margin = best[v] - row[v]
            never = margin > DEEP
            found |= never
            target[v] = _IMPOSSIBLE if never else margin
    return found


@elementwise
def _common(features, best, size, margins, rest, target):
    """The level that a voxel's features share: the best logit, within ``OFFSET_LIMIT``, or the best log-probability."""
    if features == LOGITS:
        for v in range(size):
            target[v] = min(max(best[v], -_OFFSET_LIMIT), _OFFSET_LIMIT)
        return
    for v in range(size):
        rest[v] = -ONE
    for k in range(margins.shape[0]):
        row = margins[k]
        for v in range(size):
            rest[v] += exp(-row[v])
    for v in range(size):
        rest[v] = ZERO if rest[v] < ZERO else rest[v]
        target[v] = np.float32(-log1p(np.float64(rest[v])))


@inlined
def _key(score, last):
    """The score's bits, changed so that integers have the same order, and below them ``last``: of ties, the larger."""
    bits = np.float32(score + ZERO).view(np.int32)  # + 0 makes 0 of -0
    bits = bits ^ ((bits >> 31) & _MAGNITUDE)
    return (np.int64(bits) << 32) | last


@elementwise
def _sort(keys, pairs):
    """Sort the rows of every column, the largest first."""
    for n in range(pairs.shape[0]):
        exchange_rows(keys, pairs[n, 0], pairs[n, 1])


@elementwise
def _gaps(z, start, size, best, pairs, keys, higher, order, x):
    """Rows of differences between neighbours in falling order, and their classes; ties go to the lower class first.

    ``higher (B,)`` is scratch memory. Returns whether there is an impossible class, which comes last.
    """
    classes, found = z.shape[0], False
    for begin in range(0, size, keys.shape[1]):
        part = min(keys.shape[1], size - begin)
        top = best[begin : begin + part]
        for k in range(classes):
            row, key, last = z[k, start + begin : start + begin + part], keys[k], np.int64(classes - 1 - k)
            for v in range(part):
                never = top[v] - row[v] > DEEP
                found |= never
                key[v] = _key(MINUS_INF if never else row[v], last)
        _sort(keys, pairs)
        for v in range(part):
            higher[v] = top[v]
        for k in range(classes):
            key, index, gap = keys[k], order[k, begin : begin + part], x[max(k - 1, 0), begin : begin + part]
            for v in range(part):
                bits = np.int32(key[v] >> 32)
                value = np.int32(bits ^ ((bits >> 31) & _MAGNITUDE)).view(np.float32)
                left = max(_IMPOSSIBLE - (top[v] - higher[v]), ZERO)  # to where an impossible class enters
                gap[v] = left if value == MINUS_INF else higher[v] - value  # the second row overwrites the first's
                higher[v] = value
                index[v] = np.int32(classes - 1 - (key[v] & _LOW))
    return found


@elementwise
def describe(z, start, size, best, experts, s, rest):
    """Fill ``s.x`` (and ``s.order``) for the columns from ``start`` of ``z (C, V)``; ``best (B,)`` are the largest.

    Returns whether there are impossible classes. ``rest (B,)`` is scratch memory.
    """
    if experts.features == GAPS:
        return _gaps(z, start, size, best, experts.pairs, s.keys, rest, s.order, s.x)
    found = _margins(z, start, size, best, s.x)
    if experts.features != MARGINS:
        classes = z.shape[0]
        _common(experts.features, best, size, s.x[:classes], rest, s.x[classes])
    return found


@elementwise
def group(s, valid, size):
    """Order the ``valid`` voxels (all, if that is empty) by expert. Returns how many there are."""
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
    return first[experts]


@elementwise
def gather(source, voxel, size, target):
    """Rows of ``source`` by column."""
    for j in range(source.shape[0]):
        row, columns = source[j], target[j]
        for i in range(size):
            columns[i] = row[Index(voxel[i])]


@inlined
def _multiply_columns(weight, x, u, column):
    """``u = W x`` for ``TILE`` columns. Tall tiles read x half as often."""
    rows = u.shape[0]
    for k in range(0, rows - ROWS, 2 * ROWS):
        multiply_tall_tile(weight, x, u, k, column)
    if rows % (2 * ROWS) > 0:
        multiply_tile(weight, x, u, rows - ROWS, column)


@elementwise
def multiply(weight, x, first, u):
    """``u = W x`` of every column by its expert's matrix."""
    for e in range(first.shape[0] - 1):
        # a tile may reach into the columns of the next expert, which are overwritten later
        for column in range(first[e], first[e + 1], TILE):
            _multiply_columns(weight[e], x, u, column)


@elementwise
def _find_runs(winner, size, run):
    """List the first voxel of every run of one winner, and the end. Returns the number of runs, and of their tiles."""
    count, tiles = 0, 0
    run[0] = 0
    for v in range(1, size + 1):
        if v == size or winner[v] != winner[v - 1]:
            tiles += (v - run[count] + TILE - 1) // TILE
            count += 1
            run[count] = v
    return count, tiles


@elementwise
def _map_in_place(s, weight, size, x, ahead, out, to):
    """``s.u = W s.x``. Neighbours mostly have the same expert and are mapped in place, run by run.

    If they are too mixed for that, they are ordered by expert. The columns of ``x`` from ``ahead`` and of ``out`` from
    ``to``, which are needed next, are prefetched.
    """
    u, voxel, run = s.u, s.voxel, s.run
    several = weight.shape[0] > 1
    run[0], run[1] = 0, size
    count, tiles = _find_runs(s.winner, size, run) if several else (1, 0)
    if tiles <= _MIXED * (size // TILE + 1):
        for n in range(count):
            e = s.winner[run[n]] if several else np.int32(0)
            for column in range(run[n], run[n + 1], TILE):  # may reach into the next run, which is overwritten later
                for k in range(x.shape[0]):
                    fetch(x, k, ahead + column)
                    fetch_to_write(out, k, to + column)
                _multiply_columns(weight[e], s.x, u, column)
    else:
        group(s, np.zeros(0, np.bool_), size)
        gather(s.x, voxel, size, s.own_x)
        multiply(weight, s.own_x, s.first, s.own_u)
        for k in range(u.shape[0]):
            row, columns = u[k], s.own_u[k]
            for i in range(size):
                row[Index(voxel[i])] = columns[i]


@elementwise
def _unsort(steps, order, size, running, scores):
    """Scores by class from their differences from rank to rank; ``running (B,)`` is scratch memory."""
    for v in range(size):
        running[v] = ZERO
    for k in range(1, scores.shape[0]):
        row, index = steps[k - 1], order[k]
        for v in range(size):
            running[v] += row[v]
        for v in range(size):
            scores[Index(index[v]), v] = running[v]


@elementwise
def apply_range(x, start, stop, parameters, rounding, scratch, out, to):
    """Map columns ``start..stop`` of ``x (C, V)`` and write log-probabilities to ``out (C, W)`` from column ``to``.

    ``parameters`` are ``Experts`` and whether to keep the argmax.
    """
    experts, keep = parameters
    b, s = scratch
    block = b.best.shape[0]
    scores = b.scores if experts.features == GAPS else s.u[: x.shape[0]]
    ranked = experts.features in (GAPS, MARGINS)  # the winner's score is 0
    for begin in range(start, stop, block):
        size = min(block, stop - begin)
        argmax(x, begin, size, b.best, s.winner)
        impossible = describe(x, begin, size, b.best, experts, s, b.rest)
        _map_in_place(s, experts.weight, size, x, begin + size, out, to + begin - start)
        if experts.features == GAPS:
            _unsort(s.u, s.order, size, b.rest, scores)
        for v in range(size):
            b.own[v] = b.best[v] - b.best[v]  # NaN where the best logit is not finite, else 0
        if impossible:
            for k in range(x.shape[0]):
                row, column = x[k, begin : begin + size], scores[k]
                for v in range(size):
                    column[v] = MINUS_INF if b.best[v] - row[v] > DEEP else column[v]
        if keep and ranked:  # the winner is the largest up to rounding, and its own score is not read
            for v in range(size):
                b.best[v], b.winner[v] = b.own[v], s.winner[v]
        else:
            for v in range(size):
                first = Index(s.winner[v])
                b.own[v] += ZERO if ranked else scores[first, v]
                scores[first, v] = b.own[v]
            argmax(scores, FIRST, size, b.best, b.winner)
        write_log_softmax(b, scores, FIRST, size, ONE, keep, s.winner, rounding, out, to + begin - start)


@elementwise
def lower_range(x, start, stop, pairs, keys, last, scores, winner):
    """Lower the scores of columns ``start..stop`` that are above that of a class with a larger logit in ``x``."""
    classes = x.shape[0]
    for begin in range(start, stop, keys.shape[1]):
        size = min(keys.shape[1], stop - begin)
        for k in range(classes):
            row, key, index = x[k, begin : begin + size], keys[k], np.int64(classes - 1 - k)
            for v in range(size):
                key[v] = _key(row[v], index)
        _sort(keys, pairs)
        for v in range(size):
            last[v] = np.float32(np.inf)
            winner[begin + v] = classes - 1 - (keys[0, v] & _LOW)
        for k in range(classes):
            key = keys[k]
            for v in range(size):
                own = classes - 1 - (key[v] & _LOW)
                value = scores[own, begin + v]
                last[v] = last[v] if value > last[v] else value
                scores[own, begin + v] = last[v]
