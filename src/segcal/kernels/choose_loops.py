"""The compiled loop of ``segcal.fitting.sampling``: hash, compare, count."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import numpy as np

from segcal.kernels.compiled import elementwise

_FIRST, _SECOND, _THIRD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


@elementwise
def choose(strata, first, highest, sizes, kept, keys):
    """Count the voxels of every stratum, and list those whose key is low enough. Returns how many there are.

    Voxels whose stratum is negative do not count.
    """
    n = 0
    for v in range(len(strata)):
        stratum = strata[v]
        if stratum < 0:
            continue
        x = (first + np.uint64(v)) * _FIRST
        x = (x ^ (x >> _SHIFTS[0])) * _SECOND
        x = (x ^ (x >> _SHIFTS[1])) * _THIRD
        key = x ^ (x >> _SHIFTS[2])
        sizes[stratum] += 1
        kept[n] = v
        keys[n] = key
        n += key <= highest[stratum]
    return n
