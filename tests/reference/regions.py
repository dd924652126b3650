"""Regions by brute force: every voxel against every boundary voxel, in float64."""

from __future__ import annotations

import itertools

import numpy as np


def boundary_voxels(labels: np.ndarray, valid: np.ndarray) -> list[tuple[int, ...]]:
    """Valid voxels of one image ``(*spatial)`` with a valid face neighbour of another label."""
    found = []
    for here in itertools.product(*map(range, labels.shape)):
        for axis, step in itertools.product(range(labels.ndim), (-1, 1)):
            there = list(here)
            there[axis] += step
            inside = 0 <= there[axis] < labels.shape[axis]
            if inside and valid[here] and valid[tuple(there)] and labels[here] != labels[tuple(there)]:
                found.append(here)
                break
    return found


def boundary_region(labels: np.ndarray) -> np.ndarray:
    """Voxels of one image from which at most two face steps lead to another label; all voxels valid."""
    region = np.zeros(labels.shape, bool)
    for here, there in itertools.product(itertools.product(*map(range, labels.shape)), repeat=2):
        steps = sum(abs(a - b) for a, b in zip(here, there, strict=True))
        region[here] |= steps <= 2 and labels[here] != labels[there]
    return region


def boundary_distance(labels: np.ndarray, valid: np.ndarray, spacing: tuple[float, ...]) -> np.ndarray:
    """Distance of every voxel of one image to the nearest boundary voxel, inf without any."""
    boundary = boundary_voxels(labels, valid)
    distance = np.full(labels.shape, np.inf)
    for here in itertools.product(*map(range, labels.shape)):
        for there in boundary:
            steps = [(a - b) * s for a, b, s in zip(here, there, spacing, strict=True)]
            distance[here] = min(distance[here], sum(step * step for step in steps) ** 0.5)
    return distance


def band(distance: float) -> int:
    """The distance band, by its definition."""
    return 0 if distance < 3 else 1 if distance < 7 else 2 if distance < 15 else 3
