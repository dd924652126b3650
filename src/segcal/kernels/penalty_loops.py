"""The compiled loop of CRaC's penalty; ``segcal.kernels.penalty_cpu`` calls it."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import numpy as np

from segcal.kernels.compiled import elementwise

_BLOCK = 1024
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)


@elementwise
def phr_range(z, counts, total, multipliers, rho, margin, value, gradient):
    """Fill value ``(V,)`` and, unless it is empty, gradient ``(C, V)`` of one image.

    ``z (C, V)``; ``counts (C, V)`` and ``total (V,)`` are uint8; ``multipliers`` and ``rho (2, C)``. All float32.
    """
    classes, voxels = z.shape
    outer, scale = np.empty(_BLOCK, np.bool_), np.empty(_BLOCK, np.float32)
    most, slopes = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK, np.float32)
    for start in range(0, voxels, _BLOCK):
        size = min(_BLOCK, voxels - start)
        here = slice(start, start + size)
        all_here, sums = total[here], value[here]
        most[:] = 0
        for k in range(classes):
            own = counts[k, here]
            for v in range(size):
                most[v] = own[v] if own[v] > most[v] else most[v]
        for v in range(size):
            outer[v] = most[v] != all_here[v]
            share = _ONE / np.float32(all_here[v] if all_here[v] > 0 else 1)
            scale[v] = share if outer[v] else share * margin
            sums[v] = _ZERO
        for k in range(classes):
            row, own = z[k, here], counts[k, here]
            inner_linear, outer_linear, inner_rho, outer_rho = (
                multipliers[0, k],
                multipliers[1, k],
                rho[0, k],
                rho[1, k],
            )
            for v in range(size):
                gap = row[v] - np.float32(own[v]) * scale[v]
                size_of_linear = outer_linear if outer[v] else inner_linear
                linear = size_of_linear if gap > _ZERO else (-size_of_linear if gap < _ZERO else _ZERO)
                slope = (outer_rho if outer[v] else inner_rho) * gap + linear
                slopes[v] = slope
                sums[v] += _HALF * gap * (slope + linear)  # h (lambda + rho h / 2)
            if gradient.shape[0] > 0:
                target = gradient[k, here]
                for v in range(size):
                    target[v] = slopes[v]
