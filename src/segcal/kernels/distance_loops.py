"""The compiled loop of distances: squares along lines."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import numpy as np

from segcal.kernels.compiled import elementwise


@elementwise
def nearest_along(squares, step):
    """Replace every line f of ``squares (lines, length)`` by ``min_j f(j) + (step (i - j))^2``, in place.

    The minimum of parabolas, one at every finite f(j), in linear time (Felzenszwalb and Huttenlocher 2012).
    """
    lines, length = squares.shape
    place, height, begin = np.empty(length, np.int64), np.empty(length), np.empty(length)
    for line in range(lines):
        f = squares[line]
        last = -1  # of the parabolas that are the lowest somewhere, each from ``begin`` on
        for j in range(length):
            if f[j] == np.inf:
                continue
            crossing = -np.inf
            while last >= 0:
                k = place[last]
                crossing = (f[j] - height[last]) / (2.0 * step * step * (j - k)) + 0.5 * (j + k)
                if crossing > begin[last]:
                    break
                last -= 1
                crossing = -np.inf
            last += 1
            place[last], height[last], begin[last] = j, f[j], crossing
        if last < 0:
            continue
        lowest = 0
        for i in range(length):
            while lowest < last and begin[lowest + 1] <= i:
                lowest += 1
            gap = step * (i - place[lowest])
            f[i] = height[lowest] + gap * gap
