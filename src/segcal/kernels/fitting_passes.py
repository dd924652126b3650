"""Passes that fits need: a first look at data, NLL and derivatives at a temperature, histograms fine enough to fit to.

Each has its definition in torch and a compiled loop in ``fitting_loops`` or ``bin_loops``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels.dispatch import cuda_kernels, device_kernels, fast_maps
from segcal.kernels.grid import LIMIT, LOGIT_BINS, WIDTH
from segcal.kernels.pieces_cpu import as_list, block_size, sweep, workers
from segcal.kernels.voxels import Voxels
from segcal.scores import log_probabilities

FloatArray = NDArray[np.float64]

# Logits with few digits may lie on an edge, where rounding would decide the bin: log p of the edges is raised by this
# fraction.
_ABOVE = 1e-12
# Each thread has its own tables, up to this many numbers in all (64 MB). Beyond that, threads share tables and divide
# the classes.
_NUMBERS = 2**23
# Voxels of a contiguous image that a device takes at a time; and binary digits of a probability's share of its bin's
# centre, of which 2^31 voxels can be added up.
_DEVICE_VOXELS, _FRACTION = 2**20, 32
# Results of launches, 0.1 MB each, that a device adds up together.
_TOGETHER = 64


class Survey(NamedTuple):
    """The first look at the voxels that count, in one read: what is their NLL, and in which stratum is each?

    Attributes:
        strata: The stratum of every voxel, flat: ``(2 winner + right) (n + 1) + level``, where ``level`` is how many
            of the n confidences are below the voxel's; -1 where a voxel does not count. On a CUDA device a tensor.
        true: The number of voxels with each label ``(C,)``.
        nll: The sum of their NLL.
        impossible: Whether some voxel has an impossible class.
    """

    strata: NDArray[np.int64] | Tensor
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
    if (kernels := cuda_kernels(voxels.logits)) is not None:
        strata, nll, impossible = kernels.survey(voxels, torch.from_numpy(edges))
        labels = voxels.labels.to(strata.device).reshape(-1)[strata >= 0]
        true = torch.bincount(labels, minlength=voxels.logits.shape[1]).cpu().numpy()
        return Survey(strata, true, nll, impossible)
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
    found = begin_sums(voxels, beta)
    if isinstance(found, Tensor):
        ((count, *sums, last),) = _added([found])
        if last:
            raise voxels.bad_voxel(voxels.labels.numel() - int(last))
        return TemperatureSums(int(count), *sums)
    return found


def begin_sums(voxels: Voxels | Sequence[Voxels], beta: float) -> TemperatureSums | Tensor:
    """``temperature_sums`` for ``end_sums``: on a CUDA device, which is not waited for, unfit voxels do not raise.

    Several must lie in the CPU's memory.
    """
    several = as_list(voxels)
    if len(several) == 1 and (kernels := device_kernels(several[0].logits)) is not None:
        on_device: Tensor = kernels.temperature_sums(several[0], beta)
        return on_device
    if _suit_loops(several):
        return _sums_fast(several, beta)
    return sum((_sums(own, beta) for own in several), TemperatureSums())


def _suit_loops(several: Sequence[Voxels]) -> bool:
    """Whether compiled loops suit these voxels, which are many together."""
    size = sum(voxels.logits.numel() for voxels in several)
    return all(fast_maps(voxels.logits, size) is not None for voxels in several)


def end_sums(parts: Iterable[TemperatureSums | Tensor]) -> TemperatureSums:
    """The total of what ``begin_sums`` returned; NaN if a voxel is unfit."""
    total, waiting, found = TemperatureSums(), [], []
    for part in parts:
        if isinstance(part, Tensor):
            waiting.append(part)
        else:
            total += part
        if len(waiting) == _TOGETHER:
            found += _added(waiting)
            waiting = []
    for count, *sums, last in found + (_added(waiting) if waiting else []):
        total += TemperatureSums(int(count), *sums) if not last else TemperatureSums(0, *[math.nan] * 3)
    return total


def _added(parts: list[Tensor]) -> list[list[float]]:
    """Count, NLL, slope and curvature of each of the device's parts, and 0 if all its voxels are fit."""
    stacked = torch.stack(parts)
    sums = stacked[:, :-1].reshape(len(parts), -1, 4).sum(1)
    # As a number of its own kind: as a float64, a small whole number is next to nothing.
    last = stacked.view(torch.int64)[:, -1:].double()
    rows: list[list[float]] = torch.cat((sums, last), 1).tolist()
    return rows


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


def _sums_fast(voxels: Voxels | Sequence[Voxels], beta: float) -> TemperatureSums:
    from segcal.kernels.fitting_loops import temperature_range
    from segcal.kernels.scratch import new_block
    from segcal.kernels.softmax_loops import Block

    classes = as_list(voxels)[0].logits.shape[1]

    def new_state(turn: int) -> tuple[Any, ...]:
        return np.float32(beta), new_block(Block, classes, block_size(classes)), np.zeros(4)

    states = sweep(voxels, temperature_range, new_state)
    count, *sums = np.sum([sums for *_, sums in states], 0).tolist()
    return TemperatureSums(int(count), *sums)


class FineHistogram:
    """Histograms ``(R, bins)`` of class probabilities: ``counts``, ``positive`` (the class is the label), sums of p.

    Bins are equally wide in logit(p), so both ends, where most probabilities of a segmentation are, keep their detail.
    There is a row for each class, or with ``classwise=False`` one for all. ``voxels`` is the number of voxels added,
    ``nll`` the sum of their NLL.

    Examples:
        >>> histogram = FineHistogram(3)
        >>> histogram.add(Voxels(torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)))
        >>> histogram.counts.sum(1), histogram.positive.sum(1), histogram.probability.sum(1).round(3)
        (array([5, 5, 5]), array([5, 0, 0]), array([1.667, 1.667, 1.667]))
    """

    def __init__(self, num_classes: int, *, classwise: bool = True) -> None:
        shape = (num_classes if classwise else 1, LOGIT_BINS)
        self.counts, self.positive = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.probability = np.zeros(shape)
        self.classwise, self.voxels, self.nll = classwise, 0, 0.0

    def add(self, voxels: Voxels | Sequence[Voxels]) -> None:
        """Add the valid voxels of one or several; raises if one is unfit."""
        several = as_list(voxels)
        if _suit_loops(several):
            self._add_fast(several)
            return
        for own in several:
            (self._add_on_device if own.logits.is_cuda else self._add)(own)

    def merge(self, other: FineHistogram) -> FineHistogram:
        """Add what ``other`` has seen, and return self."""
        for name in ("counts", "positive", "probability", "voxels", "nll"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def _add(self, voxels: Voxels) -> None:
        """The definition."""
        for piece in voxels.pieces():
            scores, labels, _ = (tensor.cpu() for tensor in voxels.checked(piece))
            log_p = log_probabilities(scores[None])[0]
            rows = torch.arange(len(log_p)) if self.classwise else torch.zeros(len(log_p), dtype=torch.int64)
            places = logit_bin(log_p) + LOGIT_BINS * rows[:, None]
            own = places.gather(0, labels[None])[0]
            flat, size = places.flatten().numpy(), self.counts.size
            self.counts.reshape(-1)[:] += np.bincount(flat, minlength=size)
            self.probability.reshape(-1)[:] += np.bincount(flat, log_p.exp().flatten(), size)
            self.positive.reshape(-1)[:] += np.bincount(own, minlength=size)
            self.voxels += len(labels)
            self.nll -= float(log_p.gather(0, labels[None]).sum())

    def _add_on_device(self, voxels: Voxels) -> None:
        """The same, without leaving the device; whole numbers are added, so that the order does not matter."""
        size, one = self.counts.size, 2.0**_FRACTION
        totals = torch.zeros(3, size, dtype=torch.int64, device=voxels.logits.device)
        centres = torch.from_numpy(logit_centres()).to(totals.device)
        seen, loss = 0, 0.0  # added at the end: the device may lack memory for a later piece
        for piece in voxels.pieces(_DEVICE_VOXELS):
            scores, labels, _ = voxels.checked(piece)
            log_p = log_probabilities(scores[None])[0]
            bins = logit_bin(log_p)
            rows = torch.arange(len(log_p), device=bins.device) if self.classwise else torch.zeros_like(bins[:, 0])
            places = bins + LOGIT_BINS * rows[:, None]
            share = ((log_p - centres[bins]).exp() * one).round().long()  # p in units of the bin's centre
            ones = torch.ones_like(places)
            totals[0].scatter_add_(0, places.flatten(), ones.flatten())
            totals[1].scatter_add_(0, places.gather(0, labels[None])[0], ones[0])
            totals[2].scatter_add_(0, places.flatten(), share.flatten())
            seen += len(labels)
            loss -= float(log_p.gather(0, labels[None]).sum())
        counts, positive, shares = totals.cpu().numpy()
        self.voxels, self.nll = self.voxels + seen, self.nll + loss
        self.counts.reshape(-1)[:] += counts
        self.positive.reshape(-1)[:] += positive
        self.probability[:] += shares.reshape(self.counts.shape) / one * np.exp(logit_centres())

    def _add_fast(self, voxels: Voxels | Sequence[Voxels]) -> None:
        """The same, by compiled loops."""
        from segcal.kernels.bin_loops import FineBlock, fill_range
        from segcal.kernels.scratch import new_block

        several, threads = as_list(voxels), workers(voxels)
        classes = several[0].logits.shape[1]
        copies = min(threads, max(1, _NUMBERS // (3 * self.counts.size)))
        groups = threads // copies if self.classwise else 1
        edges = np.concatenate(([-np.inf], logit_edges(), [np.inf]))
        own: tuple[NDArray[Any], ...] = (self.counts, self.positive, self.probability)
        tables = [own] + [tuple(map(np.zeros_like, own)) for _ in range(copies - 1)]

        def new_state(turn: int) -> tuple[Any, ...]:
            copy, group = divmod(turn, groups)
            return edges, group, groups, tables[copy], new_block(FineBlock, classes, block_size(classes)), np.zeros(2)

        states = sweep(several, fill_range, new_state, copies * groups, groups)
        for other in tables[1:]:
            for mine, theirs in zip(own, other, strict=True):
                mine += theirs
        number, nll = np.sum([sums for *_, sums in states], 0)
        self.voxels += int(number)
        self.nll += float(nll)


def logit_edges() -> FloatArray:
    """``log p`` at the inner edges of the bins ``(bins - 1,)``."""
    return log_sigmoid(WIDTH, LOGIT_BINS - 1) * (1 - _ABOVE)


def logit_centres() -> FloatArray:
    """``log p`` in the middle of the bins ``(bins,)``."""
    return log_sigmoid(WIDTH / 2, LOGIT_BINS)


def log_sigmoid(offset: float, count: int) -> FloatArray:
    """``log p`` at ``count`` logits a bin apart, the first one ``offset`` above the lower limit."""
    logit = -LIMIT + offset + WIDTH * np.arange(count)
    return np.asarray(-np.logaddexp(0, -logit))


def logit_bin(log_p: Tensor) -> Tensor:
    """The bin of every log-probability; it never falls as that rises."""
    edges = torch.from_numpy(logit_edges()).to(log_p)
    return torch.searchsorted(edges, log_p.contiguous())
