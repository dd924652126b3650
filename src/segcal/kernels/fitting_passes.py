"""The passes that fits begin with: the first look at data, and the NLL at a temperature with its derivatives.

Each has its definition in torch and a compiled loop in ``segcal.kernels.fitting_loops``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels.dispatch import fast_maps
from segcal.kernels.pieces_cpu import block_size, sweep
from segcal.kernels.voxels import Voxels


class Survey(NamedTuple):
    """The first look at the voxels that count, in one read: what is their NLL, and in which stratum is each?

    Attributes:
        strata: The stratum of every voxel, flat: ``(2 winner + right) (n + 1) + level``, where ``level`` is how many
            of the n confidences are below the voxel's; -1 where a voxel does not count.
        true: The number of voxels with each label ``(C,)``.
        nll: The sum of their NLL.
        impossible: Whether some voxel has an impossible class.
    """

    strata: NDArray[np.int64]
    true: NDArray[np.int64]
    nll: float
    impossible: bool


def survey(voxels: Voxels, confidences: Sequence[float]) -> Survey:
    """Survey the valid voxels; raises if one is unfit.

    Examples:
        >>> logits, labels = torch.tensor([[4.0, 0.0], [0.0, 0.1]]), torch.tensor([0, 0])
        >>> found = survey(Voxels(logits, labels), (0.6, 0.9))
        >>> found.strata, found.true, round(found.nll, 4)
        (array([5, 6]), array([2, 0]), 0.7625)
    """
    edges = np.array(confidences, np.float32)
    return _survey(voxels, edges) if fast_maps(voxels.logits) is None else _survey_fast(voxels, edges)


def _survey(voxels: Voxels, edges: NDArray[np.float32]) -> Survey:
    strata, true = np.full(voxels.labels.numel(), -1), np.zeros(voxels.logits.shape[1], np.int64)
    nll, impossible = 0.0, False
    for piece in voxels.pieces():
        z, y, valid = (tensor.cpu() for tensor in voxels.checked(piece))
        winner, log_p = z.argmax(0), z.log_softmax(0)
        level = torch.bucketize(log_p.amax(0).exp(), torch.from_numpy(edges).double())
        own = strata[piece.offset : piece.offset + len(valid)]
        own[valid.numpy()] = (winner * 2 + (winner == y)) * (len(edges) + 1) + level
        true += np.bincount(y, minlength=len(true))
        nll -= float(log_p.gather(0, y[None]).sum())
        impossible |= bool(torch.isneginf(z).any())
    return Survey(strata, true, nll, impossible)


def _survey_fast(voxels: Voxels, edges: NDArray[np.float32]) -> Survey:
    from segcal.kernels.fitting_loops import survey_range
    from segcal.kernels.scratch import new_block
    from segcal.kernels.softmax_loops import Block

    classes = voxels.logits.shape[1]
    strata = np.empty(voxels.labels.numel(), np.int64)

    def new_state(turn: int) -> tuple[Any, ...]:
        block = new_block(Block, classes, block_size(classes))
        return edges, strata, block, np.zeros(classes, np.int64), np.zeros(2)

    *_, true, sums = zip(*sweep(voxels, survey_range, new_state), strict=True)
    nll, impossible = np.sum(sums, 0).tolist()
    return Survey(strata, np.sum(true, 0), nll, impossible > 0)


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
    return _sums(voxels, beta) if fast_maps(voxels.logits) is None else _sums_fast(voxels, beta)


def slope_and_variance(p: Tensor, d: Tensor, own: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """``E[d] - d_y`` and ``Var[d]`` of every voxel: the derivatives of the NLL along scores ``d``.

    ``p`` are the probabilities of the classes along ``axis``, and ``own`` is the label's ``d_y``.
    """
    d = torch.where(p > 0, d, 0.0)
    mean = (p * d).sum(axis)
    return mean - own, (p * d**2).sum(axis) - mean**2


def _sums(voxels: Voxels, beta: float) -> TemperatureSums:
    total = TemperatureSums()
    for piece in voxels.pieces():
        z, y, _ = voxels.checked(piece)
        d = (z - z.amax(0)) * beta
        log_p = d.log_softmax(0)
        slope, variance = slope_and_variance(log_p.exp(), d, d.gather(0, y[None])[0], 0)
        nll = -log_p.gather(0, y[None]).sum()
        total += TemperatureSums(len(y), float(nll), float(slope.sum()), float((variance + slope).sum()))
    return total


def _sums_fast(voxels: Voxels, beta: float) -> TemperatureSums:
    from segcal.kernels.fitting_loops import temperature_range
    from segcal.kernels.scratch import new_block
    from segcal.kernels.softmax_loops import Block

    classes = voxels.logits.shape[1]

    def new_state(turn: int) -> tuple[Any, ...]:
        return np.float32(beta), new_block(Block, classes, block_size(classes)), np.zeros(4)

    states = sweep(voxels, temperature_range, new_state)
    count, *sums = np.sum([sums for *_, sums in states], 0).tolist()
    return TemperatureSums(int(count), *sums)
