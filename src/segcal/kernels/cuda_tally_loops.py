"""The compiled loops of ``segcal.kernels.cuda_tally`` that go through voxels."""

# mypy: ignore-errors
# (triton infers the types of compiled functions itself)
# ruff: noqa: RUF005
# (and adds tuples, but does not unpack them)

from __future__ import annotations

import math

import triton
import triton.language as tl

from segcal.kernels.cuda_tally_ends import (
    COLUMNS,
    CONFIDENCE_OF_HOT,
    COUNT_BIT,
    ENDS,
    LOW,
    NUMBER_OF_HOT,
    OF_SLOT,
    RIGHT,
    WIDTH,
    floats,
    places,
)
from segcal.kernels.cuda_tiles import (
    AHEAD,
    DEEP,
    LOWEST,
    best_of,
    best_of_few,
    block_of,
    counted,
    exp,
    log1p,
    logit,
    note_first,
)

#: Truncating p times this puts p = j / 4096 in the cell below, where it belongs; for float32 and float64.
_CELLS, _FINE_CELLS = tl.constexpr(4096 - 2**-12), tl.constexpr(math.nextafter(4096.0, 0.0))
_ONE = tl.constexpr(2**COUNT_BIT.value)


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
def _scaled(d, beta, SCALED: tl.constexpr):
    """Differences from the best logit, at most 0, times beta; impossible classes are at -inf."""
    if SCALED:
        d = tl.where(d < -DEEP, -float("inf"), d * beta)
    return d


@triton.jit
def _add_block(
    where, y, v, counts, best, winner, others, squares, slope, slots, before,  # voxels of the block
    first, top_table, class_table, top, predicted, positive, confusion, sums, shift,  # see the loops
    by_class, inside, beta, slot_count, classes, top_bins, class_bins,
    BLOCK: tl.constexpr, SLOTTED: tl.constexpr, COMPARE: tl.constexpr, SCALED: tl.constexpr, CLASSWISE: tl.constexpr,
    TOP_STEPS: tl.constexpr, CLASS_STEPS: tl.constexpr,
):  # fmt: skip
    """Add what depends on the best class and on the label; returns confidences, slots and, without these, energies.

    ``others``, ``squares`` and ``slope`` are sums over the other classes of e, e^2 and e log e, with e = exp(z - best).
    """
    raw = logit(where, y, by_class, inside)
    gap32 = _scaled(raw - best, beta, SCALED)
    rest, gap = others.to(tl.float64), gap32.to(tl.float64)
    if SCALED == 0:  # of the largest logits the gap is too large for float32
        gap = raw.to(tl.float64) - best.to(tl.float64)
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
    # The lower edge of the highest bin.
    hot = tl.load(top_table + top_bins - 2, mask=top_bins > 1, other=2.0)
    hottest = counts & right & (p > hot)
    binned = counts & (hottest == 0)
    wrong = counts & (right == 0)
    p32 = p.to(tl.float32)
    if tl.max(binned.to(tl.int32)) > 0:
        i = _bin(p, first, top_table, binned, TOP_STEPS)
        cell = (slot * 2 + right.to(tl.int32)) * top_bins + i
        _add(top + cell, _packed(p, i, top_table + top_bins, top_table + 2 * top_bins, binned), binned)
        _add(confusion + (slot * classes + y) * classes + winner, tl.full((BLOCK,), 1, tl.int64), wrong)
        if CLASSWISE:
            i = _bin(p32, first + 4096, class_table, binned, CLASS_STEPS)
            cell = ((slot * classes + winner) * 2 + right.to(tl.int32)) * class_bins + i
            value = _packed(p32, i, class_table + class_bins, class_table + 2 * class_bins, binned)
            _add(predicted + cell, value, binned)
            mine = own.to(tl.float32) * p32
            i = _bin(mine, first + 4096, class_table, wrong, CLASS_STEPS)
            _add(positive + (slot * classes + y) * class_bins + i, tl.full((BLOCK,), 1, tl.int64), wrong)

    # Neighbours mostly have the same winner: one round for each that occurs in the block, and each slot.
    width = tl.maximum(classes, WIDTH)
    group = slot * classes + winner
    left = counts
    while tl.max(left.to(tl.int32)) > 0:
        now = tl.min(tl.where(left, group, slot_count * classes))
        here = left & (group == now)
        column = sums + (now // classes).to(tl.int64) * (COLUMNS * width) + now % classes
        _add_sum(column, tl.where(here, nll, 0.0))
        _add_sum(column + width, tl.where(here, brier, 0.0))
        _add_sum(column + 2 * width, tl.where(here, entropy, 0.0))
        _add_sum(column + RIGHT * width, (here & right).to(tl.int32))
        _add_sum(column + NUMBER_OF_HOT * width, (here & hottest).to(tl.int32))
        _add_sum(column + CONFIDENCE_OF_HOT * width, tl.where(here & hottest, p, 0.0))
        by_slot = column - now % classes + OF_SLOT * width
        if SLOTTED:
            _add_sum(by_slot, tl.where(here, energy, 0.0))
            _add_sum(by_slot + 1, tl.where(here, energy * energy, 0.0))
        if COMPARE:
            u = tl.load(before + v, mask=here, other=0).to(tl.int32)
            moved = here & (u != winner)
            kind = tl.where(u == y, 2, tl.where(right, 3, 4))
            for j in tl.static_range(2, 5):
                _add_sum(by_slot + j, (moved & (kind == j)).to(tl.int32))
        left = left & (group != now)
    return tl.where(counts, p32, 0.0), slot, tl.where(counts, energy, 0.0)


@triton.jit
def _add_class(
    q, k, slot, first, class_table, cells, lowest, slot_count, classes, class_bins, CLASS_STEPS: tl.constexpr
):
    """Add the probabilities of class k that are above the lowest bin; returns the others, and 0 for these."""
    likely = q > lowest
    if tl.max(likely.to(tl.int32)) > 0:
        i = _bin(q, first + 4096, class_table, likely, CLASS_STEPS)
        value = _packed(q, i, class_table + class_bins, class_table + 2 * class_bins, likely)
        _add(cells + (slot * classes + k) * class_bins + i, value, likely)
    return tl.where(likely, 0.0, q)


@triton.jit
def _add_low(sums, low, slot, k, slot_count, width):
    for a in range(slot_count):
        _add_sum(sums + (a * COLUMNS + LOW) * width + k, tl.where(slot == a, low, 0.0))


@triton.jit
def tally_loop(
    x, labels, mask, slots, before,  # voxels: flat, or logits with strides
    first, top_table, class_table,  # the grids: first bins of cells; upper and lower edges, positions per unit
    room, start, stop, voxels, classes, inner, by_image, by_class, by_voxel, ignored, beta,
    out_size, slot_count, top_bins, class_bins, copies,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, SLOTTED: tl.constexpr, COMPARE: tl.constexpr, SCALED: tl.constexpr,
    CLASSWISE: tl.constexpr, TOP_STEPS: tl.constexpr, CLASS_STEPS: tl.constexpr,
):  # fmt: skip
    """Add the blocks from ``start`` to ``stop`` to ``cells (copies, ...)``, ``sums (programs, slots, columns, width)``.

    The cells of a copy: ``top (slots, 2, T)``, ``predicted (slots, C, 2, M)`` and ``class (slots, C, M)``, which are
    packed, then plain counts ``positive (slots, C, M)`` and ``confusion (slots, C, C)``. Most right predictions are in
    the highest bin and most other classes in the lowest: these are summed by block, without atomic additions.
    """
    program = tl.program_id(0)
    top, predicted, by_class_cells, positive, confusion, sums, size = places(
        room, out_size, slot_count, classes, top_bins, class_bins, copies
    )
    offset = (program % copies).to(tl.int64) * size
    width = tl.maximum(classes, WIDTH)
    sums += (program * slot_count).to(tl.int64) * (COLUMNS * width)
    shift, lowest = tl.load(floats(room) + out_size - ENDS), tl.load(class_table)
    energies, squared = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for block in range(start + program, stop, tl.num_programs(0)):
        image, place, inside = block_of(block, tl.cdiv(inner, BLOCK), inner, BLOCK)
        v = image * inner + place
        y, counts, known = counted(labels, mask, v, inside, ignored, classes, MASKED)
        where = x + image * by_image + place * by_voxel
        best, winner, fit = best_of(where, classes, by_class, inside)
        # Elsewhere exp must not overflow, whatever such voxels hold.
        best = tl.where(fit, best, float("inf"))
        note_first(room + out_size - 1, v, counts & ((fit & known) == 0), voxels)
        counts = counts & fit & known
        others, squares, slope = tl.zeros_like(best), tl.zeros_like(best), tl.zeros_like(best)
        for k in tl.range(0, classes, loop_unroll_factor=AHEAD):
            d = _scaled(logit(where, k, by_class, inside) - best, beta, SCALED)
            e = tl.where(k == winner, 0.0, exp(d))
            others += e
            squares += e * e
            slope += e * tl.maximum(d, LOWEST)
        p, slot, energy = _add_block(
            where, y, v, counts, best, winner, others, squares, slope, slots, before, first, top_table, class_table,
            top + offset, predicted + offset, positive + offset, confusion + offset, sums, shift, by_class, inside,
            beta, slot_count, classes, top_bins, class_bins, BLOCK, SLOTTED, COMPARE, SCALED, CLASSWISE, TOP_STEPS,
            CLASS_STEPS,
        )  # fmt: skip
        energies += energy
        squared += energy * energy
        if CLASSWISE:
            for k in tl.range(0, classes, loop_unroll_factor=AHEAD):
                d = _scaled(logit(where, k, by_class, inside) - best, beta, SCALED)
                q = tl.where(k == winner, 0.0, exp(d) * p)
                low = _add_class(
                    q, k, slot, first, class_table, by_class_cells + offset, lowest, slot_count, classes, class_bins,
                    CLASS_STEPS,
                )  # fmt: skip
                _add_low(sums, low, slot, k, slot_count, width)
    if SLOTTED == 0:
        _add_sum(sums + OF_SLOT * width, energies)
        _add_sum(sums + OF_SLOT * width + 1, squared)


@triton.jit
def tally_few_loop(
    x, labels, mask, slots, before, first, top_table, class_table, room, start, stop, voxels, classes, inner, by_image,
    by_class, by_voxel, ignored, beta, out_size, slot_count, top_bins, class_bins, copies,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, SLOTTED: tl.constexpr, COMPARE: tl.constexpr, SCALED: tl.constexpr,
    CLASSWISE: tl.constexpr, TOP_STEPS: tl.constexpr, CLASS_STEPS: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """``tally_loop`` for few classes, a number that the compiler knows: logits are read once and stay in registers."""
    program = tl.program_id(0)
    top, predicted, by_class_cells, positive, confusion, sums, size = places(
        room, out_size, slot_count, CLASSES, top_bins, class_bins, copies
    )
    offset = (program % copies).to(tl.int64) * size
    width = tl.maximum(classes, WIDTH)
    sums += (program * slot_count).to(tl.int64) * (COLUMNS * width)
    shift, lowest = tl.load(floats(room) + out_size - ENDS), tl.load(class_table)
    energies, squared = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    lows = ()
    if CLASSWISE:
        for _ in tl.static_range(CLASSES):
            lows = lows + (tl.zeros((BLOCK,), tl.float32),)
    for block in range(start + program, stop, tl.num_programs(0)):
        image, place, inside = block_of(block, tl.cdiv(inner, BLOCK), inner, BLOCK)
        v = image * inner + place
        y, counts, known = counted(labels, mask, v, inside, ignored, classes, MASKED)
        where = x + image * by_image + place * by_voxel
        z = ()
        for k in tl.static_range(CLASSES):
            z = z + (logit(where, k, by_class, inside),)
        best, winner, fit = best_of_few(z, CLASSES)
        # Elsewhere exp must not overflow, whatever such voxels hold.
        best = tl.where(fit, best, float("inf"))
        note_first(room + out_size - 1, v, counts & ((fit & known) == 0), voxels)
        counts = counts & fit & known
        others, squares, slope = tl.zeros_like(best), tl.zeros_like(best), tl.zeros_like(best)
        parts = ()
        for k in tl.static_range(CLASSES):
            d = _scaled(z[k] - best, beta, SCALED)
            e = tl.where(k == winner, 0.0, exp(d))
            others += e
            squares += e * e
            slope += e * tl.maximum(d, LOWEST)
            parts = parts + (e,)
        p, slot, energy = _add_block(
            where, y, v, counts, best, winner, others, squares, slope, slots, before, first, top_table, class_table,
            top + offset, predicted + offset, positive + offset, confusion + offset, sums, shift, by_class, inside,
            beta, slot_count, classes, top_bins, class_bins, BLOCK, SLOTTED, COMPARE, SCALED, CLASSWISE, TOP_STEPS,
            CLASS_STEPS,
        )  # fmt: skip
        energies += energy
        squared += energy * energy
        if CLASSWISE:
            more = ()
            for k in tl.static_range(CLASSES):
                low = _add_class(
                    parts[k] * p, k, slot, first, class_table, by_class_cells + offset, lowest, slot_count, classes,
                    class_bins, CLASS_STEPS,
                )  # fmt: skip
                if SLOTTED:
                    _add_low(sums, low, slot, k, slot_count, width)
                more = more + (lows[k] + low,)
            lows = more
    if SLOTTED == 0:
        _add_sum(sums + OF_SLOT * width, energies)
        _add_sum(sums + OF_SLOT * width + 1, squared)
        if CLASSWISE:
            for k in tl.static_range(CLASSES):
                _add_sum(sums + LOW * width + k, lows[k].to(tl.float64))
