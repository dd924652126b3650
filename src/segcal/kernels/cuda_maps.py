"""The compiled loops of ``segcal.kernels.cuda`` that map logits to log-probabilities."""

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


@triton.jit
def apply_temperature_loop(
    x, out, blocks, classes, inner, by_image, by_class, by_voxel, beta,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``log S(beta z)`` to ``out``, with exactly the argmax of z."""
    dtype: tl.constexpr = out.dtype.element_ty
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        inside, where, to = mapped_block(x, out, block, classes, inner, by_image, by_voxel, BLOCK)
        best, winner, fit = best_of(where, classes, by_class, inside)
        rest = tl.zeros_like(best)
        for k in tl.range(0, classes, loop_unroll_factor=AHEAD):
            d = logit(where, k, by_class, inside) - best
            rest += tl.where((k == winner) | (d < -DEEP), 0.0, exp(d * beta))
        top = tl.where(fit, -log1p32(rest), float("nan"))
        own = top.to(dtype).to(tl.float32)
        limit = next_lower(own, dtype)
        for k in tl.range(0, classes, loop_unroll_factor=AHEAD):
            d = logit(where, k, by_class, inside) - best
            log_p = tl.minimum(tl.where(d < -DEEP, -float("inf"), d * beta + top), limit)
            log_p = tl.where((k == winner) | (fit == 0), own, log_p)
            tl.store(to + tl.cast(k, tl.int64) * inner, log_p.to(dtype), mask=inside)


@triton.jit
def apply_few_temperature_loop(
    x, out, blocks, classes, inner, by_image, by_class, by_voxel, beta, BLOCK: tl.constexpr, CLASSES: tl.constexpr
):
    """``apply_temperature_loop`` for few classes, a number that the compiler knows: logits are read once."""
    dtype: tl.constexpr = out.dtype.element_ty
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        inside, where, to = mapped_block(x, out, block, classes, inner, by_image, by_voxel, BLOCK)
        z = ()
        for k in tl.static_range(CLASSES):
            z = z + (logit(where, k, by_class, inside),)
        best, winner, fit = best_of_few(z, CLASSES)
        rest = tl.zeros_like(best)
        scores = ()
        for k in tl.static_range(CLASSES):
            d = tl.where(z[k] - best < -DEEP, -float("inf"), (z[k] - best) * beta)
            rest += tl.where(k == winner, 0.0, exp(d))
            scores = scores + (d,)
        top = tl.where(fit, -log1p32(rest), float("nan"))
        own = top.to(dtype).to(tl.float32)
        limit = next_lower(own, dtype)
        for k in tl.static_range(CLASSES):
            log_p = tl.minimum(scores[k] + top, limit)
            log_p = tl.where((k == winner) | (fit == 0), own, log_p)
            tl.store(to + tl.cast(k, tl.int64) * inner, log_p.to(dtype), mask=inside)


@triton.jit
def _knot_score(log_p, logit_p, centres, knots, bins, limit, width, used):
    """g(log p): linear between ``knots (bins,)`` at ``centres (bins,)``, equally far in logit(p)."""
    place = tl.minimum(tl.maximum((logit_p + limit) / width - 0.5, 0.0), bins - 2.0)
    lower = tl.where(used, place, 0.0).to(tl.int32)
    inner_p = tl.minimum(tl.maximum(log_p, tl.load(centres)), tl.load(centres + bins - 1))
    lower = tl.maximum(lower - (inner_p <= tl.load(centres + lower)).to(tl.int32), 0)
    lower = tl.minimum(lower + (inner_p > tl.load(centres + lower + 1)).to(tl.int32), bins - 2)
    start, end = tl.load(centres + lower), tl.load(centres + lower + 1)
    low, high = tl.load(knots + lower), tl.load(knots + lower + 1)
    return tl.minimum(low + (high - low) * ((inner_p - start) / (end - start)), high)


@triton.jit
def _bin_score(log_p, k, edges, values, bins, used, STEPS: tl.constexpr):
    """The value of the bin that log p is in, by bisection of ``edges (C, 2**STEPS - 1)``."""
    i = tl.zeros_like(log_p).to(tl.int32)
    for n in tl.static_range(STEPS):
        step = 1 << (STEPS - 1 - n)
        edge = tl.load(edges + k * ((1 << STEPS) - 1) + i + step - 1, mask=used, other=float("inf"))
        i += tl.where(edge < log_p, step, 0)
    return tl.load(values + k * bins + i, mask=used, other=0.0)


@triton.jit
def _curve(
    where, k, by_class, used, best, winner, log_sum, opposite, first_table, second_table, bins, limit, width,
    STEPS: tl.constexpr,
):  # fmt: skip
    """The score of class k, a function of its log-probability: by bins if there are ``STEPS``, else by knots."""
    d = logit(where, k, by_class, used) - best
    log_p = d - log_sum
    if STEPS > 0:
        s = _bin_score(log_p, k, first_table, second_table, bins, used, STEPS)
    else:
        odds = log_p - tl.log(1.0 - tl.minimum(tl.exp(log_p), 0.75))  # a class that did not win has at most 1/2
        odds = tl.where(k == winner, -opposite, odds)
        s = _knot_score(log_p, odds, first_table, second_table, bins, limit, width, used)
    return tl.where(d < -DEEP, -float("inf"), s)


@triton.jit
def apply_curve_loop(
    x, out, first_table, second_table, blocks, classes, inner, by_image, by_class, by_voxel, bins, limit, width,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """``log S(s)`` of scores s that are functions of the log-probabilities; ``KEEP`` keeps exactly the argmax."""
    dtype: tl.constexpr = out.dtype.element_ty
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        inside, where, to = mapped_block(x, out, block, classes, inner, by_image, by_voxel, BLOCK)
        best, winner, fit = best_of(where, classes, by_class, inside)
        used = inside & fit
        others = rest_of(where, classes, by_class, used, best, winner)
        log_sum, opposite = log1p32(others), tl.log(others.to(tl.float64)).to(tl.float32)
        highest, rest, own = tl.zeros_like(best) - float("inf"), tl.zeros_like(best), tl.zeros_like(best)
        for k in range(classes):
            s = _curve(where, k, by_class, used, best, winner, log_sum, opposite, first_table, second_table, bins,
                       limit, width, STEPS)  # fmt: skip
            fall = tl.where(s == -float("inf"), 0.0, exp(-tl.abs(s - highest)))
            rest = tl.where(s > highest, (rest + 1.0) * fall, rest + fall)
            highest = tl.maximum(highest, s)
            own = tl.where(k == winner, s, own)
        down = highest + log1p32(rest)
        own = tl.where(fit, (own - down).to(dtype).to(tl.float32), float("nan"))
        for k in range(classes):
            s = _curve(where, k, by_class, used, best, winner, log_sum, opposite, first_table, second_table, bins,
                       limit, width, STEPS)  # fmt: skip
            log_p = s - down
            if KEEP:
                log_p = tl.where(k == winner, own, tl.minimum(log_p, next_lower(own, dtype)))
            log_p = tl.where(fit, log_p, float("nan"))
            tl.store(to + tl.cast(k, tl.int64) * inner, log_p.to(dtype), mask=inside)
