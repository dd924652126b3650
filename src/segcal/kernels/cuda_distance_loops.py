"""The triton loops of distances to a boundary, and of their sums by slot."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# (triton infers the types of compiled functions itself)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest_loop(squares, out, steps, axis, voxels, length, inner, BLOCK: tl.constexpr):
    """In ``out``, of every voxel i of a line along an axis, ``min_j squares(j) + (step (i - j))^2``.

    The search goes outwards from i until nothing further away can be lower for any voxel of the block. ``inner`` voxels
    lie between neighbours in a line, ``steps`` are float64.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = n < voxels
    i = (n // inner) % length
    step = tl.load(steps + axis)
    lowest = tl.load(squares + n, mask=there, other=0.0)
    k = tl.full((), 1, tl.int64)
    gap = step * 1.0
    while (k < length) & (tl.max(lowest) > gap * gap):
        before = tl.load(squares + n - k * inner, mask=there & (i >= k), other=float("inf"))
        after = tl.load(squares + n + k * inner, mask=there & (i + k < length), other=float("inf"))
        lowest = tl.minimum(lowest, tl.minimum(before, after) + gap * gap)
        k += 1
        gap = step * k.to(tl.float64)
    tl.store(out + n, lowest, mask=there)


@triton.jit
def slot_sums_loop(distance, keep, slots, sums, voxels, count, BLOCK: tl.constexpr, SLOTTED: tl.constexpr):
    """Sum and number of finite distances, and number of all, of voxels that are kept, to ``sums (programs, slots, 3)``.

    A program adds to numbers of its own, in the order of the voxels: the same data give the same bits.
    """
    own = sums + tl.program_id(0) * count * 3
    end = tl.cast(voxels, tl.int64)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, end, tl.num_programs(0) * BLOCK):
        v = start + tl.arange(0, BLOCK)
        kept = tl.load(keep + v, mask=v < end, other=0) != 0
        far = tl.load(distance + v, mask=kept, other=0.0).to(tl.float64)
        finite = kept & (tl.abs(far) < float("inf"))
        slot = tl.zeros((BLOCK,), tl.int32)
        if SLOTTED:
            slot = tl.load(slots + v, mask=kept, other=0).to(tl.int32)
        for s in range(tl.min(tl.where(kept, slot, count)), tl.max(tl.where(kept, slot, -1)) + 1):
            here = finite & (slot == s)
            tl.atomic_add(own + 3 * s, tl.sum(tl.where(here, far, 0.0)))
            tl.atomic_add(own + 3 * s + 1, tl.sum(here.to(tl.int32)).to(tl.float64))
            tl.atomic_add(own + 3 * s + 2, tl.sum((kept & (slot == s)).to(tl.int32)).to(tl.float64))
