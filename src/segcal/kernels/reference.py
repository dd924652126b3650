"""The definition of every statistic, in torch and float64, on any device. Tests compare the fast kernels with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal.kernels.grid import BinGrid
from segcal.kernels.tally import Tally
from segcal.kernels.voxels import Voxels

# Numbers in one intermediate float64 matrix (C, v): 4 MB, and there are about six at a time.
_MATRIX_SIZE = 2**19


class Batch(NamedTuple):
    """Valid voxels: scores ``z (C, v)`` in float64, all else ``(v,)`` int64."""

    z: Tensor
    y: Tensor
    slot: Tensor
    before: Tensor | None  # the uncalibrated argmax


def tally(voxels: Voxels, threads: int) -> Tally:
    """All statistics of one update; see ``segcal.kernels.tally``. ``threads`` is not used: torch has its own."""
    empty = Tally.zeros(voxels.num_slots, voxels.logits.shape[1], voxels.top_grid, voxels.class_grid)
    total = _Totals({name: torch.from_numpy(array).to(device_of(voxels)) for name, array in empty._asdict().items()})
    for batch in batches(voxels):
        _add(voxels, batch, total)
    return Tally(**{name: np.asarray(tensor.cpu()) for name, tensor in total.tensors.items()})


def device_of(voxels: Voxels) -> torch.device:
    """The device to work on: that of the logits, but the CPU for MPS, which has no float64."""
    device = voxels.logits.device
    return torch.device("cpu") if device.type == "mps" else device


def batches(voxels: Voxels) -> Iterator[Batch]:
    """The valid voxels in order, a few at a time, mapped and checked."""
    device = device_of(voxels)
    step = max(1, _MATRIX_SIZE // voxels.logits.shape[1])
    for piece in voxels.pieces():
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
            yield Batch(z, y, slot, before)


def _add(voxels: Voxels, batch: Batch, total: _Totals) -> None:
    z, y, slot, before = batch
    winner = z.argmax(0)
    best = z.gather(0, winner[None])[0]
    gap = z - best
    # The winner's own term is 1. Without it the sum keeps its relative precision however confident the voxel is.
    others = gap.exp().scatter_(0, winner[None], 0.0).sum(0)
    log_sum = torch.log1p(others)
    p = (gap - log_sum).exp()
    confidence = p.gather(0, winner[None])[0]
    right = (winner == y).long()
    nll = log_sum - gap.gather(0, y[None])[0]
    brier = (p - torch.zeros_like(p).scatter_(0, y[None], 1.0)).square().sum(0)
    entropy = log_sum - torch.where(p > 0, p * gap, 0.0).sum(0)

    total.count("confusion", slot, y, winner)
    for column, loss in enumerate((nll, brier, entropy)):
        total.sum("losses", loss, slot, winner, torch.full_like(slot, column))
    i = bins(voxels.top_grid, confidence)
    total.count("top_count", slot, right, i)
    total.sum("top_confidence", confidence, slot, right, i)
    shifted = best + log_sum - voxels.energy_shift
    total.sum("energy", shifted, slot, torch.zeros_like(slot))
    total.sum("energy", shifted.square(), slot, torch.ones_like(slot))

    if before is not None:
        total.count("flips", slot, torch.zeros_like(slot))
        kind = torch.where(before == y, 1, torch.where(right == 1, 2, 3))
        moved = before != winner
        total.count("flips", slot[moved], kind[moved])

    if voxels.class_grid is not None:
        i = bins(voxels.class_grid, confidence)
        total.count("predicted_count", slot, winner, right, i)
        total.sum("predicted_confidence", confidence, slot, winner, right, i)
        i = bins(voxels.class_grid, p)
        everywhere, k = slot.expand_as(p), torch.arange(len(p), device=p.device)[:, None].expand_as(p)
        total.count("class_count", everywhere, k, i)
        total.sum("class_confidence", p, everywhere, k, i)
        total.count("class_positive", slot, y, i.gather(0, y[None])[0])


def bins(grid: BinGrid, p: Tensor) -> Tensor:
    """The bin ``(lo, hi]`` of each probability; one rounded to above 1 is in the last."""
    upper = torch.from_numpy(grid.upper).to(p.device)
    return torch.searchsorted(upper, p.contiguous()).clamp_(max=len(grid) - 1)


class _Totals:
    """Sums and counts by index, always added in the same order: the same data give the same bits."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def count(self, name: str, *index: Tensor) -> None:
        """Add 1 at each index."""
        total = self.tensors[name]
        flat = _flat_index(total, index)
        total.view(-1).add_(torch.bincount(flat, minlength=total.numel()))

    def sum(self, name: str, values: Tensor, *index: Tensor) -> None:
        """Add each value at its index."""
        total = self.tensors[name].view(-1)
        flat, values = _flat_index(self.tensors[name], index), values.reshape(-1)
        if total.device.type == "cpu":
            total.index_add_(0, flat, values)
        else:  # here index_add_ has no fixed order
            total.index_put_((flat,), values, accumulate=True)


def _flat_index(total: Tensor, index: tuple[Tensor, ...]) -> Tensor:
    flat = torch.zeros_like(index[0])
    for size, part in zip(total.shape, index, strict=True):
        flat = flat * size + part
    return flat.reshape(-1)
