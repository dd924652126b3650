"""The compiled loops of ``segcal.kernels.cpu``, which says how they work together and how precise they are."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-untyped-decorators=False
# (numba infers the types of compiled functions itself)

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

BLOCK = 1024


def _compiled(*fastmath: str) -> Any:
    # With numpy's error model a division does not branch on zero, which would keep loops from being vectorised.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": set(fastmath)}

    def decorate(function: Any) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:  # no folder to keep the compiled code in: compile anew in every process
            return numba.njit(**options)(function)

    return decorate


# No reassociation here: it would undo the two-step range reduction and the rounding trick of exp.
_elementwise = _compiled("contract")
# Sums over a block may be split into vector lanes, which is also the more accurate order.
_reduction = _compiled("contract", "reassoc", "nsz")
_inlined = numba.njit(inline="always")

_LOG2E = np.float32(1 / math.log(2))
_LN2_HIGH = np.float32(0.693145751953125)  # exact in 14 bits, so n * _LN2_HIGH is exact
_LN2_LOW = np.float32(math.log(2) - 0.693145751953125)
_ROUND = np.float32(1.5 * 2**23)  # adding this leaves the nearest integer in the low bits of the mantissa
_SMALLEST = np.float32(-87.0)  # exp(-87) = 1.6e-38 is the last normal number; below, exp stays there
# Minimax coefficients of exp(r) = 1 + r + r^2 (c2 + ...) on [-ln 2 / 2, ln 2 / 2].
_C2, _C3, _C4 = np.float32(0.49999993444134244), np.float32(0.16666520268703539), np.float32(0.041668384075685905)
_C5, _C6 = np.float32(0.00836875833600612), np.float32(0.001381510372868473)
_ONE, _ZERO = np.float32(1), np.float32(0)
_EXPONENT_ONE, _EXPONENT_SHIFT = np.int32(0x3F800000), np.int32(23)
_ROOT_HALF_BITS, _MANTISSA_BITS = np.int64(0x3FE6A09E667F3BCD), np.int64(52)
_LN2 = math.log(2)
_CELLS = math.nextafter(4096.0, 0.0)  # truncating p * _CELLS puts p = j / 4096 in the cell below, where it belongs
_Index = np.uint64  # unsigned indices spare numba the test for negative ones
_NEXT = np.uint64(1)


@_inlined
def _exp(x):
    """exp of a float32 in [-inf, 0]; NaN stays NaN."""
    x = _SMALLEST if x < _SMALLEST else x
    shifted = np.float32(x * _LOG2E + _ROUND)
    n = shifted - _ROUND
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _C5 + r * _C6
    p = _C4 + r * p
    p = _C3 + r * p
    p = _C2 + r * p
    p = _ONE + r * p
    p = _ONE + r * p
    scale = np.int32((shifted.view(np.int32) << _EXPONENT_SHIFT) + _EXPONENT_ONE)
    return p * scale.view(np.float32)


@_inlined
def _log1p(x):
    """log(1 + x) of a float64 >= 0, by the series of 2 artanh; relative error below 2e-12 down to x = 0."""
    bits = np.float64(1.0 + x).view(np.int64)
    exponent = (bits - _ROOT_HALF_BITS) >> _MANTISSA_BITS
    fraction = np.int64(bits - (exponent << _MANTISSA_BITS)).view(np.float64)
    above_one = x if exponent == 0 else fraction - 1.0
    t = above_one / (2.0 + above_one)
    s = t * t
    series = 1.0 + s * (1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s * (1 / 13))))))
    return 2.0 * t * series + exponent * _LN2


@_inlined
def _bin(p, upper, first):
    """The bin of p: (upper[i - 1], upper[i]]."""
    i = _Index(first[_Index(np.int64(p * _CELLS))])
    while p > upper[i]:
        i += _NEXT
    return i


class _Block(NamedTuple):
    """What is kept of the voxels of one block; (BLOCK,) each but ``scores`` and ``raw``, (C, BLOCK)."""

    raw: Any  # the logits, where a matrix maps them to scores
    scores: Any  # then exp(score - best), then 0 for the winner
    best: Any
    winner: Any
    before: Any  # the uncalibrated winner
    target: Any  # the label, -1 where the voxel does not count, C where the label is no class
    slot: Any
    others: Any  # sum over the other classes of e = exp(score - best),
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
    found: Any


def new_block(classes: int) -> _Block:
    """Scratch memory for one thread."""

    def real() -> NDArray[np.float32]:
        return np.zeros(BLOCK, np.float32)

    def double() -> NDArray[np.float64]:
        return np.zeros(BLOCK, np.float64)

    def index() -> NDArray[np.uint32]:
        return np.zeros(BLOCK, np.uint32)

    flags = np.zeros(BLOCK, np.uint8)
    return _Block(
        raw=np.zeros((classes, BLOCK), np.float32), scores=np.zeros((classes, BLOCK), np.float32),
        best=real(), winner=index(), before=index(), target=np.zeros(BLOCK, np.int32), slot=index(),
        others=real(), squares=real(), slope=real(), label_gap=real(),
        confidence=double(), nll=double(), brier=double(), entropy=double(), energy=double(),
        limit=real(), own_limit=real(), inverse=real(),
        flags=flags, words=flags.view(np.uint64), found=np.zeros(BLOCK + 1, np.uint32),
    )  # fmt: skip


@_elementwise
def _load(x, start, size, z, best, winner):
    """Copy a block and find each voxel's largest score and its first index.

    Two classes at a time: the best so far is read and written half as often.
    """
    last = x.shape[0] - 1
    source, target = x[0, start : start + size], z[0]
    for v in range(size):
        target[v] = source[v]
        best[v] = source[v]
        winner[v] = 0
    for k in range(1, x.shape[0], 2):
        next_k = min(k + 1, last)  # the last class may come twice, which changes nothing
        source, target, index = x[k, start : start + size], z[k], np.uint32(k)
        next_source, next_target, next_index = x[next_k, start : start + size], z[next_k], np.uint32(next_k)
        for v in range(size):
            top, first = best[v], winner[v]
            value, next_value = source[v], next_source[v]
            target[v] = value
            next_target[v] = next_value
            first = index if value > top else first
            top = value if value > top else top
            winner[v] = next_index if next_value > top else first
            best[v] = next_value if next_value > top else top


@_elementwise
def _map(raw, size, weight, bias, z):
    """z = weight @ raw + bias; ``weight (C, 1)`` is a diagonal."""
    diagonal = weight.shape[1] == 1
    for k in range(z.shape[0]):
        target, offset = z[k], bias[k]
        for v in range(size):
            target[v] = offset
        for j in range(weight.shape[1]):
            source, w = raw[k if diagonal else j], weight[k, j]
            for v in range(size):
                target[v] += w * source[v]


@_elementwise
def _softmax_terms(z, size, best, winner, beta, others, squares, slope):
    """Turn scores into e = exp(beta (z - best)) in place and sum over the classes other than the winner.

    The winner's own term is exactly 1 and left out of the sums, so that what is left (1 - confidence) keeps its
    relative precision however confident the voxel is.
    """
    for v in range(size):
        others[v] = _ZERO
        squares[v] = _ZERO
        slope[v] = _ZERO
    for k in range(z.shape[0]):
        row, index = z[k], np.uint32(k)
        for v in range(size):
            d = (row[v] - best[v]) * beta
            e = _exp(d)
            row[v] = e
            other = _ZERO if winner[v] == index else e
            d = _SMALLEST if d < _SMALLEST else d
            others[v] += other
            squares[v] += other * other
            slope[v] += other * d


@_elementwise
def _voxel_terms(b, size, beta, shift):
    """Each voxel's confidence, losses and energy in float64, from the sums over its classes."""
    for v in range(size):
        rest, squares = np.float64(b.others[v]), np.float64(b.squares[v])
        p = 1.0 / (1.0 + rest)
        log_sum = _log1p(rest)
        e = np.float64(_exp(b.label_gap[v]))
        if_right = (rest * rest + squares) * p * p
        if_wrong = (1.0 - e * p) * (1.0 - e * p) + (1.0 + squares - e * e) * p * p
        b.confidence[v] = p
        b.nll[v] = log_sum - np.float64(b.label_gap[v])
        b.brier[v] = if_right if b.winner[v] == b.target[v] else if_wrong
        b.entropy[v] = log_sum - np.float64(b.slope[v]) * p
        b.energy[v] = np.float64(b.best[v]) * beta + log_sum - shift


@_elementwise
def _bin_voxels(b, size, compare, top, classes, out):
    """What happens once a voxel. Returns the first one without class or softmax, or -1."""
    classwise = out.class_count.shape[2] > 0
    num_classes = b.scores.shape[0]
    for v in range(size):
        label = b.target[v]
        if label < 0:
            continue
        if label == num_classes or not (b.others[v] >= _ZERO and math.isfinite(b.best[v])):
            return v
        a, c, y, p = _Index(b.slot[v]), _Index(b.winner[v]), _Index(label), b.confidence[v]
        right = _Index(c == y)
        out.confusion[a, y, c] += 1
        i = _bin(p, top[0], top[1])
        out.top_count[a, right, i] += 1
        out.top_confidence[a, right, i] += p
        out.losses[a, c, 0] += b.nll[v]
        out.losses[a, c, 1] += b.brier[v]
        out.losses[a, c, 2] += b.entropy[v]
        out.energy[a, 0] += b.energy[v]
        out.energy[a, 1] += b.energy[v] * b.energy[v]
        if compare:
            u = _Index(b.before[v])
            out.flips[a, 0] += 1
            if u != c:
                out.flips[a, 1 if u == y else (2 if right else 3)] += 1
        if classwise:
            i = _Index(top[2][i])
            out.predicted_count[a, c, right, i] += 1
            out.predicted_confidence[a, c, right, i] += p
            b.scores[c, v] = _ZERO
            if not right:
                e = b.scores[y, v]
                i = _bin(e * p, classes[0], classes[1]) if e > b.limit[v] else _Index(0)
                out.class_positive[a, y, i] += 1
    return -1


@_elementwise
def _likely(row, size, limit, flags, words, found):
    """List the voxels above the lowest bin. Returns how many there are. ``words`` is ``flags``, eight at a time."""
    for v in range(size):
        flags[v] = row[v] > limit[v]
    n = _Index(0)
    for w in range((size + 7) // 8):
        if words[w] != 0:
            for v in range(8 * w, 8 * w + 8):  # without branches: which of the eight it is cannot be predicted
                found[n] = v
                n += _Index(flags[v])
    return n


@_reduction
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


@_elementwise
def _bin_classes(b, size, classes, out):
    """The probabilities of the classes that did not win; ``cpu._complete`` adds those that did."""
    upper, first = classes
    b.flags[:] = 0
    for k in range(b.scores.shape[0]):
        row = b.scores[k]
        for n in range(_likely(row, size, b.limit, b.flags, b.words, b.found)):
            v = _Index(b.found[n])
            a, p = _Index(b.slot[v]), row[v] * b.confidence[v]
            i = _bin(p, upper, first)
            out.class_count[a, k, i] += 1
            out.class_confidence[a, k, i] += p
    for v in range(size):
        b.inverse[v] = np.float32(b.confidence[v])
    for a in range(out.class_count.shape[0]):
        present = False
        for v in range(size):
            here = b.target[v] >= 0 and b.slot[v] == a
            b.own_limit[v] = b.limit[v] if here else np.float32(-1)
            present |= here
        if present:
            _add_unlikely(b.scores, size, b.own_limit, b.inverse, out.class_confidence[a, :, 0])


@_elementwise
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
        if use_matrix:
            _load(x, start + offset, size, b.raw, b.best, b.before)
            _map(b.raw, size, weight, bias, b.scores)
            _load(b.scores, 0, size, b.scores, b.best, b.winner)
        else:
            _load(x, start + offset, size, b.scores, b.best, b.winner)
        if compare and not use_matrix:
            for v in range(size):
                b.before[v] = b.winner[v]
        if uncalibrated.size > 0:
            for v in range(size):
                b.before[v] = uncalibrated[offset + v]
        for v in range(size):
            y = b.target[v] if 0 <= b.target[v] < num_classes else 0
            b.label_gap[v] = (b.scores[_Index(y), v] - b.best[v]) * beta
        _softmax_terms(b.scores, size, b.best, b.winner, beta, b.others, b.squares, b.slope)
        _voxel_terms(b, size, beta, shift)
        if classwise:
            lowest = np.float32(classes[0][0])
            for v in range(size):
                b.limit[v] = lowest * (_ONE + b.others[v]) if b.target[v] >= 0 else np.float32(np.inf)
        bad = _bin_voxels(b, size, compare, top, classes, out)
        if bad >= 0:
            return offset + bad
        if classwise:
            _bin_classes(b, size, classes, out)
    return -1
