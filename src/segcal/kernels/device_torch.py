"""Statistics of logits on a GPU where triton is not installed: torch alone, and one wait for the device.

The twin of ``segcal.kernels.reference`` for float32 and less, with the precision of ``cuda_tally``: terms of classes
are float32, sums over voxels float64 or whole numbers. Histograms are whole numbers, as there, because a GPU adds in
any order. Voxels that do not count have no weight: to pick the others, Python would wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.kernels.grid import BinGrid
from segcal.kernels.reference import sum_in_parts
from segcal.kernels.tally import Tally
from segcal.kernels.voxels import PIECE_VOXELS, Piece, Voxels
from segcal.scores import DEPTH

# Numbers in one intermediate matrix (C, v) of float32: 64 MB. There are about six at a time.
_MATRIX_SIZE = 2**24
# A cell is count * 2**40 + sum of positions in the bin, in units of 2**-17 of its width, of this many voxels at most:
# with 2^23 the count would reach the sign.
_COUNT_BIT, _POSITIONS, _MOST = 40, 2**17, 2**23 - 64
# Copies of the histograms, because additions to one address wait for each other, and numbers in all copies.
_COPIES, _CELLS = 256, 2**22
# Up to so many sums, each is that of a row with zeros for all other voxels.
_ROWS = 64
# exp is 0 in float32 from here on.
_LOWEST = -150.0


def tally(voxels: Voxels, threads: int) -> Tally:
    """All statistics of one update; see ``segcal.kernels.tally``. ``threads`` is not used."""
    found, shift = shifted_tally(voxels)
    return found.moved(shift - voxels.energy_shift)


def shifted_tally(voxels: Voxels) -> tuple[Tally, float]:
    """All statistics, and the shift that the energies are relative to, which the device chooses."""
    adding = _Adding(voxels)
    for piece, scores, labels, valid in _read(voxels):
        slots, before = (
            None if own is None else voxels.flat(own, piece).to(scores.device).long()
            for own in (voxels.slots, voxels.uncalibrated)
        )
        adding.add(scores.float(), labels, valid, slots, before, piece.offset)
    return adding.result()


def temperature_sums(voxels: Voxels, beta: float) -> Tensor:
    """Sums of the valid voxels, and how far from the end the first unfit one is, as ``cuda.temperature_sums`` has them.

    See ``segcal.kernels.fitting_passes``.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=voxels.logits.device)
    last = torch.zeros(1, dtype=torch.int64, device=sums.device)
    for piece, scores, labels, valid in _read(voxels):
        z = scores.float()
        best, winner = z.max(0)
        known = (labels >= 0) & (labels < len(z))
        own = z.gather(0, labels.masked_fill(~known, 0)[None])[0].double() - best.double()
        fit = torch.isfinite(best) & known & (own >= -DEPTH)
        last = torch.maximum(last, _first_unfit(voxels, valid & ~fit, piece.offset))
        gap = z - best
        d = gap.mul(beta).clamp_(min=_LOWEST)
        e = d.exp().masked_fill_(gap < -DEPTH, 0.0).scatter_(0, winner[None], 0.0)
        others = e.sum(0, dtype=torch.float64)
        mean, square = ((e * power).sum(0, dtype=torch.float64) / (1 + others) for power in (d, d.square()))
        slope = mean - own * beta
        terms = torch.ones_like(others), torch.log1p(others) - own * beta, slope, square - mean.square() + slope
        sums += torch.where(valid & fit, torch.stack(terms), 0.0).sum(1)
    return torch.cat((sums, last.view(torch.float64)))


def _read(voxels: Voxels) -> Iterator[tuple[Piece, Tensor, Tensor, Tensor]]:
    """Many voxels at a time, in order: their scores ``(C, v)``, labels int64, and which of them count."""
    device, step = voxels.logits.device, min(max(_MATRIX_SIZE // voxels.logits.shape[1], PIECE_VOXELS), _MOST)
    for piece in voxels.pieces(step, step):
        scores, columns = voxels.scores(piece)
        labels = voxels.flat(voxels.labels, piece).to(device).long()
        yield piece, scores[:, columns], labels, voxels.valid(piece).to(device)


def _first_unfit(voxels: Voxels, unfit: Tensor, offset: int) -> Tensor:
    """How many of all voxels come from the first of these unfit ones on, 0 if there is none."""
    places = torch.arange(offset, offset + len(unfit), device=unfit.device)
    return torch.where(unfit, voxels.labels.numel() - places, 0).max()


class _Histogram:
    """Counts and sums of probabilities by row and bin. Probabilities are compared with edges of their own type."""

    def __init__(self, grid: BinGrid, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self.bins = rows, len(grid)
        self.upper, self.lower = (torch.from_numpy(own).to(device, dtype) for own in (grid.upper, grid.lower))
        self.scale = _POSITIONS / (self.upper - self.lower)
        self.cells = torch.zeros(2, rows * len(grid), dtype=torch.int64, device=device)
        self.edges = grid.lower, (grid.upper - grid.lower) / _POSITIONS

    def place(self, p: Tensor) -> Tensor:
        """The bin of each probability."""
        return torch.searchsorted(self.upper, p).clamp_(max=self.bins - 1)

    def add(self, p: Tensor, i: Tensor, row: Tensor, counts: Tensor) -> None:
        """Add probabilities of the bins ``i``, where they count."""
        position = (p - self.lower[i]).mul_(self.scale[i]).round_().long()
        cells = _count(self.cells.shape[1], row * self.bins + i, (position + 2**_COUNT_BIT) * counts)
        self.cells[0] += cells >> _COUNT_BIT
        self.cells[1] += cells & (2**_COUNT_BIT - 1)

    def result(self, *shape: int) -> tuple[Any, Any]:
        """Counts and sums."""
        lower, unit = self.edges
        count, position = (own.reshape(*shape, self.bins) for own in self.cells.cpu().numpy())
        return count, count * lower + position * unit


class _Adding:
    """Statistics on the device, and the voxels that are added to them."""

    def __init__(self, voxels: Voxels) -> None:
        self.voxels, self.device = voxels, voxels.logits.device
        self.slots, self.classes = voxels.num_slots, voxels.logits.shape[1]
        rows, device = self.slots * self.classes, self.device
        self.confusion = torch.zeros(rows * self.classes, dtype=torch.int64, device=device)
        self.flips = torch.zeros(self.slots * 4, dtype=torch.int64, device=device)
        self.losses = torch.zeros(3, rows, dtype=torch.float64, device=device)
        self.low = torch.zeros(self.slots, self.classes, dtype=torch.float64, device=device)
        self.energy = torch.zeros(2, self.slots, dtype=torch.float64, device=device)
        self.top = _Histogram(voxels.top_grid, 2 * self.slots, torch.float64, device)
        self.predicted, self.by_class = (
            None if voxels.class_grid is None else _Histogram(voxels.class_grid, times * rows, torch.float32, device)
            for times in (2, 1)
        )
        self.positive = None if self.by_class is None else torch.zeros_like(self.by_class.cells[0])
        # How many voxels come from the first unfit one on; whether a voxel has chosen the shift of energies; the shift.
        self.unfit = torch.zeros((), dtype=torch.int64, device=device)
        self.chosen = torch.zeros((), dtype=torch.bool, device=device)
        self.shift = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, z: Tensor, y: Tensor, valid: Tensor, slot: Tensor | None, before: Tensor | None, offset: int) -> None:
        """Add voxels: logits ``(C, v)`` float32, labels, which count, slots and the argmax to compare with."""
        score_map, beta = self.voxels.score_map, 1.0
        if score_map is not None:
            before = z.argmax(0) if before is None else before
            if score_map.is_scale:
                beta = float(score_map.weight)
            else:
                z, score_map = score_map(z[None])[0], None
        best, winner = z.max(0)
        known = (y >= 0) & (y < self.classes)
        fit = torch.isfinite(best) & known
        self.unfit = torch.maximum(self.unfit, _first_unfit(self.voxels, valid & ~fit, offset))
        counts = valid & fit
        y = y.masked_fill(~known, 0)

        gap = z - best
        own = z.gather(0, y[None])[0].double() - best.double()
        if score_map is not None:
            gap, own = (torch.where(d < -DEPTH, -torch.inf, d * beta) for d in (gap, own))
        gap = gap.clamp_(min=_LOWEST)
        e = gap.exp().scatter_(0, winner[None], 0.0)
        others, squares = e.sum(0, dtype=torch.float64), torch.linalg.vector_norm(e, dim=0).double().square()
        slope = gap.mul_(e).sum(0).double()
        confidence = 1 / (1 + others)
        log_sum, right = torch.log1p(others), winner == y
        spread, mine = squares * confidence.square(), own.exp()
        wrong = (1 - mine * confidence).square() + spread + (1 - mine.square()) * confidence.square()
        brier = torch.where(right, (others * confidence).square() + spread, wrong)
        losses = torch.stack((log_sum - own, brier, log_sum - slope * confidence))
        energy = self._shifted(best.double() * beta + log_sum, counts)

        slots = torch.zeros_like(y) if slot is None else slot
        row = slots * self.classes + winner
        self.losses += _sums(torch.where(counts, losses, 0.0), row, self.losses.shape[1])
        self.energy += _sums(torch.where(counts, torch.stack((energy, energy.square())), 0.0), slots, self.slots)
        self.confusion += _count(len(self.confusion), (slots * self.classes + y) * self.classes + winner, counts.long())
        self.top.add(confidence, self.top.place(confidence), slots * 2 + right, counts)
        if before is not None:
            kind = torch.where(before == y, 1, torch.where(right, 2, 3)) * (before != winner)
            self.flips += _count(len(self.flips), slots * 4 + kind, counts.long())
        if self.by_class is not None:
            self._add_classes(e, confidence.float(), slots, y, winner, counts)

    def _shifted(self, energy: Tensor, counts: Tensor) -> Tensor:
        """Energies relative to that of the first voxel that counts."""
        first = counts.byte().argmax(0, keepdim=True)
        some = counts.gather(0, first)[0] & ~self.chosen
        self.shift = torch.where(some, energy.gather(0, first)[0], self.shift)
        self.chosen = self.chosen | some
        return energy - self.shift

    def _add_classes(
        self, e: Tensor, confidence: Tensor, slot: Tensor, y: Tensor, winner: Tensor, counts: Tensor
    ) -> None:
        """Add to the histograms of classes; ``e`` are the probabilities of all but the winner, over its own."""
        assert self.by_class is not None
        assert self.predicted is not None
        assert self.positive is not None
        p = e.mul_(confidence).scatter_(0, winner[None], confidence[None])
        i = self.by_class.place(p)
        row = slot * self.classes + torch.arange(self.classes, device=self.device)[:, None]
        # The lowest bin holds numbers of any size: their sums are not those of positions.
        low = torch.where((i == 0) & counts, p, 0.0)
        for a, own in enumerate(self.low):
            own += torch.where(slot == a, low, 0.0).sum(1, dtype=torch.float64)
        self.by_class.add(torch.where(i == 0, 0.0, p), i, row, counts)
        ours = (slot * self.classes + winner) * 2 + (winner == y)
        self.predicted.add(confidence, i.gather(0, winner[None])[0], ours, counts)
        where = (slot * self.classes + y) * self.by_class.bins + i.gather(0, y[None])[0]
        self.positive += _count(len(self.positive), where, counts.long())

    def result(self) -> tuple[Tally, float]:
        """What was added, and the shift of the energies; raises if a voxel is unfit."""
        if unfit := int(self.unfit):
            raise self.voxels.bad_voxel(self.voxels.labels.numel() - unfit)
        shape = self.slots, self.classes
        found = Tally.zeros(*shape, self.voxels.top_grid, self.voxels.class_grid)._asdict()
        confusion = self.confusion.cpu().numpy().reshape(*shape, self.classes)
        flips = self.flips.cpu().numpy().reshape(self.slots, 4)
        flips[:, 0] = confusion.sum((1, 2)) if self.voxels.compares else 0
        losses = self.losses.cpu().numpy().reshape(3, *shape).transpose(1, 2, 0)
        found |= {"confusion": confusion, "flips": flips, "losses": np.ascontiguousarray(losses)}
        found["energy"] = np.ascontiguousarray(self.energy.cpu().numpy().T)
        found["top_count"], found["top_confidence"] = self.top.result(self.slots, 2)
        if self.predicted is not None and self.by_class is not None and self.positive is not None:
            found["predicted_count"], found["predicted_confidence"] = self.predicted.result(*shape, 2)
            found["class_count"], found["class_confidence"] = self.by_class.result(*shape)
            found["class_confidence"][:, :, 0] += self.low.cpu().numpy()
            found["class_positive"] = self.positive.cpu().numpy().reshape(found["class_count"].shape)
        return Tally(**found), float(self.shift)


def _count(size: int, index: Tensor, values: Tensor) -> Tensor:
    """Sums ``(size,)`` of whole numbers by index ``(..., v)``, which are the same in any order."""
    copies = max(1, min(_COPIES, _CELLS // size))
    copy = torch.arange(index.shape[-1], device=index.device) % copies
    cells = torch.zeros(copies * size, dtype=torch.int64, device=index.device)
    return cells.index_add_(0, (copy * size + index).reshape(-1), values.reshape(-1)).view(copies, size).sum(0)


def _sums(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """Sums ``(K, rows)`` of float64 values ``(K, v)`` by row ``(v,)``, always in the same order."""
    if rows == 1:
        return values.sum(1, keepdim=True)
    total = values.new_zeros(len(values), rows)
    for own, mine in zip(total, values, strict=True):
        if rows <= _ROWS:
            own += values.new_zeros(rows, len(row)).scatter_(0, row[None], mine[None]).sum(1)
        else:
            sum_in_parts(own, mine, row)
    return total
