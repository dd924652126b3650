"""The parameters of an expert map: their shape, the identity, their bounds, free directions and penalties."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array, diags_array, eye_array, kron, vstack

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
    """A sum of ``|R_i (theta - c_i)|^2 / 2`` of one expert's parameters, flat ``(P,)``; R_i is diagonal or sparse.

    Examples:
        >>> penalty = Quadratic(2)
        >>> penalty.add(np.ones(2), np.array([1.0, 0.0]))
        >>> penalty.value(np.zeros(2)), penalty.gradient(np.zeros(2))
        (0.5, array([-1.,  0.]))
    """

    def __init__(self, size: int) -> None:
        self._plain, self._roots = np.zeros(size), csr_array((0, size))
        self._linear, self._constant = np.zeros(size), 0.0

    def add(self, term: FloatArray | csr_array, centre: FloatArray) -> None:
        """Add a term: the squares ``(P,)`` of a diagonal R, or a sparse R ``(n, P)``."""
        if isinstance(term, np.ndarray):
            self._plain, pull = self._plain + term, term * centre
        else:
            self._roots, pull = vstack((self._roots, term), format="csr"), term.T @ (term @ centre)
        self._linear = self._linear - pull
        self._constant += 0.5 * float(centre @ pull)

    def times(self, v: FloatArray) -> FloatArray:
        """``sum R_i'R_i v``, ``(P,)``."""
        plain = self._plain * v
        return np.asarray(plain + self._roots.T @ (self._roots @ v)) if self._roots.shape[0] else plain

    def diagonal(self) -> FloatArray:
        """Of the matrix."""
        return np.asarray(self._plain + self._roots.multiply(self._roots).sum(0))

    @cached_property
    def matrix(self) -> FloatArray:
        """``sum R_i'R_i``, ``(P, P)``; to be asked for when all terms are there."""
        return np.asarray(np.diag(self._plain) + (self._roots.T @ self._roots).toarray())

    def value(self, theta: FloatArray) -> float:
        """The penalty; rounding may leave it slightly below zero."""
        return float((0.5 * self.times(theta) + self._linear) @ theta) + self._constant

    def gradient(self, theta: FloatArray) -> FloatArray:
        """Its derivative ``(P,)``."""
        return np.asarray(self.times(theta) + self._linear)


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
    def basis(self) -> csr_array | None:
        """The free directions of an expert's parameters ``(P, F)``; None where all of them are free.

        With equal row sums: an off-diagonal entry subtracted from its row's diagonal, the common sum, the biases.
        """
        if not self.equal_row_sums:
            return None
        _, outputs, columns = self.shape
        place = np.arange(outputs * columns).reshape(outputs, columns)
        rows, others = np.nonzero(~np.eye(outputs, dtype=bool))
        moved, own = np.arange(len(rows)), np.arange(outputs)
        at = np.concatenate((place[rows, others], place[rows, rows], place[own, own], place[:, -1]))
        column = np.concatenate((moved, moved, np.full(outputs, len(rows)), len(rows) + 1 + own))
        values = np.concatenate((np.ones(len(rows)), -np.ones(len(rows)), np.ones(2 * outputs)))
        return csr_array((values, (at, column)), shape=(place.size, len(rows) + 1 + outputs))

    def free(self, theta: FloatArray) -> FloatArray:
        """The components ``(E, F)`` along these directions of a ``theta (E, K, J + 1)`` that they span."""
        if not self.equal_row_sums:
            return theta.reshape(len(theta), -1)
        weight, outside = theta[:, :, :-1], ~np.eye(theta.shape[1], dtype=bool)
        return np.concatenate((weight[:, outside], weight[:, :1].sum(2), theta[:, :, -1]), 1)

    def project(self, theta: FloatArray) -> FloatArray:
        """The nearest ``theta (K, J + 1)`` of one expert that the free directions span: linear, and its own adjoint."""
        if not self.equal_row_sums:
            return theta
        sums = theta[:, :-1].sum(1, keepdims=True)
        return np.concatenate((theta[:, :-1] - (sums - sums.mean()) / len(sums), theta[:, -1:]), 1)

    def odir(self, winner: int, off_diagonal: float, bias: float) -> csr_array:
        """R of ``off_diagonal * mean of W_ij^2, i != j, + bias * mean of b_i^2`` (Kull et al., NeurIPS 2019).

        W and b are those of the equivalent matrix scaling of the logits, in class order or, for gaps, in rank order.
        The identity has neither off-diagonal entries nor biases, so it can be the centre of the penalty.
        """
        classes = self.num_classes
        if self.features == "own-logit":  # there is nothing off the diagonal
            return np.sqrt(2 * bias / classes) * kron(eye_array(classes), [[0.0, 1.0]], format="csr")
        w, b = self._equivalent(winner)
        w = w[np.flatnonzero(~np.eye(classes, dtype=bool))]
        return vstack((np.sqrt(2 * off_diagonal / w.shape[0]) * w, np.sqrt(2 * bias / classes) * b), format="csr")

    def _equivalent(self, winner: int) -> tuple[csr_array, csr_array]:
        """The matrices that map theta to the equivalent W ``(C C, P)`` and b ``(C, P)``, up to constants.

        Scores matter up to a constant per voxel, which is chosen so that the identity has W = I. ``W = left A right``
        of the expert's weights A, and ``b = left d`` of its biases.
        """
        classes, (_, outputs, columns) = self.num_classes, self.shape
        left = right = eye_array(classes, format="csr")
        if self.features == "margins":  # m_j = z_winner - z_j, and the scores are -(A m + d)
            margins = -np.eye(classes)
            margins[:, winner] += 1
            left, right = diags_array(-1.0 * (np.arange(classes) != winner)), csr_array(margins)  # the winner's is 0
        elif self.features == "gaps":
            left = csr_array(-np.tri(classes, outputs, -1))
            right = eye_array(outputs, classes, format="csr") - eye_array(outputs, classes, k=1, format="csr")
        weights = eye_array(columns - 1, columns, format="csr")
        last = csr_array(np.eye(1, columns, columns - 1))
        return kron(left, right.T @ weights, format="csr"), kron(left, last, format="csr")
