"""The compiled loops of ``segcal.kernels.cuda`` that add voxels up: statistics, temperature fits, first passes."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# (triton infers the types of compiled functions itself)

from __future__ import annotations

import math

import triton
import triton.language as tl

from segcal.kernels.cuda_tiles import (
    AHEAD,
    DEEP,
    LOWEST,
    best_of,
    block_of,
    counted,
    exp,
    labelled_block,
    log1p,
    logit,
    note_first,
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


@triton.jit
def _below(where, k, by_class, inside, best, beta, depth, SCALED: tl.constexpr):
    """How far the scores of class k are below the best, as negative numbers."""
    d = logit(where, k, by_class, inside) - best
    if SCALED:
        d = tl.where(d < -depth, -float("inf"), d * beta)
    return d


@triton.jit
def tally_loop(
    x, labels, mask, slots, before,  # voxels: flat, or logits with strides
    top_first, top_upper, top_lower, top_scale,  # the grids
    class_first, class_upper, class_lower, class_scale,
    cells, sums, bad,  # results
    start, stop, per_image, voxels, classes, inner, by_image, by_class, by_voxel, ignored, beta, depth, shift,
    slot_count, top_bins, class_bins, width, copy_cells, copies,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, SLOTTED: tl.constexpr, COMPARE: tl.constexpr, SCALED: tl.constexpr,
    CLASSWISE: tl.constexpr, TOP_STEPS: tl.constexpr, CLASS_STEPS: tl.constexpr,
):  # fmt: skip
    """Add the blocks from ``start`` to ``stop`` to ``cells (copies, ...)``, ``sums (programs, slots, columns, width)``.

    The cells of a copy: ``top (slots, 2, T)``, ``predicted (slots, C, 2, M)`` and ``class (slots, C, M)``, which are
    packed, then plain counts ``positive (slots, C, M)`` and ``confusion (slots, C, C)``. Most right predictions are in
    the highest bin and most other classes in the lowest: these are summed by block, without atomic additions.
    ``bad`` is for ``note_first``.
    """
    program = tl.program_id(0)
    top = cells + (program % copies).to(tl.int64) * copy_cells
    predicted = top + slot_count * 2 * top_bins
    by_class_cells = predicted + slot_count * 2 * classes * class_bins
    positive = by_class_cells + slot_count * classes * class_bins
    confusion = positive + slot_count * classes * class_bins
    hot = tl.load(top_upper + top_bins - 2, mask=top_bins > 1, other=2.0)  # lower edge of the highest bin
    lowest = tl.load(class_upper)
    for block in range(start + program, stop, tl.num_programs(0)):
        image, place, inside = block_of(block, per_image, inner, BLOCK)
        v = image * inner + place
        y, counts, known = counted(labels, mask, v, inside, ignored, classes, MASKED)
        where = x + image * by_image + place * by_voxel
        best, winner, fit = best_of(where, classes, by_class, inside)
        note_first(bad, v, counts & ((fit & known) == 0), voxels)
        counts = counts & fit & known
        others, squares, slope = tl.zeros_like(best), tl.zeros_like(best), tl.zeros_like(best)
        for k in tl.range(0, classes, loop_unroll_factor=AHEAD):
            d = _below(where, k, by_class, inside, best, beta, depth, SCALED)
            e = tl.where(k == winner, 0.0, exp(d))
            others += e
            squares += e * e
            slope += e * tl.maximum(d, LOWEST)
        gap32 = _below(where, y, by_class, inside, best, beta, depth, SCALED)

        rest, gap = others.to(tl.float64), gap32.to(tl.float64)
        if SCALED == 0:  # of the largest logits the gap is too large for float32
            gap = logit(where, y, by_class, inside).to(tl.float64) - best.to(tl.float64)
        p = 1.0 / (1.0 + rest)
        log_sum = log1p(rest, 1.0 + rest, p)
        right = winner == y
        own = exp(gap32).to(tl.float64)
        spread = squares.to(tl.float64) * p * p
        if_wrong = (1.0 - own * p) * (1.0 - own * p) + spread + (1.0 - own * own) * p * p
        nll = log_sum - gap
        brier = tl.where(right, rest * rest * p * p + spread, if_wrong)
        entropy = log_sum - slope.to(tl.float64) * p
        energy = best.to(tl.float64) * beta + log_sum - shift

        slot = tl.zeros_like(winner)
        if SLOTTED:
            slot = tl.load(slots + v, mask=counts, other=0).to(tl.int32)
        hottest = counts & right & (p > hot)
        binned = counts & (hottest == 0)
        wrong = counts & (right == 0)
        p32 = p.to(tl.float32)
        if tl.max(binned.to(tl.int32)) > 0:
            i = _bin(p, top_first, top_upper, binned, TOP_STEPS)
            cell = (slot * 2 + right.to(tl.int32)) * top_bins + i
            _add(top + cell, _packed(p, i, top_lower, top_scale, binned), binned)
            _add(confusion + (slot * classes + y) * classes + winner, tl.full((BLOCK,), 1, tl.int64), wrong)
            if CLASSWISE:
                i = _bin(p32, class_first, class_upper, binned, CLASS_STEPS)
                cell = ((slot * classes + winner) * 2 + right.to(tl.int32)) * class_bins + i
                _add(predicted + cell, _packed(p32, i, class_lower, class_scale, binned), binned)
                mine = own.to(tl.float32) * p32
                i = _bin(mine, class_first, class_upper, wrong, CLASS_STEPS)
                _add(positive + (slot * classes + y) * class_bins + i, tl.full((BLOCK,), 1, tl.int64), wrong)

        # Neighbours mostly have the same winner: one round for each that occurs in the block, and each slot.
        group = slot * classes + winner
        left = counts
        while tl.max(left.to(tl.int32)) > 0:
            now = tl.min(tl.where(left, group, slot_count * classes))
            here = left & (group == now)
            column = sums + (program * slot_count + now // classes).to(tl.int64) * (_COLUMNS * width) + now % classes
            _add_sum(column, tl.where(here, nll, 0.0))
            _add_sum(column + width, tl.where(here, brier, 0.0))
            _add_sum(column + 2 * width, tl.where(here, entropy, 0.0))
            _add_sum(column + 3 * width, (here & right).to(tl.int32))
            _add_sum(column + 4 * width, (here & hottest).to(tl.int32))
            _add_sum(column + 5 * width, tl.where(here & hottest, p, 0.0))
            by_slot = column - now % classes + 7 * width
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
            scale = tl.where(counts, p32, 0.0)
            for k in tl.range(0, classes, loop_unroll_factor=AHEAD):
                d = _below(where, k, by_class, inside, best, beta, depth, SCALED)
                q = tl.where(k == winner, 0.0, exp(d) * scale)
                likely = q > lowest
                if tl.max(likely.to(tl.int32)) > 0:
                    i = _bin(q, class_first, class_upper, likely, CLASS_STEPS)
                    cell = (slot * classes + k) * class_bins + i
                    _add(by_class_cells + cell, _packed(q, i, class_lower, class_scale, likely), likely)
                low = tl.where(likely, 0.0, q)
                for a in range(slot_count):
                    column = sums + (program * slot_count + a).to(tl.int64) * (_COLUMNS * width) + 6 * width + k
                    _add_sum(column, tl.where(slot == a, low, 0.0))


@triton.jit
def temperature_loop(
    x, labels, mask, sums, bad, blocks, per_image, voxels, classes, inner, by_image, by_class, by_voxel, ignored, beta,
    BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Count, NLL, slope and curvature of the voxels of each program to ``sums (programs, 4)``."""
    program = tl.program_id(0)
    count, total = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    slopes, curvatures = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for block in range(program, blocks, tl.num_programs(0)):
        _, inside, where, best, winner, _, gap32, counts = labelled_block(
            x, labels, mask, block, per_image, voxels, classes, inner, by_image, by_class, by_voxel, ignored, bad,
            BLOCK, MASKED,
        )  # fmt: skip
        others, first, second = tl.zeros_like(best), tl.zeros_like(best), tl.zeros_like(best)
        for k in tl.range(0, classes, loop_unroll_factor=AHEAD):
            below = logit(where, k, by_class, inside) - best
            d = tl.maximum(below * beta, LOWEST)
            e = tl.where((k == winner) | (below < -DEEP), 0.0, exp(d))
            others += e
            first += e * d
            second += e * d * d
        rest = others.to(tl.float64)
        p = 1.0 / (1.0 + rest)
        mean, square = first.to(tl.float64) * p, second.to(tl.float64) * p
        gap = gap32.to(tl.float64) * beta
        slope = mean - gap
        count += tl.where(counts, 1.0, 0.0)
        total += tl.where(counts, log1p(rest, 1.0 + rest, p) - gap, 0.0)
        slopes += tl.where(counts, slope, 0.0)
        curvatures += tl.where(counts, square - mean * mean + slope, 0.0)
    to = sums + program * 4
    tl.store(to, tl.sum(count))
    tl.store(to + 1, tl.sum(total))
    tl.store(to + 2, tl.sum(slopes))
    tl.store(to + 3, tl.sum(curvatures))


@triton.jit
def survey_loop(
    x, labels, mask, edges, strata, sums, bad, impossible, blocks, per_image, voxels, classes, inner, by_image,
    by_class, by_voxel, ignored, levels,
    BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The stratum of each voxel to ``strata``, -1 where it does not count, and each program's NLL to ``sums``."""
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(program, blocks, tl.num_programs(0)):
        v, inside, where, best, winner, y, gap, counts = labelled_block(
            x, labels, mask, block, per_image, voxels, classes, inner, by_image, by_class, by_voxel, ignored, bad,
            BLOCK, MASKED,
        )  # fmt: skip
        others, lowest = tl.zeros_like(best), tl.zeros_like(best)
        for k in tl.range(0, classes, loop_unroll_factor=AHEAD):
            d = logit(where, k, by_class, inside) - best
            others += tl.where(k == winner, 0.0, exp(d))
            lowest = tl.minimum(lowest, d)
        deep = tl.max((counts & (lowest < -DEEP)).to(tl.int32))
        if deep > 0:
            tl.atomic_max(impossible, deep, sem="relaxed")
        rest = others.to(tl.float64)
        p = 1.0 / (1.0 + rest)
        level = tl.zeros_like(winner)
        for i in range(levels):
            level += (tl.load(edges + i) < p).to(tl.int32)
        stratum = (winner * 2 + (winner == y).to(tl.int32)) * (levels + 1) + level
        tl.store(strata + v, tl.where(counts, stratum, -1), mask=inside)
        total += tl.where(counts, log1p(rest, 1.0 + rest, p) - gap.to(tl.float64), 0.0)
    tl.store(sums + program, tl.sum(total))
