"""The beginning and the end of statistics on a CUDA device: the room that the programs work in, and its sums.

The room is ``out``, then ``cells (copies, ...)``, then ``sums (programs, slots, columns, width)``; all numbers are 8
bytes wide. ``segcal.kernels.cuda_tally`` has the parts of ``out``.
"""

# mypy: ignore-errors
# (triton infers the types of compiled functions itself)

from __future__ import annotations

import triton
import triton.language as tl

from segcal.kernels.cuda_tiles import counted, logit

#: A cell of a histogram is count * 2**40 + sum of positions in the bin, in units of 2**-17 of its width. It holds fewer
#: than 2**23 voxels.
POSITION_BITS, COUNT_BIT = 17, tl.constexpr(40)
_POSITIONS = tl.constexpr(2**40 - 1)
#: Columns of the sums: after NLL, Brier score and entropy right predictions, count and confidence of those in the
#: highest bin, and probabilities in the lowest bin, by class; and by slot energy, its square, and three kinds of flips.
RIGHT, NUMBER_OF_HOT, CONFIDENCE_OF_HOT, LOW, OF_SLOT, COLUMNS = (tl.constexpr(column) for column in range(3, 9))
#: The least width of a column.
WIDTH = tl.constexpr(8)
#: What follows the statistics in ``out``: the origin of energies, and the place of the first unfit voxel.
ENDS = tl.constexpr(2)
#: Copies of the histograms that are added up at a time.
_TOGETHER = tl.constexpr(16)


@triton.jit
def floats(pointer):
    """The same place, for float64."""
    return pointer.to(tl.pointer_type(tl.float64), bitcast=True)


@triton.jit
def origin_loop(
    x, labels, mask, room, at, voxels, classes, inner, by_image, by_class, by_voxel, ignored, beta,
    SIZE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """In ``room[at]``, where 0 is, the best logit, times beta, of the first voxel that counts; for one program.

    That is about its energy: sums of squares about it keep their digits.
    """
    start = tl.cast(tl.program_id(0), tl.int64)
    end = tl.cast(voxels, tl.int64)
    first = end
    while start < end:
        v = start + tl.arange(0, SIZE)
        _, counts, _ = counted(labels, mask, v, v < end, ignored, classes, MASKED)
        first = tl.min(tl.where(counts, v, end))
        start = tl.where(first < end, end, start + SIZE)
    if first < end:
        image = first // inner
        where = x + image * by_image + (first - image * inner) * by_voxel
        best = logit(where, 0, by_class, first < end)
        for k in range(1, classes):
            best = tl.maximum(best, logit(where, k, by_class, first < end))
        energy = best.to(tl.float64) * beta
        tl.store(floats(room) + at, tl.where(tl.abs(energy) < float("inf"), energy, 0.0))


@triton.jit
def places(room, out_size, slot_count, classes, top_bins, class_bins, copies):
    """Where things are: the cells of top labels, predicted classes, classes, positives and confusion; the sums.

    And how many cells a copy has.
    """
    top = room + out_size
    predicted = top + slot_count * 2 * top_bins
    by_class = predicted + slot_count * 2 * classes * class_bins
    positive = by_class + slot_count * classes * class_bins
    confusion = positive + slot_count * classes * class_bins
    size = slot_count * (2 * top_bins + classes * (4 * class_bins + classes))
    sums = floats(top + tl.cast(copies, tl.int64) * size)
    return top, predicted, by_class, positive, confusion, sums, size


@triton.jit
def _summed(cells, n, there, size, copies):
    """The sums over all copies of the cells ``n``."""
    total = tl.zeros_like(n).to(tl.int64)
    for start in range(0, copies, _TOGETHER):
        copy = start + tl.arange(0, _TOGETHER)
        every = cells + copy[:, None].to(tl.int64) * size + n[None, :]
        total += tl.sum(tl.load(every, mask=(copy < copies)[:, None] & there[None, :], other=0), 0)
    return total


@triton.jit
def _unpacked(cell, table, i, bins, there):
    """Count and sum of probabilities of cells of the bins ``i``; the table has lower edges and units of positions."""
    count = cell >> COUNT_BIT
    position = (cell & _POSITIONS).to(tl.float64)
    lower, unit = tl.load(table + i, mask=there, other=0.0), tl.load(table + bins + i, mask=there, other=0.0)
    return count, count.to(tl.float64) * lower + position * unit


@triton.jit
def _increase(out, value, there):
    tl.store(out, tl.load(out, mask=there, other=0) + value, mask=there)


@triton.jit
def _finish_top(out, top, n, columns, table, tops, size, copies, classes, bins, width):
    """Counts and confidences of top labels to ``out``; all of the highest bin's right predictions are in columns."""
    there, i = n < tops, n % bins
    count, confidence = _unpacked(_summed(top, n, there, size, copies), table, i, bins, there)
    hottest = there & (i == bins - 1) & (n // bins % 2 == 1)
    column = columns + n // (2 * bins) * (COLUMNS * width)
    if tl.max(hottest.to(tl.int32)) > 0:
        for k in range(classes):
            count += tl.load(column + NUMBER_OF_HOT * width + k, mask=hottest, other=0.0).to(tl.int64)
            confidence += tl.load(column + CONFIDENCE_OF_HOT * width + k, mask=hottest, other=0.0)
    _increase(out + n, count, there)
    _increase(floats(out + tops) + n, confidence, there)


@triton.jit
def _finish_rest(out, confusion, n, columns, size, copies, slot_count, classes, width):
    """The confusion matrices, whose right predictions are in columns, and the columns to ``out``."""
    there = n < slot_count * classes * classes
    y, slot = n // classes % classes, n // (classes * classes)
    right = columns + (slot * COLUMNS + RIGHT) * width + y
    count = _summed(confusion, n, there, size, copies)
    count += tl.load(right, mask=there & (n % classes == y), other=0.0).to(tl.int64)
    _increase(out + n, count, there)
    exists = n < slot_count * COLUMNS * width
    own = tl.load(columns + n, mask=exists, other=0.0)
    _increase(floats(out + slot_count * classes * classes) + n, own, exists)


@triton.jit
def _finish_class(
    out, predicted, by_class, positive, row, i, columns, table, histogram, size, copies, classes, bins, width
):
    """All histograms of one slot and class to ``out``. The lowest bin of a class has no count yet."""
    there = i < bins
    n, wrong = row * bins + i, 2 * row * bins + i
    right = wrong + bins
    column = columns + (row // classes * COLUMNS) * width + row % classes
    total, sums = _unpacked(_summed(by_class, n, there, size, copies), table, i, bins, there)
    sums += tl.load(column + LOW * width + i, mask=there & (i == 0), other=0.0)
    count, confidence = _unpacked(_summed(predicted, wrong, there, size, copies), table, i, bins, there)
    _increase(out + wrong, count, there)
    _increase(floats(out + 2 * histogram) + wrong, confidence, there)
    total += count
    sums += confidence
    count, confidence = _unpacked(_summed(predicted, right, there, size, copies), table, i, bins, there)
    last, hot = there & (i == bins - 1), column + tl.zeros_like(i)
    count += tl.load(hot + NUMBER_OF_HOT * width, mask=last, other=0.0).to(tl.int64)
    confidence += tl.load(hot + CONFIDENCE_OF_HOT * width, mask=last, other=0.0)
    _increase(out + right, count, there)
    _increase(floats(out + 2 * histogram) + right, confidence, there)
    _increase(out + 4 * histogram + n, total + count, there)
    _increase(floats(out + 5 * histogram) + n, sums + confidence, there)
    _increase(out + 6 * histogram + n, _summed(positive, n, there, size, copies) + count, there)


@triton.jit
def finish_loop(
    room, columns, top_table, class_table, out_size, slot_count, classes, top_bins, class_bins, copies,
    SIZE: tl.constexpr, CLASSWISE: tl.constexpr,
):  # fmt: skip
    """Add up the copies of the cells and add the result to ``out``; ``columns`` are the sums over all programs.

    The tables are lower edges and units of positions, float64. The first programs are for top labels, the next for the
    confusion matrix and the columns, the last for classes.
    """
    top, predicted, by_class, positive, confusion, _, size = places(
        room, out_size, slot_count, classes, top_bins, class_bins, copies
    )
    width = tl.maximum(classes, WIDTH)
    tops, histogram = slot_count * 2 * top_bins, slot_count * classes * class_bins
    program, j = tl.program_id(0), tl.arange(0, SIZE)
    top_end = tl.cdiv(tops, SIZE)
    rest_end = top_end + tl.cdiv(slot_count * tl.maximum(classes * classes, COLUMNS * width), SIZE)
    if program < top_end:
        _finish_top(room, top, program * SIZE + j, columns, top_table, tops, size, copies, classes, top_bins, width)
    elif program < rest_end:
        n = (program - top_end) * SIZE + j
        _finish_rest(room + 2 * tops + 7 * histogram, confusion, n, columns, size, copies, slot_count, classes, width)
    elif CLASSWISE:
        parts = tl.cdiv(class_bins, SIZE)
        row, i = (program - rest_end) // parts, (program - rest_end) % parts * SIZE + j
        _finish_class(
            room + 2 * tops, predicted, by_class, positive, row, i, columns, class_table, histogram, size, copies,
            classes, class_bins, width,
        )  # fmt: skip
