"""The compiled loops of ``segcal.kernels.cuda`` that add voxels up for temperature fits and first passes."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# (triton infers the types of compiled functions itself)

from __future__ import annotations

import triton
import triton.language as tl

from segcal.kernels.cuda_tiles import AHEAD, DEEP, LOWEST, exp, labelled_block, log1p, logit


@triton.jit
def temperature_loop(
    x, labels, mask, sums, bad, blocks, per_image, voxels, classes, inner, by_image, by_class, by_voxel, ignored, beta,
    BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Count, NLL, slope and curvature of the voxels of each program to ``sums (programs, 4)``."""
    program = tl.program_id(0)
    count, total = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    slopes, curvatures = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for block in range(program, blocks, tl.num_programs(0)):
        _, inside, where, best, winner, _, gap32, counts = labelled_block(
            x, labels, mask, block, per_image, voxels, classes, inner, by_image, by_class, by_voxel, ignored, bad,
            BLOCK, MASKED,
        )  # fmt: skip
        others, first, second = tl.zeros_like(best), tl.zeros_like(best), tl.zeros_like(best)
        for k in tl.range(0, classes, loop_unroll_factor=AHEAD):
            below = logit(where, k, by_class, inside) - best
            d = tl.maximum(below * beta, LOWEST)
            e = tl.where((k == winner) | (below < -DEEP), 0.0, exp(d))
            others += e
            first += e * d
            second += e * d * d
        rest = others.to(tl.float64)
        p = 1.0 / (1.0 + rest)
        mean, square = first.to(tl.float64) * p, second.to(tl.float64) * p
        gap = gap32.to(tl.float64) * beta
        slope = mean - gap
        count += tl.where(counts, 1.0, 0.0)
        total += tl.where(counts, log1p(rest, 1.0 + rest, p) - gap, 0.0)
        slopes += tl.where(counts, slope, 0.0)
        curvatures += tl.where(counts, square - mean * mean + slope, 0.0)
    to = sums + program * 4
    tl.store(to, tl.sum(count))
    tl.store(to + 1, tl.sum(total))
    tl.store(to + 2, tl.sum(slopes))
    tl.store(to + 3, tl.sum(curvatures))


@triton.jit
def survey_loop(
    x, labels, mask, edges, strata, sums, bad, impossible, blocks, per_image, voxels, classes, inner, by_image,
    by_class, by_voxel, ignored, levels,
    BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The stratum of each voxel to ``strata``, -1 where it does not count, and each program's NLL to ``sums``."""
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float64)
    for block in range(program, blocks, tl.num_programs(0)):
        v, inside, where, best, winner, y, gap, counts = labelled_block(
            x, labels, mask, block, per_image, voxels, classes, inner, by_image, by_class, by_voxel, ignored, bad,
            BLOCK, MASKED,
        )  # fmt: skip
        others, lowest = tl.zeros_like(best), tl.zeros_like(best)
        for k in tl.range(0, classes, loop_unroll_factor=AHEAD):
            d = logit(where, k, by_class, inside) - best
            others += tl.where(k == winner, 0.0, exp(d))
            lowest = tl.minimum(lowest, d)
        deep = tl.max((counts & (lowest < -DEEP)).to(tl.int32))
        if deep > 0:
            tl.atomic_max(impossible, deep, sem="relaxed")
        rest = others.to(tl.float64)
        p = 1.0 / (1.0 + rest)
        level = tl.zeros_like(winner)
        for i in range(levels):
            level += (tl.load(edges + i) < p).to(tl.int32)
        stratum = (winner * 2 + (winner == y).to(tl.int32)) * (levels + 1) + level
        tl.store(strata + v, tl.where(counts, stratum, -1), mask=inside)
        total += tl.where(counts, log1p(rest, 1.0 + rest, p) - gap.to(tl.float64), 0.0)
    tl.store(sums + program, tl.sum(total))
