"""The CUDA twin of ``segcal.kernels.reference``, ``apply_cpu`` and the passes of fits: triton, one read of the logits.

Logits of a block of voxels are a tile in registers: maximum, exp and the sums over classes never leave the processor.
``cuda_tally`` has the statistics.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from segcal.kernels import cuda_experts as experts
from segcal.kernels import cuda_loops as loops
from segcal.kernels import cuda_maps as maps
from segcal.kernels.cuda_tally import shifted_tally as shifted_tally
from segcal.kernels.cuda_tally import tally as tally
from segcal.kernels.cuda_walk import BLOCK, FEW, PROGRAMS, Walk, joined, launch
from segcal.kernels.experts import ExpertMap
from segcal.kernels.grid import LIMIT, WIDTH
from segcal.kernels.voxels import Voxels

# How few classes are mapped: voxels of a block, warps and programs. Where no voxel waits for others, a thread has one
# and a program few blocks, so that processors that are done get the next; where voxels share an expert, a program is a
# warp, and with fewer registers (None: as many as it asks for) there are more of them at a time.
_ALONE: dict[str, Any] = {"size": 128, "warps": 4, "programs": 2**16}
_TOGETHER: dict[str, Any] = {"size": 32, "programs": 2**16, "maxnreg": 96}
# Voxels of a tile of scores, numbers of it that a warp holds in registers, and the most warps that share one.
_TILE_BLOCK, _TILE, _WARPS = 64, 2048, 8
# The tables of expert maps by their weights, with what they were made for, and the bias so that its id stays its own.
_EXPERT_TABLES: Any = WeakTensorKeyDictionary()


def temperature_sums(voxels: Voxels, beta: float) -> Tensor:
    """Sums of the valid voxels, in parts, and how far from the end the first unfit one is; ``end_sums`` adds up.

    See ``segcal.kernels.fitting_passes``.
    """
    walk = Walk.of(voxels)
    blocks, per_image = walk.blocks()
    parts = torch.zeros(4 * PROGRAMS + 1, dtype=torch.float64, device=walk.logits.device)
    launch(
        loops.temperature_loop, min(PROGRAMS, blocks),
        *walk.tensors, parts, parts[-1:].view(torch.int64), blocks, per_image, walk.voxels, *walk.sizes, walk.ignored,
        beta, BLOCK=BLOCK, MASKED=walk.masked, num_warps=1,
    )  # fmt: skip
    return parts


def survey(voxels: Voxels, edges: Tensor) -> tuple[Tensor, float, bool]:
    """The strata ``(v,)`` int32 of a ``Survey``, the sum of the NLL, and whether some class is impossible."""
    walk = Walk.of(voxels)
    device, (blocks, per_image) = walk.logits.device, walk.blocks()
    strata = torch.empty(walk.voxels, dtype=torch.int32, device=device)
    impossible, sums, bad = _zeros(device, (1,), (min(PROGRAMS, blocks),))
    launch(
        loops.survey_loop, len(sums),
        *walk.tensors, edges.to(device), strata, sums, bad, impossible, blocks, per_image, walk.voxels, *walk.sizes,
        walk.ignored, len(edges), BLOCK=BLOCK, MASKED=walk.masked, num_warps=1,
    )  # fmt: skip
    nll, last, deep = torch.stack((sums.sum(), bad[0], impossible[0])).tolist()
    if last:
        raise voxels.bad_voxel(walk.voxels - int(last))
    return strata, nll, deep > 0


def apply_temperature(logits: Tensor, beta: float) -> Tensor:
    """``log S(beta z)`` of logits ``(N, C, *spatial)``, with exactly their argmax and in their dtype."""
    classes = logits.shape[1]
    if classes > FEW:
        return _map(logits, maps.apply_temperature_loop, (), beta)
    return _map(logits, maps.apply_few_temperature_loop, (), beta, CLASSES=classes, **_ALONE)


def apply_mixture(logits: Tensor, beta: float, log_weights: tuple[float, float, float]) -> Tensor:
    """``log(w1 S(beta z) + w2 S(z) + w3 / C)`` in the dtype of the logits, with exactly their argmax, in their order.

    C are a voxel's possible classes. The weights sum to one; the logarithm of one that is zero is -inf.
    """
    classes = logits.shape[1]
    if classes > FEW:
        return _map(logits, maps.apply_mixture_loop, (), beta, *log_weights)
    return _map(logits, maps.apply_few_mixture_loop, (), beta, *log_weights, CLASSES=classes, **_ALONE)


def apply_experts(logits: Tensor, expert_map: ExpertMap, *, keep: bool) -> Tensor:
    """``log S(expert_map(z))`` of logits ``(N, C, *spatial)`` in their dtype; ``keep`` keeps exactly their argmax."""
    classes = logits.shape[1]
    expert_map.check_classes(classes)
    options: dict[str, Any] = {
        "KIND": experts.KINDS[expert_map.features],
        "ROUTED": len(expert_map.weight) > 1,
        "KEEP": keep,
    }
    if classes <= FEW:
        tables = _expert_tables(expert_map, logits.device, classes + classes % 2)
        options |= _TOGETHER if options["ROUTED"] else _ALONE
        return _map(logits, experts.apply_few_experts_loop, tables, CLASSES=classes, **options)
    rows = _rows(classes)
    size = min(_TILE_BLOCK, _TILE * _WARPS // rows)
    room = (PROGRAMS, classes, size) if expert_map.features == "gaps" else (1,)
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
    steps = max(1, (bins - 1).bit_length())  # 0 stands for knots
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
    known, _, tables = _EXPERT_TABLES.get(weight, (None, None, ()))
    if known != made_for:
        tables = _tables_of(expert_map, device, rows)
        _EXPERT_TABLES[weight] = made_for, bias, tables
    return cast("tuple[Tensor, ...]", tables)


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
    logits: Tensor, loop: Any, tables: tuple[Tensor, ...], *numbers: float, size: int = BLOCK, warps: int = 1,
    programs: int = PROGRAMS, **options: Any,
) -> Tensor:  # fmt: skip
    """The log-probabilities that a loop writes."""
    flat = joined(logits)
    images, classes, inner = flat.shape
    blocks = images * -(-inner // size)
    out = torch.empty(flat.shape, dtype=logits.dtype, device=logits.device)
    launch(
        loop, min(programs, blocks), flat, out, *tables, blocks, classes, inner, *flat.stride(), *numbers,
        BLOCK=size, num_warps=warps, **options,
    )  # fmt: skip
    if images == len(logits):
        return out.view(logits.shape)
    return out.view(classes, len(logits), -1).transpose(0, 1).reshape(logits.shape)


def _zeros(device: torch.device, counts: tuple[int, ...], sums: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros for whole numbers, for float64 sums, and one whole number more, in one piece of memory."""
    first, second = math.prod(counts), math.prod(sums)
    room = torch.zeros(first + second + 1, dtype=torch.int64, device=device)
    return room[:first].view(counts), room[first:-1].view(torch.float64).view(sums), room[-1:]
