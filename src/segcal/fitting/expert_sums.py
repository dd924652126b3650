"""Loss, gradient and curvature of ``segcal.kernels.experts`` maps, as sums over voxels.

The NLL of a voxel is convex in the parameters of its expert: an affine map, then log-sum-exp. The parameters of an
expert are a matrix ``(K, J + 1)``, weights then bias; those of all experts are ``theta (E, K, J + 1)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels.experts import ExpertMap, Features, describe
from segcal.kernels.pieces_cpu import in_threads
from segcal.types import FloatArray

Pieces = Sequence[tuple[int, slice]]
_Part = tuple[FloatArray, FloatArray, FloatArray]

# Rows summed at a time: for 19 classes their products, 419 x 512 float64, take 2 MB.
_ROWS = 512
# Voxels whose features are computed at a time, so that copies of their logits in float64 stay small.
_DESCRIBED = 2**14


class Rows(NamedTuple):
    """Voxels as the experts see them, ordered by expert: expert e has rows ``first[e]`` to ``first[e + 1]``.

    ``x (n, J + 1)`` are the features and a one, ``target (n,)`` is the label's place among the scores, ``weight (n,)``
    is how many voxels a row stands for, and ``impossible (n, C)`` says which scores are -inf whatever the map (None
    where there are none).
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
        order = torch.argsort(logits.argmax(1), stable=True) if experts > 1 else torch.arange(len(logits))
        inputs = logits.shape[1] - (features == "gaps")
        x, never = np.ones((len(logits), inputs + 1)), np.zeros(logits.shape, np.bool_)
        target, winner = (np.empty(len(logits), np.int64) for _ in range(2))
        for start in range(0, len(logits), _DESCRIBED):
            here = slice(start, start + _DESCRIBED)
            z, y = logits[order[here]], labels[order[here]]
            seen = describe(z.double(), features)
            x[here, :-1], winner[here] = seen.x, seen.winner
            if seen.order is None:
                target[here], never[here] = y, seen.never
            else:
                target[here] = (seen.order == y[:, None]).to(torch.int64).argmax(1)
                never[here] = seen.never.gather(1, seen.order)
        first = np.searchsorted(winner, np.arange(experts + 1)) if experts > 1 else np.array([0, len(logits)])
        return cls(x, target, weights[order.numpy()], winner, first, never if never.any() else None)

    def of_expert(self, expert: int) -> Rows:
        """The rows of one expert."""
        own = slice(*self.first[expert : expert + 2])
        impossible = None if self.impossible is None else self.impossible[own]
        rows = self.x[own], self.target[own], self.weight[own], self.winner[own]
        return Rows(*rows, np.array([0, len(rows[0])]), impossible)


class Sums(NamedTuple):
    """Sums over each expert's voxels: NLL ``(E,)``, gradient ``(E, K, J + 1)``, curvature ``(E, P, P)`` or empty."""

    nll: FloatArray
    gradient: FloatArray
    curvature: FloatArray = np.zeros(0)


def expert_sums(
    rows: Rows,
    theta: FloatArray,
    features: Features,
    *,
    curvature: bool = False,
    experts: Sequence[int] | None = None,
    threads: int = 1,
) -> Sums:
    """Sums over the rows of all experts, or of some, at ``theta (E, K, J + 1)``, shared by ``threads``."""
    size = _ROWS if len(theta) > 1 else max(1, min(_ROWS, -(-len(rows.x) // threads)))
    chosen = range(len(theta)) if experts is None else experts
    pieces = [
        (e, slice(start, min(start + size, rows.first[e + 1])))
        for e in chosen
        for start in range(rows.first[e], rows.first[e + 1], size)
    ]
    sums = _vector_sums if features == "own-logit" else partial(_matrix_sums, features=features)
    parts = in_threads(lambda turn: sums(rows, theta, pieces[turn::threads], curvature), threads)
    nll, gradient, products = (np.sum(numbers, 0) for numbers in zip(*parts, strict=True))
    if curvature and features != "own-logit":
        full = np.zeros((len(theta), *[theta[0].size] * 2))
        for e in chosen:
            full[e] = full_curvature(products[e], *theta.shape[1:], nested=features == "gaps")
        products = full
    return Sums(nll, gradient, products)


def _matrix_sums(rows: Rows, theta: FloatArray, pieces: Pieces, curvature: bool, *, features: Features) -> _Part:
    """NLL, gradient and, on request, products of probabilities times products of features."""
    experts, outputs, inputs = theta.shape
    nll, gradient = np.zeros(experts), np.zeros(theta.shape)
    products = np.zeros((experts, _pairs(outputs) + outputs, _pairs(inputs)) if curvature else 0)
    for e, piece in pieces:
        x, weight, winner = rows.x[piece], rows.weight[piece], rows.winner[piece]
        losses, p, slope = _softmax(x @ theta[e].T, rows, piece, features)
        nll[e] += weight @ losses
        gradient[e] += (_pull_back(slope, winner, features) * weight[:, None]).T @ x
        if curvature:
            q = _pull_back(p, winner, features).T
            weighted = np.concatenate((_products(q * np.sqrt(weight)), np.abs(q) * weight))
            products[e] += weighted @ _products(np.ascontiguousarray(x.T)).T
    return nll, gradient, products


def _vector_sums(rows: Rows, theta: FloatArray, pieces: Pieces, curvature: bool) -> _Part:
    """NLL, gradient and, on request, curvature ``(1, 2 C, 2 C)`` of vector scaling ``theta (1, C, 2)``.

    With ``u = (p_k z_k, p_k)`` of all classes it is ``sum w (D - u u')``; D has the blocks ``p_k (z_k, 1) (z_k, 1)'``.
    """
    (scale, bias), classes = theta[0].T, theta.shape[1]
    nll, gradient = np.zeros(1), np.zeros(theta.shape)
    products = np.zeros((1, 2 * classes, 2 * classes) if curvature else 0)
    blocks = np.zeros((classes, 2, 2))
    for _, piece in pieces:
        z, weight = rows.x[piece, :-1], rows.weight[piece]
        losses, p, slope = _softmax(z * scale + bias, rows, piece, "own-logit")
        nll += weight @ losses
        gradient[0] += np.stack((weight @ (slope * z), weight @ slope), 1)
        if curvature:
            u = np.stack((p * z, p), 2).reshape(len(z), -1) * np.sqrt(weight)[:, None]
            products[0] -= u.T @ u
            first = weight @ (p * z)
            blocks += np.stack((weight @ (p * z * z), first, first, weight @ p), 1).reshape(classes, 2, 2)
    if curvature:
        own = np.arange(classes)
        products.reshape(classes, 2, classes, 2)[own, :, own] += blocks
    return nll, gradient, products


def diagonal(rows: Rows, theta: FloatArray, features: Features, turn: FloatArray | None = None) -> FloatArray:
    """The diagonal ``(K, L)`` of the curvature of one expert's sums at ``theta (K, L)``.

    Given ``turn (L, L)``, that of the curvature by ``theta @ turn``. For ``own-logit``, instead, moments ``(C, 3)`` of
    each class's logit z: sums of 1, z and z^2, weighted by ``p (1 - p)``.
    """
    vector = features == "own-logit"
    total = np.zeros((len(theta), 3) if vector else theta.shape)
    for start in range(0, len(rows.x), _ROWS):
        piece = slice(start, start + _ROWS)
        x, weight = rows.x[piece], rows.weight[piece, None]
        mapped = x[:, :-1] * theta[:, 0] + theta[:, 1] if vector else x @ theta.T
        q = np.abs(_pull_back(_softmax(mapped, rows, piece, features)[1], rows.winner[piece], features))
        q *= (1 - q) * weight
        if vector:
            total += np.stack([(q * x[:, :-1] ** power).sum(0) for power in range(3)], 1)
        else:
            total += q.T @ np.square(x if turn is None else x @ turn)
    return total


def _pairs(rows: int) -> int:
    return rows * (rows + 1) // 2


def _products(rows: FloatArray) -> FloatArray:
    """The products of all pairs of rows: the first with itself and all later ones, the second likewise, and so on."""
    count, start = len(rows), 0
    out = np.empty((_pairs(count), rows.shape[1]))
    for k in range(count):
        np.multiply(rows[k:], rows[k], out=out[start : start + count - k])
        start += count - k
    return out


def places(rows: int) -> NDArray[np.int64]:
    """Where ``_products`` has the product of two rows ``(rows, rows)``."""
    places = np.zeros((rows, rows), np.int64)
    upper = np.triu_indices(rows)
    places[upper] = places[upper[::-1]] = np.arange(_pairs(rows))
    return places


def full_curvature(products: FloatArray, outputs: int, inputs: int, *, nested: bool) -> FloatArray:
    """``sum w M'(diag(p) - p p')M (x) x x'``, ``(P, P)``, from the sums of products with ``q = M'p``.

    Both factors are symmetric, so a quarter of all products is enough. The sums are float64: the two terms nearly
    cancel along some directions, and the rounding of float32 there misleads the solver.
    """
    pairs = _pairs(outputs)
    blocks = -products[:pairs][places(outputs)]
    ranks = np.arange(outputs)
    if nested:  # M'diag(p)M at (k, l) is the probability of all ranks beyond max(k, l)
        blocks += products[pairs + np.maximum.outer(ranks, ranks)]
    else:
        blocks[ranks, ranks] += products[pairs:]
    full: FloatArray = blocks[:, :, places(inputs)].transpose(0, 2, 1, 3).reshape(outputs * inputs, -1)
    return full


def _softmax(mapped: FloatArray, rows: Rows, piece: slice, features: Features) -> _Part:
    """Losses ``(n,)``, probabilities and gradients ``(n, C)``, in rank order for gaps, of what the experts return."""
    place = np.arange(len(mapped))
    if features == "gaps":
        scores = np.concatenate((np.zeros((len(mapped), 1)), -np.cumsum(mapped, 1)), 1)
    elif features == "margins":
        scores = -mapped
        scores[place, rows.winner[piece]] = 0
    else:
        scores = mapped
    if rows.impossible is not None:
        scores = np.where(rows.impossible[piece], -np.inf, scores)
    scores = scores - scores.max(1, keepdims=True)
    e = np.exp(scores)
    total, target = e.sum(1), rows.target[piece]
    p = e / total[:, None]
    slope = p.copy()
    slope[place, target] -= 1
    return np.log(total) - scores[place, target], p, slope


def _pull_back(slope: FloatArray, winner: NDArray[np.int64], features: Features) -> FloatArray:
    """``M'slope (n, K)`` of ``slope (n, C)``, M being the matrix from what the expert returns to the scores."""
    if features == "gaps":
        return -np.cumsum(slope[:, :0:-1], 1)[:, ::-1]
    if features == "margins":
        slope = -slope
        slope[np.arange(len(slope)), winner] = 0
    return slope


def expert_map(theta: FloatArray, features: Features) -> ExpertMap:
    """The map with these parameters."""
    values = torch.from_numpy(theta)
    return ExpertMap(features, values[:, :, :-1], values[:, :, -1])
