"""The parameters of an expert map: their shape, the identity, their bounds and their free directions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from segcal.kernels.experts import Features
from segcal.types import FloatArray

#: The smallest bias of a constrained map: many constraints are active at the optimum, and without it outputs would tie.
FLOOR = 1e-3
# Bounds far beyond any sensible map: they only stop separable data from driving parameters to infinity.
_LARGEST, _LARGEST_BIAS = 100.0, 20.0


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
