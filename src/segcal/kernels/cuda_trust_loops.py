"""The compiled loops of ``segcal.kernels.cuda_trust``; what they compute is in ``segcal.calibrators.trust``.

Classes of a block of voxels are a tile ``(CP, BLOCK)`` in registers, CP being the classes rounded up to a power of two.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# (triton infers the types of compiled functions itself)

from __future__ import annotations

import triton
import triton.language as tl

from segcal.scores import DEPTH

_DEEP = tl.constexpr(DEPTH)
#: Point features.
_POINTS = tl.constexpr(5)


# ``skew`` is 0, which the compiler does not know. If it knew how the logits are aligned, a thread would load four
# voxels at once, and the classes of a voxel would be spread over several threads.
@triton.jit(do_not_specialize=["skew"])
def describe_loop(
    x, winner, point, rounded, predicted, sums, programs, voxels, classes, skew, beta, lowest, widest, unit,
    CP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Winner ``(N, V)``, point features ``(N, 5, V)``, two of them in units, and sums over the image of the program.

    Voxels without a softmax count as undecided between all classes.
    """
    image = (tl.program_id(0) // programs).to(tl.int64)
    k = tl.arange(0, CP)[:, None]
    count = tl.zeros((CP,), tl.int64)
    total_0 = tl.zeros((BLOCK,), tl.int64)
    total_1, total_2, total_3, total_4 = total_0, total_0, total_0, total_0
    for first in range(tl.program_id(0) % programs * BLOCK, voxels, programs * BLOCK):
        v = first + tl.arange(0, BLOCK)
        inside = v < voxels
        where = x + skew + (image * classes + k) * voxels + v[None, :]
        z = tl.load(where, mask=(k < classes) & inside[None, :], other=-float("inf")).to(tl.float32)
        nan = tl.max((z != z).to(tl.int32), 0)
        best = tl.max(tl.where(z != z, -float("inf"), z), 0)
        fit = (nan == 0) & (tl.abs(best) < float("inf"))
        z = tl.where(k < classes, tl.where(fit[None, :], z, 0.0), -float("inf"))
        best, own = tl.max(z, 0, return_indices=True)
        wins = k == own[None, :]
        losers = tl.where(wins, -float("inf"), z)
        second, place = tl.max(losers, 0, return_indices=True)
        third = tl.max(tl.where(k == place[None, :], -float("inf"), losers), 0)
        gap = z - best[None, :]
        deep = wins | (gap < -_DEEP)
        scaled = tl.where(deep, 0.0, beta * gap)
        e = tl.where(deep, 0.0, tl.exp(scaled))
        others = tl.sum(e, 0)
        more = others.to(tl.float64)
        total = tl.log(1.0 + more)
        rest = (tl.log(tl.where(others > 0, more, 1.0)) - total).to(tl.float32)
        rest = tl.where((others > 0) & (rest > lowest), rest, lowest)
        p = 1.0 / (1.0 + others)
        entropy = (total - (tl.sum(e * scaled, 0) / (1.0 + others)).to(tl.float64)).to(tl.float32)
        ahead = tl.minimum(beta * (best - second), widest)
        below = beta * tl.where(third == -float("inf"), float("inf"), second - third)
        below = tl.where((best - third <= _DEEP) & (below < widest), below, widest)
        below = tl.where(classes == 2, 0.0, below)
        at = image * voxels + v
        tl.store(winner + at, own.to(tl.int64), mask=inside)
        to = point + image * _POINTS * voxels + v
        tl.store(to, rest, mask=inside)
        tl.store(to + voxels, p, mask=inside)
        tl.store(to + 2 * voxels, ahead, mask=inside)
        tl.store(to + 3 * voxels, below, mask=inside)
        tl.store(to + 4 * voxels, entropy, mask=inside)
        rest_units, p_units = _units(rest, unit, inside), _units(p, unit, inside)
        to_units = rounded + image * 2 * voxels + v
        tl.store(to_units, rest_units.to(tl.int32), mask=inside)
        tl.store(to_units + voxels, p_units.to(tl.int32), mask=inside)
        total_0 += rest_units
        total_1 += p_units
        total_2 += _units(ahead, unit, inside)
        total_3 += _units(below, unit, inside)
        total_4 += _units(entropy, unit, inside)
        count += tl.sum((wins & inside[None, :]).to(tl.int64), 1)
    k_flat = tl.arange(0, CP)
    tl.atomic_add(predicted + image * classes + k_flat, count, mask=k_flat < classes, sem="relaxed")
    to = sums + image * _POINTS
    tl.atomic_add(to, tl.sum(total_0), sem="relaxed")
    tl.atomic_add(to + 1, tl.sum(total_1), sem="relaxed")
    tl.atomic_add(to + 2, tl.sum(total_2), sem="relaxed")
    tl.atomic_add(to + 3, tl.sum(total_3), sem="relaxed")
    tl.atomic_add(to + 4, tl.sum(total_4), sem="relaxed")


@triton.jit
def _image_and_voxels(programs, BLOCK: tl.constexpr):
    """The image of a program, of which so many share each, and its voxels."""
    block = tl.program_id(0)
    return (block // programs).to(tl.int64), (block % programs) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _units(value, unit, inside):
    """The nearest whole number of units, int64."""
    return tl.where(inside, tl.floor(value.to(tl.float64) * unit + 0.5), 0.0).to(tl.int64)


@triton.jit
def _place(everything, height, width, pitch, REACH: tl.constexpr, BLOCK: tl.constexpr):
    """Voxels of a program, which of them exist, their column and row, and where they are within frames of REACH."""
    v = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = v < everything
    v = tl.minimum(v, everything - 1)
    line, x = v // width, v % width
    framed = (line + (2 * (line // height) + 1) * REACH) * pitch + REACH + x
    return v, inside, x, line % height, framed


@triton.jit
def rows_loop(
    who, rounded, sums, along, height, width, voxels, everything, pitch,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, REACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Along rows: sums of two features in windows of three half sides, and the squared distance to a boundary.

    ``who (planes, H + 2 REACH, pitch)`` are predictions within frames of -1, ``rounded (N, 2, voxels)``;
    ``sums (6, everything)`` and ``along (everything,)`` are written.
    """
    v, inside, x, _, framed = _place(everything, height, width, pitch, REACH, BLOCK)
    line = rounded + v // voxels * voxels + v
    rest_1 = tl.zeros((BLOCK,), tl.int32)
    rest_2, rest_3, p_1, p_2, p_3 = rest_1, rest_1, rest_1, rest_1, rest_1
    for dx in range(-THIRD, THIRD + 1):
        near = (x + dx >= 0) & (x + dx < width)
        rest, p = tl.load(line + dx, mask=near, other=0), tl.load(line + voxels + dx, mask=near, other=0)
        rest_1 += tl.where(dx * dx <= FIRST * FIRST, rest, 0)
        rest_2 += tl.where(dx * dx <= SECOND * SECOND, rest, 0)
        rest_3 += rest
        p_1 += tl.where(dx * dx <= FIRST * FIRST, p, 0)
        p_2 += tl.where(dx * dx <= SECOND * SECOND, p, 0)
        p_3 += p
    tl.store(sums + v, p_1, mask=inside)
    tl.store(sums + everything + v, rest_1, mask=inside)
    tl.store(sums + 2 * everything + v, p_2, mask=inside)
    tl.store(sums + 3 * everything + v, rest_2, mask=inside)
    tl.store(sums + 4 * everything + v, p_3, mask=inside)
    tl.store(sums + 5 * everything + v, rest_3, mask=inside)
    nearest = tl.zeros((BLOCK,), tl.int32) + REACH * REACH
    for dx in range(1 - REACH, REACH):
        centre = who + framed + dx
        here = tl.load(centre)
        edge = _differs(centre - 1, here) | _differs(centre + 1, here)
        edge = edge | _differs(centre - pitch, here) | _differs(centre + pitch, here)
        nearest = tl.where(edge & (here >= 0), tl.minimum(nearest, dx * dx), nearest)
    tl.store(along + v, nearest, mask=inside)


@triton.jit
def _differs(where, here):
    """Whether the voxels there exist and have another prediction."""
    near = tl.load(where)
    return (near >= 0) & (near != here)


@triton.jit
def _same_in_row(line, here, HALF: tl.constexpr, FROM: tl.constexpr):
    """How many voxels of a row, more than FROM and at most HALF away on either side, have the prediction ``here``."""
    count = (here * 0).to(tl.int32)
    for step in tl.static_range(FROM + 1, HALF + 1):
        count += (tl.load(line - step) == here).to(tl.int32) + (tl.load(line + step) == here).to(tl.int32)
    return count


@triton.jit
def _length(place, size, half):
    """Voxels of an axis that a window around a place covers."""
    return tl.minimum(place + half, size - 1) - tl.maximum(place - half, 0) + 1


@triton.jit
def around_loop(
    who, sums, along, shares, means, out, height, width, voxels, everything, pitch, classes, features, unit,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, REACH: tl.constexpr, POINTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """From what ``rows_loop`` wrote: the features of distance, windows and image, after POINTS others."""
    v, inside, x, y, framed = _place(everything, height, width, pitch, REACH, BLOCK)
    here = tl.load(who + framed)
    same_1 = tl.zeros((BLOCK,), tl.int32)
    same_2, same_3 = same_1, same_1
    rest_1 = tl.zeros((BLOCK,), tl.int64)
    rest_2, rest_3, p_1, p_2, p_3 = rest_1, rest_1, rest_1, rest_1, rest_1
    for dy in range(-THIRD, THIRD + 1):
        line = who + framed + dy * pitch
        near = (tl.load(line) == here).to(tl.int32) + _same_in_row(line, here, FIRST, 0)
        wider = near + _same_in_row(line, here, SECOND, FIRST)
        same_1 += tl.where(dy * dy <= FIRST * FIRST, near, 0)
        same_2 += tl.where(dy * dy <= SECOND * SECOND, wider, 0)
        same_3 += wider + _same_in_row(line, here, THIRD, SECOND)
        seen, at = (y + dy >= 0) & (y + dy < height), sums + v + dy * width
        p_3 += tl.load(at + 4 * everything, mask=seen, other=0)
        rest_3 += tl.load(at + 5 * everything, mask=seen, other=0)
        p_2 += tl.where(dy * dy <= SECOND * SECOND, tl.load(at + 2 * everything, mask=seen, other=0), 0)
        rest_2 += tl.where(dy * dy <= SECOND * SECOND, tl.load(at + 3 * everything, mask=seen, other=0), 0)
        p_1 += tl.where(dy * dy <= FIRST * FIRST, tl.load(at, mask=seen, other=0), 0)
        rest_1 += tl.where(dy * dy <= FIRST * FIRST, tl.load(at + everything, mask=seen, other=0), 0)
    nearest = tl.zeros((BLOCK,), tl.int32) + REACH * REACH
    for dy in range(1 - REACH, REACH):
        seen = (y + dy >= 0) & (y + dy < height)
        distance = tl.load(along + v + dy * width, mask=seen, other=REACH * REACH) + dy * dy
        nearest = tl.minimum(nearest, distance)
    image = v // voxels
    to = out + (image * (features - 1) + POINTS) * voxels + v
    tl.store(to, tl.log(1.0 + tl.sqrt(nearest.to(tl.float32))), mask=inside)
    area = _length(x, width, FIRST) * _length(y, height, FIRST)
    _store_window(to + voxels, voxels, same_1, p_1, rest_1, area, unit, inside)
    area = _length(x, width, SECOND) * _length(y, height, SECOND)
    _store_window(to + 4 * voxels, voxels, same_2, p_2, rest_2, area, unit, inside)
    area = _length(x, width, THIRD) * _length(y, height, THIRD)
    _store_window(to + 7 * voxels, voxels, same_3, p_3, rest_3, area, unit, inside)
    tl.store(to + 10 * voxels, tl.load(shares + image * classes + here), mask=inside)
    tl.store(to + 11 * voxels, tl.load(means + 2 * image), mask=inside)
    tl.store(to + 12 * voxels, tl.load(means + 2 * image + 1), mask=inside)


@triton.jit
def _store_window(to, voxels, same, p, rest, area, unit, inside):
    """The share of the own prediction and two means."""
    tl.store(to, same.to(tl.float32) / area.to(tl.float32), mask=inside)
    scale = area.to(tl.float64) * unit
    tl.store(to + voxels, (p.to(tl.float64) / scale).to(tl.float32), mask=inside)
    tl.store(to + 2 * voxels, (rest.to(tl.float64) / scale).to(tl.float32), mask=inside)


@triton.jit
def correct_loop(
    features, winner, out, mean, scale, first, classes, second, bias, last, programs, voxels, inputs,
    num_classes, widest, NETWORKS: tl.constexpr, JP: tl.constexpr, UP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The mean correction ``(N, V)`` of NETWORKS networks for ``features (N, J, V)``.

    Tables are padded with zeros: ``first (F, JP, UP)``, ``classes (F, C, UP)``, ``second (F, UP, UP)``, ``bias`` and
    ``last (F, UP)``.
    """
    image, v = _image_and_voxels(programs, BLOCK)
    inside = v < voxels
    j, u = tl.arange(0, JP), tl.arange(0, UP)
    used = inside[:, None] & (j < inputs)[None, :]
    x = tl.load(
        features + image * inputs * voxels + j[None, :].to(tl.int64) * voxels + v[:, None], mask=used, other=0.0
    )
    x = (x - tl.load(mean + j)[None, :]) / tl.load(scale + j)[None, :]
    x = tl.where(used, tl.minimum(tl.maximum(x, -widest), widest), 0.0)
    who = tl.load(winner + image * voxels + v, mask=inside, other=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for f in range(NETWORKS):
        weights = tl.load(first + (f * JP + j[:, None]) * UP + u[None, :])
        hidden = tl.dot(x, weights, input_precision="tf32x3")
        hidden += tl.load(classes + (f * num_classes + who[:, None]) * UP + u[None, :])
        hidden = tl.maximum(hidden, 0.0)
        weights = tl.load(second + (f * UP + u[:, None]) * UP + u[None, :])
        hidden = tl.dot(hidden, weights, input_precision="tf32x3") + tl.load(bias + f * UP + u)[None, :]
        total += tl.sum(tl.maximum(hidden, 0.0) * tl.load(last + f * UP + u)[None, :], 1)
    tl.store(out + image * voxels + v, total / NETWORKS, mask=inside)


@triton.jit
def _risen(values, place, BINS: tl.constexpr):
    """A map given at bins, linear between them, at a real place."""
    place = tl.minimum(tl.maximum(place, 0.0), BINS - 1.0)
    low = tl.minimum(place.to(tl.int32), BINS - 2)
    start = tl.load(values + low)
    return start + (tl.load(values + low + 1) - start) * (place - low.to(tl.float64))


@triton.jit
def odds_loop(
    x, winner, correction, first, second, slopes, known, out, programs, voxels, inputs, share,
    BINS: tl.constexpr, ORIGIN: tl.constexpr, WIDTH: tl.constexpr, CORRECTED: tl.constexpr, POINTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Log-odds of the winner ``(N, V)`` from the features ``(N, J, V)``, of which the first is ``log(1 - p1)``, and the
    networks' correction."""
    image, v = _image_and_voxels(programs, BLOCK)
    inside = v < voxels
    own_features = x + image * inputs * voxels + v
    r = tl.minimum(tl.load(own_features, mask=inside, other=-1.0).to(tl.float64), -1e-6)
    plain = tl.log(1.0 - tl.exp(r)) - r
    odds = _risen(first, (plain + ORIGIN) / WIDTH, BINS)
    if CORRECTED:
        own = slopes + tl.load(winner + image * voxels + v, mask=inside, other=0) * (2 + POINTS)
        change = tl.load(correction + image * voxels + v, mask=inside, other=0.0).to(tl.float64)
        change += tl.load(own) + tl.load(own + 1) * odds
        for j in tl.static_range(POINTS):
            change += tl.load(own + 2 + j) * tl.load(own_features + j * voxels, mask=inside, other=0.0).to(tl.float64)
        odds = _risen(second, (odds + share * change + ORIGIN) / WIDTH, BINS)
    odds = plain + tl.load(known + image) * (odds - plain)
    tl.store(out + image * voxels + v, odds.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["skew"])
def level_loop(
    scores, odds, winner, levelled, programs, voxels, classes, skew,
    BELOW: tl.constexpr, LEAST: tl.constexpr, CP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn the losers' scores ``(N, C, V)`` into log-probabilities, in place; see ``levelling.level``."""
    image, v = _image_and_voxels(programs, BLOCK)
    inside = v < voxels
    k = tl.arange(0, CP)[:, None]
    used = (k < classes) & inside[None, :]
    where = scores + skew + (image * classes + k) * voxels + v[None, :]
    own = tl.load(winner + image * voxels + v, mask=inside, other=0)
    wins = k == own[None, :]
    s = tl.where(wins, -float("inf"), tl.load(where, mask=used, other=-float("inf")))
    possible = tl.sum((s > -float("inf")).to(tl.int32), 0)
    some = possible > 0
    top = tl.where(some, tl.max(s, 0), 0.0)
    e = tl.exp(s - top[None, :])
    log_total = tl.where(some, tl.log(tl.where(some, tl.sum(e, 0), 1.0).to(tl.float64)), 0.0)
    given = tl.load(odds + image * voxels + v, mask=inside, other=0.0).to(tl.float64)
    equal = LEAST - tl.log(tl.maximum(possible, 1).to(tl.float64))
    o = tl.where(some, tl.maximum(given, equal), given)
    tail = tl.log(1.0 + tl.exp(-tl.abs(o)))
    log_rest = -tl.maximum(o, 0.0) - tail
    log_q = tl.where(some, tl.minimum(o, 0.0) - tail, 0.0).to(tl.float32)
    log_cap = o + BELOW  # of a loser, as a share of what the winner leaves
    moved = some & inside & ((o > given) | (-log_total > log_cap))
    shift = log_rest - top.to(tl.float64) - log_total
    log_p = s + shift.to(tl.float32)[None, :]
    if tl.max(moved.to(tl.int32)) > 0:
        cap = tl.exp(log_cap)
        r = e.to(tl.float64)
        factor = tl.zeros_like(cap)  # the c for which min(cap, c r) sums to one, from below
        rising = moved
        while tl.max(rising.to(tl.int32)) > 0:
            capped = (factor > 0.0)[None, :] & (r * factor[None, :] >= cap[None, :])
            left = 1.0 - cap * tl.sum(capped.to(tl.float64), 0)
            others = tl.sum(tl.where(capped, 0.0, r), 0)
            open_ = (others > 0.0) & (left > 0.0)
            level = tl.where(open_, left / tl.where(open_, others, 1.0), float("inf"))
            rising = rising & (level > factor)
            factor = tl.where(rising, level, factor)
            rising = rising & (factor < float("inf"))
        reached = r * factor[None, :] >= cap[None, :]
        finite = tl.where(factor < float("inf"), tl.maximum(factor, 1e-300), 1.0)
        lower = log_rest - top.to(tl.float64) + tl.log(finite)
        lowered = tl.where(reached, (log_cap + log_rest).to(tl.float32)[None, :], s + lower.to(tl.float32)[None, :])
        log_p = tl.where(moved[None, :], tl.where(s == -float("inf"), s, lowered), log_p)
    # the number just below: the winner stays strictly the largest
    most = ((-tl.abs(log_q)).to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    log_p = tl.where(wins, log_q[None, :], tl.minimum(log_p, most[None, :]))
    tl.store(where, log_p, mask=used)
    tl.store(levelled + image * voxels + v, moved.to(tl.int8), mask=inside)
