"""The convex problem of fitting an expert map: value, gradient and curvature, of a sample or of all voxels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from segcal.cases import CaseSet
from segcal.fitting.expert_form import ExpertForm
from segcal.fitting.expert_sums import RememberedSums, Rows, Sums, expert_sums, stream_sums
from segcal.fitting.first_pass import FirstPass
from segcal.fitting.penalty import Quadratic
from segcal.fitting.sampling import VoxelSample
from segcal.solvers import Policy, Problem, Solution, minimise
from segcal.types import FloatArray


class ExpertProblem:
    """Mean NLL plus penalties, as a function of the free parameters ``x`` of all experts.

    An expert's parameters are ``theta_e = basis @ x_e`` (or ``x_e`` itself), and every expert is a block of its own.
    The objective is that of the sample of the first pass or, given cases that it does not cover, of all their voxels.

    Attributes:
        streaming: Whether every evaluation of the objective reads the cases.
        blocks: The indices in ``x`` of every expert's parameters.
        bounds: Lower and upper bounds of ``x``.
    """

    def __init__(
        self, form: ExpertForm, first: FirstPass, penalties: list[Quadratic], cases: CaseSet | None = None
    ) -> None:
        self.form, self.first, self.penalties = form, first, penalties
        self.basis, self.threads = form.basis, torch.get_num_threads()
        self._cases = None if first.sample.complete else cases
        self.streaming = self._cases is not None
        experts, outputs, columns = form.shape
        free = outputs * columns if self.basis is None else self.basis.shape[1]
        self.blocks = list(np.arange(experts * free).reshape(experts, free))
        lower, upper = form.bounds
        self.bounds = (lower.ravel(), upper.ravel()) if self.basis is None else (lower.min(), upper.max())

    def theta(self, x: FloatArray) -> FloatArray:
        """``(E, K, J + 1)`` of ``x (E F,)``."""
        blocks = x.reshape(len(self.blocks), -1)
        return (blocks if self.basis is None else blocks @ self.basis.T).reshape(self.form.shape)

    def x(self, theta: FloatArray) -> FloatArray:
        """The ``x`` of a theta that the basis can express."""
        blocks = theta.reshape(len(theta), -1)
        if self.basis is not None:
            blocks = np.linalg.lstsq(self.basis, blocks.T, rcond=None)[0].T
        return np.ascontiguousarray(blocks).ravel()

    def solve(self, policy: Policy[Any], x: FloatArray, **options: Any) -> Solution[FloatArray]:
        """The minimum that a policy finds from ``x``; the options are those of ``minimise``."""
        return minimise(policy, x, *self.bounds, blocks=self.blocks, **options)

    def penalty(self, theta: FloatArray) -> float:
        """The penalties of all experts."""
        return sum(own.value(part.ravel()) for own, part in zip(self.penalties, theta, strict=True))

    def on(self, sample: VoxelSample) -> Problem:
        """The objective on a sample: values by expert, gradient and Hessians."""
        rows = self._all_rows.rows if sample is self.first.sample else self._rows(sample)

        def problem(x: FloatArray) -> tuple[FloatArray, FloatArray, list[FloatArray]]:
            sums = expert_sums(rows, self.theta(x), self.form.features, curvature=True, threads=self.threads)
            return *self._combine(sums, x), [self._hessian(e, own) for e, own in enumerate(sums.curvature)]

        return problem

    def whole(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Values by expert and gradient of the objective."""
        theta = self.theta(x)
        if self._cases is None:
            return self._combine(self._all_rows(theta), x)
        return self._combine(stream_sums(self._cases, theta, self.form.features, fast=not self.first.impossible), x)

    def curvature(self, x: FloatArray, experts: Sequence[int]) -> list[FloatArray]:
        """Hessians of some experts."""
        theta, features, threads = self.theta(x), self.form.features, self.threads
        if self._cases is None:
            sums = expert_sums(self._all_rows.rows, theta, features, curvature=True, experts=experts, threads=threads)
        else:
            sums = stream_sums(self._cases, theta, features, experts=experts, threads=threads)
        return [self._hessian(e, sums.curvature[e]) for e in experts]

    @cached_property
    def _all_rows(self) -> RememberedSums:
        return RememberedSums(self._rows(self.first.sample), self.form.features, self.threads)

    def _rows(self, sample: VoxelSample) -> Rows:
        return Rows.of(sample.logits, sample.labels, sample.weights, self.form.features, len(self.blocks))

    def _hessian(self, expert: int, curvature: FloatArray) -> FloatArray:
        """An expert's Hessian ``(F, F)`` from the sums ``(P, P)`` over its voxels."""
        hessian = curvature / self.first.total + self.penalties[expert].matrix
        return hessian if self.basis is None else self.basis.T @ hessian @ self.basis

    def _combine(self, sums: Sums, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Values by expert ``(E,)`` and the gradient ``(E F,)``, penalties included."""
        theta = self.theta(x).reshape(len(self.blocks), -1)
        values = sums.nll / self.first.total
        gradient = sums.gradient.reshape(theta.shape) / self.first.total
        for e, penalty in enumerate(self.penalties):
            values[e] += penalty.value(theta[e])
            gradient[e] += penalty.gradient(theta[e])
        return values, (gradient if self.basis is None else gradient @ self.basis).ravel()
