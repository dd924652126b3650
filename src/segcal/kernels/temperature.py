"""NLL at a temperature, with its derivatives: the pass that fits temperature scaling."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal.kernels import fast_maps
from segcal.kernels.pieces_cpu import block_size, sweep
from segcal.kernels.voxels import Voxels


class TemperatureSums(NamedTuple):
    """Sums over voxels: how many, NLL, and its first and second derivative by log beta, beta = 1 / T."""

    count: int = 0  # type: ignore[assignment]  # nobody counts in it with tuple.count
    nll: float = 0.0
    slope: float = 0.0
    curvature: float = 0.0

    def __add__(self, other: TemperatureSums) -> TemperatureSums:  # type: ignore[override]
        return TemperatureSums(*map(operator.add, self, other))

    def by_beta(self, beta: float) -> tuple[float, float, float]:
        """The mean NLL at beta and its first two derivatives by beta, in which it is convex."""
        slope, curvature = self.slope / self.count, self.curvature / self.count
        return self.nll / self.count, slope / beta, (curvature - slope) / beta**2


def temperature_sums(voxels: Voxels, beta: float) -> TemperatureSums:
    """Sums over the valid voxels at ``S(beta z)``; raises if a voxel is unfit.

    With ``d = beta (z - max z)``: ``nll = log sum exp(d) - d_y``, ``slope = E[d] - d_y``, ``curvature = Var[d] +
    slope``, expectations under ``S(beta z)``.

    Examples:
        >>> sums = temperature_sums(Voxels(torch.tensor([[2.0, 0.0]]), torch.tensor([0])), 0.5)
        >>> sums.count, round(sums.nll, 4), round(sums.slope, 4)
        (1, 0.3133, -0.2689)
    """
    return _reference(voxels, beta) if fast_maps(voxels.logits) is None else _fast(voxels, beta)


def slope_and_variance(p: Tensor, d: Tensor, own: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """``E[d] - d_y`` and ``Var[d]`` of every voxel: the derivatives of the NLL along scores ``d``.

    ``p`` are the probabilities of the classes along ``axis``, and ``own`` is the label's ``d_y``.
    """
    d = torch.where(p > 0, d, 0.0)
    mean = (p * d).sum(axis)
    return mean - own, (p * d**2).sum(axis) - mean**2


def _reference(voxels: Voxels, beta: float) -> TemperatureSums:
    total = TemperatureSums()
    for piece in voxels.pieces():
        z, y, _ = voxels.checked(piece)
        d = (z - z.amax(0)) * beta
        log_p = d.log_softmax(0)
        slope, variance = slope_and_variance(log_p.exp(), d, d.gather(0, y[None])[0], 0)
        nll = -log_p.gather(0, y[None]).sum()
        total += TemperatureSums(len(y), float(nll), float(slope.sum()), float((variance + slope).sum()))
    return total


def _fast(voxels: Voxels, beta: float) -> TemperatureSums:
    from segcal.kernels.fitting_loops import temperature_range
    from segcal.kernels.scratch import new_block
    from segcal.kernels.softmax_loops import Block

    classes = voxels.logits.shape[1]

    def new_state(turn: int) -> tuple[Any, ...]:
        return np.float32(beta), new_block(Block, classes, block_size(classes)), np.zeros(4)

    states = sweep(voxels, temperature_range, new_state)
    count, *sums = np.sum([sums for *_, sums in states], 0).tolist()
    return TemperatureSums(int(count), *sums)
