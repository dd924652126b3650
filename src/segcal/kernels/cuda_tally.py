"""Statistics on a CUDA device: triton, one read of the logits, one wait for the device.

Histograms are 64-bit integers, a count and a sum of positions within the bin together, so that one atomic addition adds
a voxel and the order of additions does not matter: the same data give the same bits. Neighbouring programs add to
different copies of the histograms, because additions to one address wait for each other. The highest bin of right
predictions and the lowest of class probabilities, which hold most voxels, are summed by block instead.

Precision: exp has a relative error below 3e-7; per-class terms are float32, everything summed over voxels is float64,
but for the lowest class probabilities, which up to a hundred blocks sum in float32. A sum of probabilities in a bin is
off by at most 4e-6 of the bin's width for every voxel, without bias.

What the device does not need is prepared while it works: Python takes as long as the device.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels import cuda_tally_ends as ends
from segcal.kernels import cuda_tally_loops as loops
from segcal.kernels.cuda_walk import FEW, Walk, flat, launch
from segcal.kernels.grid import BinGrid
from segcal.kernels.tally import Tally
from segcal.kernels.voxels import ONE_BIN, Voxels

# Voxels that one histogram can count: with 2^23 in one cell its count would reach the sign.
_LAUNCH = 2**23 - 64
# Voxels of a block, registers of a thread (None: as many as it asks for) and programs, each one warp, that take the
# blocks in turn; with histograms of classes and without. With fewer registers more warps of an H200's 132 processors
# hide each other's waiting, 65536 / 32 / registers and at most 32 of each; with far fewer, numbers move to memory and
# back.
_FEW = {True: (32, 64, 132 * 32), False: (32, 64, 132 * 32)}
_MANY = {True: (32, 64, 132 * 32), False: (64, None, 132 * 32)}
# Copies of the histograms, and numbers in all of them (32 MB).
_COPIES, _CELLS = 64, 2**22
# Voxels among which the first that counts is looked for at a time, numbers that a program finishes, and warps for both.
_SEARCH, _FINISH, _WARPS = 1024, 128, 4


class _Tables(NamedTuple):
    """The grids on a device: first bins of cells, edges and scales for the loops, edges and units for their end."""

    first: Tensor
    top: Tensor
    by_class: Tensor
    top_units: Tensor
    class_units: Tensor
    top_steps: int
    class_steps: int


class _Part(NamedTuple):
    """One array in ``out``."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: Any


def tally(voxels: Voxels, threads: int) -> Tally:
    """All statistics of logits on a CUDA device; see ``segcal.kernels.tally``. ``threads`` is not used."""
    found, shift = shifted_tally(voxels)
    return found.moved(shift - voxels.energy_shift)


def shifted_tally(voxels: Voxels) -> tuple[Tally, float]:
    """All statistics, and the shift that the energies are relative to, which the device chooses."""
    score_map, beta = voxels.score_map, 1.0
    scaled = score_map is not None and score_map.is_scale
    if score_map is not None and scaled:
        beta = float(score_map.weight)
    elif score_map is not None:
        before = voxels.logits.argmax(1)
        mapped = score_map(voxels.logits.detach().float())
        voxels = dataclasses.replace(voxels, logits=mapped, score_map=None, uncalibrated=before)
    walk, slots, classwise = Walk.of(voxels), voxels.num_slots, voxels.class_grid is not None
    number, sizes, tensors = walk.voxels, walk.sizes, walk.tensors
    device, classes, top = walk.logits.device, sizes[0], voxels.top_grid
    by_class = voxels.class_grid or ONE_BIN
    bins, few = len(by_class) if classwise else 0, classes <= FEW
    if not number:
        return Tally.zeros(slots, classes, top, voxels.class_grid), 0.0
    size, registers, most = (_FEW if few else _MANY)[classwise]
    blocks, _ = walk.blocks(size)
    programs = min(most, blocks)
    cells = slots * (2 * len(top) + classes * (4 * bins + classes))
    copies = max(1, min(_COPIES, _CELLS // cells))
    parts = _parts(slots, classes, len(top), bins)
    out_size = parts["ends"].stop
    tables = _tables(top, by_class, device)
    room_size = out_size + copies * cells + programs * math.prod(parts["columns"].shape)
    room = torch.zeros(room_size, dtype=torch.int64, device=device)
    launch(
        ends.origin_loop, 1,
        *tensors, room, parts["ends"].start, number, *sizes, walk.ignored, beta, SIZE=_SEARCH, MASKED=walk.masked,
        num_warps=_WARPS,
    )  # fmt: skip
    others = [flat(own, device) for own in (voxels.slots, voxels.uncalibrated)]
    loop, options = (loops.tally_few_loop, {"CLASSES": classes}) if few else (loops.tally_loop, {})
    for start in range(0, blocks, _LAUNCH // size):
        if start:
            room[out_size:].zero_()
        launch(
            loop, programs,
            *tensors, *(room if own is None else own for own in others), tables.first, tables.top, tables.by_class,
            room, start, min(start + _LAUNCH // size, blocks), number, *sizes, walk.ignored, beta, out_size, slots,
            len(top), bins, copies,
            BLOCK=size, MASKED=walk.masked, SLOTTED=others[0] is not None, COMPARE=others[1] is not None,
            SCALED=scaled, CLASSWISE=classwise, TOP_STEPS=tables.top_steps, CLASS_STEPS=tables.class_steps,
            num_warps=1, maxnreg=registers, **options,
        )  # fmt: skip
        columns = room[out_size + copies * cells :].view(torch.float64).view(programs, -1).sum(0)
        finished = [2 * slots * len(top), max(slots * classes**2, len(columns))]
        launch(
            ends.finish_loop, sum(-(-own // _FINISH) for own in finished) + slots * classes * -(-bins // _FINISH),
            room, columns, tables.top_units, tables.class_units, out_size, slots, classes, len(top), bins, copies,
            SIZE=_FINISH, CLASSWISE=classwise, num_warps=_WARPS,
        )  # fmt: skip
    found = room[:out_size].to("cpu", non_blocking=True)
    values = np.full(out_size, 0, np.int64)  # not np.zeros, whose memory comes when it is first used
    arrays = {name: values[part.start : part.stop].view(part.dtype).reshape(part.shape) for name, part in parts.items()}
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    values[:] = found.numpy()
    shift, last = values[-2:].view(np.float64)[0], values[-1]
    if last:
        raise voxels.bad_voxel(number - int(last))
    return _tally_of(arrays, compares=voxels.compares), float(shift)


def _tally_of(found: dict[str, NDArray[Any]], *, compares: bool) -> Tally:
    """The arrays of ``out`` as a tally."""
    columns, confusion, class_count = (found.pop(name) for name in ("columns", "confusion", "class_count"))
    del found["ends"]
    slots, classes = confusion.shape[:2]
    voxels = confusion.sum((1, 2))
    if class_count.size:
        class_count[:, :, 0] = voxels[:, None] - class_count[:, :, 1:].sum(2)
    by_slot = columns[:, ends.OF_SLOT.value]
    flips = np.zeros((slots, 4), np.int64)
    flips[:, 0] = voxels if compares else 0
    flips[:, 1:] = by_slot[:, 2:5]
    losses = np.ascontiguousarray(columns[:, :3, :classes].transpose(0, 2, 1))
    return Tally(
        confusion=confusion, losses=losses, class_count=class_count, flips=flips, energy=by_slot[:, :2].copy(),
        distance=np.zeros((slots, 3)), **found,
    )  # fmt: skip


@lru_cache(maxsize=32)
def _parts(slots: int, classes: int, top: int, bins: int) -> dict[str, _Part]:
    """The arrays of ``out``, in the order of ``finish_loop``."""
    by_class, predicted = (slots, classes, bins), (slots, classes, 2, bins)
    whole: list[tuple[str, tuple[int, ...], Any]] = [
        ("top_count", (slots, 2, top), np.int64),
        ("top_confidence", (slots, 2, top), np.float64),
        ("predicted_count", predicted, np.int64),
        ("predicted_confidence", predicted, np.float64),
        ("class_count", by_class, np.int64),
        ("class_confidence", by_class, np.float64),
        ("class_positive", by_class, np.int64),
        ("confusion", (slots, classes, classes), np.int64),
        ("columns", (slots, ends.COLUMNS.value, max(classes, ends.WIDTH.value)), np.float64),
        ("ends", (ends.ENDS.value,), np.int64),
    ]
    stops = list(accumulate((math.prod(shape) for _, shape, _ in whole), initial=0))
    return {
        name: _Part(*where, shape, dtype) for (name, shape, dtype), where in zip(whole, pairwise(stops), strict=True)
    }


@lru_cache(maxsize=32)
def _tables(top: BinGrid, by_class: BinGrid, device: torch.device) -> _Tables:
    """Made once for each pair of grids: these take Python longer than the device works."""
    grids = (top, torch.float64), (by_class, torch.float32)
    edges = [[torch.from_numpy(array).to(device, dtype) for array in (grid.upper, grid.lower)] for grid, dtype in grids]
    units = [np.concatenate((grid.lower, (grid.upper - grid.lower) / 2**ends.POSITION_BITS)) for grid, _ in grids]
    scaled = [torch.cat((upper, lower, 2**ends.POSITION_BITS / (upper - lower))) for upper, lower in edges]
    first = torch.from_numpy(np.concatenate((top.first, by_class.first))).to(device)
    there = [torch.from_numpy(own).to(device) for own in units]
    return _Tables(first, scaled[0], scaled[1], there[0], there[1], top.steps, by_class.steps)
