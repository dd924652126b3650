"""How far each function is from its exact value on hard inputs: ``(function, path, input, error)``, one by one.

A path is the way through the code: a type, or ``compiled`` for the loops that large float32 inputs take. Tests hold the
errors to ``torture.bounds``; ``torture/table.py`` measures them for the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from reference import exact
from reference import losses as naive_losses
from reference import metrics as naive
from segcal import losses
from segcal.metrics import METRICS
from segcal.statistics import VoxelStatistics
from torture import inputs

BINS = 15
BANDS, EDGE = ("near", "far"), 3


class Found(NamedTuple):
    """One comparison."""

    function: str
    path: str
    given: str
    error: float


def error(found: float, expected: float, floor: float = 1.0) -> float:
    """``|found - expected|`` as a share of the latter, or of ``floor`` if that is more; inf where one is undefined."""
    if found == expected or (math.isnan(found) and math.isnan(expected)):
        return 0.0
    gap = abs(found - expected) / max(abs(expected), floor)
    return gap if math.isfinite(gap) else math.inf


# -- metrics ----------------------------------------------------------------------------------------------------------


def metric_inputs(seed: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every family in every type with few classes, and up to a thousand classes."""
    for dtype in inputs.TYPES:
        for turn, family in enumerate(inputs.FAMILIES):
            classes = (2, 3, 7)[(turn + seed) % 3]
            z = inputs.logits(family, 60, classes, dtype, seed)
            yield f"{family}, {dtype}, {classes} classes", z, inputs.labels(z, seed)
    for classes in (19, 150, 1000):
        for family in ("ordinary", "±3e38", "ties"):
            z = inputs.logits(family, 12, classes, torch.float32, seed)
            yield f"{family}, {classes} classes", z, inputs.labels(z, seed)
    z = inputs.logits("ordinary", 1, 4, torch.float32, seed)
    yield "a single voxel", z, inputs.labels(z, seed)
    z = inputs.logits("sure", 40, 3, torch.float32, seed)
    z[:, 0] = 60.0
    yield "all background", z, torch.zeros(40, dtype=torch.int64)


def near_an_edge(p: list[float], bins: int) -> bool:
    """Whether float32 may put a probability into the next bin; one that is on the edge in float64 stays."""
    places = [value * bins for value in p]
    return any(0 < abs(place - round(place)) < 1e-5 for place in places if place > 1e-5)


def metric_errors(seed: int) -> Iterator[Found]:
    """All metrics of probabilities and confusions, from both kernels."""
    for given, z, y in metric_inputs(seed):
        voxels = [exact.voxel(*pair) for pair in zip(z.double().tolist(), y.tolist(), strict=True)]
        kept = torch.tensor([not near_an_edge(voxel.p, BINS) for voxel in voxels])
        if not kept.any():
            continue
        voxels = [voxel for voxel, own in zip(voxels, kept.tolist(), strict=True) if own]
        distance = torch.arange(len(z)) % 7 + 0.5
        expected = _expected(voxels, y[kept].tolist(), distance[kept].tolist(), z[kept].double())
        for backend, path in (("reference", "float64"), ("numba", "compiled")):
            if backend == "numba" and z.dtype == torch.float64:
                continue
            stats = VoxelStatistics(z.shape[1], (BINS,), regions=BANDS, backend=backend)
            regions = {"near": distance < EDGE, "far": distance >= EDGE}
            before = z.roll(1, 1).argmax(1)
            stats.update(z, y, mask=kept, regions=regions, distance=distance, uncalibrated=before)
            for name, value in expected.items():
                own = METRICS[name].function(stats, **({"bands": BANDS} if name == "ba-ece" else {}))
                # The share of doubt that an equal-mass metric admits itself does not count.
                away = error(float(own), value, floor=1e-30 if name in ("nll", "brier", "entropy") else 1.0)
                yield Found(name, path, given, max(0.0, away - own.bound))


def _expected(voxels: list[exact.Voxel], y: list[int], distance: list[float], z: Tensor) -> dict[str, float]:
    p, classes = [voxel.p for voxel in voxels], z.shape[1]
    winners, before = z.argmax(1).tolist(), z.roll(1, 1).argmax(1).tolist()
    # By the logits: probabilities of different logits may round to the same number.
    confidence = [own[winner] for own, winner in zip(p, winners, strict=True)]
    hits = [winner == label for winner, label in zip(winners, y, strict=True)]

    def binned(here: list[int]) -> list[tuple[int, float]]:
        return naive.gaps([confidence[i] for i in here], [hits[i] for i in here], BINS)

    def total(gaps: list[tuple[int, float]]) -> float:
        return math.fsum(n * gap for n, gap in gaps) / len(y)

    everything = list(range(len(y)))
    bands = [[i for i in everything if (distance[i] < EDGE) == near] for near in (True, False)]
    weights = [1 / (naive.mean(distance[i] for i in band) + 1) if band else 0.0 for band in bands]
    in_bands = [abs(naive.mean(confidence[i] - hits[i] for i in band)) if band else 0.0 for band in bands]
    found = {
        "nll": exact.mean([v.nll for v in voxels]),
        "entropy": exact.mean([v.entropy for v in voxels]),
        "brier": exact.mean([v.brier for v in voxels]),
        "confidence-balance": exact.mean([v.nll - v.entropy for v in voxels]),
        "free-energy-std": exact.spread([v.energy for v in voxels]),
        "accuracy": naive.mean(map(float, hits)),
        "flip": naive.mean(float(w != b) for w, b in zip(winners, before, strict=True)),
        "ece": total(binned(everything)),
        "mce": max(gap for _, gap in binned(everything)),
        "ace": naive.mean(gap for _, gap in binned(everything)),
        "sce": math.fsum(total(binned([i for i in everything if winners[i] == c])) for c in set(winners)),
        "ba-ece": math.fsum(w * gap for w, gap in zip(weights, in_bands, strict=True)) / math.fsum(weights),
        "ece-wrong": naive.mean(confidence[i] for i in everything if not hits[i]),
        "ece-right": naive.mean(1 - confidence[i] for i in everything if hits[i]),
        "dsc": naive.mean(v for v in naive.dice(winners, y, classes) if not math.isnan(v)),
        "miou": naive.mean(v for v in naive.iou(winners, y, classes) if not math.isnan(v)),
    }
    if classes <= 20:  # the naive loops over classes take minutes with a thousand
        found["cece"] = naive.cece(p, y, BINS)
        found["ace-adaptive"] = naive.ace_adaptive(p, y, BINS)
        found["tace"] = naive.ace_adaptive(p, y, BINS, threshold=1e-3)
    return found


# -- losses -----------------------------------------------------------------------------------------------------------

LOSSES = {
    "ce": naive_losses.ce,
    "focal": naive_losses.focal,
    "ls": naive_losses.ls,
    "ecp": naive_losses.ecp,
    "meep": naive_losses.meep,
    "mbls": naive_losses.mbls,
    "svls": naive_losses.svls,
    "nacl": naive_losses.nacl,
    "crac": lambda batch: naive_losses.crac(batch, *_tables(len(next(iter(batch[0].values()))[0]))),
    "dice": naive_losses.dice,
    "ce-dice": lambda batch: naive_losses.ce(batch) + naive_losses.dice(batch),
    "mmce": naive_losses.mmce,
    "ml1-ace": naive_losses.ml1_ace,
    "bwcr": naive_losses.bwcr,
}
#: Where the derivative jumps (at tied confidences, at edges of bins), rounding decides which side it is.
JUMPS = {"mmce": ("flat", "ties", "one ulp", "subnormal", "±1e4", "±3e38", "sure"), "ml1-ace": ("one ulp", "flat")}


def _tables(classes: int) -> tuple[list[list[float]], list[list[float]]]:
    return [[0.3] * classes, [0.7] * classes], [[0.1] * classes, [0.5] * classes]


def _loss(name: str, classes: int) -> losses.Loss:
    if name != "crac":
        return losses.LOSSES[name].of_classes(classes)
    return lambda z, y: losses.crac(z, y, *(torch.tensor(table, dtype=torch.float64) for table in _tables(classes)))  # type: ignore[return-value]


def loss_inputs(family: str, classes: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Two images in two views each, of which no label is impossible; one voxel is ignored."""
    space = (2, 5, 6)
    views = [inputs.logits(family, math.prod(space), classes, dtype, seed, view) for view in (0, 1)]
    both = torch.minimum(*views)
    y = inputs.labels(torch.where(torch.isinf(both), both, views[0]), seed).view(space)
    z = torch.cat([view.view(*space, classes) for view in views]).movedim(-1, 1).contiguous()
    y[0, 0, 0] = 255
    return z, torch.cat((y, y))


def loss_errors(seed: int) -> Iterator[Found]:
    """Values and gradients of every loss; half precision is widened first, so float32 stands for it."""
    for turn, family in enumerate(inputs.FAMILIES):
        classes = (2, 4, 11)[(turn + seed) % 3]
        for dtype in (torch.float64, torch.float32):
            z, y = loss_inputs(family, classes, dtype, seed)
            images = naive_losses.images(z.double(), y)
            path, given = str(dtype).removeprefix("torch."), f"{family}, {classes} classes"
            for name, reference in LOSSES.items():
                if name == "ml1-ace" and family in ("one ulp", "flat"):
                    continue  # values jump, too
                value, slope = _value_and_slope(name, z, y)
                expected = reference(images)
                # The loss of a voxel may be too large for the type: inf says so, and only that.
                over = value == math.inf and family == "±3e38"
                yield Found(name, path, given, 0.0 if over else error(value, expected))
                if (
                    dtype == torch.float32
                    and family not in JUMPS.get(name, ())
                    and not math.isinf(expected)
                    and not over
                ):
                    exactly = _value_and_slope(name, z.double(), y)[1]
                    scale = max(float(exactly.abs().max()), 1 / y.numel())
                    away = float((slope.double() - exactly).abs().max()) / scale
                    yield Found(name, "gradient", given, away if math.isfinite(away) else math.inf)


def _value_and_slope(name: str, z: Tensor, y: Tensor) -> tuple[float, Tensor]:
    z = z.detach().clone().requires_grad_()
    value = _loss(name, z.shape[1])(z, y)
    value.backward()
    assert z.grad is not None
    return value.item(), z.grad
