"""Histograms of class probabilities fine enough to fit regressions to, from one read of the logits.

Bins are equally wide in logit(p), so both ends, where most probabilities of a segmentation are, keep their detail.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels.dispatch import fast_maps
from segcal.kernels.grid import LIMIT, LOGIT_BINS, WIDTH
from segcal.kernels.pieces_cpu import block_size, sweep, workers
from segcal.kernels.voxels import Voxels
from segcal.scores import log_probabilities

FloatArray = NDArray[np.float64]

# Logits with few digits may lie on an edge, where rounding would decide the bin: log p of the edges is raised by this
# fraction.
_ABOVE = 1e-12
# Each thread has its own tables, up to this many numbers in all (64 MB). Beyond that, threads share tables and divide
# the classes.
_NUMBERS = 2**23


class FineHistogram:
    """Histograms ``(R, bins)`` of class probabilities: ``counts``, ``positive`` (the class is the label), sums of p.

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

    def add(self, voxels: Voxels) -> None:
        """Add the valid voxels; raises if one is unfit."""
        (self._add if fast_maps(voxels.logits) is None else self._add_fast)(voxels)

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

    def _add_fast(self, voxels: Voxels) -> None:
        """The same, by compiled loops."""
        from segcal.kernels.bin_loops import FineBlock, fill_range
        from segcal.kernels.scratch import new_block

        classes, threads = voxels.logits.shape[1], workers(voxels)
        copies = min(threads, max(1, _NUMBERS // (3 * self.counts.size)))
        groups = threads // copies if self.classwise else 1
        edges = np.concatenate(([-np.inf], logit_edges(), [np.inf]))
        own: tuple[NDArray[Any], ...] = (self.counts, self.positive, self.probability)
        tables = [own] + [tuple(map(np.zeros_like, own)) for _ in range(copies - 1)]

        def new_state(turn: int) -> tuple[Any, ...]:
            copy, group = divmod(turn, groups)
            return edges, group, groups, tables[copy], new_block(FineBlock, classes, block_size(classes)), np.zeros(2)

        states = sweep(voxels, fill_range, new_state, copies * groups, groups)
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
