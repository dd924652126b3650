"""The CPU twin of ``segcal.kernels.reference``: numba, compiled once and cached on disk.

Logits are stored class by class, so a voxel's classes are far apart in memory. The kernel takes blocks of 1024 voxels,
which stay in the core's cache, through one step after the other: maximum, exp, sums over classes, log. Each step is a
loop over voxels with unit stride that the compiler turns into vector instructions. Only binning is scalar, and it skips
the lowest bin, which has most probabilities: those are summed by vector instructions and counted by difference.

Precision: exp has a relative error below 1e-7 (a polynomial of degree 6 within 3.1e-9 of exp on [-ln 2 / 2, ln 2 / 2];
the rest is float32 rounding, without bias beyond 1e-9; over all 1.1e9 float32 numbers in [-87, 0] the worst is 7.7e-8),
log1p one below 2e-12. Per-class terms are float32, everything summed over voxels is float64. A confidence within about
1e-7 of a bin edge may fall on the other side than in the reference. Each such voxel changes an ECE by at most 2/n, and
not at all if both bins err in the same direction.

Threads are plain Python threads that run compiled code without the interpreter lock: unlike numba's own, they can be
used from several threads and in forked workers. Each takes a fixed share, so the same call gives the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.kernels.cpu_loops import Rules, new_tally_block, tally_range
from segcal.kernels.pieces_cpu import sweep
from segcal.kernels.tally import Tally
from segcal.kernels.voxels import ONE_BIN, Voxels
from segcal.scores import DEPTH


def _complete(out: Tally) -> None:
    """Add the winners' probabilities to the classwise histograms, and count the lowest bin by difference."""
    if out.class_count.size:
        out.class_count[:] += out.predicted_count.sum(2)
        out.class_confidence[:] += out.predicted_confidence.sum(2)
        out.class_positive[:] += out.predicted_count[:, :, 1]
        voxels = out.confusion.sum((1, 2))
        out.class_count[:, :, 0] = voxels[:, None] - out.class_count[:, :, 1:].sum(2)


def tally(voxels: Voxels, threads: int) -> Tally:
    """All statistics of float32 (or narrower) logits on the CPU; see ``segcal.kernels.tally``."""
    if voxels.score_map is not None and not voxels.score_map.suits(voxels.logits):
        mapped = voxels.score_map(voxels.logits.detach().float())
        voxels = dataclasses.replace(voxels, logits=mapped, score_map=None, uncalibrated=voxels.logits.argmax(1))
    classes, rules = voxels.logits.shape[1], _rules(voxels)

    def new_state(turn: int) -> tuple[Rules, Any, Tally]:
        result = Tally.zeros(voxels.num_slots, classes, voxels.top_grid, voxels.class_grid)
        return rules, new_tally_block(classes), result

    total, *others = (result for *_, result in sweep(voxels, tally_range, new_state, threads))
    for part in others:
        total.add(part)
    _complete(total)
    return total


def _rules(voxels: Voxels) -> Rules:
    score_map, classes = voxels.score_map, voxels.logits.shape[1]
    top, by_class = voxels.top_grid, voxels.class_grid or ONE_BIN
    weight, bias, beta, depth = torch.zeros(0, 0), torch.zeros(0), 1.0, np.inf
    if score_map is not None and score_map.is_scale:
        # Multiplies z - max(z), which rounds less than beta z would. Impossible classes stay so.
        beta, depth = float(score_map.weight), DEPTH
    elif score_map is not None:
        score_map.check_classes(classes)
        weight = score_map.weight.detach().float().cpu()
        weight = weight if weight.ndim == 2 else weight.expand(classes)[:, None]
        bias = torch.zeros(classes) if score_map.bias is None else score_map.bias.detach().float().cpu()
    return Rules(
        compare=voxels.compares,
        beta=np.float32(beta),
        depth=float(depth),
        weight=weight.contiguous().numpy(),
        bias=bias.contiguous().numpy(),
        shift=voxels.energy_shift,
        upper=top.upper,
        first=_narrow(top.first),
        within=_narrow(top.within(by_class)),
        class_upper=by_class.upper,
        class_first=_narrow(by_class.first),
    )


def _narrow(bins: NDArray[Any]) -> NDArray[Any]:
    """The same table of bins in fewer bytes, which leaves more of the cache to the histograms."""
    return bins.astype(np.uint16 if bins.max() < 2**16 else np.int64)
