"""The convex problem of fitting an expert map: what ``segcal.solvers`` ask of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from segcal.fitting.expert_fit import Rows, Sums, expert_sums
from segcal.fitting.penalty import Quadratic
from segcal.kernels.experts import Features

FloatArray = NDArray[np.float64]


class ExpertProblem:
    """Mean NLL plus penalties, as a function of the free parameters ``x`` of all experts.

    An expert's parameters are ``theta_e = basis @ x_e`` (or ``x_e`` itself), and every expert is a block of its own.

    Attributes:
        shape: ``(E, K, J + 1)`` of theta.
        basis: ``(P, F)``, or None where all parameters are free.
        penalties: One for each expert, in theta.
        total: Voxels that the sums stand for.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        features: Features,
        basis: FloatArray | None,
        penalties: list[Quadratic],
        total: int,
        threads: int,
    ) -> None:
        self.shape, self.features, self.basis, self.penalties = shape, features, basis, penalties
        self.total, self.threads = total, threads
        self.parameters = shape[1] * shape[2]
        self.free = self.parameters if basis is None else basis.shape[1]

    def theta(self, x: FloatArray) -> FloatArray:
        """``(E, K, J + 1)`` of ``x (E F,)``."""
        blocks = x.reshape(self.shape[0], self.free)
        return (blocks if self.basis is None else blocks @ self.basis.T).reshape(self.shape)

    def x(self, theta: FloatArray) -> FloatArray:
        """The ``x`` of a theta that the basis can express."""
        blocks = theta.reshape(self.shape[0], -1)
        if self.basis is not None:
            blocks = np.linalg.lstsq(self.basis, blocks.T, rcond=None)[0].T
        return np.ascontiguousarray(blocks).ravel()

    def with_curvature(self, rows: Rows, x: FloatArray) -> tuple[FloatArray, FloatArray, list[FloatArray]]:
        """Values by expert, gradient and Hessians on these rows."""
        sums = expert_sums(rows, self.theta(x), self.features, curvature=True, threads=self.threads)
        values, gradient = self.combine(sums, x)
        assert sums.curvature is not None
        blocks = [self.hessian(e, own) for e, own in enumerate(sums.curvature)]
        return values, gradient, blocks

    def blocks(self) -> list[NDArray[np.int64]]:
        """The places in ``x`` of every expert's parameters."""
        return list(np.arange(self.shape[0] * self.free).reshape(self.shape[0], self.free))

    def hessian(self, expert: int, curvature: FloatArray) -> FloatArray:
        """An expert's Hessian ``(F, F)`` from the sums ``(P, P)`` over its voxels."""
        hessian = curvature / self.total + self.penalties[expert].matrix
        return hessian if self.basis is None else self.basis.T @ hessian @ self.basis

    def combine(self, sums: Sums, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Values by expert ``(E,)`` and the gradient ``(E F,)``, penalties included."""
        theta = self.theta(x).reshape(self.shape[0], -1)
        values = sums.nll / self.total
        gradient = sums.gradient.reshape(theta.shape) / self.total
        for e, penalty in enumerate(self.penalties):
            values[e] += penalty.value(theta[e])
            gradient[e] += penalty.gradient(theta[e])
        return values, (gradient if self.basis is None else gradient @ self.basis).ravel()
