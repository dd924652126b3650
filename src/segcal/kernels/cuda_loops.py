"""The compiled loops of ``segcal.kernels.cuda``, which says how they work together and how precise they are.

A program takes blocks of ``BLOCK`` voxels in turn, each as a tile ``(CP, BLOCK)`` of logits in registers; ``CP`` is the
number of classes rounded up to a power of two.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# (triton infers the types of compiled functions itself)

from __future__ import annotations

import math

import triton
import triton.language as tl

from segcal.kernels.experts import IMPOSSIBLE
from segcal.scores import DEPTH, OFFSET_LIMIT

_LOG2E = tl.constexpr(1 / math.log(2))
_LN2 = tl.constexpr(math.log(2))
#: exp is 0 in float32 from here on.
_LOWEST = tl.constexpr(-150.0)
_DEPTH = tl.constexpr(DEPTH)
#: Truncating p times this puts p = j / 4096 in the cell below, where it belongs; for float32 and float64.
_CELLS, _FINE_CELLS = tl.constexpr(4096 - 2**-12), tl.constexpr(math.nextafter(4096.0, 0.0))
#: A cell of a histogram is count * 2**40 + sum of positions in the bin, in units of 2**-17 of its width. Up to 2**23
#: voxels fit.
POSITION_BITS = 17
COUNT_BIT = 40
_ONE = tl.constexpr(2**COUNT_BIT)
#: Kinds of expert maps, by their features.
KINDS = {"logits": 0, "own-logit": 1, "log-probs": 2, "margins": 3, "gaps": 4}
_OWN, _LOG_PROBS, _MARGINS, _GAPS = (tl.constexpr(kind) for kind in range(1, 5))
_AWAY, _OFFSET = tl.constexpr(IMPOSSIBLE), tl.constexpr(OFFSET_LIMIT)
#: Columns of the sums by class.
NLL, BRIER, ENTROPY, RIGHT, HOT_COUNT, HOT_CONFIDENCE, LOW, BY_SLOT = range(8)
COLUMNS = 8
_COLUMNS = tl.constexpr(COLUMNS)


# ``skew`` is 0, which the compiler does not know. If it knew how the logits are aligned, a thread would load four
# voxels at once, and the classes of a voxel would be spread over several threads.
_walking = triton.jit(do_not_specialize=["skew"])


@triton.jit
def _exp(d):
    """exp of float32 ``d`` from -150 to 0 with a relative error below 2e-7; the product with log2(e) keeps its tail."""
    d = tl.maximum(d, _LOWEST)
    power = d * _LOG2E
    return tl.exp2(power) * (1.0 + tl.fma(d, _LOG2E, -power) * _LN2)


@triton.jit
def _log1p(x):
    """log(1 + x) of float64 ``x >= 0`` to full relative precision: the rounding of 1 + x is divided out."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _counts(labels, mask, v, inside, ignored, MASKED: tl.constexpr):
    """Labels ``(BLOCK,)`` and which voxels count."""
    y = tl.load(labels + v, mask=inside, other=0).to(tl.int64)
    counts = inside & (y != ignored)
    if MASKED:
        counts = counts & (tl.load(mask + v, mask=inside, other=0) != 0)
    return y, counts


@triton.jit
def _first(voxels, BLOCK: tl.constexpr):
    """The first voxel of this program, in the type of their number."""
    return (voxels * 0 + tl.program_id(0)) * BLOCK


@triton.jit
def _place(v, inner, by_image, by_voxel):
    """Where the first class of each voxel is."""
    image = v // inner
    return image.to(tl.int64) * by_image + (v - image * inner).to(tl.int64) * by_voxel


@triton.jit
def _tile(x, v, counts, classes, inner, by_image, by_class, by_voxel, skew, CP: tl.constexpr):
    """The logits ``(CP, BLOCK)`` in float32, -inf beyond the classes, and the classes ``(CP, 1)``."""
    k = tl.arange(0, CP)[:, None]
    where = x + skew + _place(v, inner, by_image, by_voxel)[None, :] + k.to(tl.int64) * by_class
    z = tl.load(where, mask=(k < classes) & counts[None, :], other=-float("inf")).to(tl.float32)
    return z, k


@triton.jit
def _best(z):
    """The best of scores ``(CP, BLOCK)``, 0 if there is no softmax; its class, the first of equals; and which have one.

    A NaN, +inf, or no possible class: no softmax.
    """
    nan = tl.max((z != z).to(tl.int32), 0) > 0
    best, winner = tl.max(tl.where(z != z, -float("inf"), z), 0, return_indices=True)
    fit = (nan == 0) & (tl.abs(best) < float("inf"))
    return tl.where(fit, best, 0.0), winner, fit


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
def _note(bad, v, unfit, most):
    """Lower ``bad`` to the first unfit voxel. There is nearly never one, and all programs share this number."""
    if tl.max(unfit.to(tl.int32)) > 0:
        tl.atomic_min(bad, tl.min(tl.where(unfit, v, most)).to(tl.int64), sem="relaxed")


@triton.jit
def _add(cells, value, counted):
    tl.atomic_add(cells, value, mask=counted, sem="relaxed")


@triton.jit
def _add_sum(cell, values):
    tl.atomic_add(cell, tl.sum(values).to(tl.float64), sem="relaxed")


@_walking
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
        y64, counts = _counts(labels, mask, v, (v >= start) & (v < stop), ignored, MASKED)
        z, k = _tile(x, v, counts, classes, inner, by_image, by_class, by_voxel, skew, CP)
        best, winner, fit = _best(z)
        known = (y64 >= 0) & (y64 < classes)
        y = tl.where(known & counts, y64, 0).to(tl.int32)
        d = tl.where(best[None, :] - z > depth, -float("inf"), (z - best[None, :]) * beta)
        won = k == winner[None, :]
        e = tl.where(won | (k >= classes), 0.0, _exp(d))
        others = tl.sum(e, 0)
        gap = tl.sum(tl.where(k == y[None, :], d, 0.0), 0)
        squares = tl.sum(e * e, 0).to(tl.float64)
        slope = tl.sum(e * tl.maximum(d, _LOWEST), 0).to(tl.float64)
        fit = fit & known
        _note(bad, v, counts & (fit == 0), stop)
        counts = counts & fit

        rest, gap = others.to(tl.float64), gap.to(tl.float64)
        p = 1.0 / (1.0 + rest)
        log_sum = _log1p(rest)
        right = winner == y
        own = _exp(gap.to(tl.float32)).to(tl.float64)
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


@_walking
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
        y64, counts = _counts(labels, mask, v, v < voxels, ignored, MASKED)
        z, k = _tile(x, v, counts, classes, inner, by_image, by_class, by_voxel, skew, CP)
        best, winner, fit = _best(z)
        y = tl.where((y64 >= 0) & (y64 < classes) & counts, y64, 0).to(tl.int32)
        below = z - best[None, :]
        own = tl.sum(tl.where(k == y[None, :], below, 0.0), 0)
        fit = fit & (y64 >= 0) & (y64 < classes) & (own >= -_DEPTH)
        _note(bad, v, counts & (fit == 0), voxels)
        counts = counts & fit
        possible = below >= -_DEPTH
        d = tl.where(possible, below * beta, 0.0)
        e = tl.where(possible & (k != winner[None, :]), _exp(d), 0.0)
        rest = tl.sum(e, 0).to(tl.float64)
        d = tl.maximum(d, _LOWEST)
        mean = tl.sum(e * d, 0).to(tl.float64) / (1.0 + rest)
        square = tl.sum(e * d * d, 0).to(tl.float64) / (1.0 + rest)
        gap = own.to(tl.float64) * beta
        slope = mean - gap
        count += tl.where(counts, 1.0, 0.0)
        total += tl.where(counts, _log1p(rest) - gap, 0.0)
        slopes += tl.where(counts, slope, 0.0)
        curvatures += tl.where(counts, square - mean * mean + slope, 0.0)
    place = sums + program * 4
    tl.store(place, tl.sum(count))
    tl.store(place + 1, tl.sum(total))
    tl.store(place + 2, tl.sum(slopes))
    tl.store(place + 3, tl.sum(curvatures))


@_walking
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
        y64, counts = _counts(labels, mask, v, v < voxels, ignored, MASKED)
        z, k = _tile(x, v, counts, classes, inner, by_image, by_class, by_voxel, skew, CP)
        best, winner, fit = _best(z)
        y = tl.where((y64 >= 0) & (y64 < classes) & counts, y64, 0).to(tl.int32)
        d = z - best[None, :]
        own = tl.sum(tl.where(k == y[None, :], d, 0.0), 0)
        fit = fit & (y64 >= 0) & (y64 < classes) & (own >= -_DEPTH)
        _note(bad, v, counts & (fit == 0), voxels)
        counts = counts & fit
        deep = tl.max(((d < -_DEPTH) & (k < classes) & counts[None, :]).to(tl.int32))
        if deep > 0:
            tl.atomic_max(impossible, deep, sem="relaxed")
        rest = tl.sum(tl.where(k == winner[None, :], 0.0, tl.where(k < classes, _exp(d), 0.0)), 0).to(tl.float64)
        p = 1.0 / (1.0 + rest)
        level = tl.zeros_like(winner)
        for i in range(levels):
            level += (tl.load(edges + i) < p).to(tl.int32)
        stratum = (winner * 2 + (winner == y).to(tl.int32)) * (levels + 1) + level
        tl.store(strata + v, tl.where(counts, stratum, -1), mask=v < voxels)
        total += tl.where(counts, _log1p(rest) - own.to(tl.float64), 0.0)
    tl.store(sums + program, tl.sum(total))


@triton.jit
def _next_lower(value, dtype: tl.constexpr):
    """The number just below ``value <= 0`` in a type; between float16's subnormal numbers the step is too large."""
    if dtype == tl.float32:
        lower = ((-tl.abs(value)).to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    else:
        bits = (-tl.abs(value)).to(dtype).to(tl.int16, bitcast=True)
        lower = (bits + 1).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return lower


@triton.jit
def _write_log_softmax(s, k, winner, counts, where, classes, KEEP: tl.constexpr):
    """Write ``log softmax(s)`` of scores ``(CP, BLOCK)``, -inf where impossible; ``KEEP`` makes ``winner`` the argmax.

    Scores that would reach the winner's value in the output type get the next smaller number.
    """
    best, first, fit = _best(s)
    d = s - best[None, :]
    rest = tl.sum(tl.where((k == first[None, :]) | (k >= classes), 0.0, _exp(d)), 0)
    log_p = d - _log1p(rest.to(tl.float64)).to(tl.float32)[None, :]
    dtype: tl.constexpr = where.dtype.element_ty
    if KEEP:
        own = tl.sum(tl.where(k == winner[None, :], log_p, 0.0), 0).to(dtype).to(tl.float32)
        log_p = tl.where(k == winner[None, :], own[None, :], tl.minimum(log_p, _next_lower(own, dtype)[None, :]))
    log_p = tl.where(fit[None, :], log_p, float("nan"))
    tl.store(where, log_p.to(dtype), mask=(k < classes) & counts[None, :])


@_walking
def apply_temperature_loop(
    x, out, voxels, classes, inner, by_image, by_class, by_voxel, skew, out_image, out_class, out_voxel, beta,
    CP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``log S(beta z)`` to ``out``."""
    v = _first(voxels, BLOCK) + tl.arange(0, BLOCK)
    inside = v < voxels
    z, k = _tile(x, v, inside, classes, inner, by_image, by_class, by_voxel, skew, CP)
    best, winner, fit = _best(z)
    below = z - best[None, :]
    s = tl.where(below < -_DEPTH, -float("inf"), below * beta)
    s = tl.where(fit[None, :], s, float("nan"))
    to = out + _place(v, inner, out_image, out_voxel)[None, :] + k.to(tl.int64) * out_class
    _write_log_softmax(s, k, winner, inside, to, classes, True)


@_walking
def apply_experts_loop(
    x, out, weight, tilt, bias, voxels, classes, inner, by_image, by_class, by_voxel, skew, out_image, out_class,
    out_voxel, CP: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, ROUTED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """``log S(s)`` of the scores s of an ``ExpertMap``.

    ``weight (E, inputs, CP)``, ``tilt`` and ``bias (E, CP)``: with a the common number of the voxel and m its margins,
    ``s_k = bias_k + a tilt_k + sum_j weight_jk m_j``. For gaps, ``k`` is the rank of the class, and m the gaps.
    """
    v = _first(voxels, BLOCK) + tl.arange(0, BLOCK)
    inside = v < voxels
    z, k = _tile(x, v, inside, classes, inner, by_image, by_class, by_voxel, skew, CP)
    best, winner, fit = _best(z)
    never = best[None, :] - z > _DEPTH
    place = _place(v, inner, by_image, by_voxel)
    expert = tl.zeros_like(winner)
    if ROUTED:
        expert = winner
    output = k + tl.zeros_like(z).to(tl.int32)
    if KIND == _GAPS:
        z = tl.where(never, -float("inf"), z)
        output = tl.zeros_like(output)
        for j in range(classes):
            other = tl.load(x + place + j * by_class.to(tl.int64), mask=inside, other=0.0).to(tl.float32)
            other = tl.where(best - other > _DEPTH, -float("inf"), other)
            before = (other[None, :] > z) | ((other[None, :] == z) & (j < k))
            output += before.to(tl.int32)
        output = tl.where(k < classes, output, 0)
    row = expert[None, :] * CP + output
    common = tl.minimum(tl.maximum(best, -_OFFSET), _OFFSET)
    if KIND == _LOG_PROBS:
        others = tl.where(
            (k == winner[None, :]) | (k >= classes), 0.0, _exp(tl.where(never, -_AWAY, z - best[None, :]))
        )
        common = -_log1p(tl.sum(others, 0).to(tl.float64)).to(tl.float32)
    s = tl.load(bias + row) + common[None, :] * tl.load(tilt + row)
    if KIND == _OWN:
        s += tl.load(weight + row) * tl.where(never, _AWAY, best[None, :] - z)
    else:
        above = best
        for j in range(classes - (KIND == _GAPS)):
            if KIND == _GAPS:
                below = tl.sum(tl.where((output == j + 1) & (k < classes), z, 0.0), 0)
                below = tl.where(below == -float("inf"), tl.minimum(best - _AWAY, above), below)
                feature = above - below
                above = below
            else:
                feature = best - tl.load(x + place + j * by_class.to(tl.int64), mask=inside, other=0.0).to(tl.float32)
                feature = tl.where(feature > _DEPTH, _AWAY, feature)
            inputs = classes - (KIND == _GAPS)
            s += tl.load(weight + (expert[None, :] * inputs + j) * CP + output) * feature[None, :]
    if KIND == _MARGINS:
        s = tl.where(k == winner[None, :], 0.0, s)
    s = tl.where(never | (k >= classes), -float("inf"), s)
    s = tl.where(fit[None, :], s, float("nan"))
    to = out + _place(v, inner, out_image, out_voxel)[None, :] + k.to(tl.int64) * out_class
    _write_log_softmax(s, k, winner, inside, to, classes, KEEP)


@triton.jit
def _log_probabilities(x, v, inside, classes, inner, by_image, by_class, by_voxel, skew, CP: tl.constexpr):
    """``log S(z)`` ``(CP, BLOCK)``, the winner and its ``-logit``, which voxels have a softmax, and the classes."""
    z, k = _tile(x, v, inside, classes, inner, by_image, by_class, by_voxel, skew, CP)
    best, winner, fit = _best(z)
    d = tl.where(best[None, :] - z > _DEPTH, -float("inf"), z - best[None, :])
    rest = tl.sum(tl.where((k == winner[None, :]) | (k >= classes), 0.0, _exp(d)), 0).to(tl.float64)
    return d - _log1p(rest).to(tl.float32)[None, :], winner, tl.log(rest).to(tl.float32), fit, k


@_walking
def apply_knots_loop(
    x, out, centres, knots, voxels, classes, inner, by_image, by_class, by_voxel, skew, out_image, out_class, out_voxel,
    bins, limit, width, CP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``log S(g(log S(z)))``: g is linear between ``knots (bins,)`` at ``centres (bins,)``, equally far in logit(p)."""
    v = _first(voxels, BLOCK) + tl.arange(0, BLOCK)
    inside = v < voxels
    log_p, winner, opposite, fit, k = _log_probabilities(
        x, v, inside, classes, inner, by_image, by_class, by_voxel, skew, CP
    )
    used = (k < classes) & inside[None, :] & fit[None, :]
    logit = log_p - tl.log(1.0 - tl.minimum(tl.exp(log_p), 0.75))  # a class that did not win has at most 1/2
    logit = tl.where(k == winner[None, :], -opposite[None, :], logit)
    place = tl.minimum(tl.maximum((logit + limit) / width - 0.5, 0.0), bins - 2.0)
    lower = tl.where(used, place, 0.0).to(tl.int32)
    inner_p = tl.minimum(tl.maximum(log_p, tl.load(centres)), tl.load(centres + bins - 1))
    lower = tl.maximum(lower - (inner_p <= tl.load(centres + lower, mask=used, other=0.0)).to(tl.int32), 0)
    lower = tl.minimum(lower + (inner_p > tl.load(centres + lower + 1, mask=used, other=0.0)).to(tl.int32), bins - 2)
    start, end = tl.load(centres + lower, mask=used, other=0.0), tl.load(centres + lower + 1, mask=used, other=1.0)
    low, high = tl.load(knots + lower, mask=used, other=0.0), tl.load(knots + lower + 1, mask=used, other=0.0)
    s = tl.minimum(low + (high - low) * ((inner_p - start) / (end - start)), high)
    s = tl.where((log_p == -float("inf")) | (k >= classes), -float("inf"), s)
    s = tl.where(fit[None, :], s, float("nan"))
    to = out + _place(v, inner, out_image, out_voxel)[None, :] + k.to(tl.int64) * out_class
    _write_log_softmax(s, k, winner, inside, to, classes, True)


@_walking
def apply_bins_loop(
    x, out, edges, values, voxels, classes, inner, by_image, by_class, by_voxel, skew, out_image, out_class,
    out_voxel, bins,
    CP: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Log-probabilities from scores: the ``values (C, bins)`` of the bin that log S(z) is in, by bisection."""
    v = _first(voxels, BLOCK) + tl.arange(0, BLOCK)
    inside = v < voxels
    log_p, winner, _, fit, k = _log_probabilities(x, v, inside, classes, inner, by_image, by_class, by_voxel, skew, CP)
    used = (k < classes) & inside[None, :] & fit[None, :]
    i = tl.zeros_like(log_p).to(tl.int32)
    for n in tl.static_range(STEPS):
        step = 1 << (STEPS - 1 - n)
        edge = tl.load(edges + k * ((1 << STEPS) - 1) + i + step - 1, mask=used, other=float("inf"))
        i += tl.where(edge < log_p, step, 0)
    s = tl.load(values + k * bins + i, mask=used, other=0.0)
    s = tl.where((log_p == -float("inf")) | (k >= classes), -float("inf"), s)
    s = tl.where(fit[None, :], s, float("nan"))
    to = out + _place(v, inner, out_image, out_voxel)[None, :] + k.to(tl.int64) * out_class
    _write_log_softmax(s, k, winner, inside, to, classes, False)
