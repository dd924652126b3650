"""The compiled loops of distances: squares along lines, and sums by slot."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import numpy as np

from segcal.kernels.compiled import elementwise


@elementwise
def within_lines(boundary, step, start, stop, squares):
    """Squares of distances in the lines ``start`` to ``stop`` of ``boundary (lines, length)``; inf in those without."""
    length = boundary.shape[1]
    for line in range(start, stop):
        here, out = boundary[line], squares[line]
        last = -1
        for i in range(length):
            last = i if here[i] else last
            gap = step * (i - last)
            out[i] = gap * gap if last >= 0 else np.inf
        if last < 0:
            continue
        for i in range(last - 1, -1, -1):
            last = i if here[i] else last
            gap = step * (last - i)
            out[i] = min(out[i], gap * gap)


@elementwise
def across_lines(squares, step, start, stop):
    """Replace columns f of every ``squares (images, length, width)`` by ``min_j f(j) + (step (i - j))^2``, in place.

    The minimum of parabolas, one at every finite f(j), in linear time (Felzenszwalb and Huttenlocher 2012). Columns
    ``start`` to ``stop`` are counted over all images.
    """
    _, length, width = squares.shape
    place, height, begin = np.empty(length, np.int64), np.empty(length), np.empty(length)
    scale = 0.5 / (step * step)
    for column in range(start, stop):
        f = squares[column // width, :, column % width]
        last = -1  # of the parabolas that are the lowest somewhere, each from ``begin`` on
        for j in range(length):
            own = f[j]
            if own == np.inf:
                continue
            crossing = -np.inf
            while last >= 0:
                k = place[last]
                crossing = (own - height[last]) * scale / (j - k) + 0.5 * (j + k)
                if crossing > begin[last]:
                    break
                last -= 1
                crossing = -np.inf
            last += 1
            place[last], height[last], begin[last] = j, own, crossing
        if last < 0:
            continue
        lowest = 0
        for i in range(length):
            while lowest < last and begin[lowest + 1] <= i:
                lowest += 1
            gap = step * (i - place[lowest])
            f[i] = height[lowest] + gap * gap


@elementwise
def roots(squares, start, stop, out):
    """The roots of some squares, computed in float64."""
    for i in range(start, stop):
        out[i] = np.sqrt(squares[i])


@elementwise
def add_by_slot(distance, keep, slots, start, stop, sums):
    """Add sum and number of finite distances, and number of all, of some voxels that are kept to ``sums (slots, 3)``.

    Without ``slots`` all are in the first. Neighbours are mostly in one slot: they are added up first.
    """
    slot, total, finite, number = 0, 0.0, 0, 0
    for v in range(start, stop):
        if not keep[v]:
            continue
        if len(slots) and slots[v] != slot:
            sums[slot, 0] += total
            sums[slot, 1] += finite
            sums[slot, 2] += number
            slot, total, finite, number = np.int64(slots[v]), 0.0, 0, 0
        there = abs(distance[v]) < np.inf
        total += distance[v] if there else 0.0
        finite += there
        number += 1
    sums[slot, 0] += total
    sums[slot, 1] += finite
    sums[slot, 2] += number
