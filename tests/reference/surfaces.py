"""Surface metrics by brute force: all pairs of surface voxels of one class in one image, in float64."""

from __future__ import annotations

import itertools

import numpy as np


def surface(segmentation: np.ndarray, valid: np.ndarray, label: int) -> list[tuple[int, ...]]:
    """Valid voxels of the class at the image border or with a valid face neighbour of another class."""
    found = []
    for here in itertools.product(*map(range, segmentation.shape)):
        if not valid[here] or segmentation[here] != label:
            continue
        for axis, step in itertools.product(range(segmentation.ndim), (-1, 1)):
            there = list(here)
            there[axis] += step
            if segmentation.shape[axis] == 1:
                continue
            outside = not 0 <= there[axis] < segmentation.shape[axis]
            if outside or (valid[tuple(there)] and segmentation[tuple(there)] != label):
                found.append(here)
                break
    return found


def distances(points: list[tuple[int, ...]], targets: list[tuple[int, ...]], spacing: tuple[float, ...]) -> np.ndarray:
    """Distance from every point to the nearest target, inf without any."""
    nearest = []
    for here in points:
        lengths = [
            sum(((a - b) * s) ** 2 for a, b, s in zip(here, there, spacing, strict=True)) ** 0.5 for there in targets
        ]
        nearest.append(min(lengths, default=np.inf))
    return np.asarray(nearest, np.float64)


def quantile(values: np.ndarray, q: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return (
        ordered[low] if ordered[low] == ordered[high] else ordered[low] + (place - low) * (ordered[high] - ordered[low])
    )


def surface_metrics(
    prediction: np.ndarray,
    labels: np.ndarray,
    valid: np.ndarray,
    label: int,
    spacing: tuple[float, ...],
    tolerance: float,
) -> tuple[float, float, float]:
    """HD95, average symmetric surface distance and surface Dice of one class in one image ``(*spatial)``.

    A class that is in one segmentation only is as far away as the image is long, corner to corner.
    """
    here, there = (bool(((x == label) & valid).any()) for x in (prediction, labels))
    if here != there:
        diagonal = sum((size * length) ** 2 for size, length in zip(labels.shape, spacing, strict=True)) ** 0.5
        return diagonal, diagonal, 0.0
    predicted, labelled = surface(prediction, valid, label), surface(labels, valid, label)
    forth, back = distances(predicted, labelled, spacing), distances(labelled, predicted, spacing)
    total = len(forth) + len(back)
    if len(forth) == 0 or len(back) == 0:
        return np.nan, np.nan, np.nan
    hausdorff = max(quantile(side, 0.95) for side in (forth, back))
    within = sum((side <= tolerance * (1 + 1e-7)).sum() for side in (forth, back))
    return hausdorff, (forth.sum() + back.sum()) / total, within / total
