"""The parameters of an expert map: their shape, the identity, their bounds, free directions and penalties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from segcal.kernels.experts import Features
from segcal.types import FloatArray

#: The smallest bias of a constrained map: many constraints are active at the optimum, and without it outputs would tie.
FLOOR = 1e-3
# Bounds far beyond any sensible map: they only stop separable data from driving parameters to infinity.
_LARGEST, _LARGEST_BIAS = 100.0, 20.0


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


@dataclass(frozen=True)
class ExpertForm:
    """Which parameters ``theta (E, K, J + 1)`` a map has: E experts, K outputs, J inputs and a bias.

    Attributes:
        features: What an expert reads of the logits.
        num_classes: C.
        routed: Whether every predicted class has an expert of its own.
        equal_row_sums: Whether all rows of an expert's weights share one sum.

    Examples:
        >>> form = ExpertForm("gaps", num_classes=3, routed=True)
        >>> form.shape, form.identity[0]
        ((3, 2, 3), array([[1., 0., 0.],
               [0., 1., 0.]]))
    """

    features: Features
    num_classes: int
    routed: bool
    equal_row_sums: bool = False

    @property
    def constrained(self) -> bool:
        """Whether weights and biases are non-negative, so that decisions are preserved."""
        return self.features in ("margins", "gaps")

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(E, K, J + 1)``."""
        outputs = self.num_classes - (self.features == "gaps")
        return self.num_classes if self.routed else 1, outputs, 2 if self.features == "own-logit" else outputs + 1

    @property
    def identity(self) -> FloatArray:
        """The theta that changes nothing."""
        theta = np.zeros(self.shape)
        theta[:, :, :-1] = 1 if self.features == "own-logit" else np.eye(self.shape[1])
        if self.features == "margins" and self.routed:
            own = np.arange(self.num_classes)
            theta[own, own, own] = 0  # the winner's margin is always 0
        return theta

    def scaled_identity(self, beta: float) -> FloatArray:
        """Temperature scaling in these parameters, or the feasible map nearest to it."""
        return np.clip(beta * self.identity, *self.bounds)

    @property
    def bounds(self) -> tuple[FloatArray, FloatArray]:
        """Lower and upper bounds of theta; equal where a parameter is fixed."""
        upper = np.full(self.shape, _LARGEST)
        lower = -upper
        if self.constrained:
            lower[:] = 0
            lower[:, :, -1], upper[:, :, -1] = FLOOR, _LARGEST_BIAS
        if self.features == "margins" and self.routed:
            own = np.arange(self.num_classes)
            for bound in (lower, upper):  # the winner's score and its margin are 0
                bound[own, own, :] = 0
                bound[own, :, own] = 0
        return lower, upper

    @property
    def basis(self) -> FloatArray | None:
        """The free directions of an expert's parameters ``(P, F)``; None where all of them are free.

        With equal row sums: an off-diagonal entry subtracted from its row's diagonal, the common sum, the biases.
        """
        if not self.equal_row_sums:
            return None
        _, outputs, columns = self.shape
        unit = np.eye(outputs * columns).reshape(outputs, columns, -1)
        own = np.arange(outputs)
        rows, others = np.nonzero(~np.eye(outputs, dtype=bool))
        moved = unit[rows, others] - unit[rows, rows]
        return np.asarray(np.concatenate((moved, unit[own, own].sum(0, keepdims=True), unit[own, -1])).T)

    def odir(self, winner: int, off_diagonal: float, bias: float) -> FloatArray:
        """Q of ``off_diagonal * mean of W_ij^2, i != j, + bias * mean of b_i^2`` (Kull et al., NeurIPS 2019).

        W and b are those of the equivalent matrix scaling of the logits, in class order or, for gaps, in rank order.
        The identity has neither off-diagonal entries nor biases, so it can be the centre of the penalty.
        """
        if self.features == "own-logit":  # there is nothing off the diagonal
            return np.diag(np.tile([0.0, 2 * bias / self.num_classes], self.num_classes))
        w, b = self._equivalent(winner)
        outside = ~np.eye(self.num_classes, dtype=bool).ravel()
        w = w[outside]
        return np.asarray(2 * off_diagonal * w.T @ w / outside.sum() + 2 * bias * b.T @ b / self.num_classes)

    def _equivalent(self, winner: int) -> tuple[FloatArray, FloatArray]:
        """The matrices that map theta to the equivalent W ``(C C, P)`` and b ``(C, P)``, up to constants.

        Scores matter up to a constant per voxel, which is chosen so that the identity has W = I.
        """
        classes, (_, outputs, columns) = self.num_classes, self.shape
        size = outputs * columns
        unit = np.eye(size).reshape(size, outputs, columns)
        weight, bias = unit[:, :, :-1], unit[:, :, -1]
        if not self.constrained:
            return weight.reshape(size, -1).T, bias.T
        if self.features == "margins":  # m_j = z_winner - z_j, and the scores are -(A m + d)
            margins = -np.eye(classes)
            margins[:, winner] += 1
            keep = (np.arange(classes) != winner)[None, :, None]  # the winner's own score is 0
            return -(keep * (weight @ margins)).reshape(size, -1).T, -(keep[..., 0] * bias).T
        gaps = np.eye(outputs, classes) - np.eye(outputs, classes, 1)
        below = np.tri(classes, outputs, -1)
        return -(below @ weight @ gaps).reshape(size, -1).T, -(bias @ below.T).T
