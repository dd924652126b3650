"""What calibrators without an exact optimum measure of themselves: their NLL, and how well they find mistakes."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.calibrators.base import Calibrator
from segcal.calibrators.first_pass import check_possible
from segcal.case_scores import score_pieces
from segcal.cases import CaseSet
from segcal.errors import InputError, SegcalError
from segcal.statistics import VoxelStatistics
from segcal.types import Chunk


class Loss(NamedTuple):
    """Mean NLL, and the number of voxels it is the mean of."""

    nll: float
    voxels: int


def mean_loss(cases: CaseSet, calibrator: Calibrator | None = None) -> Loss:
    """The mean NLL of all valid voxels, in one pass; of the scores as they are where there is no calibrator.

    Raises where scores or labels are unfit.
    """
    statistics = VoxelStatistics(cases.num_classes, (), classwise=False)
    for case in cases:
        try:
            for rows, scores in score_pieces(case, calibrator):
                chunk = Chunk(rows, scores, case.rows("labels", rows), case.rows("mask", rows), case.ignore_index)
                statistics.update(scores, chunk.labels, ignore_index=chunk.ignore_index, mask=chunk.mask)
                if calibrator is None:
                    check_possible(chunk)
        except SegcalError as error:
            raise error.at(case=case.id) from None
        del case
    count = statistics.count()
    if not count:
        raise InputError("no valid voxel", expected="labels that are neither ignored nor masked")
    nll = float(statistics.total().losses.sum(0)[0]) / count
    return Loss(nll, count)


class Detection(NamedTuple):
    """How well mispredictions are told from correct predictions; NaN where there is nothing to tell.

    ``recall``: share of the mispredictions that are found, which Wang et al. call the accuracy on mispredictions;
    ``precision``: share of mispredictions in what is found; ``accuracy``: share of all voxels that are told rightly.

    Examples:
        >>> Detection.of(torch.tensor([[80.0, 10.0], [2.0, 8.0]]))
        Detection(recall=0.8, precision=0.4444444444444444, accuracy=0.88)
    """

    recall: float
    precision: float
    accuracy: float

    @classmethod
    def of(cls, counts: Tensor) -> Detection:
        """From ``counts (2, 2)`` of voxels: rows correct and wrong, columns taken for correct and for wrong."""
        (kept, false), (missed, found) = counts.tolist()
        told = kept + found
        return cls(_ratio(found, found + missed), _ratio(found, found + false), _ratio(told, told + false + missed))

    def __str__(self) -> str:
        return f"mispredictions: recall {self.recall:.3f}, precision {self.precision:.3f}, accuracy {self.accuracy:.3f}"


def detection_counts(wrong: Tensor, flagged: Tensor, weights: NDArray[np.float64]) -> Tensor:
    """What ``Detection.of`` takes, from bool ``wrong`` and ``flagged (n,)`` and how many each voxel stands for."""
    index = (2 * wrong.long() + flagged.long()).numpy()
    return torch.from_numpy(np.bincount(index, weights, 4).reshape(2, 2))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
