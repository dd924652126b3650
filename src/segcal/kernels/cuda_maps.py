"""The compiled loops of ``segcal.kernels.cuda`` that map logits to log-probabilities."""

# mypy: ignore-errors
# (triton infers the types of compiled functions itself)
# ruff: noqa: RUF005
# (and adds tuples, but does not unpack them)

from __future__ import annotations

import math

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

_LOG2E, _LN2 = tl.constexpr(1 / math.log(2)), tl.constexpr(math.log(2))
#: Exponent of a part that is 0: below every other, which is above -2^21, as the inverse temperature is at most 1000.
_NONE = tl.constexpr(-1e9)


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
def _power(y):
    """2^y as a fraction from 1 to 2 and a whole exponent. It never falls as y rises: no term of the sums does."""
    whole = tl.floor(tl.maximum(y, _NONE))
    f = tl.maximum(y, _NONE) - whole
    p = tl.fma(f, 2.18775048e-4, 1.23878215e-3)
    p = tl.fma(f, p, 9.68458045e-3)
    p = tl.fma(f, p, 5.54804263e-2)
    p = tl.fma(f, p, 2.40230502e-1)
    p = tl.fma(f, p, 6.93146929e-1)
    return tl.minimum(tl.fma(f, p, 1.0), 2.0), whole


@triton.jit
def _times(fraction, exponent):
    """``fraction * 2^exponent`` for exponents up to 0; below -126, where nothing is left beside 1, for -126."""
    return fraction * ((tl.maximum(exponent, -126.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _log(x):
    """log of float32 x from 1 to 8, within 1e-7, as a multiple of log 2 and what is subtracted from it, up to log 2.

    It never falls as x rises: ``-log(1 - r)``, with 1 - r in [1/2, 1) and of 24 binary digits, is a polynomial of r
    that rises from each such number to the next (a test tries all).
    """
    bits = x.to(tl.int32, bitcast=True)
    r = 1.0 - 0.5 * ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    p = tl.fma(r, 1.44252288, -1.69866582)
    p = tl.fma(r, p, 1.26001044)
    p = tl.fma(r, p, -0.204539746)
    p = tl.fma(r, p, 0.269850133)
    p = tl.fma(r, p, 0.242774453)
    p = tl.fma(r, p, 0.333702559)
    p = tl.fma(r, p, 0.499992805)
    p = tl.fma(r, p, 1.00000002)
    return ((bits >> 23) - 126).to(tl.float32), tl.minimum(r * p, _LN2)


@triton.jit
def _mixed(d, factor, scaled, plain, uniform):
    """``log(2^(factor d + scaled) + 2^(d log2(e) + plain) + 2^uniform)``, which never falls as d rises.

    So the order of classes is kept, however little rounding leaves of their differences.
    """
    first, i = _power(tl.fma(d, factor, scaled))
    second, j = _power(tl.fma(d, _LOG2E, plain))
    third, k = _power(uniform)
    most = tl.maximum(tl.maximum(i, j), k)
    twos, less = _log(_times(first, i - most) + _times(second, j - most) + _times(third, k - most))
    return tl.fma(most + twos, _LN2, -less)


@triton.jit
def _parts(rest_scaled, rest, possible, scaled, plain, uniform):
    """What ``_mixed`` takes, and the log-probability of the winner.

    From the sums of exp of all classes but the winner, at both temperatures, how many classes are possible, and the
    logarithms of the weights. The probabilities of the other classes are added: their sum, however small, is precise.
    """
    others = possible - 1.0
    a, b, c = exp(scaled) / (1.0 + rest_scaled), exp(plain) / (1.0 + rest), exp(uniform) / possible
    top = -log1p32((a * rest_scaled + b * rest + c * others) / (a + b + c))
    scaled = (scaled - log1p32(rest_scaled)) * _LOG2E
    plain = (plain - log1p32(rest)) * _LOG2E
    return scaled, plain, (uniform - log1p32(others)) * _LOG2E, top


@triton.jit
def apply_mixture_loop(
    x, out, blocks, classes, inner, by_image, by_class, by_voxel, beta, scaled, plain, uniform,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``log(w1 S(beta z) + w2 S(z) + w3 / C)`` to ``out``, in the order of z; C are the possible classes.

    ``scaled``, ``plain`` and ``uniform`` are the logarithms of the weights.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        inside, where, to = mapped_block(x, out, block, classes, inner, by_image, by_voxel, BLOCK)
        best, winner, fit = best_of(where, classes, by_class, inside)
        rest_scaled, rest, possible = tl.zeros_like(best), tl.zeros_like(best), tl.zeros_like(best)
        for k in tl.range(0, classes, loop_unroll_factor=AHEAD):
            d = logit(where, k, by_class, inside) - best
            there = d >= -DEEP
            possible += tl.where(there, 1.0, 0.0)
            rest_scaled += tl.where(there & (k != winner), exp(d * beta), 0.0)
            rest += tl.where(there & (k != winner), exp(d), 0.0)
        first, second, third, top = _parts(rest_scaled, rest, tl.maximum(possible, 1.0), scaled, plain, uniform)
        own = tl.where(fit, top, float("nan")).to(dtype).to(tl.float32)
        limit = next_lower(own, dtype)
        for k in tl.range(0, classes, loop_unroll_factor=AHEAD):
            d = logit(where, k, by_class, inside) - best
            log_p = tl.where(d < -DEEP, -float("inf"), _mixed(d, beta * _LOG2E, first, second, third))
            log_p = tl.where((k == winner) | (fit == 0), own, tl.minimum(log_p, limit))
            tl.store(to + tl.cast(k, tl.int64) * inner, log_p.to(dtype), mask=inside)


@triton.jit
def apply_few_mixture_loop(
    x, out, blocks, classes, inner, by_image, by_class, by_voxel, beta, scaled, plain, uniform,
    BLOCK: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """``apply_mixture_loop`` for few classes, a number that the compiler knows: logits are read once."""
    dtype: tl.constexpr = out.dtype.element_ty
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        inside, where, to = mapped_block(x, out, block, classes, inner, by_image, by_voxel, BLOCK)
        z = ()
        for k in tl.static_range(CLASSES):
            z = z + (logit(where, k, by_class, inside),)
        best, winner, fit = best_of_few(z, CLASSES)
        rest_scaled, rest, possible = tl.zeros_like(best), tl.zeros_like(best), tl.zeros_like(best)
        for k in tl.static_range(CLASSES):
            d = z[k] - best
            there = d >= -DEEP
            possible += tl.where(there, 1.0, 0.0)
            rest_scaled += tl.where(there & (k != winner), exp(d * beta), 0.0)
            rest += tl.where(there & (k != winner), exp(d), 0.0)
        first, second, third, top = _parts(rest_scaled, rest, tl.maximum(possible, 1.0), scaled, plain, uniform)
        own = tl.where(fit, top, float("nan")).to(dtype).to(tl.float32)
        limit = next_lower(own, dtype)
        for k in tl.static_range(CLASSES):
            d = z[k] - best
            log_p = tl.where(d < -DEEP, -float("inf"), _mixed(d, beta * _LOG2E, first, second, third))
            log_p = tl.where((k == winner) | (fit == 0), own, tl.minimum(log_p, limit))
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
