"""The compiled loops of ``segcal.kernels.cuda`` that add voxels up: statistics, temperature fits, first passes."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# (triton infers the types of compiled functions itself)

from __future__ import annotations

import math

import triton
import triton.language as tl

from segcal.kernels.cuda_tiles import (
    DEEP,
    LOWEST,
    best_of,
    counted,
    exp,
    labelled_tile,
    log1p,
    note_first,
    tile,
    walking,
)

#: Truncating p times this puts p = j / 4096 in the cell below, where it belongs; for float32 and float64.
_CELLS, _FINE_CELLS = tl.constexpr(4096 - 2**-12), tl.constexpr(math.nextafter(4096.0, 0.0))
#: A cell of a histogram is count * 2**40 + sum of positions in the bin, in units of 2**-17 of its width. Up to 2**23
#: voxels fit.
POSITION_BITS = 17
COUNT_BIT = 40
_ONE = tl.constexpr(2**COUNT_BIT)
#: Columns of the sums by class.
NLL, BRIER, ENTROPY, RIGHT, HOT_COUNT, HOT_CONFIDENCE, LOW, BY_SLOT = range(8)
COLUMNS = 8
_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _bin(p, first, upper, counted, STEPS: tl.constexpr):
    """The bin of p: ``(upper[i - 1], upper[i]]``; at most STEPS above that of the table of cells."""
    cell = p * (_FINE_CELLS if p.dtype == tl.float64 else _CELLS)
    i = tl.load(first + cell.to(tl.int32), mask=counted, other=0)
    for _ in tl.static_range(STEPS):
        i += (p > tl.load(upper + i, mask=counted, other=2.0)).to(tl.int32)
    return i


@triton.jit
def _packed(p, i, lower, scale, counted):
    """One voxel in bin i, as a cell of a histogram holds it."""
    position = (p - tl.load(lower + i, mask=counted, other=0.0)) * tl.load(scale + i, mask=counted, other=0.0)
    return (position + 0.5).to(tl.int64) + _ONE


@triton.jit
def _add(cells, value, counted):
    tl.atomic_add(cells, value, mask=counted, sem="relaxed")


@triton.jit
def _add_sum(cell, values):
    tl.atomic_add(cell, tl.sum(values).to(tl.float64), sem="relaxed")


@walking
def tally_loop(
    x, labels, mask, slots, before,  # voxels: flat, or logits with strides
    top_first, top_upper, top_lower, top_scale,  # the grids
    class_first, class_upper, class_lower, class_scale,
    cells, sums, bad,  # results
    start, stop, classes, inner, by_image, by_class, by_voxel, skew, ignored, beta, depth, shift, slot_count, top_bins,
    class_bins, copy_cells, copies,
    CP: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, SLOTTED: tl.constexpr, COMPARE: tl.constexpr,
    CLASSWISE: tl.constexpr, TOP_STEPS: tl.constexpr, CLASS_STEPS: tl.constexpr,
):  # fmt: skip
    """Add the voxels from ``start`` to ``stop`` to ``cells (copies, ...)`` and ``sums (programs, slots, columns, CP)``.

    The cells of a copy: ``top (slots, 2, T)``, ``predicted (slots, C, 2, M)`` and ``class (slots, C, M)``, which are
    packed, then plain counts ``positive (slots, C, M)`` and ``confusion (slots, C, C)``. Most right predictions are in
    the highest bin and most other classes in the lowest: these are summed by block, without atomic additions.
    ``bad`` becomes the first voxel that is unfit.
    """
    program = tl.program_id(0)
    top = cells + (program % copies).to(tl.int64) * copy_cells
    predicted = top + slot_count * 2 * top_bins
    by_class_cells = predicted + slot_count * classes * 2 * class_bins
    positive = by_class_cells + slot_count * classes * class_bins
    confusion = positive + slot_count * classes * class_bins
    hot = tl.load(top_upper + top_bins - 2, mask=top_bins > 1, other=2.0)  # lower edge of the highest bin
    lowest = tl.load(class_upper)
    for block in range(start // BLOCK + program, tl.cdiv(stop, BLOCK), tl.num_programs(0)):
        v = block * BLOCK + tl.arange(0, BLOCK)
        y64, counts = counted(labels, mask, v, (v >= start) & (v < stop), ignored, MASKED)
        z, k = tile(x, v, counts, classes, inner, by_image, by_class, by_voxel, skew, CP)
        best, winner, fit = best_of(z)
        known = (y64 >= 0) & (y64 < classes)
        y = tl.where(known & counts, y64, 0).to(tl.int32)
        d = tl.where(best[None, :] - z > depth, -float("inf"), (z - best[None, :]) * beta)
        won = k == winner[None, :]
        e = tl.where(won | (k >= classes), 0.0, exp(d))
        others = tl.sum(e, 0)
        gap = tl.sum(tl.where(k == y[None, :], d, 0.0), 0)
        squares = tl.sum(e * e, 0).to(tl.float64)
        slope = tl.sum(e * tl.maximum(d, LOWEST), 0).to(tl.float64)
        fit = fit & known
        note_first(bad, v, counts & (fit == 0), stop)
        counts = counts & fit

        rest, gap = others.to(tl.float64), gap.to(tl.float64)
        p = 1.0 / (1.0 + rest)
        log_sum = log1p(rest)
        right = winner == y
        own = exp(gap.to(tl.float32)).to(tl.float64)
        if_right = (rest * rest + squares) * p * p
        if_wrong = (1.0 - own * p) * (1.0 - own * p) + (1.0 + squares - own * own) * p * p
        nll = log_sum - gap
        brier = tl.where(right, if_right, if_wrong)
        entropy = log_sum - slope * p
        energy = best.to(tl.float64) * beta + log_sum - shift

        slot = tl.zeros_like(winner)
        if SLOTTED:
            slot = tl.load(slots + v, mask=counts, other=0).to(tl.int32)
        hottest = counts & right & (p > hot)
        binned = counts & (hottest == 0)
        i = _bin(p, top_first, top_upper, binned, TOP_STEPS)
        cell = (slot * 2 + right.to(tl.int32)) * top_bins + i
        _add(top + cell, _packed(p, i, top_lower, top_scale, binned), binned)
        wrong = counts & (right == 0)
        _add(confusion + (slot * classes + y) * classes + winner, tl.full((BLOCK,), 1, tl.int64), wrong)
        q = e * p.to(tl.float32)[None, :]
        if CLASSWISE:
            p32 = p.to(tl.float32)
            i = _bin(p32, class_first, class_upper, binned, CLASS_STEPS)
            cell = ((slot * classes + winner) * 2 + right.to(tl.int32)) * class_bins + i
            _add(predicted + cell, _packed(p32, i, class_lower, class_scale, binned), binned)
            mine = own.to(tl.float32) * p32
            i = _bin(mine, class_first, class_upper, wrong, CLASS_STEPS)
            _add(positive + (slot * classes + y) * class_bins + i, tl.full((BLOCK,), 1, tl.int64), wrong)
            likely = (q > lowest) & counts[None, :]
            i = _bin(q, class_first, class_upper, likely, CLASS_STEPS)
            cell = (slot[None, :] * classes + k) * class_bins + i
            _add(by_class_cells + cell, _packed(q, i, class_lower, class_scale, likely), likely)
            q = tl.where(likely, 0.0, q)

        # Neighbours mostly have the same winner: one round for each that occurs in the block, and each slot.
        group = slot * classes + winner
        left = counts
        while tl.max(left.to(tl.int32)) > 0:
            now = tl.min(tl.where(left, group, slot_count * classes))
            here = left & (group == now)
            column = sums + (program * slot_count + now // classes).to(tl.int64) * (_COLUMNS * CP) + now % classes
            _add_sum(column, tl.where(here, nll, 0.0))
            _add_sum(column + CP, tl.where(here, brier, 0.0))
            _add_sum(column + 2 * CP, tl.where(here, entropy, 0.0))
            _add_sum(column + 3 * CP, (here & right).to(tl.int32))
            _add_sum(column + 4 * CP, (here & hottest).to(tl.int32))
            _add_sum(column + 5 * CP, tl.where(here & hottest, p, 0.0))
            by_slot = column - now % classes + 7 * CP
            _add_sum(by_slot, tl.where(here, energy, 0.0))
            _add_sum(by_slot + 1, tl.where(here, energy * energy, 0.0))
            if COMPARE:
                u = tl.load(before + v, mask=here, other=0).to(tl.int32)
                moved = here & (u != winner)
                kind = tl.where(u == y, 2, tl.where(right, 3, 4))
                for j in tl.static_range(2, 5):
                    _add_sum(by_slot + j, (moved & (kind == j)).to(tl.int32))
            left = left & (group != now)
        if CLASSWISE:
            for a in range(slot_count):
                here = counts & (slot == a)
                low = tl.sum(tl.where(here[None, :], q, 0.0), 1).to(tl.float64)
                row = tl.arange(0, CP)
                column = sums + (program * slot_count + a).to(tl.int64) * (_COLUMNS * CP) + 6 * CP + row
                _add(column, low, (row < classes) & (low > 0))


@walking
def temperature_loop(
    x, labels, mask, sums, bad, voxels, classes, inner, by_image, by_class, by_voxel, skew, ignored, beta,
    CP: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Count, NLL, slope and curvature of the voxels of each program to ``sums (programs, 4)``."""
    program = tl.program_id(0)
    count, total = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    slopes, curvatures = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for block in range(program, tl.cdiv(voxels, BLOCK), tl.num_programs(0)):
        v = block * BLOCK + tl.arange(0, BLOCK)
        below, own, k, winner, _, counts = labelled_tile(
            x, labels, mask, v, voxels, classes, inner, by_image, by_class, by_voxel, skew, ignored, bad, CP, MASKED
        )
        possible = below >= -DEEP
        d = tl.where(possible, below * beta, 0.0)
        e = tl.where(possible & (k != winner[None, :]), exp(d), 0.0)
        rest = tl.sum(e, 0).to(tl.float64)
        d = tl.maximum(d, LOWEST)
        mean = tl.sum(e * d, 0).to(tl.float64) / (1.0 + rest)
        square = tl.sum(e * d * d, 0).to(tl.float64) / (1.0 + rest)
        gap = own.to(tl.float64) * beta
        slope = mean - gap
        count += tl.where(counts, 1.0, 0.0)
        total += tl.where(counts, log1p(rest) - gap, 0.0)
        slopes += tl.where(counts, slope, 0.0)
        curvatures += tl.where(counts, square - mean * mean + slope, 0.0)
    place = sums + program * 4
    tl.store(place, tl.sum(count))
    tl.store(place + 1, tl.sum(total))
    tl.store(place + 2, tl.sum(slopes))
    tl.store(place + 3, tl.sum(curvatures))


@walking
def survey_loop(
    x, labels, mask, edges, strata, sums, bad, impossible, voxels, classes, inner, by_image, by_class, by_voxel, skew,
    ignored, levels,
    CP: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The stratum of each voxel to ``strata``, -1 where it does not count, and each program's NLL to ``sums``."""
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(program, tl.cdiv(voxels, BLOCK), tl.num_programs(0)):
        v = block * BLOCK + tl.arange(0, BLOCK)
        below, own, k, winner, y, counts = labelled_tile(
            x, labels, mask, v, voxels, classes, inner, by_image, by_class, by_voxel, skew, ignored, bad, CP, MASKED
        )
        deep = tl.max(((below < -DEEP) & (k < classes) & counts[None, :]).to(tl.int32))
        if deep > 0:
            tl.atomic_max(impossible, deep, sem="relaxed")
        rest = tl.sum(tl.where(k == winner[None, :], 0.0, tl.where(k < classes, exp(below), 0.0)), 0).to(tl.float64)
        p = 1.0 / (1.0 + rest)
        level = tl.zeros_like(winner)
        for i in range(levels):
            level += (tl.load(edges + i) < p).to(tl.int32)
        stratum = (winner * 2 + (winner == y).to(tl.int32)) * (levels + 1) + level
        tl.store(strata + v, tl.where(counts, stratum, -1), mask=v < voxels)
        total += tl.where(counts, log1p(rest) - own.to(tl.float64), 0.0)
    tl.store(sums + program, tl.sum(total))
