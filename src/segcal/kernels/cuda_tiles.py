"""What the compiled loops of ``segcal.kernels.cuda`` share: tiles of logits, their softmax, unfit voxels.

A program takes blocks of ``BLOCK`` voxels, each as a tile ``(CP, BLOCK)`` of logits in registers; ``CP`` is the number
of classes rounded up to a power of two.
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


# ``skew`` is 0, which the compiler does not know. If it knew how the logits are aligned, a thread would load four
# voxels at once, and the classes of a voxel would be spread over several threads.
walking = triton.jit(do_not_specialize=["skew"])


@triton.jit
def exp(d):
    """exp of float32 ``d`` from -150 to 0 with a relative error below 2e-7; the product with log2(e) keeps its tail."""
    d = tl.maximum(d, LOWEST)
    power = d * _LOG2E
    return tl.exp2(power) * (1.0 + tl.fma(d, _LOG2E, -power) * _LN2)


@triton.jit
def log1p(x):
    """log(1 + x) of float64 ``x >= 0`` to full relative precision: the rounding of 1 + x is divided out."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def counted(labels, mask, v, inside, ignored, MASKED: tl.constexpr):
    """Labels ``(BLOCK,)`` and which voxels count."""
    y = tl.load(labels + v, mask=inside, other=0).to(tl.int64)
    counts = inside & (y != ignored)
    if MASKED:
        counts = counts & (tl.load(mask + v, mask=inside, other=0) != 0)
    return y, counts


@triton.jit
def first_voxel(voxels, BLOCK: tl.constexpr):
    """The first voxel of this program, in the type of their number."""
    return (voxels * 0 + tl.program_id(0)) * BLOCK


@triton.jit
def place_of(v, inner, by_image, by_voxel):
    """Where the first class of each voxel is."""
    image = v // inner
    return image.to(tl.int64) * by_image + (v - image * inner).to(tl.int64) * by_voxel


@triton.jit
def tile(x, v, counts, classes, inner, by_image, by_class, by_voxel, skew, CP: tl.constexpr):
    """The logits ``(CP, BLOCK)`` in float32, -inf beyond the classes, and the classes ``(CP, 1)``."""
    k = tl.arange(0, CP)[:, None]
    where = x + skew + place_of(v, inner, by_image, by_voxel)[None, :] + k.to(tl.int64) * by_class
    z = tl.load(where, mask=(k < classes) & counts[None, :], other=-float("inf")).to(tl.float32)
    return z, k


@triton.jit
def best_of(z):
    """The best of scores ``(CP, BLOCK)``, 0 if there is no softmax; its class, the first of equals; and which have one.

    A NaN, +inf, or no possible class: no softmax.
    """
    nan = tl.max((z != z).to(tl.int32), 0) > 0
    best, winner = tl.max(tl.where(z != z, -float("inf"), z), 0, return_indices=True)
    fit = (nan == 0) & (tl.abs(best) < float("inf"))
    return tl.where(fit, best, 0.0), winner, fit


@triton.jit
def note_first(bad, v, unfit, most):
    """Lower ``bad`` to the first unfit voxel. There is nearly never one, and all programs share this number."""
    if tl.max(unfit.to(tl.int32)) > 0:
        tl.atomic_min(bad, tl.min(tl.where(unfit, v, most)).to(tl.int64), sem="relaxed")


@triton.jit
def labelled_tile(
    x, labels, mask, v, voxels, classes, inner, by_image, by_class, by_voxel, skew, ignored, bad,
    CP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The scores ``(CP, BLOCK)`` below the best, and those of the labels; classes, winners, labels, who counts.

    Voxels are unfit if they have no softmax, or if their label is no class or an impossible one.
    """
    y64, counts = counted(labels, mask, v, v < voxels, ignored, MASKED)
    z, k = tile(x, v, counts, classes, inner, by_image, by_class, by_voxel, skew, CP)
    best, winner, fit = best_of(z)
    known = (y64 >= 0) & (y64 < classes)
    y = tl.where(known & counts, y64, 0).to(tl.int32)
    below = z - best[None, :]
    own = tl.sum(tl.where(k == y[None, :], below, 0.0), 0)
    fit = fit & known & (own >= -DEEP)
    note_first(bad, v, counts & (fit == 0), voxels)
    return below, own, k, winner, y, counts & fit
