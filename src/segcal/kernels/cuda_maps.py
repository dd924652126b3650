"""The compiled loops of ``segcal.kernels.cuda`` that map logits to log-probabilities."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# (triton infers the types of compiled functions itself)

from __future__ import annotations

import triton
import triton.language as tl

from segcal.kernels.cuda_tiles import DEEP, best_of, exp, first_voxel, log1p, place_of, tile, walking
from segcal.kernels.experts import IMPOSSIBLE
from segcal.scores import OFFSET_LIMIT

#: Kinds of expert maps, by their features.
KINDS = {"logits": 0, "own-logit": 1, "log-probs": 2, "margins": 3, "gaps": 4}
_OWN, _LOG_PROBS, _MARGINS, _GAPS = (tl.constexpr(kind) for kind in range(1, 5))
_AWAY, _OFFSET = tl.constexpr(IMPOSSIBLE), tl.constexpr(OFFSET_LIMIT)


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
    best, first, fit = best_of(s)
    d = s - best[None, :]
    rest = tl.sum(tl.where((k == first[None, :]) | (k >= classes), 0.0, exp(d)), 0)
    log_p = d - log1p(rest.to(tl.float64)).to(tl.float32)[None, :]
    dtype: tl.constexpr = where.dtype.element_ty
    if KEEP:
        own = tl.sum(tl.where(k == winner[None, :], log_p, 0.0), 0).to(dtype).to(tl.float32)
        log_p = tl.where(k == winner[None, :], own[None, :], tl.minimum(log_p, _next_lower(own, dtype)[None, :]))
    log_p = tl.where(fit[None, :], log_p, float("nan"))
    tl.store(where, log_p.to(dtype), mask=(k < classes) & counts[None, :])


@walking
def apply_temperature_loop(
    x, out, voxels, classes, inner, by_image, by_class, by_voxel, skew, out_image, out_class, out_voxel, beta,
    CP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``log S(beta z)`` to ``out``."""
    v = first_voxel(voxels, BLOCK) + tl.arange(0, BLOCK)
    inside = v < voxels
    z, k = tile(x, v, inside, classes, inner, by_image, by_class, by_voxel, skew, CP)
    best, winner, fit = best_of(z)
    below = z - best[None, :]
    s = tl.where(below < -DEEP, -float("inf"), below * beta)
    s = tl.where(fit[None, :], s, float("nan"))
    to = out + place_of(v, inner, out_image, out_voxel)[None, :] + k.to(tl.int64) * out_class
    _write_log_softmax(s, k, winner, inside, to, classes, True)


@walking
def apply_experts_loop(
    x, out, weight, tilt, bias, voxels, classes, inner, by_image, by_class, by_voxel, skew, out_image, out_class,
    out_voxel, CP: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, ROUTED: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """``log S(s)`` of the scores s of an ``ExpertMap``.

    ``weight (E, inputs, CP)``, ``tilt`` and ``bias (E, CP)``: with a the common number of the voxel and m its margins,
    ``s_k = bias_k + a tilt_k + sum_j weight_jk m_j``. For gaps, ``k`` is the rank of the class, and m the gaps.
    """
    v = first_voxel(voxels, BLOCK) + tl.arange(0, BLOCK)
    inside = v < voxels
    z, k = tile(x, v, inside, classes, inner, by_image, by_class, by_voxel, skew, CP)
    best, winner, fit = best_of(z)
    never = best[None, :] - z > DEEP
    place = place_of(v, inner, by_image, by_voxel)
    expert = tl.zeros_like(winner)
    if ROUTED:
        expert = winner
    output = k + tl.zeros_like(z).to(tl.int32)
    if KIND == _GAPS:
        z = tl.where(never, -float("inf"), z)
        output = tl.zeros_like(output)
        for j in range(classes):
            other = tl.load(x + place + j * by_class.to(tl.int64), mask=inside, other=0.0).to(tl.float32)
            other = tl.where(best - other > DEEP, -float("inf"), other)
            before = (other[None, :] > z) | ((other[None, :] == z) & (j < k))
            output += before.to(tl.int32)
        output = tl.where(k < classes, output, 0)
    row = expert[None, :] * CP + output
    common = tl.minimum(tl.maximum(best, -_OFFSET), _OFFSET)
    if KIND == _LOG_PROBS:
        others = tl.where((k == winner[None, :]) | (k >= classes), 0.0, exp(tl.where(never, -_AWAY, z - best[None, :])))
        common = -log1p(tl.sum(others, 0).to(tl.float64)).to(tl.float32)
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
                feature = tl.where(feature > DEEP, _AWAY, feature)
            inputs = classes - (KIND == _GAPS)
            s += tl.load(weight + (expert[None, :] * inputs + j) * CP + output) * feature[None, :]
    if KIND == _MARGINS:
        s = tl.where(k == winner[None, :], 0.0, s)
    s = tl.where(never | (k >= classes), -float("inf"), s)
    s = tl.where(fit[None, :], s, float("nan"))
    to = out + place_of(v, inner, out_image, out_voxel)[None, :] + k.to(tl.int64) * out_class
    _write_log_softmax(s, k, winner, inside, to, classes, KEEP)


@triton.jit
def _log_probabilities(x, v, inside, classes, inner, by_image, by_class, by_voxel, skew, CP: tl.constexpr):
    """``log S(z)`` ``(CP, BLOCK)``, the winner and its ``-logit``, which voxels have a softmax, and the classes."""
    z, k = tile(x, v, inside, classes, inner, by_image, by_class, by_voxel, skew, CP)
    best, winner, fit = best_of(z)
    d = tl.where(best[None, :] - z > DEEP, -float("inf"), z - best[None, :])
    rest = tl.sum(tl.where((k == winner[None, :]) | (k >= classes), 0.0, exp(d)), 0).to(tl.float64)
    return d - log1p(rest).to(tl.float32)[None, :], winner, tl.log(rest).to(tl.float32), fit, k


@walking
def apply_knots_loop(
    x, out, centres, knots, voxels, classes, inner, by_image, by_class, by_voxel, skew, out_image, out_class, out_voxel,
    bins, limit, width, CP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``log S(g(log S(z)))``: g is linear between ``knots (bins,)`` at ``centres (bins,)``, equally far in logit(p)."""
    v = first_voxel(voxels, BLOCK) + tl.arange(0, BLOCK)
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
    to = out + place_of(v, inner, out_image, out_voxel)[None, :] + k.to(tl.int64) * out_class
    _write_log_softmax(s, k, winner, inside, to, classes, True)


@walking
def apply_bins_loop(
    x, out, edges, values, voxels, classes, inner, by_image, by_class, by_voxel, skew, out_image, out_class,
    out_voxel, bins,
    CP: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Log-probabilities from scores: the ``values (C, bins)`` of the bin that log S(z) is in, by bisection."""
    v = first_voxel(voxels, BLOCK) + tl.arange(0, BLOCK)
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
    to = out + place_of(v, inner, out_image, out_voxel)[None, :] + k.to(tl.int64) * out_class
    _write_log_softmax(s, k, winner, inside, to, classes, False)
