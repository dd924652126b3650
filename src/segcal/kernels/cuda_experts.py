"""The compiled loops of ``segcal.kernels.cuda`` for expert maps: matrices, one for all voxels or one for each winner.

With few classes everything about a voxel is in the registers of one thread, and loops over classes are unrolled. With
many, the scores of a block are a tile ``(CP, BLOCK)``, ``CP`` being the number of classes rounded up to a power of two.
"""

# mypy: ignore-errors
# (triton infers the types of compiled functions itself)
# ruff: noqa: RUF005
# (and adds tuples, but does not unpack them)

from __future__ import annotations

import triton
import triton.language as tl

from segcal.kernels.cuda_tiles import (
    AHEAD,
    DEEP,
    best_of,
    best_of_few,
    exp,
    log1p32,
    logit,
    mapped_block,
    next_lower,
    rest_of,
)
from segcal.kernels.experts import IMPOSSIBLE
from segcal.scores import OFFSET_LIMIT

#: Kinds of expert maps, by their features.
KINDS = {"logits": 0, "own-logit": 1, "log-probs": 2, "margins": 3, "gaps": 4}
_OWN, _LOG_PROBS, _MARGINS, _GAPS = (tl.constexpr(kind) for kind in range(1, 5))
# More than any class; and stages of a sort of up to 32 numbers.
_LAST, _STAGES = tl.constexpr(2**16), tl.constexpr(5)
_AWAY, _OFFSET = tl.constexpr(IMPOSSIBLE), tl.constexpr(OFFSET_LIMIT)


@triton.jit
def _key(z, k):
    """A number that sorts logits, and equal ones by their classes: the first is the largest."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)  # adding 0 turns -0 into 0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.to(tl.int64) << 32) | (_LAST - k)


@triton.jit
def _merged(keys, BLOCK: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr, CLASSES: tl.constexpr):
    """One step of the merging of sorted blocks: items that are this far apart change places if they must."""
    for i in tl.static_range(FIRST, CLASSES - STEP):
        if (i - FIRST) % (2 * STEP) < STEP and i // (2 * BLOCK) == (i + STEP) // (2 * BLOCK):
            a, b = keys[i], keys[i + STEP]
            larger = tl.maximum(a, b)
            smaller = a ^ b ^ larger  # without another comparison
            keys = keys[:i] + (larger,) + keys[i + 1 : i + STEP] + (smaller,) + keys[i + STEP + 1 :]
    return keys


@triton.jit
def _sorted(z, CLASSES: tl.constexpr):
    """Logits in descending order, and their classes: Batcher's odd-even merge sort of the keys."""
    keys = ()
    for k in tl.static_range(CLASSES):
        keys = keys + (_key(z[k], k),)
    for stage in tl.static_range(_STAGES):
        for turn in tl.static_range(stage + 1):
            keys = _merged(keys, 1 << stage, 1 << (stage - turn), (turn > 0) * (1 << (stage - turn)), CLASSES)
    logits, order = (), ()
    for k in tl.static_range(CLASSES):
        rising = (keys[k] >> 32).to(tl.int32)
        logits = logits + ((rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True),)
        order = order + (-((keys[k] & 0x7FFFFFFF).to(tl.int32) - _LAST),)
    return logits, order


@triton.jit
def _features(z, best, KIND: tl.constexpr, CLASSES: tl.constexpr):
    """The margins of all classes, or the gaps between sorted ones; impossible classes are ``IMPOSSIBLE`` below."""
    features = ()
    above = tl.zeros_like(best)
    for k in tl.static_range(CLASSES):
        below = best - z[k]
        if KIND == _GAPS:
            below = tl.where(below > DEEP, tl.maximum(_AWAY, above), below)
            if k > 0:
                features = features + (below - above,)
            above = below
        else:
            features = features + (tl.where(below > DEEP, _AWAY, below),)
    return features


@triton.jit
def _two(numbers, place):
    """Two neighbouring float32 numbers, the first at an even place, in one load."""
    both = tl.load((numbers + place).to(tl.pointer_type(tl.int64), bitcast=True))
    return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _few_scores(
    features, common, weight, tilt, bias, expert, KIND: tl.constexpr, CLASSES: tl.constexpr, INPUTS: tl.constexpr
):
    """The scores of one expert, two classes at a time: the rows of tables have an even length."""
    ROWS: tl.constexpr = CLASSES + CLASSES % 2
    scores = ()
    for k in tl.static_range(0, CLASSES, 2):
        row = expert * ROWS + k
        one, other = _two(bias, row)
        s, t = one + tl.zeros_like(common), other + tl.zeros_like(common)
        if KIND != _GAPS:
            one, other = _two(tilt, row)
            s += one * common
            t += other * common
        if KIND == _OWN:
            one, other = _two(weight, row)
            s += one * features[k]
            if k + 1 < CLASSES:
                t += other * features[k + 1]
        else:
            for j in tl.static_range(INPUTS):
                one, other = _two(weight, (expert * INPUTS + j) * ROWS + k)
                s += one * features[j]
                t += other * features[j]
        scores = scores + (s, t) if k + 1 < CLASSES else scores + (s,)
    return scores


@triton.jit
def apply_few_experts_loop(
    x, out, weight, tilt, bias, blocks, classes, inner, by_image, by_class, by_voxel,
    CLASSES: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, ROUTED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """``apply_experts_loop`` for few classes, a number that the compiler knows; rows of tables are even."""
    INPUTS: tl.constexpr = CLASSES - (KIND == _GAPS)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        inside, where, to = mapped_block(x, out, block, classes, inner, by_image, by_voxel, BLOCK)
        z = ()
        for k in tl.static_range(CLASSES):
            z = z + (logit(where, k, by_class, inside),)
        best, winner, fit = best_of_few(z, CLASSES)
        common = tl.minimum(tl.maximum(best, -_OFFSET), _OFFSET)
        if KIND == _LOG_PROBS:
            rest = tl.zeros_like(best)
            for k in tl.static_range(CLASSES):
                rest += tl.where(k == winner, 0.0, exp(z[k] - best))
            common = -log1p32(rest)
        first, order = winner, z
        if KIND == _GAPS:
            z, order = _sorted(z, CLASSES)
            first = tl.zeros_like(winner)
        features = _features(z, best, KIND, CLASSES)

        # Neighbours mostly have the same winner, and so the same expert: one round for each that occurs in the block.
        if ROUTED:
            s = z
            left = inside
            while tl.max(left.to(tl.int32)) > 0:
                expert = tl.min(tl.where(left, winner, CLASSES))
                here = winner == expert
                found = _few_scores(features, common, weight, tilt, bias, expert, KIND, CLASSES, INPUTS)
                chosen = ()
                for k in tl.static_range(CLASSES):
                    chosen = chosen + (tl.where(here, found[k], s[k]),)
                s = chosen
                left = left & (here == 0)
        else:
            s = _few_scores(features, common, weight, tilt, bias, 0, KIND, CLASSES, INPUTS)

        highest, top = tl.zeros_like(best) - float("inf"), tl.zeros_like(winner)
        scores = ()
        for k in tl.static_range(CLASSES):
            own = s[k]
            if KIND == _MARGINS:
                own = tl.where(k == winner, 0.0, own)
            own = tl.where(best - z[k] > DEEP, -float("inf"), own)
            top = tl.where(own > highest, k, top)
            highest = tl.maximum(highest, own)
            scores = scores + (own,)
        rest, first_score = tl.zeros_like(best), tl.zeros_like(best)
        for k in tl.static_range(CLASSES):
            rest += tl.where(k == top, 0.0, exp(scores[k] - highest))
            first_score = tl.where(k == first, scores[k], first_score)
        down = highest + log1p32(rest)
        dtype: tl.constexpr = out.dtype.element_ty
        own = (first_score - down).to(dtype).to(tl.float32)
        for k in tl.static_range(CLASSES):
            log_p = scores[k] - down
            if KEEP:
                log_p = tl.where(k == first, own, tl.minimum(log_p, next_lower(own, dtype)))
            log_p = tl.where(fit, log_p, float("nan"))
            if KIND == _GAPS:
                tl.store(to + order[k].to(tl.int64) * inner, log_p.to(dtype), mask=inside)
            else:
                tl.store(to + tl.cast(k, tl.int64) * inner, log_p.to(dtype), mask=inside)


@triton.jit
def _sort_classes(where, order, classes, by_class, inside, BLOCK: tl.constexpr):
    """Write the classes of each voxel to ``order (ranks, BLOCK)``: descending logits, the first of equals first."""
    to = order + tl.arange(0, BLOCK)
    for k in range(classes):
        z = logit(where, k, by_class, inside)
        rank = tl.zeros_like(z).to(tl.int32)
        for j in tl.range(0, k, loop_unroll_factor=AHEAD):
            rank += (logit(where, j, by_class, inside) >= z).to(tl.int32)
        for j in tl.range(k + 1, classes, loop_unroll_factor=AHEAD):
            rank += (logit(where, j, by_class, inside) > z).to(tl.int32)
        tl.store(to + rank * BLOCK, tl.cast(k, tl.int16))
    tl.debug_barrier()


@triton.jit
def _margins(where, own_class, by_class, inside, best, classes):
    """How far logits ``(CP, BLOCK)`` are below the best, inf beyond the classes."""
    exists = (tl.arange(0, own_class.shape[0]) < classes)[:, None] & inside[None, :]
    z = tl.load(where[None, :] + own_class.to(tl.int64) * by_class, mask=exists, other=-float("inf"))
    return best[None, :] - z.to(tl.float32)


@triton.jit
def apply_experts_loop(
    x, out, weight, tilt, bias, order, blocks, classes, inner, by_image, by_class, by_voxel,
    CP: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, ROUTED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """``log S(s)`` of the scores s of an ``ExpertMap``; ``KEEP`` keeps exactly the argmax.

    ``weight (E, inputs, CP)``, ``tilt`` and ``bias (E, CP)``: with a the common number of the voxel and m its margins,
    ``s_k = bias_k + a tilt_k + sum_j weight_jk m_j``. For gaps, ``k`` is the rank of the class, and m the gaps;
    ``order (programs, ranks, BLOCK)`` is room for the classes of the ranks. ``CP`` is the number of classes rounded up
    to a power of two.
    """
    k = tl.arange(0, CP)
    inputs = classes - (KIND == _GAPS)
    order += (tl.program_id(0) * classes).to(tl.int64) * BLOCK
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        inside, where, to = mapped_block(x, out, block, classes, inner, by_image, by_voxel, BLOCK)
        best, winner, fit = best_of(where, classes, by_class, inside)
        if KIND == _GAPS:
            _sort_classes(where, order, classes, by_class, inside, BLOCK)
        common = tl.minimum(tl.maximum(best, -_OFFSET), _OFFSET)
        if KIND == _LOG_PROBS:
            common = -log1p32(rest_of(where, classes, by_class, inside, best, winner))

        # Neighbours mostly have the same winner, and so the same expert: one round for each that occurs in the block.
        s = tl.zeros((CP, BLOCK), tl.float32)
        left = inside
        while tl.max(left.to(tl.int32)) > 0:
            expert, here = 0, left
            if ROUTED:
                expert = tl.min(tl.where(left, winner, classes))
                here = left & (winner == expert)
            row = expert * CP + k
            amount = here.to(tl.float32)
            s += tl.load(bias + row)[:, None] * amount[None, :]
            s += tl.load(tilt + row)[:, None] * (common * amount)[None, :]
            if KIND == _OWN:
                margin = _margins(where, k[:, None], by_class, inside, best, classes)
                s += tl.load(weight + row)[:, None] * (tl.where(margin > DEEP, _AWAY, margin) * amount[None, :])
            else:
                above = tl.zeros_like(best)
                for j in range(inputs):
                    if KIND == _GAPS:
                        own = tl.load(order + (j + 1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
                        below = best - logit(where, own, by_class, inside)
                        below = tl.where(below > DEEP, tl.maximum(_AWAY, above), below)
                        feature = below - above
                        above = below
                    else:
                        feature = best - logit(where, j, by_class, inside)
                        feature = tl.where(feature > DEEP, _AWAY, feature)
                    column = tl.load(weight + (expert * inputs + j) * CP + k)
                    s += column[:, None] * tl.where(here, feature, 0.0)[None, :]
            left = left & (here == 0)

        own_class, first = k[:, None], winner
        if KIND == _GAPS:
            ranks = order + k[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            own_class = tl.load(ranks, mask=k[:, None] < classes, other=0)
            first = tl.zeros_like(winner)
        if KIND == _MARGINS:
            s = tl.where(k[:, None] == winner[None, :], 0.0, s)
        s = tl.where(_margins(where, own_class, by_class, inside, best, classes) > DEEP, -float("inf"), s)
        highest = tl.max(s, 0)
        d = s - highest[None, :]
        top = tl.min(tl.where(d == 0.0, k[:, None], CP), 0)  # the first of equals
        rest = tl.sum(tl.where(k[:, None] == top[None, :], 0.0, exp(d)), 0)
        log_p = d - log1p32(rest)[None, :]
        dtype: tl.constexpr = out.dtype.element_ty
        if KEEP:
            mine = k[:, None] == first[None, :]
            own = tl.sum(tl.where(mine, log_p, 0.0), 0).to(dtype).to(tl.float32)
            log_p = tl.where(mine, own[None, :], tl.minimum(log_p, next_lower(own, dtype)[None, :]))
        log_p = tl.where(fit[None, :], log_p, float("nan"))
        tl.store(to[None, :] + own_class.to(tl.int64) * inner, log_p.to(dtype),
                 mask=(k < classes)[:, None] & inside[None, :])  # fmt: skip
        if KIND == _GAPS:
            tl.debug_barrier()  # the next block sorts its classes in the same room
