"""NLL at a temperature, with its derivatives: the pass that fits temperature scaling."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from segcal.kernels import fast_maps
from segcal.kernels.grid import BinGrid
from segcal.kernels.voxels import Voxels

_NO_GRID = BinGrid.top_label((1,))  # nothing is binned here


class TemperatureSums(NamedTuple):
    """Sums over voxels: how many, NLL, and its first and second derivative by log beta, beta = 1 / T."""

    count: int = 0  # type: ignore[assignment]  # nobody counts in it with tuple.count
    nll: float = 0.0
    slope: float = 0.0
    curvature: float = 0.0

    def __add__(self, other: TemperatureSums) -> TemperatureSums:  # type: ignore[override]
        return TemperatureSums(
            self.count + other.count,
            self.nll + other.nll,
            self.slope + other.slope,
            self.curvature + other.curvature,
        )

    def by_beta(self, beta: float) -> tuple[float, float, float]:
        """The mean NLL at beta and its first two derivatives by beta, in which it is convex."""
        slope, curvature = self.slope / self.count, self.curvature / self.count
        return self.nll / self.count, slope / beta, (curvature - slope) / beta**2


def temperature_sums(
    logits: Tensor, labels: Tensor, beta: float, *, ignore_index: int | None = None, mask: Tensor | None = None
) -> TemperatureSums:
    """Sums over the valid voxels of logits ``(N, C, *spatial)`` at ``S(beta z)``; raises where a voxel is unfit.

    With ``d = beta (z - max z)``: ``nll = log sum exp(d) - d_y``, ``slope = E[d] - d_y``, ``curvature = Var[d] +
    slope``, expectations under ``S(beta z)``.

    Examples:
        >>> sums = temperature_sums(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), 0.5)
        >>> sums.count, round(sums.nll, 4), round(sums.slope, 4)
        (1, 0.3133, -0.2689)
    """
    voxels = Voxels(logits, labels, _NO_GRID, None, ignore_index=ignore_index, mask=mask)
    return _reference(voxels, beta) if fast_maps(logits) is None else _fast(voxels, beta)


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
    from segcal.kernels.pieces_cpu import block_size, labelled, matrix, workers
    from segcal.kernels.pool import in_threads
    from segcal.kernels.temperature_loops import new_block, temperature_range

    classes, count = voxels.logits.shape[1], workers(voxels, None)

    def work(turn: int) -> tuple[TemperatureSums, int]:
        block, sums = new_block(block_size(classes)), np.zeros(4)
        for piece in itertools.islice(voxels.pieces(), turn, None, count):
            x, columns = matrix(voxels, piece)
            bad = temperature_range(
                x, columns.start, columns.stop, *labelled(voxels, piece), np.float32(beta), block, sums
            )
            if bad >= 0:
                return TemperatureSums(), piece.offset + bad
        return TemperatureSums(int(sums[0]), *sums[1:].tolist()), -1

    results = in_threads(work, count)
    unfit = [place for _, place in results if place >= 0]
    if unfit:
        raise voxels.bad_voxel(min(unfit))
    return sum((own for own, _ in results), TemperatureSums())
