"""The table of classes: how well each one is calibrated and segmented, from pooled statistics."""

from __future__ import annotations

from collections.abc import Sequence

from segcal.evaluation.plan import DEFAULT_BINS
from segcal.evaluation.results import ClassRow
from segcal.metrics import cece_per_class, dice_per_class
from segcal.metrics.calibration import class_balances
from segcal.statistics import VoxelStatistics


def class_rows(pooled: VoxelStatistics, names: Sequence[str] | None = None) -> tuple[ClassRow, ...]:
    """One row for each class, over all voxels.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]))
        >>> [(row.name, round(row.ece, 4), round(row.dice, 4), row.voxels, row.predicted) for row in class_rows(stats)]
        [('0', 0.5, 0.6667, 2, 1), ('1', 0.5, 0.0, 0, 1)]
    """
    confusion = pooled.total().confusion
    columns = (
        names or [str(index) for index in range(pooled.num_classes)],
        cece_per_class(pooled, num_bins=DEFAULT_BINS).tolist(),
        dice_per_class(pooled).tolist(),
        confusion.sum(1).tolist(),
        confusion.sum(0).tolist(),
        map(float, class_balances(pooled)),
    )
    return tuple(ClassRow(*row) for row in zip(*columns, strict=True))
