"""Loss, gradient and curvature of ``segcal.kernels.experts`` maps, as sums over voxels.

The NLL of a voxel is convex in the parameters of its expert: an affine map, then log-sum-exp. Parameters of an expert
are a matrix ``(K, J + 1)``, weights then bias; those of all are ``theta (E, K, J + 1)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels.experts import ExpertMap, Features, describe

FloatArray = NDArray[np.float64]
Pieces = Sequence[tuple[int, slice]]

# Rows of the matrix whose square is the curvature: 1024 x 380 float64 are 3 MB.
_ROWS = 1024


class Rows(NamedTuple):
    """Voxels as the experts see them, ordered by expert: expert e has rows ``first[e]`` to ``first[e + 1]``.

    ``x (n, J + 1)`` are the features and a one, ``target (n,)`` is the label's place among the scores,
    ``weight (n,)`` the voxels each row stands for, and ``impossible (n, C)`` the scores that are -inf whatever the map
    (None where there are none).
    """

    x: FloatArray
    target: NDArray[np.int64]
    weight: FloatArray
    winner: NDArray[np.int64]
    first: NDArray[np.int64]
    impossible: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, weights: FloatArray, features: Features, experts: int) -> Rows:
        """From ``logits (n, C)`` and ``labels (n,)``."""
        seen = describe(logits.double(), features)
        target, never = labels, torch.isneginf(logits)
        if seen.order is not None:
            target = (seen.order == labels[:, None]).to(torch.int64).argmax(1)
            never = never.gather(1, seen.order)
        winner = seen.winner.numpy()
        expert = winner if experts > 1 else np.zeros_like(winner)
        by_expert = np.argsort(expert, kind="stable")
        x = np.concatenate((seen.x.numpy(), np.ones((len(logits), 1))), 1)
        first = np.searchsorted(expert[by_expert], np.arange(experts + 1))
        impossible = never.numpy()[by_expert] if bool(never.any()) else None
        return cls(x[by_expert], target.numpy()[by_expert], weights[by_expert], winner[by_expert], first, impossible)


class Sums(NamedTuple):
    """Of each expert's voxels: NLL ``(E,)``, gradient ``(E, K, J + 1)``, and on request curvature ``(E, P, P)``."""

    nll: FloatArray
    gradient: FloatArray
    curvature: FloatArray | None


def expert_sums(
    rows: Rows, theta: FloatArray, features: Features, *, curvature: bool = False, threads: int = 1
) -> Sums:
    """Sums over the rows at ``theta (E, K, J + 1)``, in ``threads`` parts of fixed extent."""
    pieces = [
        (e, slice(start, min(start + _ROWS, rows.first[e + 1])))
        for e in range(len(theta))
        for start in range(rows.first[e], rows.first[e + 1], _ROWS)
    ]
    turns = [pieces[turn::threads] for turn in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(lambda own: _sums(rows, theta, features, own, curvature), turns))
    total = parts[0]
    for part in parts[1:]:
        for into, more in zip(total, part, strict=True):
            if into is not None and more is not None:
                into += more
    return total


def _sums(rows: Rows, theta: FloatArray, features: Features, pieces: Pieces, curvature: bool) -> Sums:
    experts, outputs, inputs = theta.shape
    size = outputs * inputs
    nll, gradient = np.zeros(experts), np.zeros(theta.shape)
    second = np.zeros((experts, size, size)) if curvature else None
    for e, piece in pieces:
        x, weight, target, winner = rows.x[piece], rows.weight[piece], rows.target[piece], rows.winner[piece]
        never = None if rows.impossible is None else rows.impossible[piece]
        losses, p = _softmax(x @ theta[e].T, target, winner, features, never)
        nll[e] += weight @ losses
        slope = p.copy()
        slope[np.arange(len(x)), target] -= 1
        gradient[e] += (_pull_back(slope, winner, features) * weight[:, None]).T @ x
        if second is not None:
            _add_curvature(second[e], x, _pull_back(p, winner, features), weight, nested=features == "gaps")
    return Sums(nll, gradient, second)


def _softmax(
    mapped: FloatArray,
    target: NDArray[np.int64],
    winner: NDArray[np.int64],
    features: Features,
    impossible: NDArray[np.bool_] | None,
) -> tuple[FloatArray, FloatArray]:
    """Losses ``(n,)`` and probabilities ``(n, C)``, in rank order for gaps."""
    if features == "gaps":
        scores = np.concatenate((np.zeros((len(mapped), 1)), -np.cumsum(mapped, 1)), 1)
    elif features == "margins":
        scores = -mapped
        scores[np.arange(len(scores)), winner] = 0
    else:
        scores = mapped
    if impossible is not None:
        scores = np.where(impossible, -np.inf, scores)
    scores = scores - scores.max(1, keepdims=True)
    e = np.exp(scores)
    total = e.sum(1)
    losses = np.log(total) - scores[np.arange(len(scores)), target]
    return losses, e / total[:, None]


def _pull_back(slope: FloatArray, winner: NDArray[np.int64], features: Features) -> FloatArray:
    """``M'slope (n, K)`` of ``slope (n, C)``, M being the matrix from what the expert returns to the scores."""
    if features == "gaps":
        return -np.cumsum(slope[:, :0:-1], 1)[:, ::-1]
    if features == "margins":
        slope = -slope
        slope[np.arange(len(slope)), winner] = 0
    return slope


def _add_curvature(total: FloatArray, x: FloatArray, q: FloatArray, weight: FloatArray, *, nested: bool) -> None:
    """Add ``sum w M'(diag(p) - p p')M (x) x x'`` to ``total (P, P)``, where ``q = M'p``.

    In float64: the two terms nearly cancel along some directions, and what float32 leaves there misleads the solver.
    """
    inputs = x.shape[1]
    outer = ((q * np.sqrt(weight)[:, None])[:, :, None] * x[:, None, :]).reshape(len(x), -1)
    total -= outer.T @ outer
    blocks = total.reshape(q.shape[1], inputs, q.shape[1], inputs)
    for k in range(q.shape[1]):
        diagonal = x.T @ (x * np.abs(q[:, k] * weight)[:, None])
        if nested:  # M'diag(p)M at (k, l) is the probability of all ranks beyond max(k, l)
            blocks[k, :, : k + 1, :] += diagonal[:, None, :]
            blocks[:k, :, k, :] += diagonal[None]
        else:
            blocks[k, :, k, :] += diagonal


def expert_map(theta: FloatArray, features: Features) -> ExpertMap:
    """The map with these parameters."""
    values = torch.from_numpy(theta)
    return ExpertMap(features, values[:, :, :-1], values[:, :, -1])
