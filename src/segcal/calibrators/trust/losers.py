"""How wrong voxels divide what the winner leaves: ``r``, the conditional distribution of the losers.

Of a voxel with winner k and margins ``m_i = beta (z_k - z_i)``, ``r = S(-u)`` over ``j != k`` with
``u_j = b m_j + sum_i A[k]_ji m_i + B[k]_j``. The NLL of the wrong voxels, and no others, is convex in ``A`` and ``B``;
a penalty draws both to zero, where one temperature serves all losers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.fitting.expert_device import DeviceRows, device_sums, tensor_curvature, tensor_sums
from segcal.fitting.expert_sums import Rows, Sums, expert_sums
from segcal.fitting.limits import Limits
from segcal.kernels import ExpertMap, cuda_kernels, fast_maps
from segcal.parallel.threads import blas_threads
from segcal.scores import DEPTH, only_possible
from segcal.solvers import Newton, minimise, newton_1d, newton_of_blocks
from segcal.types import FloatArray

#: Strengths of the penalty that are tried; infinity leaves one temperature.
STRENGTHS = (np.inf, 1.0, 1e-1, 1e-2, 1e-3)
# Matrices are fitted up to this many classes, as their curvature grows as C^4 for each winner; beyond, each winner has
# biases alone; and beyond the second number, where curvatures of C^2 would fill memory, one temperature serves all.
_MATRICES, _BIASES = 32, 256
# Bounds that no sensible map comes near: of the temperature's inverse, and of matrices and biases.
_LOWEST, _HIGHEST, _LARGEST = 1e-3, 10.0, 20.0
#: The same for what is read from files.
TEMPERATURE_LIMITS, LIMITS = Limits(_LOWEST, _HIGHEST), Limits(-_LARGEST, _LARGEST)


def columns(num_classes: int) -> int:
    """The parameters of each winner and loser: a row of its matrix and a bias, or a bias, or none."""
    if num_classes == 2:
        return 0  # the loser has all that is left
    return num_classes + 1 if num_classes <= _MATRICES else int(num_classes <= _BIASES)


def explain(num_classes: int) -> str:
    """Why the map is simpler than matrices, or nothing."""
    if num_classes == 2:
        return "; two classes, so the loser has all that the winner leaves"
    if num_classes <= _MATRICES:
        return ""
    simpler = "biases" if columns(num_classes) else "one temperature"
    return f"; {num_classes} classes are more than {_MATRICES}, so {simpler} and no matrices"


def loser_scores(logits: Tensor, winner: Tensor, temperature: Tensor, change: Tensor) -> Tensor:
    """Scores of the losers ``(N, C, *spatial)``, a new tensor; what the winner has means nothing.

    Args:
        logits: ``(N, C, *spatial)``, float32 or float64.
        winner: Their argmax ``(N, *spatial)``.
        temperature: b, times beta.
        change: A, times beta, and B: ``(C, C, columns)``.
    """
    if change.shape[2] <= 1:
        possible = only_possible(logits)
        gaps = temperature.to(possible) * (possible - possible.gather(1, winner.unsqueeze(1)))
        return gaps - change[:, :, 0].to(gaps)[winner].movedim(-1, 1) if change.shape[2] else gaps
    eye = torch.eye(change.shape[1], dtype=change.dtype, device=change.device)
    mapping = ExpertMap("margins", change[:, :, :-1] + temperature * eye, change[:, :, -1])
    kernels = fast_maps(logits) or cuda_kernels(logits)
    if kernels is None:
        return mapping(only_possible(logits))
    found: Tensor = kernels.apply_experts(logits, mapping, keep=False)
    return found


@dataclass(frozen=True)
class WrongVoxels:
    """A sample of wrong voxels: ``logits (n, C)`` times beta, ``labels (n,)``, the folds of their cases, weights."""

    logits: Tensor
    labels: Tensor
    folds: NDArray[np.int64]
    weights: FloatArray

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, chosen: NDArray[np.bool_]) -> WrongVoxels:
        """Some of them."""
        index = torch.from_numpy(chosen).to(self.labels.device)
        return WrongVoxels(self.logits[index], self.labels[index], self.folds[chosen], self.weights[chosen])


class LosersFit(NamedTuple):
    """The fitted ``temperature`` and ``change (C, C, columns)``, and how the fit went.

    ``strength`` is the penalty that was chosen, ``certificate`` the norm of the projected gradient, ``nll`` the mean
    over the wrong voxels before (as the network has them) and after.
    """

    temperature: float
    change: FloatArray
    strength: float = np.inf
    certificate: float = 0.0
    converged: bool = True
    nll_before: float = 0.0
    nll_after: float = 0.0


class _Problem(ABC):
    """The mean NLL of wrong voxels as a function of A and B, or of B alone; winners are independent."""

    def __init__(self, voxels: WrongVoxels, temperature: float) -> None:
        self.classes = voxels.logits.shape[1]
        rows: Any = self._rows(voxels)
        each: Any = np.arange(self.classes)
        if isinstance(rows, DeviceRows):
            each = torch.from_numpy(each).to(rows.winner)
        won = rows.winner[:, None] == each
        self.rows: Any = rows._replace(impossible=won if rows.impossible is None else rows.impossible | won)
        self.temperature, self.total = temperature, float(voxels.weights.sum())
        self.shape = (self.classes, self.classes, columns(self.classes))
        self.blocks = list(np.arange(np.prod(self.shape)).reshape(self.classes, -1))

    def _rows(self, voxels: WrongVoxels) -> Rows | DeviceRows:
        """The voxels as the experts see them, where their sums are made."""
        return Rows.of(voxels.logits.cpu(), voxels.labels.cpu(), voxels.weights, "margins", self.classes)

    @abstractmethod
    def sums(self, change: FloatArray, *, curvature: bool) -> tuple[FloatArray, FloatArray, list[FloatArray]]:
        """NLL by winner, gradient ``(C, parameters)`` and Hessians."""

    def nll(self, x: FloatArray) -> float:
        """The mean."""
        return float(self.sums(x.reshape(self.shape), curvature=False)[0].sum()) / self.total

    def objective(self, x: FloatArray, strength: float) -> tuple[FloatArray, FloatArray, list[FloatArray]]:
        """Penalised mean NLL by winner, gradient, Hessians."""
        nll, gradient, hessians = self.sums(x.reshape(self.shape), curvature=True)
        blocks = x.reshape(self.classes, -1)
        scale = strength / blocks.shape[1]
        ridge = scale * np.eye(blocks.shape[1])
        values = nll / self.total + 0.5 * scale * (blocks**2).sum(1)
        return values, (gradient / self.total + scale * blocks).ravel(), [own / self.total + ridge for own in hessians]

    def fit(self, strength: float, start: FloatArray, tolerance: float) -> tuple[FloatArray, float, bool]:
        """The optimum, its certificate, and whether it converged."""
        policy = Newton(lambda x: self.objective(x, strength))
        found = minimise(policy, start, -_LARGEST, _LARGEST, blocks=self.blocks, tolerance=tolerance)
        return found.value, found.certificate, found.converged


class _Matrices(_Problem):
    """A and B of every winner; on the device of the voxels."""

    # Where the curvature was last evaluated, and what it was.
    _last: tuple[FloatArray, Sums | None] = np.zeros(0), None

    def _rows(self, voxels: WrongVoxels) -> Rows | DeviceRows:
        device = voxels.logits.device
        if device.type == "cpu":
            return super()._rows(voxels)
        weights = torch.from_numpy(voxels.weights).to(device)
        return DeviceRows.of(voxels.logits, voxels.labels, weights, "margins", self.classes)

    def sums(self, change: FloatArray, *, curvature: bool) -> tuple[FloatArray, FloatArray, list[FloatArray]]:
        theta = change + self.temperature * np.eye(*self.shape[1:])
        if isinstance(self.rows, DeviceRows):
            found = device_sums(self.rows, theta, "margins", curvature=curvature)
        elif curvature:
            found = self._sums_here(theta)
        else:
            found = expert_sums(self.rows, theta, "margins", threads=_threads())
        return found.nll, found.gradient.reshape(self.classes, -1), list(found.curvature)

    def _sums_here(self, theta: FloatArray) -> Sums:
        """With curvature; those of winners that rest are the last ones."""
        old, last = self._last
        rest = [k for k in range(len(theta)) if last is not None and np.array_equal(theta[k], old[k])]
        moved = [k for k in range(len(theta)) if k not in rest]
        found = expert_sums(self.rows, theta, "margins", curvature=True, experts=moved, threads=_threads())
        if last is not None:
            for new, before in zip(found, last, strict=True):
                new[rest] = before[rest]
        self._last = theta, found
        return found

    def fit(self, strength: float, start: FloatArray, tolerance: float) -> tuple[FloatArray, float, bool]:
        """On a device, all steps are taken there; no sensible map comes near the bounds."""
        if isinstance(self.rows, DeviceRows):
            begin = torch.from_numpy(start.reshape(self.classes, -1)).to(self.rows.x)
            found = newton_of_blocks(lambda x: self._there(x, strength), begin, tolerance)
            if found.converged and float(found.x.abs().max()) < _LARGEST:
                return found.x.cpu().numpy().ravel(), found.certificate, True
        return super().fit(strength, start, tolerance)

    def _there(self, x: Tensor, strength: float) -> tuple[Tensor, Tensor, Tensor]:
        """``objective`` in tensors."""
        ridge = strength / x.shape[1]
        unit = torch.eye(*self.shape[1:], dtype=x.dtype, device=x.device)
        theta = x.view(self.shape) + self.temperature * unit
        nll, gradient, products = tensor_sums(self.rows, theta, "margins", curvature=True)
        hessians = tensor_curvature(products, *self.shape[1:]) / self.total
        hessians.diagonal(dim1=1, dim2=2).add_(ridge)
        values = nll / self.total + 0.5 * ridge * x.square().sum(1)
        return values, gradient.flatten(1) / self.total + ridge * x, hessians


class _Biases(_Problem):
    """B of every winner."""

    def sums(self, change: FloatArray, *, curvature: bool) -> tuple[FloatArray, FloatArray, list[FloatArray]]:
        nll, gradient, hessians = np.zeros(self.classes), np.zeros((self.classes, self.classes)), []
        for k in range(self.classes):
            own = slice(self.rows.first[k], self.rows.first[k + 1])
            weight, target = self.rows.weight[own], self.rows.target[own]
            scores = -self.temperature * self.rows.x[own, :-1] - change[k, :, 0]
            assert self.rows.impossible is not None
            scores[self.rows.impossible[own]] = -np.inf
            log_p = torch.from_numpy(scores).log_softmax(1).numpy()
            nll[k] = -weight @ log_p[np.arange(len(target)), target]
            weighted = weight[:, None] * np.exp(log_p)
            mass = weighted.sum(0)
            gradient[k] = np.bincount(target, weight, self.classes) - mass
            if curvature:
                hessians.append(np.diag(mass) - np.exp(log_p).T @ weighted)
        return nll, gradient, hessians


def _gaps(voxels: WrongVoxels) -> Tensor:
    """Logits below the winner's ``(n, C)`` float64; that of the winner itself is -inf."""
    gaps = voxels.logits.double()
    winner = gaps.argmax(1, keepdim=True)
    return (gaps - gaps.gather(1, winner)).clamp(min=-DEPTH).scatter(1, winner, -torch.inf)


def fit_temperature(voxels: WrongVoxels) -> float:
    """b: the factor of all margins under which the wrong voxels are most likely."""
    gaps = _gaps(voxels)
    label = gaps.gather(1, voxels.labels[:, None])[:, 0]
    weights = torch.from_numpy(voxels.weights / voxels.weights.sum()).to(gaps)

    def nll(b: float) -> tuple[float, float, float]:
        scaled = b * gaps
        p = scaled.softmax(1)
        z = torch.where(p > 0, gaps, 0.0)
        mean = (p * z).sum(1)
        value = float(weights @ (scaled.logsumexp(1) - b * label))
        return value, float(weights @ (mean - label)), float(weights @ ((p * z**2).sum(1) - mean**2))

    return newton_1d(nll, 1.0, (_LOWEST, _HIGHEST), tolerance=1e-9).value


def _threads() -> int:
    return torch.get_num_threads()


@blas_threads(1)  # threads share the voxels, and must not wait for those of numpy
def fit_losers(voxels: WrongVoxels, folds: int, strengths: Sequence[float] = STRENGTHS) -> LosersFit:
    """The map whose penalty has the lowest out-of-fold NLL, fitted to all wrong voxels.

    ``folds`` is the number of folds that ``voxels.folds`` counts; with fewer than two, or without voxels, there is
    nothing to choose by, and one temperature is kept.
    """
    classes = voxels.logits.shape[1]
    none = np.zeros((classes, classes, columns(classes)))
    if not len(voxels) or classes == 2:
        return LosersFit(1.0, none)
    temperature = fit_temperature(voxels)
    before, shared = (-float(_log_r(voxels, b) @ voxels.weights) / voxels.weights.sum() for b in (1.0, temperature))
    chosen = strengths[_best(voxels, folds, temperature, strengths)] if folds > 1 and none.size else np.inf
    if np.isinf(chosen):
        return LosersFit(temperature, none, nll_before=before, nll_after=shared)
    problem = _problem(voxels, temperature)
    x, certificate, converged = problem.fit(chosen, none.ravel(), 1e-8)
    return LosersFit(temperature, x.reshape(none.shape), chosen, certificate, converged, before, problem.nll(x))


def _problem(voxels: WrongVoxels, temperature: float) -> _Problem:
    kind = _Matrices if voxels.logits.shape[1] <= _MATRICES else _Biases
    return kind(voxels, temperature)


def _log_r(voxels: WrongVoxels, temperature: float) -> FloatArray:
    """``log r`` of the labels ``(n,)`` where all losers share a temperature."""
    scores = temperature * _gaps(voxels)
    return (scores.gather(1, voxels.labels[:, None])[:, 0] - scores.logsumexp(1)).cpu().numpy()


def _best(voxels: WrongVoxels, folds: int, temperature: float, strengths: Sequence[float]) -> int:
    """The place of the strength with the lowest out-of-fold NLL, as far as it falls from strong to weak."""
    parts = [(voxels.where(voxels.folds != fold), voxels.where(voxels.folds == fold)) for fold in range(folds)]
    trials = [_Trial(*(_problem(part, temperature) for part in pair)) for pair in parts if all(map(len, pair))]
    losses: list[float] = []
    for strength in strengths:  # from strong to weak, until the loss rises
        losses.append(sum(trial.held_out_loss(strength) for trial in trials))
        if losses[-1] > min(losses):
            break
    return int(np.argmin(losses))


class _Trial:
    """A fit to some folds, and voxels of another; each penalty starts where the last one ended."""

    def __init__(self, problem: _Problem, held_out: _Problem) -> None:
        self.problem, self.held_out = problem, held_out
        self.x = np.zeros(np.prod(problem.shape))

    def held_out_loss(self, strength: float) -> float:
        """The summed NLL of the other voxels after a fit with this penalty."""
        if np.isfinite(strength):
            self.x, _, _ = self.problem.fit(strength, self.x, 1e-5)
        return self.held_out.nll(self.x) * self.held_out.total
