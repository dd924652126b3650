"""What calibrators without an exact optimum measure of themselves: NLL, and how well they find mispredictions."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.cases import CaseSet
from segcal.cases.calibrated import AnyCalibrator
from segcal.cases.shares import in_shares
from segcal.fitting.data import check_voxels, over_chunks
from segcal.fitting.first_pass import check_possible
from segcal.statistics import VoxelStatistics
from segcal.types import Case, Chunk

# Values of a network in float32 are this close to those in float64.
_ROUNDING = 1e-5


class Loss(NamedTuple):
    """The mean NLL, and how many voxels it is the mean of."""

    nll: float
    voxels: int


def mean_loss(cases: CaseSet, calibrator: AnyCalibrator = None) -> Loss:
    """The mean NLL of all valid voxels in one pass, of the scores as they are if there is no calibrator.

    Raises where scores or labels are invalid.
    """
    statistics = in_shares(_losses, cases, calibrator, merge=VoxelStatistics.merge)
    count = statistics.count()
    check_voxels(count)
    return Loss(float(statistics.total().losses.sum(0)[0]) / count, count)


def _losses(cases: CaseSet, calibrator: AnyCalibrator) -> VoxelStatistics:
    statistics = VoxelStatistics(cases.num_classes, (), classwise=False)

    def add(case: Case, chunk: Chunk) -> None:
        if calibrator is None:
            check_possible(chunk)
        statistics.update(chunk.logits, chunk.labels, ignore_index=chunk.ignore_index, mask=chunk.mask)

    for _ in over_chunks(cases, add, calibrator):
        pass
    return statistics


def compared(nll: float, other: float) -> str:
    """An NLL compared with another one, however close they are.

    Examples:
        >>> compared(0.43603612, 0.43603604), compared(0.2, 0.3), compared(0.5, 0.5)
        ('0.436036, 8.0e-08 above', '0.2, 1.0e-01 below', '0.5, the same as')
    """
    if nll == other:
        return f"{nll:.6g}, the same as"
    return f"{nll:.6g}, {abs(nll - other):.1e} {'above' if nll > other else 'below'}"


class Detection(NamedTuple):
    """How well mispredictions are told from correct predictions; NaN where there are no voxels to divide by.

    ``recall``: share of the mispredictions that are flagged, which Wang et al. call the accuracy on mispredictions;
    ``precision``: share of mispredictions among the flagged; ``accuracy``: share of all voxels that are told correctly.

    Examples:
        >>> Detection.of(torch.tensor([[80.0, 10.0], [2.0, 8.0]]))
        Detection(recall=0.8, precision=0.4444444444444444, accuracy=0.88)
    """

    recall: float
    precision: float
    accuracy: float

    @classmethod
    def of(cls, counts: Tensor) -> Detection:
        """From ``counts (2, 2)`` of voxels: rows correct and wrong, columns not flagged and flagged."""
        (kept, false), (missed, found) = counts.tolist()
        told = kept + found
        return cls(_ratio(found, found + missed), _ratio(found, found + false), _ratio(told, told + false + missed))

    def __str__(self) -> str:
        known = [f"{name} {share:.3f}" for name, share in self._asdict().items() if share == share]
        return "mispredictions: " + ", ".join(known)


class HasDetection:
    """A calibrator that finds mispredictions, and keeps the ``counts`` of ``Detection.of`` as a buffer."""

    counts: Tensor

    @property
    def detection(self) -> Detection:
        """How well it finds mispredictions, on the validation cases if there were any."""
        return Detection.of(self.counts)


def beside(threshold: float, values: Tensor) -> float:
    """A threshold just above this one that none of the values ``(n,)`` is near: there, rounding would decide.

    Halfway to the lowest value that differs by more than rounding, or 0.5 above the threshold if there is none.

    Examples:
        >>> beside(2.0, torch.tensor([1.0, 2.0, 5.0])), beside(2.0, torch.tensor([1.0, 2.0]))
        (3.5, 2.5)
    """
    larger = values[values > threshold + _ROUNDING * max(1.0, abs(threshold))]
    return (threshold + float(larger.min())) / 2 if len(larger) else threshold + 0.5


def missing_kind(wrong: Tensor) -> str | None:
    """The kind of prediction that does not occur, if any; ``wrong (n,)`` is bool."""
    if not bool(wrong.any()):
        return "misprediction"
    return "correct prediction" if bool(wrong.all()) else None


def detection_counts(wrong: Tensor, flagged: Tensor, weights: NDArray[np.float64]) -> Tensor:
    """The ``counts`` of ``Detection.of``, from bool ``wrong`` and ``flagged (n,)`` and the voxels' weights."""
    index = (2 * wrong.long() + flagged.long()).numpy()
    return torch.from_numpy(np.bincount(index, weights, 4).reshape(2, 2))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
