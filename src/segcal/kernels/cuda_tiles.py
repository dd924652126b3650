"""What the compiled loops of ``segcal.kernels.cuda`` share: blocks of voxels, their best class, unfit voxels.

A program is one warp. It takes blocks of ``BLOCK`` neighbouring voxels of an image and goes through their classes one
by one: each thread has a few voxels, and what is summed over classes stays in its registers. Logits are read from
memory once; when a loop goes through the classes again, they come from the processor's cache.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# (triton infers the types of compiled functions itself)

from __future__ import annotations

import math

import triton
import triton.language as tl

from segcal.scores import DEPTH

_LOG2E = tl.constexpr(1 / math.log(2))
_LN2 = tl.constexpr(math.log(2))
#: exp is 0 in float32 from here on.
LOWEST = tl.constexpr(-150.0)
#: Classes this far below the best are impossible.
DEEP = tl.constexpr(DEPTH)
#: Classes that are read at once, to wait for memory less often.
AHEAD = tl.constexpr(4)


@triton.jit
def exp(d):
    """exp of float32 ``d`` from -150 to 0 with a relative error below 2e-7; the product with log2(e) keeps its tail."""
    d = tl.maximum(d, LOWEST)
    power = d * _LOG2E
    return tl.exp2(power) * (1.0 + tl.fma(d, _LOG2E, -power) * _LN2)


@triton.jit
def log1p(x, u, inverse):
    """log(1 + x) of float64 ``x >= 0``, from ``u = 1 + x`` and 1 / u: what was lost when u was rounded is added."""
    return tl.log(u) + (x - (u - 1.0)) * inverse


@triton.jit
def log1p32(rest):
    """log(1 + rest) of float32, rounded once."""
    u = 1.0 + rest.to(tl.float64)
    return log1p(rest.to(tl.float64), u, 1.0 / u).to(tl.float32)


@triton.jit
def next_lower(value, dtype: tl.constexpr):
    """The number just below ``value <= 0`` in a type; between float16's subnormal numbers the step is too large."""
    if dtype == tl.float32:
        lower = ((-tl.abs(value)).to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    else:
        bits = (-tl.abs(value)).to(dtype).to(tl.int16, bitcast=True)
        lower = (bits + 1).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return lower


@triton.jit
def block_of(block, per_image, inner, BLOCK: tl.constexpr):
    """The image of a block, the places of its voxels in the image, and which of them exist."""
    image = (block // per_image).to(tl.int64)
    place = (block - image * per_image) * BLOCK + tl.arange(0, BLOCK)
    return image, place, place < inner


@triton.jit
def mapped_block(x, out, block, classes, inner, by_image, by_voxel, BLOCK: tl.constexpr):
    """Which voxels of a block exist, where their first logits are, and where their first results go.

    The results of a class are ``inner`` numbers apart from those of the next.
    """
    image, place, inside = block_of(block, tl.cdiv(inner, BLOCK), inner, BLOCK)
    return inside, x + image * by_image + place * by_voxel, out + image * classes * inner + place


@triton.jit
def counted(labels, mask, v, inside, ignored, classes, MASKED: tl.constexpr):
    """Labels ``(BLOCK,)``, 0 where they are none of the classes; which voxels count; and which labels are known."""
    y = tl.load(labels + v, mask=inside, other=0).to(tl.int64)
    counts = inside & (y != ignored)
    if MASKED:
        counts = counts & (tl.load(mask + v, mask=inside, other=0) != 0)
    known = (y >= 0) & (y < classes)
    return tl.where(known & counts, y, 0).to(tl.int32), counts, known


@triton.jit
def logit(where, k, by_class, inside):
    """The logits ``(BLOCK,)`` of class k."""
    return tl.load(where + tl.cast(k, tl.int64) * by_class, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def best_of(where, classes, by_class, inside):
    """The best logit, 0 if there is no softmax; its class, the first of equals; and which voxels have a softmax.

    A NaN, +inf, or no possible class: no softmax.
    """
    best = tl.where(inside, -float("inf"), 0.0)
    winner = tl.zeros_like(best).to(tl.int32)
    nan = winner != 0
    for k in tl.range(0, classes, loop_unroll_factor=AHEAD):
        z = logit(where, k, by_class, inside)
        better = z > best
        best = tl.where(better, z, best)
        winner = tl.where(better, k, winner)
        nan = nan | (z != z)
    fit = (nan == 0) & (tl.abs(best) < float("inf"))
    return tl.where(fit, best, 0.0), winner, fit


@triton.jit
def best_of_few(z, CLASSES: tl.constexpr):
    """``best_of`` logits that a tuple holds."""
    best, winner, nan = z[0], tl.zeros_like(z[0]).to(tl.int32), z[0] != z[0]
    for k in tl.static_range(1, CLASSES):
        winner = tl.where(z[k] > best, k, winner)
        best = tl.maximum(best, z[k])
        nan = nan | (z[k] != z[k])
    fit = (nan == 0) & (tl.abs(best) < float("inf"))
    return tl.where(fit, best, 0.0), winner, fit


@triton.jit
def rest_of(where, classes, by_class, inside, best, winner):
    """The sum of exp(logit - best) of all classes but the winner."""
    rest = tl.zeros_like(best)
    for k in tl.range(0, classes, loop_unroll_factor=AHEAD):
        d = logit(where, k, by_class, inside) - best
        rest += tl.where(k == winner, 0.0, exp(d))
    return rest


@triton.jit
def note_first(bad, v, unfit, voxels):
    """Raise ``bad`` to how many voxels come from the first unfit one on. There is nearly never one."""
    if tl.max(unfit.to(tl.int32)) > 0:
        tl.atomic_max(bad, tl.max(tl.where(unfit, voxels - v, 0)).to(tl.int64), sem="relaxed")


@triton.jit
def labelled_block(
    x, labels, mask, block, per_image, voxels, classes, inner, by_image, by_class, by_voxel, ignored, bad,
    BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A block: voxels, which exist, where their first logits are, best logits, winners, labels, gaps, who counts.

    The gap is how far the logit of the label is below the best, as a negative number. Voxels are unfit if they have no
    softmax, or if their label is no class or an impossible one.
    """
    image, place, inside = block_of(block, per_image, inner, BLOCK)
    v = image * inner + place
    y, counts, known = counted(labels, mask, v, inside, ignored, classes, MASKED)
    where = x + image * by_image + place * by_voxel
    best, winner, fit = best_of(where, classes, by_class, inside)
    gap = logit(where, y, by_class, inside) - best
    fit = fit & known & (gap >= -DEEP)
    note_first(bad, v, counts & (fit == 0), voxels)
    return v, inside, where, best, winner, y, gap, counts & fit
