"""The compiled loops of ``segcal.kernels.cpu``, which says how they work together and how precise they are."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from segcal.kernels.compiled import ONE, SMALLEST, ZERO, elementwise, exp, inlined, log1p, reduction
from segcal.kernels.scratch import DOUBLE, FLOAT, INDEX, PerClass, new_block
from segcal.kernels.softmax_loops import argmax

BLOCK = 1024
_WIDTH = BLOCK + 80  # arrays that all start at the same place in a page would compete for the same cache lines

_CELLS = math.nextafter(4096.0, 0.0)  # truncating p * _CELLS puts p = j / 4096 in the cell below, where it belongs
_Index = np.uint64  # unsigned indices spare numba the test for negative ones
_NEXT = np.uint64(1)


class Rules(NamedTuple):
    """What to do with every voxel."""

    compare: Any  # whether to count flips
    beta: Any  # scores are beta z, and -inf for what is further than depth below the best,
    depth: Any
    weight: Any  # or weight z + bias, unless these are empty; a weight (C, 1) is a diagonal
    bias: Any
    shift: Any  # subtracted from energies
    upper: Any  # the top-label grid
    first: Any
    within: Any  # the class bin that each of its bins lies in
    class_upper: Any  # the classwise grid
    class_first: Any


class Block(NamedTuple):
    """Scratch memory for one block; see ``segcal.kernels.scratch``."""

    flags: Any
    words: Any  # the flags, eight to a word
    mapped: Any = PerClass()  # the scores, where a matrix maps the logits to them
    terms: Any = PerClass()  # e = exp(score - best), then 0 for the winner
    best: Any = FLOAT
    winner: Any = INDEX
    before: Any = INDEX  # the uncalibrated winner
    target: Any = INDEX  # the label, -1 where the voxel does not count, C where the label is no class
    slot: Any = INDEX
    bin: Any = INDEX  # of the confidence, in the top-label grid
    others: Any = FLOAT  # sum over the other classes of e,
    squares: Any = FLOAT  # of e^2,
    slope: Any = FLOAT  # and of e (score - best)
    label_gap: Any = DOUBLE  # score of the label - best; of the largest logits this is too large for float32
    confidence: Any = DOUBLE
    nll: Any = DOUBLE
    brier: Any = DOUBLE
    entropy: Any = DOUBLE
    energy: Any = DOUBLE
    limit: Any = FLOAT  # e at the upper edge of the lowest bin
    own_limit: Any = FLOAT  # the same for one slot, -1 elsewhere
    inverse: Any = FLOAT
    filled: Any = INDEX  # words that are not 0
    found: Any = INDEX  # voxels whose flag is 1


def new_tally_block(classes: int) -> Block:
    """Scratch memory for one thread."""
    flags = np.zeros(BLOCK, np.uint8)
    block: Block = new_block(Block, classes, _WIDTH, flags=flags, words=flags.view(np.uint64))
    return block


@elementwise
def _map(x, start, size, weight, bias, z):
    """z = weight @ x + bias; ``weight (C, 1)`` is a diagonal."""
    diagonal = weight.shape[1] == 1
    for k in range(z.shape[0]):
        target, offset = z[k], bias[k]
        for v in range(size):
            target[v] = offset
        for j in range(weight.shape[1]):
            source, w = x[k if diagonal else j, start : start + size], weight[k, j]
            for v in range(size):
                target[v] += w * source[v]


@elementwise
def _softmax_terms(x, start, size, best, winner, beta, terms, others, squares, slope):
    """e = exp(beta (x - best)), and sums over the classes other than the winner.

    The winner's own term is exactly 1. Without it the sums keep their relative precision, however small they are.
    """
    for v in range(size):
        others[v] = ZERO
        squares[v] = ZERO
        slope[v] = ZERO
    for k in range(x.shape[0]):
        row, row_terms, index = x[k, start : start + size], terms[k], np.int32(k)
        for v in range(size):
            d = (row[v] - best[v]) * beta
            e = exp(d)
            row_terms[v] = e
            other = ZERO if winner[v] == index else e
            d = SMALLEST if d < SMALLEST else d
            others[v] += other
            squares[v] += other * other
            slope[v] += other * d


@elementwise
def _voxel_terms(b, size, beta, shift):
    """Each voxel's confidence, losses and energy in float64, from the sums over its classes."""
    for v in range(size):
        rest, squares = np.float64(b.others[v]), np.float64(b.squares[v])
        p = 1.0 / (1.0 + rest)
        log_sum = log1p(rest)
        e = np.float64(exp(np.float32(b.label_gap[v])))
        if_right = (rest * rest + squares) * p * p
        if_wrong = (1.0 - e * p) * (1.0 - e * p) + (1.0 + squares - e * e) * p * p
        b.confidence[v] = p
        b.nll[v] = log_sum - b.label_gap[v]
        b.brier[v] = if_right if b.winner[v] == b.target[v] else if_wrong
        b.entropy[v] = log_sum - np.float64(b.slope[v]) * p
        b.energy[v] = np.float64(b.best[v]) * beta + log_sum - shift


@reduction
def _first_bad(b, size, num_classes):
    """The first voxel that counts although its label is no class or its scores have no softmax, or ``size``."""
    first = size
    for v in range(size):
        softmax = (b.others[v] >= ZERO) & (abs(b.best[v]) < np.float32(np.inf))
        bad = (b.target[v] == num_classes) | ((b.target[v] >= 0) & (not softmax))
        first = min(first, v if bad else size)
    return first


# The scalar work is split into several short loops. In one long loop the instructions of a voxel would fill the
# processor's window, and it could not start on the next voxels while it waits for a bin.
#
# Most probabilities are in the lowest bin. These are found by vector instructions, and only their sum is kept.


@inlined
def _bin(p, upper, first):
    """The bin of p: (upper[i - 1], upper[i]]."""
    i = _Index(first[_Index(np.int64(p * _CELLS))])
    while p > upper[i]:
        i += _NEXT
    return i


@elementwise
def _bin_confidence(b, size, upper, first, out):
    """Bin the confidences."""
    for v in range(size):
        if b.target[v] >= 0:
            a, right, p = _Index(b.slot[v]), _Index(b.winner[v] == b.target[v]), b.confidence[v]
            i = _bin(p, upper, first)
            b.bin[v] = i
            out.top_count[a, right, i] += 1
            out.top_confidence[a, right, i] += p


@elementwise
def _bin_predicted(b, size, rules, out):
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
def _add_unlikely(z, size, limit, inverse, sums):
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
def _bin_classes(b, size, upper, first, out):
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


@elementwise
def _add_losses(b, size, out):
    for v in range(size):
        if b.target[v] >= 0:
            a, c, y = _Index(b.slot[v]), _Index(b.winner[v]), _Index(b.target[v])
            out.confusion[a, y, c] += 1
            out.losses[a, c, 0] += b.nll[v]
            out.losses[a, c, 1] += b.brier[v]
            out.losses[a, c, 2] += b.entropy[v]


@elementwise
def _add_flips(b, size, out):
    for v in range(size):
        if b.target[v] >= 0:
            a, c, u, label = _Index(b.slot[v]), b.winner[v], b.before[v], b.target[v]
            out.flips[a, 0] += 1
            if u != c:
                out.flips[a, 1 if u == label else (2 if c == label else 3)] += 1


@reduction
def _add_energy(energy, size, limit, sums):
    """Add F and F^2. A negative limit leaves a voxel out."""
    total, squares = 0.0, 0.0
    for v in range(size):
        value = energy[v] if limit[v] >= ZERO else 0.0
        total += value
        squares += value * value
    sums[0] += total
    sums[1] += squares


@elementwise
def _add_by_slot(b, size, classwise, out):
    """Add up by vector instructions, one slot after the other."""
    for v in range(size):
        b.inverse[v] = np.float32(b.confidence[v])
    for a in range(out.energy.shape[0]):
        present = False
        for v in range(size):
            here = b.target[v] >= 0 and b.slot[v] == a
            b.own_limit[v] = b.limit[v] if here else np.float32(-1)
            present |= here
        if present:
            _add_energy(b.energy, size, b.own_limit, out.energy[a])
            if classwise:
                _add_unlikely(b.terms, size, b.own_limit, b.inverse, out.class_confidence[a, :, 0])


@elementwise
def _targets(b, size, offset, num_classes, given):
    """Fill ``b.target`` and ``b.slot`` for the voxels from ``offset`` on."""
    labels, mask, slots = given.labels[offset : offset + size], given.mask, given.slots
    for v in range(size):
        label = np.int32(labels[v]) if 0 <= labels[v] < num_classes else np.int32(num_classes)
        b.target[v] = label if labels[v] != given.ignored else np.int32(-1)
    if mask.size > 0:
        for v in range(size):
            b.target[v] = b.target[v] if mask[offset + v] else np.int32(-1)
    if slots.size > 0:
        for v in range(size):
            b.slot[v] = slots[offset + v]


@elementwise
def tally_range(x, start, stop, given, rules, b, out):
    """Add columns ``start..stop`` of ``x (C, V)`` to ``out``. Returns the first bad one, counted from ``start``, or -1.

    ``given`` is a ``pieces_cpu.Given`` that begins at ``start``.
    """
    beta, use_matrix = rules.beta, rules.weight.size > 0
    num_classes = x.shape[0]
    classwise = out.class_count.shape[2] > 0
    for offset in range(0, stop - start, BLOCK):
        size = min(BLOCK, stop - start - offset)
        _targets(b, size, offset, num_classes, given)
        scores, first = x, start + offset
        if use_matrix:
            argmax(x, first, size, b.best, b.before)
            _map(x, first, size, rules.weight, rules.bias, b.mapped)
            scores, first = b.mapped, 0
        argmax(scores, first, size, b.best, b.winner)
        if rules.compare and not use_matrix:
            for v in range(size):
                b.before[v] = b.winner[v]
        if given.uncalibrated.size > 0:
            for v in range(size):
                b.before[v] = given.uncalibrated[offset + v]
        for v in range(size):
            y = b.target[v] if 0 <= b.target[v] < num_classes else 0
            gap = np.float64(scores[_Index(y), first + v]) - np.float64(b.best[v])
            b.label_gap[v] = gap * beta if gap >= -rules.depth else -np.inf
        _softmax_terms(scores, first, size, b.best, b.winner, beta, b.terms, b.others, b.squares, b.slope)
        bad = _first_bad(b, size, num_classes)
        if bad < size:
            return offset + bad
        _voxel_terms(b, size, beta, rules.shift)
        lowest = np.float32(rules.class_upper[0])
        for v in range(size):
            b.limit[v] = lowest * (ONE + b.others[v]) if b.target[v] >= 0 else np.float32(np.inf)
        _bin_confidence(b, size, rules.upper, rules.first, out)
        _add_losses(b, size, out)
        if rules.compare:
            _add_flips(b, size, out)
        if classwise:
            _bin_predicted(b, size, rules, out)
            _bin_classes(b, size, rules.class_upper, rules.class_first, out)
        _add_by_slot(b, size, classwise, out)
    return -1
