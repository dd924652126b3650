"""Distances between predicted and labelled surfaces, per class: Hausdorff 95, average surface distance, surface Dice.

Definitions, written once. The *surface* of a class is the set of its voxels that have a face neighbour of another class
or lie at the image border (voxel centres, as in MONAI, MedPy and seg-metrics; not DeepMind's marching cubes). Two
points differ from MONAI so that missing data makes no surface: an ignored or masked neighbour does not count as
another class, and an axis of length 1 (a single slice) has no border. A distance leads from a surface voxel to the
nearest surface voxel of the same class in the other segmentation, in voxels or in the unit of ``spacing``; P holds
those of the prediction's surface voxels, L those of the labels'.

A class with voxels in only *one* of the two is a miss, and a miss has no distance. It must count as an error: surface
Dice is 0, and ``absent`` chooses the value of HD95 and ASD:

* ``"diagonal"`` (the default): the diagonal of the image, edge to edge, in the unit of the spacing. It is larger than
  any distance in the image, so missing a class is worse than any error.
* ``"infinite"``: inf, as in DeepMind surface-distance and MONAI (whose Hausdorff percentile is NaN).
* ``"skip"``: NaN, so the class is left out. Missing a class then scores better than getting it wrong.
* a number: that distance.

A class in *neither* is undefined (NaN), and so is a class in both that has a surface in only one of them (a class that
fills all valid voxels has no surface where these do not reach the image border).

Finding surfaces and distances is the expensive part: ``surface_distances`` does it once, and all metrics reduce it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import KDTree
from torch import Tensor

from segcal.errors import InputError, check_name
from segcal.metrics.measure import Absent, Measure
from segcal.regions.boundary import checked_spacing, label_boundary, valid_voxels

__all__ = ["asd", "hd95", "surface_dice"]

Miss = Literal["diagonal", "infinite", "skip"] | float
Distances = NDArray[np.float64]


@dataclass(frozen=True)
class SurfaceDistances:
    """All surface distances of a batch: ``prediction_to_labels[n][c]`` and ``labels_to_prediction[n][c]``, float64.

    Attributes:
        prediction_to_labels: For every predicted surface voxel its distance to the labelled surface (P).
        labels_to_prediction: For every labelled surface voxel its distance to the predicted surface (L).
        missed: ``(N, C)`` bool, True where the class has voxels in one of the two segmentations only.
        absent: ``(N, C)`` bool, True where it has none in both.
        diagonal: Of the image, in the unit of the distances.
    """

    prediction_to_labels: list[list[Distances]]
    labels_to_prediction: list[list[Distances]]
    missed: Tensor
    absent: Tensor
    diagonal: float

    @property
    def counts(self) -> Tensor:
        """``(N, C)`` int64: surface voxels in both segmentations together."""
        return self._each(lambda p, q: p.size + q.size).long()

    def _reduce(
        self, metric: Callable[[Distances, Distances], float], *, missed: float, absent: float = math.nan
    ) -> Tensor:
        """``(N, C)`` float64 of a function of P and L, NaN where one of them is empty."""
        values = self._each(lambda p, q: metric(p, q) if p.size and q.size else math.nan)
        return values.masked_fill_(self.missed, missed).masked_fill_(self.absent, absent)

    def _each(self, function: Callable[[Distances, Distances], float]) -> Tensor:
        images = zip(self.prediction_to_labels, self.labels_to_prediction, strict=True)
        values = [[function(p, q) for p, q in zip(*n, strict=True)] for n in images]
        return torch.tensor(values, dtype=torch.float64, device=self.missed.device)


def surface_distances(
    prediction: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    spacing: Sequence[float] | None = None,
    ignore_index: int | None = 255,
    mask: Tensor | None = None,
) -> SurfaceDistances:
    """Distances between the predicted and the labelled surface of every class, in both directions.

    Args:
        prediction: Predicted class indices ``(N, *spatial)``.
        labels: True class indices ``(N, *spatial)``.
        num_classes: C; the classes are 0..C-1, all of which are measured.
        spacing: Voxel size per spatial axis; None means that distances are in voxels.
        ignore_index: The label that takes a voxel out, in both segmentations.
        mask: ``(N, *spatial)`` bool, True where the voxel counts.

    Examples:
        >>> labels = torch.tensor([[0, 1, 1, 0, 0, 0]])
        >>> distances = surface_distances(torch.tensor([[0, 0, 0, 1, 1, 0]]), labels, 2, spacing=(2.0,))
        >>> distances.prediction_to_labels[0][1]
        array([2., 4.])
        >>> hd95(distances)[0, 1].item(), asd(distances)[0, 1].item()
        (3.9, 3.0)
    """
    lengths = checked_spacing(spacing, labels)
    if prediction.shape != labels.shape:
        raise InputError(
            f"prediction has shape {tuple(prediction.shape)}",
            expected=f"{tuple(labels.shape)}, the shape of the labels",
            fix="pass class indices, the argmax over the class axis of the scores",
        )
    valid = valid_voxels(labels, ignore_index=ignore_index, mask=mask)
    for name, segmentation in (("prediction", prediction), ("labels", labels)):
        _check_classes(segmentation, valid, num_classes, name)
    predicted, labelled = _surface(prediction, valid), _surface(labels, valid)
    shared = predicted & labelled & (prediction == labels)
    forth, back, here, there = [], [], [], []
    for n in range(len(labels)):
        # Where the surfaces coincide the distance is 0: good predictions need little search.
        p, p_shared = _points_by_class(prediction[n], predicted[n], shared[n], num_classes, lengths)
        q, q_shared = _points_by_class(labels[n], labelled[n], shared[n], num_classes, lengths)
        forth.append([_nearest(p[c], p_shared[c], q[c]) for c in range(num_classes)])
        back.append([_nearest(q[c], q_shared[c], p[c]) for c in range(num_classes)])
        here.append(_present(prediction[n], valid[n], p))
        there.append(_present(labels[n], valid[n], q))
    in_prediction, in_labels = torch.stack(here), torch.stack(there)
    diagonal = math.hypot(*(size * length for size, length in zip(labels.shape[1:], lengths, strict=True)))
    return SurfaceDistances(forth, back, in_prediction ^ in_labels, ~(in_prediction | in_labels), diagonal)


def hd95(distances: SurfaceDistances, *, absent: Miss = "diagonal") -> Tensor:
    """Hausdorff distance at the 95th percentile, ``(N, C)`` float64: ``max(quantile(P, 0.95), quantile(L, 0.95))``.

    The larger of the two directed percentiles (MONAI, DeepMind, Metrics Reloaded), not the percentile of both together
    (MedPy); quantiles interpolate linearly. Huttenlocher et al., "Comparing images using the Hausdorff distance", 1993.

    Args:
        distances: From ``surface_distances``.
        absent: The value of a class that is in one segmentation only: ``"diagonal"``, ``"infinite"``, ``"skip"`` or a
            number; see above. A class in neither is NaN.

    Examples:
        >>> labels = torch.tensor([[0, 1, 1, 0, 0]])
        >>> hd95(surface_distances(labels.roll(1, 1), labels, 3))
        tensor([[0.9000, 0.9500,    nan]], dtype=torch.float64)
    """
    missed = _miss(absent, distances.diagonal)
    return distances._reduce(lambda p, q: float(max(np.quantile(p, 0.95), np.quantile(q, 0.95))), missed=missed)


def asd(distances: SurfaceDistances, *, absent: Miss = "diagonal") -> Tensor:
    """Average symmetric surface distance, ``(N, C)`` float64: ``(sum(P) + sum(L)) / (|P| + |L|)``.

    One mean over all surface voxels of both segmentations (ASSD of Heimann et al., "Comparison and evaluation of
    methods for liver segmentation from CT datasets", 2009; MONAI with ``symmetric=True``), not the mean of two means.

    ``absent`` is the value of a class that is in one segmentation only, as for ``hd95``.

    Examples:
        >>> labels = torch.tensor([[0, 1, 1, 0, 0]])
        >>> asd(surface_distances(labels.roll(1, 1), labels, 3))
        tensor([[0.3333, 0.5000,    nan]], dtype=torch.float64)
    """
    missed = _miss(absent, distances.diagonal)
    return distances._reduce(lambda p, q: (p.sum() + q.sum()) / (p.size + q.size), missed=missed)


def surface_dice(distances: SurfaceDistances, *, tolerance: float = 1.0, absent: Absent = "nan") -> Tensor:
    """Share of both surfaces that lies within the tolerance, ``(N, C)``: ``(|P <= t| + |L <= t|) / (|P| + |L|)``.

    Normalised surface Dice of Nikolov et al., "Clinically applicable segmentation of head and neck anatomy for
    radiotherapy", 2021, with surface voxels counted rather than surface areas (MONAI with ``use_subvoxels=False``).

    Args:
        distances: From ``surface_distances``.
        tolerance: Largest distance that counts as agreement: voxels, or the unit of the spacing.
        absent: A class in neither segmentation is NaN, or with ``"one"`` a perfect score: 1.

    Examples:
        >>> labels = torch.tensor([[0, 1, 1, 0, 0]])
        >>> surface_dice(surface_distances(labels.roll(1, 1), labels, 3), tolerance=0.0)
        tensor([[0.6667, 0.5000,    nan]], dtype=torch.float64)
    """
    check_name("absent", absent, get_args(Absent))
    if not tolerance >= 0:
        raise InputError(f"tolerance is {tolerance}", expected="a length of 0 or more")
    # Compared in float32, so that 3 voxels of 0.1 mm are within 0.3 mm although their float64 product is just above.
    limit = np.float32(tolerance)

    def share(p: Distances, q: Distances) -> float:
        within = sum(int((x.astype(np.float32) <= limit).sum()) for x in (p, q))
        return within / (p.size + q.size)

    return distances._reduce(share, missed=0.0, absent=1.0 if absent == "one" else math.nan)


def foreground(values: Tensor, background: int | None = 0) -> Tensor:
    """The ``(N, C)`` values without the background, if there is one.

    Examples:
        >>> foreground(torch.tensor([[1, 2, 3]]), 1)
        tensor([[1, 3]])
    """
    return values[:, [k for k in range(values.shape[1]) if k != background]]


def class_mean(values: Tensor, background: int | None = 0) -> Measure:
    """The mean of the ``(N, C)`` values over images and classes, without the background and undefined values.

    Examples:
        >>> values = torch.tensor([[9.0, 1.0, 2.0, torch.nan]])
        >>> class_mean(values), class_mean(values).count
        (1.5, 2)
    """
    return Measure.mean(foreground(values, background).flatten().tolist())


def _surface(segmentation: Tensor, valid: Tensor) -> Tensor:
    border = torch.zeros_like(valid)
    for axis in range(1, valid.ndim):
        if valid.shape[axis] > 1:
            border.select(axis, 0).fill_(True)
            border.select(axis, -1).fill_(True)
    return label_boundary(segmentation, valid) | (border & valid)


def _points_by_class(
    segmentation: Tensor, surface: Tensor, shared: Tensor, num_classes: int, spacing: tuple[float, ...]
) -> tuple[list[Distances], list[NDArray[np.bool_]]]:
    """Positions ``(points, axes)`` of the surface voxels of each class, and which of them both surfaces share."""
    position = surface.nonzero().cpu().numpy() * np.asarray(spacing)
    classes, both = segmentation[surface].cpu().numpy(), shared[surface].cpu().numpy()
    order = np.argsort(classes, kind="stable")
    starts = np.searchsorted(classes[order], np.arange(1, num_classes))
    return np.split(position[order], starts), np.split(both[order], starts)


def _nearest(points: Distances, shared: NDArray[np.bool_], targets: Distances) -> Distances:
    """Distance from each point to the nearest target, inf without any."""
    if not len(targets):
        return np.full(len(points), np.inf)
    distance = np.zeros(len(points))
    if not shared.all():
        # The tree is used once, so a quick build beats a balanced tree.
        tree = KDTree(targets, leafsize=32, balanced_tree=False, compact_nodes=False)
        distance[~shared] = tree.query(points[~shared])[0]
    return distance


def _present(segmentation: Tensor, valid: Tensor, points: list[Distances]) -> Tensor:
    """``(C,)`` bool: whether each class has a valid voxel in an image. Classes with surface points certainly do."""
    if all(len(own) for own in points):
        return torch.ones(len(points), dtype=torch.bool, device=segmentation.device)
    voxels = segmentation.flatten() if bool(valid.all()) else segmentation[valid]
    return torch.bincount(voxels, minlength=len(points)) > 0


def _miss(absent: Miss, diagonal: float) -> float:
    """The distance of a class that is in one segmentation only."""
    chosen = {"diagonal": diagonal, "infinite": math.inf, "skip": math.nan}
    if isinstance(absent, str) and absent in chosen:
        return chosen[absent]
    if isinstance(absent, int | float) and not isinstance(absent, bool) and absent >= 0:
        return float(absent)
    raise InputError(f"absent is {absent!r}", expected="'diagonal', 'infinite', 'skip' or a length of 0 or more")


def _check_classes(segmentation: Tensor, valid: Tensor, num_classes: int, name: str) -> None:
    if segmentation.is_floating_point():
        raise InputError(f"{name} has dtype {segmentation.dtype}", expected="integers", fix="pass class indices")
    segmentation = segmentation.long()  # uint16 has no comparison
    bad = valid & ((segmentation < 0) | (segmentation >= num_classes))
    if bool(bad.any()):
        raise InputError(
            f"{name} contains {int(segmentation[bad][0])}",
            expected=f"0..{num_classes - 1} at every valid voxel",
            fix="set ignore_index to the value of unlabelled voxels, or num_classes to the number of classes",
        )
