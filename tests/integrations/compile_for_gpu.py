"""Compiles every triton kernel for an H200 on a machine without a GPU, and prints their names.

Nothing is run: launches end after compilation, and what they would have computed stays as it was allocated.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from segcal.calibrators.trust.features import _LOWEST, _UNIT, _WIDEST, REACH, WINDOWS
from segcal.calibrators.trust.levelling import BELOW
from segcal.calibrators.trust.rising import bin_centres
from segcal.calibrators.trust.slopes import COLUMNS
from segcal.kernels import cuda, cuda_distance, cuda_trust
from segcal.kernels.experts import ExpertMap
from segcal.kernels.grid import BinGrid
from segcal.kernels.voxels import AffineMap, Voxels

MODULES = "loops", "maps", "experts", "tally_loops", "tally_ends", "trust_loops", "distance_loops"
COMPILED = set()


class Hopper:
    """A driver that knows the GPU's kind, and has none."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """In place of a launch."""
    compiled = _run(self, *arguments, grid=grid, warmup=True, **options)
    assert compiled.asm["cubin"]
    COMPILED.add(self.fn.__name__)


_run = JITFunction.run
# Classes of the kernels for few and for many.
FEW, MANY = 5, 26
SIZE = (2, 45, 52)


def statistics(classes: int, dtype: torch.dtype, **more: Any) -> None:
    """``update`` with and without classwise histograms, and what fits ask for."""
    by_class = BinGrid.classwise((15, 50), (1e-3,))
    z, y = torch.zeros(SIZE[0], classes, *SIZE[1:], dtype=dtype), torch.zeros(SIZE, dtype=torch.int64)
    for grid in (by_class, None):
        given = Voxels(z, y, BinGrid.top_label((15, 50), by_class), grid, 255, **more)
        cuda.shifted_tally(given)
    cuda.temperature_sums(given, 0.7)
    cuda.survey(given, torch.tensor([0.6, 0.9]))


def maps(classes: int, dtype: torch.dtype) -> None:
    """Every map of logits."""
    z = torch.zeros(SIZE[0], classes, *SIZE[1:], dtype=dtype)
    cuda.apply_temperature(z, 0.7)
    cuda.apply_mixture(z, 0.7, (math.log(0.5), math.log(0.5), -math.inf))
    cuda.apply_knots(z, bin_centres().float(), bin_centres().float())
    cuda.apply_bins(z, torch.rand(classes, 9).sort(1).values, torch.rand(classes, 10))
    for features in ("logits", "own-logit", "log-probs", "margins", "gaps"):
        outputs = classes - (features == "gaps")
        inputs = 1 if features == "own-logit" else outputs
        for experts in {1, 1 if features == "own-logit" else classes}:
            weights = torch.zeros(experts, outputs, inputs), torch.zeros(experts, outputs)
            cuda.apply_experts(z, ExpertMap(features, *weights), keep=features in ("margins", "gaps"))


def trust() -> None:
    """What ``trust`` is made of."""
    z = torch.zeros(SIZE[0], FEW, *SIZE[1:])
    winner, point, rounded, *_ = cuda_trust.describe(z, 0.7, _LOWEST, _WIDEST, _UNIT)
    image = torch.zeros(SIZE[0], FEW), torch.zeros(SIZE[0], 2)
    found = cuda_trust.features(point, winner, rounded, image, WINDOWS, _UNIT, REACH)
    units, inputs = 24, found.shape[1]
    shapes = (inputs,), (inputs,), (5, inputs, units), (5, FEW, units), (5, units, units), (5, 1, units), (5, units, 1)
    cuda_trust.correct(found, winner, tuple(map(torch.zeros, shapes)), 8.0)
    curves = bin_centres(), bin_centres(), torch.zeros(FEW, COLUMNS)
    for correction, share in ((None, 0.0), (point[:, 0], 0.5)):
        odds = cuda_trust.odds(found, winner, correction, curves, share, torch.ones(SIZE[0]))
    cuda_trust.level(z, odds, winner, BELOW)


def main() -> None:
    """Compile everything; fails if a kernel was left out."""
    driver.set_active(Hopper())
    JITFunction.run = compile_only
    for classes, dtype in ((FEW, torch.float32), (MANY, torch.bfloat16)):
        statistics(classes, dtype)
        maps(classes, dtype)
    mask, other = torch.ones(SIZE, dtype=torch.bool), torch.zeros(SIZE, dtype=torch.int64)
    more = {"mask": mask, "slots": other.to(torch.uint8), "num_slots": 3, "uncalibrated": other}
    statistics(FEW, torch.float16, score_map=AffineMap.temperature(1.7), **more)
    trust()
    far = cuda_distance.distances(mask, (1.0, 1.0))
    for slots in (None, other.to(torch.uint8)):
        cuda_distance.sums_by_slot(far, mask, slots, 4)

    there = {
        name
        for module in MODULES
        for name, own in vars(import_module(f"segcal.kernels.cuda_{module}")).items()
        if isinstance(own, JITFunction) and name.endswith("_loop")
    }
    assert there == COMPILED, there ^ COMPILED
    print(*sorted(COMPILED))


if __name__ == "__main__":
    main()
