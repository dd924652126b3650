"""The convex problem of fitting an expert map: mean NLL plus penalties on a sample, or streamed over all voxels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from typing import Any, TypeVar

import numpy as np
import torch

from segcal.cases import CaseSet
from segcal.cases.shares import added, in_shares
from segcal.fitting.data import over_chunks
from segcal.fitting.expert_device import DeviceRows, device_sums
from segcal.fitting.expert_form import ExpertForm, Quadratic
from segcal.fitting.expert_sums import Rows, Sums, expert_map, expert_sums
from segcal.fitting.first_pass import FirstPass
from segcal.fitting.sampling import VoxelSample
from segcal.kernels import fast_maps
from segcal.kernels.experts import Features
from segcal.kernels.pieces_cpu import in_turn
from segcal.solvers import Policy, Problem, Solution, minimise
from segcal.types import Case, Chunk, FloatArray

T = TypeVar("T")

# What an expert's sums were at some points: NLL, gradient and Hessian.
_Known = defaultdict[int, dict[bytes, tuple[float, FloatArray, FloatArray]]]
# The points that are kept.
_KEPT = 3
# Parameters of an expert from which on work on them takes longer than handing it to a thread.
_LARGE = 64


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
        self.cases = cases
        self.streaming = cases is not None and not first.sample.complete
        self._known: _Known = defaultdict(dict)
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
        return np.ascontiguousarray(self.form.free(theta)).ravel()

    def solve(self, policy: Policy[Any], x: FloatArray, **options: Any) -> Solution[FloatArray]:
        """The minimum that a policy finds from ``x``; the options are those of ``minimise``."""
        return minimise(policy, x, *self.bounds, blocks=self.blocks, each=self._each, **options)

    def penalty(self, theta: FloatArray) -> float:
        """The penalties of all experts."""
        return sum(own.value(part.ravel()) for own, part in zip(self.penalties, theta, strict=True))

    def on(self, sample: VoxelSample) -> Problem:
        """The objective on a sample: values by expert, gradient and Hessians."""
        rows, known = self._sample_there if sample is self.first.sample else self._rows_there(sample), _Known(dict)

        def problem(x: FloatArray) -> tuple[FloatArray, FloatArray, list[FloatArray]]:
            theta = self.theta(x)
            sums, hessians = self._remembered(known, rows, theta, curvature=True)
            return *self._by_x(sums, theta), hessians

        return problem

    def whole(self, x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Values by expert and gradient of the objective."""
        theta = self.theta(x)
        if self.streaming:
            return self._by_x(self.streamed(theta), theta)
        return self._by_x(self._remembered(self._known, self._sample_there, theta)[0], theta)

    def curvature(self, x: FloatArray, experts: Sequence[int]) -> list[FloatArray]:
        """Hessians of some experts."""
        theta = self.theta(x)
        if self.streaming:
            sums = self.streamed(theta, experts)
        else:
            sums = self.sums(self._sample_there, theta, curvature=True, experts=experts)
        return self._hessians(sums, experts)

    def _remembered(
        self, known: _Known, rows: Rows | DeviceRows, theta: FloatArray, *, curvature: bool = False
    ) -> tuple[Sums, list[FloatArray]]:
        """NLL, gradient and Hessians on a sample; those of experts that did not move are not computed again.

        A solver moves some experts while others rest, and returns to the point before where a step is refused: so what
        was found at the last points of every expert is kept.
        """
        points = [own.tobytes() for own in theta]
        new = [e for e, point in enumerate(points) if point not in known[e]]
        if new:
            sums = self.sums(rows, theta, curvature=curvature, experts=new)
            hessians = self._hessians(sums, new) if curvature else [np.zeros(0)] * len(new)
            for e, hessian in zip(new, hessians, strict=True):
                last = list(known[e].items())[1 - _KEPT :]
                known[e] = {**dict(last), points[e]: (sums.nll[e], sums.gradient[e], hessian)}
        nll, gradient, found = zip(*(known[e][point] for e, point in enumerate(points)), strict=True)
        return Sums(np.array(nll), np.stack(gradient)), list(found)

    def streamed(self, theta: FloatArray, experts: Sequence[int] | None = None) -> Sums:
        """NLL and gradient over all voxels of the cases; given experts, over theirs only, and with curvature.

        The compiled loops have no curvature and cannot handle impossible classes.
        """
        assert self.cases is not None
        fast, threads = not experts and not self.first.impossible, self.threads if experts else 1
        options = self.form.features, experts, fast, threads
        return added(*in_shares(_share_sums, self.cases, theta, *options, merge=_added_exactly))

    @cached_property
    def sample_rows(self) -> Rows:
        """The sample as the experts see it."""
        return self._rows(self.first.sample)

    @cached_property
    def _sample_there(self) -> Rows | DeviceRows:
        """The same, where the data are."""
        return self.sample_rows if self.first.device.type == "cpu" else self._rows_there(self.first.sample)

    def _rows(self, sample: VoxelSample) -> Rows:
        return Rows.of(sample.logits, sample.labels, sample.weights, self.form.features, len(self.blocks))

    def _rows_there(self, sample: VoxelSample) -> Rows | DeviceRows:
        if (device := self.first.device).type == "cpu":
            return self._rows(sample)
        z, y, weights = sample.logits.to(device), sample.labels.to(device), torch.from_numpy(sample.weights).to(device)
        return DeviceRows.of(z, y, weights, self.form.features, len(self.blocks))

    def sums(self, rows: Rows | DeviceRows, theta: FloatArray, **options: Any) -> Sums:
        """``expert_sums`` of some rows, computed where they are."""
        if isinstance(rows, DeviceRows):
            return device_sums(rows, theta, self.form.features, **options)
        return expert_sums(rows, theta, self.form.features, **{"threads": self.threads, **options})

    def _hessians(self, sums: Sums, experts: Sequence[int]) -> list[FloatArray]:
        return self._each(lambda e: self._hessian(e, sums.curvature[e]), experts)

    def _each(self, work: Callable[[T], Any], items: Sequence[T]) -> list[Any]:
        """Work on every item, or on an expert's item each, by threads if that takes long."""
        experts, outputs, columns = self.form.shape
        return in_turn(work, items, self.threads if experts > 1 and outputs * columns >= _LARGE else 1)

    def _hessian(self, expert: int, curvature: FloatArray) -> FloatArray:
        """An expert's Hessian ``(F, F)`` from the sums ``(P, P)`` over its voxels."""
        hessian = curvature / self.first.total
        hessian += self.penalties[expert].matrix
        return hessian if self.basis is None else self.basis.T @ hessian @ self.basis

    def combine(self, sums: Sums, theta: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Values by expert ``(E,)`` and the gradient by theta ``(E, P)``, penalties included."""
        blocks = theta.reshape(len(self.blocks), -1)
        values = sums.nll / self.first.total
        gradient = sums.gradient.reshape(blocks.shape) / self.first.total
        for e, penalty in enumerate(self.penalties):
            values[e] += penalty.value(blocks[e])
            gradient[e] += penalty.gradient(blocks[e])
        return values, gradient

    def _by_x(self, sums: Sums, theta: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Values by expert and the gradient by x."""
        values, gradient = self.combine(sums, theta)
        return values, (gradient if self.basis is None else gradient @ self.basis).ravel()


def _share_sums(
    cases: CaseSet, theta: FloatArray, features: Features, experts: Sequence[int] | None, fast: bool, threads: int
) -> tuple[Sums, Sums]:
    """``ExpertProblem.streamed`` of some cases, and what rounding has lost of it."""

    def chunk_sums(_: Case, chunk: Chunk) -> Sums:
        if fast and fast_maps(chunk.logits) is not None:
            from segcal.kernels.expert_cpu import expert_gradient

            return Sums(*expert_gradient(chunk.logits, chunk.labels, chunk.valid, expert_map(theta, features)))
        if chunk.logits.is_cuda:
            valid = chunk.valid.nonzero(as_tuple=True)  # the device is waited for once, not for each tensor
            z, labels = chunk.logits.movedim(1, -1)[valid], chunk.labels[valid]
            ones = torch.ones(len(z), dtype=torch.float64, device=z.device)
            found = DeviceRows.of(z, labels, ones, features, len(theta))
            return device_sums(found, theta, features, curvature=bool(experts), experts=experts)
        chosen = chunk.valid.cpu()
        if experts and len(theta) > 1:
            chosen = chosen & torch.isin(chunk.logits.argmax(1).cpu(), torch.tensor(experts))
        z, labels = chunk.logits.movedim(1, -1).cpu()[chosen], chunk.labels.cpu()[chosen]
        rows = Rows.of(z, labels, np.ones(len(z)), features, len(theta))
        return expert_sums(rows, theta, features, curvature=bool(experts), experts=experts, threads=threads)

    nothing = Sums(*[np.zeros(())] * 3)
    return reduce(_added_exactly, ((sums, nothing) for sums in over_chunks(cases, chunk_sums)))


def _added_exactly(mine: tuple[Sums, Sums], other: tuple[Sums, Sums]) -> tuple[Sums, Sums]:
    """Sums, and what rounding has lost of them (Knuth's two-sum), so that their order does not matter.

    Where parameters are hardly determined, the rounding of a sum in another order would move them by 1e-8.
    """
    total, lost = added(mine[0], other[0]), added(mine[1], other[1])
    moved = Sums(*(whole - own for whole, own in zip(total, mine[0], strict=True)))
    errors = (
        (own - (whole - part)) + (new - part) + low
        for whole, own, new, part, low in zip(total, mine[0], other[0], moved, lost, strict=True)
    )
    return total, Sums(*errors)
