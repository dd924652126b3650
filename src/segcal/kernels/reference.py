"""The definition of every statistic, in torch and float64, on any device. Tests compare the fast kernels with it.

``refine`` is the second pass of exact equal-mass bins.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels.grid import BinGrid
from segcal.kernels.tally import Counts, Sums, Tally
from segcal.kernels.voxels import PIECE_VOXELS, Voxels

# Numbers in one intermediate float64 matrix (C, v): 4 MB on the CPU, 128 MB on a GPU, which is waited for after each.
# There are about six at a time.
_MATRIX_SIZE, _DEVICE_MATRIX_SIZE = 2**19, 2**24
# On a GPU each sum is made of at most this many partial sums, and all of an array have at most so many numbers.
_PARTS, _PARTS_SIZE = 1024, 2**22


def tally(voxels: Voxels, threads: int) -> Tally:
    """All statistics of one update; see ``segcal.kernels.tally``. ``threads`` is not used: torch has its own."""
    empty = Tally.zeros(voxels.num_slots, voxels.logits.shape[1], voxels.top_grid, voxels.class_grid)
    totals = {name: torch.from_numpy(array).to(device_of(voxels)) for name, array in empty._asdict().items()}
    for batch in batches(voxels):
        _add(voxels, *batch, totals)
    return Tally(**{name: np.asarray(tensor.cpu()) for name, tensor in totals.items()})


def device_of(voxels: Voxels) -> torch.device:
    """The device to work on: that of the logits, but the CPU for MPS, which has no float64."""
    device = voxels.logits.device
    return torch.device("cpu") if device.type == "mps" else device


def batches(voxels: Voxels) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """The valid voxels in order, a few at a time, mapped and checked.

    Scores ``(C, v)`` in float64; labels, slots and, to compare with, the uncalibrated argmax, ``(v,)`` int64 each.
    """
    device = device_of(voxels)
    step = max(1, (_MATRIX_SIZE if device.type == "cpu" else _DEVICE_MATRIX_SIZE) // voxels.logits.shape[1])
    large = PIECE_VOXELS if device.type == "cpu" else max(step, PIECE_VOXELS)
    for piece in voxels.pieces(large, large):
        (scores, columns), valid = voxels.scores(piece), voxels.valid(piece).to(device)
        for start in range(columns.start, columns.stop, step):
            stop = min(start + step, columns.stop)
            here = slice(start - columns.start, stop - columns.start)

            def pick(tensor: Tensor, here: slice = here) -> Tensor:
                return voxels.flat(tensor, piece)[here].to(device)  # noqa: B023

            kept = valid[here].nonzero().squeeze(1)
            raw, y = scores[:, start:stop].to(device)[:, kept].double(), pick(voxels.labels).long()[kept]
            slot = torch.zeros_like(y) if voxels.slots is None else pick(voxels.slots)[kept].long()
            z = raw if voxels.score_map is None else voxels.score_map(raw[None])[0]
            bad = (y < 0) | (y >= len(z)) | ~torch.isfinite(z.amax(0)) | torch.isnan(z).any(0)
            if bool(bad.any()):
                raise voxels.bad_voxel(piece.offset + here.start + int(kept[bad.nonzero()[0, 0]]))
            before = raw.argmax(0) if voxels.compares else None
            if voxels.uncalibrated is not None:
                before = pick(voxels.uncalibrated)[kept].long()
            yield z, y, slot, before


def _add(voxels: Voxels, z: Tensor, y: Tensor, slot: Tensor, before: Tensor | None, totals: dict[str, Tensor]) -> None:
    winner = z.argmax(0)
    best = z.gather(0, winner[None])[0]
    gap = z - best
    # The winner's own term is 1. Without it the sum keeps its relative precision however confident the voxel is.
    others = gap.exp().scatter_(0, winner[None], 0.0).sum(0)
    log_sum = torch.log1p(others)
    p = gap.exp() / (1 + others)  # not exp(gap - log_sum): tied classes have exactly 1/2, 1/3, ..., edges of bins
    confidence = p.gather(0, winner[None])[0]
    right = (winner == y).long()
    nll = log_sum - gap.gather(0, y[None])[0]
    brier = (p - torch.zeros_like(p).scatter_(0, y[None], 1.0)).square().sum(0)
    entropy = log_sum - torch.where(p > 0, p * gap, 0.0).sum(0)

    _count(totals["confusion"], slot, y, winner)
    for column, loss in enumerate((nll, brier, entropy)):
        _sum(totals["losses"], loss, slot, winner, torch.full_like(slot, column))
    i = bins(voxels.top_grid, confidence)
    _count(totals["top_count"], slot, right, i)
    _sum(totals["top_confidence"], confidence, slot, right, i)
    shifted = best + log_sum - voxels.energy_shift
    _sum(totals["energy"], shifted, slot, torch.zeros_like(slot))
    _sum(totals["energy"], shifted.square(), slot, torch.ones_like(slot))

    if before is not None:
        _count(totals["flips"], slot, torch.zeros_like(slot))
        kind = torch.where(before == y, 1, torch.where(right == 1, 2, 3))
        moved = before != winner
        _count(totals["flips"], slot[moved], kind[moved])

    if voxels.class_grid is not None:
        i = bins(voxels.class_grid, confidence)
        _count(totals["predicted_count"], slot, winner, right, i)
        _sum(totals["predicted_confidence"], confidence, slot, winner, right, i)
        i = bins(voxels.class_grid, p)
        everywhere, k = slot.expand_as(p), torch.arange(len(p), device=p.device)[:, None].expand_as(p)
        _count(totals["class_count"], everywhere, k, i)
        _sum(totals["class_confidence"], p, everywhere, k, i)
        _count(totals["class_positive"], slot, y, i.gather(0, y[None])[0])


def bins(grid: BinGrid, p: Tensor) -> Tensor:
    """The bin ``(lo, hi]`` of each probability; one rounded to above 1 is in the last."""
    upper = torch.from_numpy(grid.upper).to(p.device)
    return torch.searchsorted(upper, p.contiguous()).clamp_(max=len(grid) - 1)


# Sums and counts by index are always added in the same order: the same data give the same bits.


def _count(total: Tensor, *index: Tensor) -> None:
    """Add 1 at each index."""
    total.view(-1).add_(torch.bincount(_flat_index(total, index), minlength=total.numel()))


def _sum(total: Tensor, values: Tensor, *index: Tensor) -> None:
    """Add each value at its index."""
    _add_at(total.view(-1), values.reshape(-1), _flat_index(total, index))


def _add_at(total: Tensor, values: Tensor, index: Tensor) -> None:
    """Add each value ``(n,)`` at its index ``(n,)``."""
    if total.device.type == "cpu":
        total.index_add_(0, index, values)
    else:
        sum_in_parts(total, values, index)


def sum_in_parts(total: Tensor, values: Tensor, index: Tensor) -> None:
    """``_add_at`` in a fixed order, which ``index_add_`` has not on a GPU.

    ``index_put_`` has one, but adds what goes to one address serially: so every part of the values has its own address.
    """
    parts = max(1, min(_PARTS, _PARTS_SIZE // len(total)))
    part = torch.arange(len(index), device=index.device) * parts // max(1, len(index))
    sums = total.new_zeros(parts * len(total))
    sums.index_put_((part * len(total) + index,), values, accumulate=True)
    total += sums.view(parts, -1).sum(0)


def _flat_index(total: Tensor, index: tuple[Tensor, ...]) -> Tensor:
    flat = torch.zeros_like(index[0])
    for size, part in zip(total.shape, index, strict=True):
        flat = flat * size + part
    return flat.reshape(-1)


def refine(voxels: Voxels, grid: BinGrid, cells: NDArray[np.int64]) -> tuple[Counts, Sums, Counts]:
    """Count, sum of probabilities and positives per cell; bin i of class c is split into ``cells[c, i]`` equal cells.

    The arrays hold all cells of the first class in ascending order, then of the second, and so on. Float64, any device.

    Examples:
        >>> grid = BinGrid.from_edges([0.5])
        >>> voxels = Voxels(torch.tensor([[3.0, 0.0]]), torch.tensor([1]), grid, None)
        >>> refine(voxels, grid, np.array([[1, 1], [4, 1]]))[0]
        array([0, 1, 1, 0, 0, 0, 0])
    """
    device = device_of(voxels)
    sizes = torch.from_numpy(cells).to(device)
    starts = (sizes.reshape(-1).cumsum(0) - sizes.reshape(-1)).reshape(sizes.shape)
    lower, upper = torch.from_numpy(grid.lower).to(device), torch.from_numpy(grid.upper).to(device)
    length = int(sizes.sum())
    count = torch.zeros(length, dtype=torch.int64, device=device)
    positive, total = torch.zeros_like(count), torch.zeros(length, dtype=torch.float64, device=device)
    for z, y, *_ in batches(voxels):
        p = torch.softmax(z, 0)
        i = bins(grid, p)
        size = sizes.gather(1, i)
        cell = ((p - lower[i]) / (upper[i] - lower[i]) * size).ceil().long() - 1
        where = starts.gather(1, i) + torch.minimum(cell.clamp_(min=0), size - 1)
        count += torch.bincount(where.reshape(-1), minlength=length)
        positive += torch.bincount(where.gather(0, y[None]).reshape(-1), minlength=length)
        _add_at(total, p.reshape(-1), where.reshape(-1))
    return count.cpu().numpy(), total.cpu().numpy(), positive.cpu().numpy()
