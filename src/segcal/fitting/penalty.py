"""Quadratic penalties of expert maps, and the ODIR penalty."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from segcal.kernels.experts import Features
from segcal.types import FloatArray


class Strengths(NamedTuple):
    """Strengths of the penalties: ODIR on off-diagonal weights and on biases, shrinkage to temperature scaling."""

    off_diagonal: float
    bias: float
    shrinkage: float


class Quadratic:
    """``sum_i (theta - c_i)' Q_i (theta - c_i) / 2`` of one expert's parameters, flat ``(P,)``.

    Examples:
        >>> penalty = Quadratic(2)
        >>> penalty.add(np.eye(2), np.array([1.0, 0.0]))
        >>> penalty.value(np.zeros(2)), penalty.gradient(np.zeros(2))
        (0.5, array([-1.,  0.]))
    """

    def __init__(self, size: int) -> None:
        self.matrix, self._linear, self._constant = np.zeros((size, size)), np.zeros(size), 0.0

    def add(self, matrix: FloatArray, centre: FloatArray) -> None:
        """Add a term; a vector stands for a diagonal matrix."""
        full = np.diag(matrix) if matrix.ndim == 1 else matrix
        self.matrix = self.matrix + full
        self._linear = self._linear - full @ centre
        self._constant += 0.5 * float(centre @ full @ centre)

    def value(self, theta: FloatArray) -> float:
        """The penalty; rounding may leave it slightly below zero."""
        return float(0.5 * theta @ self.matrix @ theta + self._linear @ theta) + self._constant

    def gradient(self, theta: FloatArray) -> FloatArray:
        """Its derivative ``(P,)``."""
        return np.asarray(self.matrix @ theta + self._linear)


def odir(num_classes: int, features: Features, winner: int, off_diagonal: float, bias: float) -> FloatArray:
    """Q of ``off_diagonal * mean of W_ij^2, i != j, + bias * mean of b_i^2`` (Kull et al., NeurIPS 2019), centred at 0.

    W and b are those of the equivalent matrix scaling of the logits, in class order or, for gaps, in rank order. The
    identity has neither off-diagonal entries nor biases, so it can be the centre of the penalty.
    """
    if features == "own-logit":  # there is nothing off the diagonal
        return np.diag(np.tile([0.0, 2 * bias / num_classes], num_classes))
    linear_w, linear_b = _equivalent(num_classes, features, winner)
    outside = ~np.eye(num_classes, dtype=bool).ravel()
    w, b = linear_w[outside], linear_b
    return np.asarray(2 * off_diagonal * w.T @ w / outside.sum() + 2 * bias * b.T @ b / num_classes)


def _equivalent(num_classes: int, features: Features, winner: int) -> tuple[FloatArray, FloatArray]:
    """The matrices that map theta to the equivalent W ``(C C, P)`` and b ``(C, P)``, up to constants.

    Scores matter up to a constant per voxel, which is chosen so that the identity has W = I.
    """
    outputs = num_classes - (features == "gaps")
    size = outputs * (outputs + 1)
    unit = np.eye(size).reshape(size, outputs, outputs + 1)
    weight, bias = unit[:, :, :-1], unit[:, :, -1]
    if features in ("logits", "log-probs"):
        return weight.reshape(size, -1).T, bias.T
    if features == "margins":  # m_j = z_winner - z_j, and the scores are -(A m + d)
        margins = -np.eye(num_classes)
        margins[:, winner] += 1
        keep = (np.arange(num_classes) != winner)[None, :, None]  # the winner's own score is 0
        return -(keep * (weight @ margins)).reshape(size, -1).T, -(keep[..., 0] * bias).T
    gaps = np.eye(outputs, num_classes) - np.eye(outputs, num_classes, 1)
    below = np.tri(num_classes, outputs, -1)
    return -(below @ weight @ gaps).reshape(size, -1).T, -(bias @ below.T).T
