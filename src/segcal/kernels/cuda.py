"""The CUDA twin of ``segcal.kernels.reference`` and ``apply_cpu``: triton, one read of the logits.

Logits of a block of voxels are a tile in registers: maximum, exp and the sums over classes never leave the processor.
Histograms are 64-bit integers, a count and a sum of positions within the bin together, so that one atomic addition adds
a voxel and the order of additions does not matter: the same data give the same bits. Neighbouring programs add to
different copies of the histograms, because additions to one address wait for each other. The highest bin of right
predictions and the lowest of class probabilities, which hold most voxels, are summed by block instead.

Precision: exp has a relative error below 3e-7; per-class terms are float32, everything summed over voxels is float64. A
sum of probabilities in a bin is off by at most 4e-6 of the bin's width for every voxel, without bias.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from segcal.kernels import cuda_experts as experts
from segcal.kernels import cuda_loops as loops
from segcal.kernels import cuda_maps as maps
from segcal.kernels.experts import ExpertMap
from segcal.kernels.grid import LIMIT, WIDTH, BinGrid
from segcal.kernels.tally import Tally
from segcal.kernels.voxels import ONE_BIN, Voxels
from segcal.scores import DEPTH

# Voxels that one histogram can count.
_LAUNCH = 2**23
# Voxels of a block, and programs that take the blocks in turn: 32 warps for each of an H200's processors.
_BLOCK, _PROGRAMS = 64, 132 * 32
# Voxels of a block of statistics, and registers of its threads: with one voxel and half of the registers for each
# thread, twice as many warps of an H200 hide each other's waiting.
_TALLY_BLOCK, _TALLY_REGISTERS = 32, 64
# Up to how many classes a thread has all scores of a voxel.
_FEW = 24
# Voxels of a tile of scores, numbers of it that a warp holds in registers, and the most warps that share one.
_TILE_BLOCK, _TILE, _WARPS = 64, 2048, 8
# Copies of the histograms, and numbers in all of them (32 MB).
_COPIES, _CELLS = 64, 2**22
# The tables of expert maps by their weights, with what they were made for, and the bias so that its id stays its own.
_EXPERT_TABLES: Any = WeakTensorKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Walk:
    """How a kernel walks through voxels: logits ``(N, C, V)`` with their strides, and flat labels and mask."""

    logits: Tensor
    labels: Tensor
    mask: Tensor | None
    ignored: int

    @classmethod
    def of(cls, voxels: Voxels) -> Walk:
        """Copies the logits only if their spatial axes cannot be flattened, or to join small images to one."""
        logits = voxels.logits.detach()
        batch, classes, *spatial = logits.shape
        inner = math.prod(spatial)
        logits = logits.reshape(batch, classes, inner)
        if inner < _BLOCK:
            logits = logits.transpose(0, 1).reshape(1, classes, batch * inner)
        ignored = int(np.iinfo(np.int64).min) if voxels.ignore_index is None else voxels.ignore_index
        labels, mask = (_flat(own, logits.device) for own in (voxels.labels, voxels.mask))
        assert labels is not None
        return cls(logits, labels, mask, ignored)

    @property
    def voxels(self) -> int:
        """Voxels of all images."""
        return len(self.logits) * self.logits.shape[2]

    @property
    def masked(self) -> bool:
        """Whether there is a mask."""
        return self.mask is not None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, labels and mask; without a mask anything that is not read."""
        return self.logits, self.labels, self.labels if self.mask is None else self.mask

    @property
    def sizes(self) -> tuple[int, ...]:
        """Classes, voxels of an image, strides by image, class and voxel."""
        return *self.logits.shape[1:], *self.logits.stride()

    def blocks(self, size: int = _BLOCK) -> tuple[int, int]:
        """Blocks of all images and of one."""
        per_image = -(-self.logits.shape[2] // size)
        return len(self.logits) * per_image, per_image


def tally(voxels: Voxels, threads: int) -> Tally:
    """All statistics of logits on a CUDA device; see ``segcal.kernels.tally``. ``threads`` is not used."""
    score_map, beta, depth = voxels.score_map, 1.0, math.inf
    if score_map is not None and score_map.is_scale:
        beta, depth = float(score_map.weight), DEPTH
    elif score_map is not None:
        before = voxels.logits.argmax(1)
        mapped = score_map(voxels.logits.detach().float())
        voxels = dataclasses.replace(voxels, logits=mapped, score_map=None, uncalibrated=before)
    walk, slots = Walk.of(voxels), voxels.num_slots
    device, classes, top = walk.logits.device, walk.logits.shape[1], voxels.top_grid
    by_class = voxels.class_grid or ONE_BIN
    bins = 0 if voxels.class_grid is None else len(by_class)
    shapes = [(slots, 2, len(top)), (slots, classes, 2, bins), (slots, classes, bins), (slots, classes, bins),
              (slots, classes, classes)]  # fmt: skip
    sizes = [math.prod(shape) for shape in shapes]
    copies = max(1, min(_COPIES, _CELLS // sum(sizes)))
    total: Tally | None = None
    size, registers = (_TALLY_BLOCK, _TALLY_REGISTERS) if bins else (_BLOCK, None)
    blocks, per_image = walk.blocks(size)
    programs, width = min(_PROGRAMS, blocks), max(classes, 8)
    others = [_flat(own, device) for own in (voxels.slots, voxels.uncalibrated)]
    *top_tables, top_steps = _tables(top, torch.float64, device)
    *class_tables, class_steps = _tables(by_class, torch.float32, device)
    for start in range(0, blocks, _LAUNCH // size):
        stop = min(start + _LAUNCH // size, blocks)
        cells, sums, bad = _zeros(device, (copies, sum(sizes)), (programs, slots * loops.COLUMNS * width))
        loops.tally_loop[(programs,)](
            *walk.tensors, *(bad if own is None else own for own in others), *top_tables, *class_tables, cells, sums,
            bad, start, stop, per_image, walk.voxels, *walk.sizes, walk.ignored, beta, depth, voxels.energy_shift,
            slots, len(top), bins, width, sum(sizes), copies,
            BLOCK=size, MASKED=walk.masked, SLOTTED=others[0] is not None, COMPARE=others[1] is not None,
            SCALED=depth < math.inf, CLASSWISE=bins > 0, TOP_STEPS=top_steps, CLASS_STEPS=class_steps, num_warps=1,
            maxnreg=registers,
        )  # fmt: skip
        found = torch.cat((cells.sum(0), sums.sum(0).view(torch.int64), bad)).cpu().numpy()
        if found[-1]:
            raise voxels.bad_voxel(walk.voxels - int(found[-1]))
        ends = list(accumulate(sizes))
        counts, confidences = _unpacked(found[: ends[2]], _edges_of_cells(top, by_class, slots, classes, bins))
        whole = [counts[: ends[0]], counts[ends[0] : ends[1]], counts[ends[1] :]]
        whole += [found[ends[2] : ends[3]], found[ends[3] : ends[4]]]
        sums_of_cells = np.split(confidences, ends[:2])
        columns = found[ends[4] : -1].view(np.float64).reshape(slots, loops.COLUMNS, width)
        launched = _tally_of(
            [own.reshape(shape) for own, shape in zip(whole, shapes, strict=True)],
            [own.reshape(shape) for own, shape in zip(sums_of_cells, shapes[:3], strict=True)],
            columns,
        )
        if total is None:
            total = launched
        else:
            total.add(launched)
    total = Tally.zeros(slots, classes, top, voxels.class_grid) if total is None else total
    if voxels.compares:
        total.flips[:, 0] = total.confusion.sum((1, 2))
    return total


def _tally_of(counts: list[NDArray[np.int64]], sums: list[NDArray[np.float64]], by_column: Any) -> Tally:
    """What a launch found: counts and sums of cells, plain counts, and sums by column, in the order of the loop."""
    top_count, predicted_count, class_count, positive, confusion = counts
    top_confidence, predicted_confidence, class_confidence = sums
    slots, classes = confusion.shape[:2]
    columns = by_column[:, :, :classes]
    right = columns[:, loops.RIGHT].astype(np.int64)
    voxels = confusion.sum((1, 2)) + right.sum(1)
    confusion[:, range(classes), range(classes)] += right
    hot_count, hot_confidence = columns[:, loops.HOT_COUNT].astype(np.int64), columns[:, loops.HOT_CONFIDENCE]
    top_count[:, 1, -1] += hot_count.sum(1)
    top_confidence[:, 1, -1] += hot_confidence.sum(1)
    if positive.size:
        predicted_count[:, :, 1, -1] += hot_count
        predicted_confidence[:, :, 1, -1] += hot_confidence
        class_count += predicted_count.sum(2)
        class_confidence += predicted_confidence.sum(2)
        class_count[:, :, 0] = voxels[:, None] - class_count[:, :, 1:].sum(2)
        class_confidence[:, :, 0] += columns[:, loops.LOW]
        positive += predicted_count[:, :, 1]
    flips = np.zeros((slots, 4), np.int64)
    flips[:, 1:] = by_column[:, loops.BY_SLOT, 2:5]
    losses = np.ascontiguousarray(columns[:, : loops.ENTROPY + 1].transpose(0, 2, 1))
    energy, distance = by_column[:, loops.BY_SLOT, :2].copy(), np.zeros((slots, 3))
    return Tally(
        confusion, losses, top_count, top_confidence, predicted_count, predicted_confidence, class_count,
        class_confidence, positive, flips, energy, distance,
    )  # fmt: skip


def _unpacked(cells: NDArray[np.int64], edges: tuple[Any, Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Counts and sums of probabilities from the cells of histograms, with their ``_edges_of_cells``."""
    lower, step = edges
    count = cells >> loops.COUNT_BIT
    return count, count * lower + (cells & (2**loops.COUNT_BIT - 1)) * step


def _edges_of_cells(
    top: BinGrid, by_class: BinGrid, slots: int, classes: int, bins: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The lower edge of each cell's bin and the unit of positions in it: cells of top labels, predicted, classes."""
    return _cached_edges(top.upper.tobytes(), by_class.upper.tobytes(), slots, classes, bins)


@lru_cache(maxsize=32)
def _cached_edges(top: bytes, by_class: bytes, slots: int, classes: int, bins: int) -> tuple[Any, Any]:
    first, second = (BinGrid.from_edges(np.frombuffer(edges)) for edges in (top, by_class))
    times = 3 * slots * classes if bins else 0
    lower, upper = (
        np.concatenate((np.tile(getattr(first, side), 2 * slots), np.tile(getattr(second, side), times)))
        for side in ("lower", "upper")
    )
    return lower, (upper - lower) / 2**loops.POSITION_BITS


@lru_cache(maxsize=32)
def _cached_tables(edges: bytes, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """First bins of cells, upper and lower edges, positions per unit, and how far the first bins may be below."""
    grid = BinGrid.from_edges(np.frombuffer(edges))
    upper, lower = (torch.from_numpy(array).to(device, dtype) for array in (grid.upper, grid.lower))
    steps = int(np.diff(np.append(grid.first, len(grid))).max())
    return torch.from_numpy(grid.first).to(device), upper, lower, 2**loops.POSITION_BITS / (upper - lower), steps


def _tables(grid: BinGrid, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return _cached_tables(grid.upper.tobytes(), dtype, device)


def temperature_sums(voxels: Voxels, beta: float) -> Tensor:
    """Sums of the valid voxels, in parts, and how far from the end the first unfit one is; ``end_sums`` adds up.

    See ``segcal.kernels.fitting_passes``.
    """
    walk = Walk.of(voxels)
    blocks, per_image = walk.blocks()
    parts = torch.zeros(4 * _PROGRAMS + 1, dtype=torch.float64, device=walk.logits.device)
    loops.temperature_loop[(min(_PROGRAMS, blocks),)](
        *walk.tensors, parts, parts[-1:].view(torch.int64), blocks, per_image, walk.voxels, *walk.sizes, walk.ignored,
        beta, BLOCK=_BLOCK, MASKED=walk.masked, num_warps=1,
    )  # fmt: skip
    return parts


def survey(voxels: Voxels, edges: Tensor) -> tuple[Tensor, float, bool]:
    """The strata ``(v,)`` int32 of a ``Survey``, the sum of the NLL, and whether some class is impossible."""
    walk = Walk.of(voxels)
    device, (blocks, per_image) = walk.logits.device, walk.blocks()
    strata = torch.empty(walk.voxels, dtype=torch.int32, device=device)
    impossible, sums, bad = _zeros(device, (1,), (min(_PROGRAMS, blocks),))
    loops.survey_loop[(len(sums),)](
        *walk.tensors, edges.to(device), strata, sums, bad, impossible, blocks, per_image, walk.voxels, *walk.sizes,
        walk.ignored, len(edges), BLOCK=_BLOCK, MASKED=walk.masked, num_warps=1,
    )  # fmt: skip
    nll, last, deep = torch.stack((sums.sum(), bad[0], impossible[0])).tolist()
    if last:
        raise voxels.bad_voxel(walk.voxels - int(last))
    return strata, nll, deep > 0


def apply_temperature(logits: Tensor, beta: float) -> Tensor:
    """``log S(beta z)`` of logits ``(N, C, *spatial)``, with exactly their argmax and in their dtype."""
    return _map(logits, maps.apply_temperature_loop, (), beta)


def apply_experts(logits: Tensor, expert_map: ExpertMap, *, keep: bool) -> Tensor:
    """``log S(expert_map(z))`` of logits ``(N, C, *spatial)`` in their dtype; ``keep`` keeps exactly their argmax."""
    classes = logits.shape[1]
    expert_map.check_classes(classes)
    options = {"KIND": experts.KINDS[expert_map.features], "ROUTED": len(expert_map.weight) > 1, "KEEP": keep}
    if classes <= _FEW:
        tables = _expert_tables(expert_map, logits.device, classes)
        size = _TILE_BLOCK // (1 + options["ROUTED"])
        return _map(logits, experts.apply_few_experts_loop, tables, size=size, CLASSES=classes, **options)
    rows = _rows(classes)
    size = min(_TILE_BLOCK, _TILE * _WARPS // rows)
    room = (_PROGRAMS, classes, size) if expert_map.features == "gaps" else (1,)
    order = torch.zeros(room, dtype=torch.int16, device=logits.device)
    tables = *_expert_tables(expert_map, logits.device, rows), order
    warps = max(1, rows * size // _TILE)
    return _map(logits, experts.apply_experts_loop, tables, size=size, warps=warps, CP=rows, **options)


def apply_knots(logits: Tensor, centres: Tensor, knots: Tensor) -> Tensor:
    """``log S(g(log S(z)))`` of logits ``(N, C, *spatial)``; see ``apply_cpu.apply_knots``."""
    tables = tuple(own.to(logits.device, torch.float32) for own in (centres, knots))
    return _map(logits, maps.apply_curve_loop, tables, len(centres), LIMIT, WIDTH, STEPS=0, KEEP=True)


def apply_bins(logits: Tensor, edges: Tensor, values: Tensor) -> Tensor:
    """Log-probabilities from the ``values (C, bins)`` of bins; see ``apply_cpu.apply_bins``."""
    classes, bins = values.shape
    steps = (bins - 1).bit_length()
    limits = torch.full((classes, 2**steps - 1), torch.inf, device=logits.device)
    limits[:, : bins - 1] = edges
    tables = limits, values.to(logits.device, torch.float32).contiguous()
    return _map(logits, maps.apply_curve_loop, tables, bins, LIMIT, WIDTH, STEPS=steps, KEEP=False)


def _rows(classes: int) -> int:
    """Rows of a tile of scores: the classes rounded up to a power of two."""
    return max(8, 1 << (classes - 1).bit_length())


def _expert_tables(expert_map: ExpertMap, device: torch.device, rows: int) -> tuple[Tensor, ...]:
    """``_tables_of``, kept while the weights live: making them takes Python longer than the device maps an image."""
    weight, bias = expert_map.weight, expert_map.bias
    if weight.is_inference() or bias.is_inference():  # these do not say whether they were changed
        return _tables_of(expert_map, device, rows)
    made_for = expert_map.features, id(bias), weight._version, bias._version, device, rows
    if weight not in _EXPERT_TABLES or _EXPERT_TABLES[weight][0] != made_for:
        _EXPERT_TABLES[weight] = made_for, bias, _tables_of(expert_map, device, rows)
    tables: tuple[Tensor, ...] = _EXPERT_TABLES[weight][-1]
    return tables


def _tables_of(expert_map: ExpertMap, device: torch.device, rows: int) -> tuple[Tensor, ...]:
    """Weights ``(E, inputs, rows)``, tilt and bias ``(E, rows)`` of the loop, in float32; zero beyond the classes."""
    classes, features = expert_map.num_classes, expert_map.features
    weight, bias = expert_map.weight.double(), expert_map.bias.double()
    tilt = torch.zeros_like(bias)
    if features in ("logits", "log-probs", "own-logit"):
        tilt = expert_map.tilt
    if features == "gaps":  # scores fall by what the map returns, from rank to rank
        weight, bias = (
            torch.nn.functional.pad(own.cumsum(1), (0,) * (2 * own.ndim - 4) + (1, 0)) for own in (weight, bias)
        )
        tilt = torch.zeros_like(bias)
    if features in ("margins", "gaps"):
        bias = -bias
    tables = [
        torch.nn.functional.pad(own, (0, rows - classes)).float() for own in (-weight.transpose(1, 2), tilt, bias)
    ]
    there = torch.cat([own.flatten() for own in tables]).to(device)
    starts = accumulate((own.numel() for own in tables), initial=0)
    return tuple(there[n : n + own.numel()].view(own.shape) for n, own in zip(starts, tables, strict=False))


def _map(
    logits: Tensor, loop: Any, tables: tuple[Tensor, ...], *numbers: float, size: int = _BLOCK, warps: int = 1,
    **options: Any,
) -> Tensor:  # fmt: skip
    """The log-probabilities that a loop writes."""
    walk = Walk.of(Voxels(logits, logits))
    out = torch.empty(walk.logits.shape, dtype=logits.dtype, device=logits.device)
    blocks, per_image = walk.blocks(size)
    loop[(min(_PROGRAMS, blocks),)](
        walk.logits, out, *tables, blocks, per_image, *walk.sizes, *out.stride(), *numbers, BLOCK=size,
        num_warps=warps, **options,
    )  # fmt: skip
    if len(out) == len(logits):
        return out.view(logits.shape)
    classes = logits.shape[1]
    return out.view(classes, len(logits), -1).transpose(0, 1).reshape(logits.shape)


def _zeros(device: torch.device, counts: tuple[int, ...], sums: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros for whole numbers, for float64 sums, and one whole number more, in one piece of memory."""
    first, second = math.prod(counts), math.prod(sums)
    room = torch.zeros(first + second + 1, dtype=torch.int64, device=device)
    return room[:first].view(counts), room[first:-1].view(torch.float64).view(sums), room[-1:]


def _flat(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device).reshape(-1)
