"""Compiled loops of ``segcal.kernels.cpu`` that put probabilities into bins.

Most probabilities are in the lowest bin. These are found by vector instructions, and only their sum is kept.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math

import numpy as np

from segcal.kernels.compiled import ZERO, elementwise, inlined, reduction

_CELLS = math.nextafter(4096.0, 0.0)  # truncating p * _CELLS puts p = j / 4096 in the cell below, where it belongs
_Index = np.uint64  # unsigned indices spare numba the test for negative ones
_NEXT = np.uint64(1)


@inlined
def _bin(p, upper, first):
    """The bin of p: (upper[i - 1], upper[i]]."""
    i = _Index(first[_Index(np.int64(p * _CELLS))])
    while p > upper[i]:
        i += _NEXT
    return i


@elementwise
def bin_confidence(b, size, upper, first, out):
    """Bin the confidences."""
    for v in range(size):
        if b.target[v] >= 0:
            a, right, p = _Index(b.slot[v]), _Index(b.winner[v] == b.target[v]), b.confidence[v]
            i = _bin(p, upper, first)
            b.bin[v] = i
            out.top_count[a, right, i] += 1
            out.top_confidence[a, right, i] += p


@elementwise
def bin_predicted(b, size, rules, out):
    """Bin the winners' probabilities by class, and the label's probability where it did not win."""
    within, upper, first = rules.within, rules.class_upper, rules.class_first
    wrong = _Index(0)
    for v in range(size):
        if b.target[v] >= 0:
            a, c, y, p = _Index(b.slot[v]), _Index(b.winner[v]), _Index(b.target[v]), b.confidence[v]
            i, right = _Index(within[_Index(b.bin[v])]), _Index(c == y)
            out.predicted_count[a, c, right, i] += 1
            out.predicted_confidence[a, c, right, i] += p
            b.terms[c, v] = ZERO
            b.found[wrong] = v  # a list, because a branch that cannot be predicted would cost more
            wrong += _NEXT - right
    for n in range(wrong):
        v = _Index(b.found[n])
        a, y, e = _Index(b.slot[v]), _Index(b.target[v]), b.terms[_Index(b.target[v]), v]
        i = _bin(e * b.confidence[v], upper, first) if e > b.limit[v] else _Index(0)
        out.class_positive[a, y, i] += 1


@elementwise
def _likely(row, size, limit, flags, words, filled, found):
    """List the voxels above the lowest bin. Returns how many there are. ``words`` is ``flags``, eight at a time.

    Without branches, because neither the words with flags nor the flags in them can be predicted.
    """
    for v in range(size):
        flags[v] = row[v] > limit[v]
    used = _Index(0)
    for w in range((size + 7) // 8):
        filled[used] = w
        used += _Index(words[w] != 0)
    n = _Index(0)
    for w in filled[:used]:
        first = _Index(8) * _Index(w)
        for v in range(first, first + _Index(8)):
            found[n] = v
            n += _Index(flags[v])
    return n


@reduction
def add_unlikely(z, size, limit, inverse, sums):
    """Add the probabilities in the lowest bin of every class. A negative limit leaves a voxel out.

    Two classes at a time: one sum alone would wait for itself.
    """
    for k in range(0, z.shape[0], 2):
        next_k = min(k + 1, z.shape[0] - 1)
        row, next_row = z[k], z[next_k]
        total, next_total = 0.0, 0.0
        for v in range(size):
            top, scale = limit[v], inverse[v]
            total += np.float64(row[v] * scale if row[v] <= top else ZERO)
            next_total += np.float64(next_row[v] * scale if next_row[v] <= top else ZERO)
        sums[k] += total
        if next_k > k:
            sums[next_k] += next_total


@elementwise
def bin_classes(b, size, upper, first, out):
    """Bin the probabilities of the classes that did not win; ``cpu._complete`` adds those that did."""
    b.flags[:] = 0
    for k in range(b.terms.shape[0]):
        row = b.terms[k]
        for n in range(_likely(row, size, b.limit, b.flags, b.words, b.filled, b.found)):
            v = _Index(b.found[n])
            a, p = _Index(b.slot[v]), row[v] * b.confidence[v]
            i = _bin(p, upper, first)
            out.class_count[a, k, i] += 1
            out.class_confidence[a, k, i] += p
