"""Label fusion as naive loops in float64, written from the formulas of METHODS.md, not from segcal's code.

``candidates`` and ``probabilities`` are lists of what each candidate says at one voxel.
"""

from __future__ import annotations

import numpy as np


def joint_weights(probabilities: list[float], epsilon: float) -> list[float]:
    """w = M^-1 1 / (1' M^-1 1), M_ij = (1 - p_i)(1 - p_j) + epsilon I."""
    count = len(probabilities)
    matrix = np.array([[(1 - a) * (1 - b) for b in probabilities] for a in probabilities]) + epsilon * np.eye(count)
    solution = np.linalg.inv(matrix) @ np.ones(count)
    return list(solution / solution.sum())


def vote(candidates: list[int], weights: list[float], num_classes: int) -> list[float]:
    """The sum of weights for every label."""
    return [
        sum(weight for label, weight in zip(candidates, weights, strict=True) if label == k) for k in range(num_classes)
    ]
