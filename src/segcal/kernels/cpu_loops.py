"""The compiled loops of ``segcal.kernels.cpu``, which says how they work together and how precise they are."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.kernels.compiled import SMALLEST, elementwise, exp, inlined, log1p, reduction

BLOCK = 1024
_WIDTH = BLOCK + 80  # rows that all begin at the same place of a page would compete for the same lines of cache


_ONE, _ZERO = np.float32(1), np.float32(0)
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


@inlined
def _larger(score, index, top, first):
    """The larger of two scores and its index."""
    above = score > top
    return score if above else top, index if above else first


class _Block(NamedTuple):
    """What is kept of the voxels of one block; (BLOCK,) or a little more, (C, BLOCK) for ``mapped`` and ``terms``."""

    mapped: Any  # the scores, where a matrix maps the logits to them
    terms: Any  # e = exp(score - best), then 0 for the winner
    best: Any
    winner: Any
    before: Any  # the uncalibrated winner
    target: Any  # the label, -1 where the voxel does not count, C where the label is no class
    slot: Any
    bin: Any  # of the confidence, in the top-label grid
    others: Any  # sum over the other classes of e,
    squares: Any  # of e^2,
    slope: Any  # and of e (score - best)
    label_gap: Any  # score of the label - best
    confidence: Any
    nll: Any
    brier: Any
    entropy: Any
    energy: Any
    limit: Any  # e at the upper edge of the lowest bin
    own_limit: Any  # the same for one slot, -1 elsewhere
    inverse: Any
    flags: Any
    words: Any  # the flags, eight to a word
    filled: Any  # words that are not 0
    found: Any  # voxels whose flag is 1


def new_block(classes: int) -> _Block:
    """Scratch memory for one thread."""

    def real() -> NDArray[np.float32]:
        return np.zeros(_WIDTH, np.float32)

    def double() -> NDArray[np.float64]:
        return np.zeros(_WIDTH, np.float64)

    def index() -> NDArray[np.uint32]:
        return np.zeros(_WIDTH, np.uint32)

    flags = np.zeros(BLOCK, np.uint8)
    return _Block(
        mapped=np.zeros((classes, _WIDTH), np.float32), terms=np.zeros((classes, _WIDTH), np.float32),
        best=real(), winner=index(), before=index(), target=np.zeros(_WIDTH, np.int32), slot=index(), bin=index(),
        others=real(), squares=real(), slope=real(), label_gap=real(),
        confidence=double(), nll=double(), brier=double(), entropy=double(), energy=double(),
        limit=real(), own_limit=real(), inverse=real(),
        flags=flags, words=flags.view(np.uint64), filled=index(), found=index(),
    )  # fmt: skip


@elementwise
def argmax(x, start, size, best, winner):
    """Each voxel's largest score and its first index.

    Four classes at a time: from main memory, four rows come faster side by side than one after the other.
    """
    last, columns = x.shape[0] - 1, slice(start, start + size)
    for v in range(size):
        best[v] = np.float32(-np.inf)
        winner[v] = 0
    for k in range(0, x.shape[0], 4):
        k2, k3, k4 = min(k + 1, last), min(k + 2, last), min(k + 3, last)  # a class may come twice: no matter
        row, row2, row3, row4 = x[k, columns], x[k2, columns], x[k3, columns], x[k4, columns]
        i, i2, i3, i4 = np.uint32(k), np.uint32(k2), np.uint32(k3), np.uint32(k4)
        for v in range(size):
            top, first = _larger(row[v], i, best[v], winner[v])
            top, first = _larger(row2[v], i2, top, first)
            top, first = _larger(row3[v], i3, top, first)
            best[v], winner[v] = _larger(row4[v], i4, top, first)


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

    The winner's own term is exactly 1 and left out of the sums, so that what is left (1 - confidence) keeps its
    relative precision however confident the voxel is.
    """
    for v in range(size):
        others[v] = _ZERO
        squares[v] = _ZERO
        slope[v] = _ZERO
    for k in range(x.shape[0]):
        row, row_terms, index = x[k, start : start + size], terms[k], np.uint32(k)
        for v in range(size):
            d = (row[v] - best[v]) * beta
            e = exp(d)
            row_terms[v] = e
            other = _ZERO if winner[v] == index else e
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
        e = np.float64(exp(b.label_gap[v]))
        if_right = (rest * rest + squares) * p * p
        if_wrong = (1.0 - e * p) * (1.0 - e * p) + (1.0 + squares - e * e) * p * p
        b.confidence[v] = p
        b.nll[v] = log_sum - np.float64(b.label_gap[v])
        b.brier[v] = if_right if b.winner[v] == b.target[v] else if_wrong
        b.entropy[v] = log_sum - np.float64(b.slope[v]) * p
        b.energy[v] = np.float64(b.best[v]) * beta + log_sum - shift


@reduction
def _first_bad(b, size, num_classes):
    """The first voxel that counts but has no class or no softmax, or ``size``."""
    first = size
    for v in range(size):
        softmax = (b.others[v] >= _ZERO) & (abs(b.best[v]) < np.float32(np.inf))
        bad = (b.target[v] == num_classes) | ((b.target[v] >= 0) & (not softmax))
        first = min(first, v if bad else size)
    return first


# What happens once a voxel is done in several short loops: so many instructions of one voxel would keep the processor
# from working on the next ones while it waits for a bin.


@elementwise
def _bin_confidence(b, size, upper, first, out):
    for v in range(size):
        if b.target[v] >= 0:
            a, right, p = _Index(b.slot[v]), _Index(b.winner[v] == b.target[v]), b.confidence[v]
            i = _bin(p, upper, first)
            b.bin[v] = i
            out.top_count[a, right, i] += 1
            out.top_confidence[a, right, i] += p


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


@elementwise
def _bin_predicted(b, size, within, classes, out):
    """The winners' probabilities by class, and the bin of the label's where it did not win."""
    upper, first = classes
    wrong = _Index(0)
    for v in range(size):
        if b.target[v] >= 0:
            a, c, y, p = _Index(b.slot[v]), _Index(b.winner[v]), _Index(b.target[v]), b.confidence[v]
            i, right = _Index(within[b.bin[v]]), _Index(c == y)
            out.predicted_count[a, c, right, i] += 1
            out.predicted_confidence[a, c, right, i] += p
            b.terms[c, v] = _ZERO
            b.found[wrong] = v  # a list, for a branch that cannot be predicted would cost more
            wrong += _NEXT - right
    for n in range(wrong):
        v = _Index(b.found[n])
        a, y, e = _Index(b.slot[v]), _Index(b.target[v]), b.terms[_Index(b.target[v]), v]
        i = _bin(e * b.confidence[v], upper, first) if e > b.limit[v] else _Index(0)
        out.class_positive[a, y, i] += 1


@elementwise
def _likely(row, size, limit, flags, words, filled, found):
    """List the voxels above the lowest bin. Returns how many there are. ``words`` is ``flags``, eight at a time.

    Without branches: which words hold a flag, and which of the eight it is, cannot be predicted.
    """
    for v in range(size):
        flags[v] = row[v] > limit[v]
    used = _Index(0)
    for w in range((size + 7) // 8):
        filled[used] = w
        used += _Index(words[w] != 0)
    n = _Index(0)
    for w in filled[:used]:
        for v in range(8 * w, 8 * w + 8):
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
            total += np.float64(row[v] * scale if row[v] <= top else _ZERO)
            next_total += np.float64(next_row[v] * scale if next_row[v] <= top else _ZERO)
        sums[k] += total
        if next_k > k:
            sums[next_k] += next_total


@elementwise
def _bin_classes(b, size, classes, out):
    """The probabilities of the classes that did not win; ``cpu._complete`` adds those that did."""
    upper, first = classes
    b.flags[:] = 0
    for k in range(b.terms.shape[0]):
        row = b.terms[k]
        for n in range(_likely(row, size, b.limit, b.flags, b.words, b.filled, b.found)):
            v = _Index(b.found[n])
            a, p = _Index(b.slot[v]), row[v] * b.confidence[v]
            i = _bin(p, upper, first)
            out.class_count[a, k, i] += 1
            out.class_confidence[a, k, i] += p


@reduction
def _add_energy(energy, size, limit, sums):
    """Add F and F^2. A negative limit leaves a voxel out."""
    total, squares = 0.0, 0.0
    for v in range(size):
        value = energy[v] if limit[v] >= _ZERO else 0.0
        total += value
        squares += value * value
    sums[0] += total
    sums[1] += squares


@elementwise
def _add_by_slot(b, size, classwise, out):
    """The sums that vector instructions do, one slot after the other."""
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
def tally_range(x, start, stop, labels, ignored, mask, slots, uncalibrated, mapping, top, classes, shift, b, out):
    """Add voxels ``start..stop`` of ``x (C, V)`` to ``out``. Returns the first bad one, counted from ``start``, or -1.

    ``labels`` and, unless empty, ``mask``, ``slots`` and ``uncalibrated`` begin at ``start``. ``mapping`` is
    (compare, beta, weight, bias), ``top`` and ``classes`` are (upper, first) of the two grids, ``top`` with the class
    bin that each of its bins lies in, and ``b`` is scratch memory.
    """
    compare, beta, weight, bias = mapping
    use_matrix = weight.size > 0
    num_classes = x.shape[0]
    classwise = out.class_count.shape[2] > 0
    for offset in range(0, stop - start, BLOCK):
        size = min(BLOCK, stop - start - offset)
        here = labels[offset : offset + size]
        for v in range(size):
            label = np.int32(here[v]) if 0 <= here[v] < num_classes else np.int32(num_classes)
            b.target[v] = label if here[v] != ignored else np.int32(-1)
        if mask.size > 0:
            for v in range(size):
                b.target[v] = b.target[v] if mask[offset + v] else np.int32(-1)
        if slots.size > 0:
            for v in range(size):
                b.slot[v] = slots[offset + v]
        scores, first = x, start + offset
        if use_matrix:
            argmax(x, first, size, b.best, b.before)
            _map(x, first, size, weight, bias, b.mapped)
            scores, first = b.mapped, 0
        argmax(scores, first, size, b.best, b.winner)
        if compare and not use_matrix:
            for v in range(size):
                b.before[v] = b.winner[v]
        if uncalibrated.size > 0:
            for v in range(size):
                b.before[v] = uncalibrated[offset + v]
        for v in range(size):
            y = b.target[v] if 0 <= b.target[v] < num_classes else 0
            b.label_gap[v] = (scores[_Index(y), first + v] - b.best[v]) * beta
        _softmax_terms(scores, first, size, b.best, b.winner, beta, b.terms, b.others, b.squares, b.slope)
        bad = _first_bad(b, size, num_classes)
        if bad < size:
            return offset + bad
        _voxel_terms(b, size, beta, shift)
        lowest = np.float32(classes[0][0])
        for v in range(size):
            b.limit[v] = lowest * (_ONE + b.others[v]) if b.target[v] >= 0 else np.float32(np.inf)
        _bin_confidence(b, size, top[0], top[1], out)
        _add_losses(b, size, out)
        if compare:
            _add_flips(b, size, out)
        if classwise:
            _bin_predicted(b, size, top[2], classes, out)
            _bin_classes(b, size, classes, out)
        _add_by_slot(b, size, classwise, out)
    return -1
