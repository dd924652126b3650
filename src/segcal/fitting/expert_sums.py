"""Loss, gradient and curvature of ``segcal.kernels.experts`` maps, as sums over voxels.

The NLL of a voxel is convex in the parameters of its expert: an affine map, then log-sum-exp. The parameters of an
expert are a matrix ``(K, J + 1)``, weights then bias; those of all experts are ``theta (E, K, J + 1)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache, partial, reduce
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.kernels.dispatch import fast_rows, fast_sums
from segcal.kernels.experts import ExpertMap, Features, describe
from segcal.kernels.pieces_cpu import in_ranges, in_turn
from segcal.types import FloatArray

_Part = tuple[float, FloatArray, FloatArray]

# Rows summed at a time: for 19 classes their products, 419 x 512 float64, take 2 MB.
_ROWS = 512
# Threads share parts of at least so many rows, and about so many parts.
_PART_ROWS, _PARTS = 2**10, 64
# Up to so many outputs of a map compiled loops are as fast as matrix products. With 64 they take 1.7 times as long,
# with 150 nearly three times: the map no longer fits the fastest memory.
_LOOP_OUTPUTS = 32
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
        loops = fast_rows(logits) if logits.shape[1] <= _LOOP_OUTPUTS else None
        return (cls._of if loops is None else partial(cls._of_fast, loops))(logits, labels, weights, features, experts)

    @classmethod
    def _of(cls, logits: Tensor, labels: Tensor, weights: FloatArray, features: Features, experts: int) -> Rows:
        """The definition."""
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

    @classmethod
    def _of_fast(
        cls, loops: ModuleType, logits: Tensor, labels: Tensor, weights: FloatArray, features: Features, experts: int
    ) -> Rows:
        """The same, by compiled loops."""
        order, first = np.arange(len(logits)), np.array([0, len(logits)])
        if experts > 1:
            winners = logits.argmax(1).numpy().astype(np.uint8)  # in which sorting is fast
            order = np.argsort(winners, kind="stable")
            first = np.concatenate(([0], np.cumsum(np.bincount(winners, minlength=experts))))
        x = np.empty((len(logits), logits.shape[1] + (features != "gaps")))
        never, (target, winner) = np.empty(logits.shape, np.bool_), np.empty((2, len(logits)), np.int64)
        given = logits.contiguous().numpy(), order, labels.contiguous().numpy()
        kind, found = loops.FEATURES.index(features), (x, target, winner, never)
        some = in_ranges(lambda start, stop: loops.describe(*given, start, stop, kind, *found), len(logits))
        return cls(x, target, weights[order], winner, first, never if any(some) else None)

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
    chosen = range(len(theta)) if experts is None else experts
    outputs, inputs = theta.shape[1:]
    vector = features == "own-logit"
    loops = None if vector or outputs > _LOOP_OUTPUTS else fast_sums(rows.x.size)
    sums = _vector_sums if vector else _matrix_sums if loops is None else partial(_compiled_sums, loops)
    size = max(_PART_ROWS, sum(int(rows.first[e + 1] - rows.first[e]) for e in chosen) // _PARTS)
    parts = [(e, part) for e in chosen for part in _parts(rows.first[e], rows.first[e + 1], size)]
    found = in_turn(lambda part: sums(rows, theta[part[0]], part[1], features, curvature), parts, threads)
    # Always added in this order: the sums do not depend on the number of threads.
    of_expert = {e: [own for (other, _), own in zip(parts, found, strict=True) if other == e] for e in chosen}
    nll, gradient = np.zeros(len(theta)), np.zeros(theta.shape)
    for e in chosen:
        for loss, slope, _ in of_expert[e]:
            nll[e] += loss
            gradient[e] += slope
    products = np.empty((len(theta), *[theta[0].size] * 2) if curvature else 0)

    def finish(e: int) -> None:
        own = reduce(np.add, (product for *_, product in of_expert.get(e, [])), np.zeros(()))
        full = own.ndim and not vector
        products[e] = full_curvature(own, outputs, inputs, nested=features == "gaps") if full else own

    if curvature:
        in_turn(finish, range(len(theta)), threads)
    return Sums(nll, gradient, products)


def _parts(start: int, stop: int, size: int) -> list[slice]:
    """Equal parts of some rows, none of them smaller than ``size`` unless there is only one."""
    count = max(1, (stop - start) // size)
    edges = [start + (stop - start) * number // count for number in range(count + 1)]
    return [slice(*pair) for pair in itertools.pairwise(edges) if pair[1] > pair[0]]


def _compiled_sums(
    loops: ModuleType, rows: Rows, theta: FloatArray, part: slice, features: Features, curvature: bool
) -> _Part:
    """``_matrix_sums`` by compiled loops."""
    outputs, inputs = theta.shape
    gradient, size = np.zeros(theta.shape), (_pairs(outputs) + outputs, _pairs(inputs)) if curvature else (0, 0)
    products, product = np.zeros(size), np.empty(size)
    across, within = (np.empty((_ROWS, own) if curvature else (0, 0)) for own in size)
    kind = loops.FEATURES.index(features)
    impossible = np.zeros((0, 0), np.bool_) if rows.impossible is None else rows.impossible[part]
    given = rows.x[part], rows.target[part], rows.weight[part], rows.winner[part], impossible, theta, kind, _ROWS
    nll = loops.add_part(*given, gradient, across, within, product, products)
    return nll, gradient, products


def _matrix_sums(rows: Rows, theta: FloatArray, part: slice, features: Features, curvature: bool) -> _Part:
    """NLL, gradient and, on request, products of probabilities times products of features, of one expert's rows."""
    outputs, inputs = theta.shape
    nll, gradient = 0.0, np.zeros(theta.shape)
    products = np.zeros((_pairs(outputs) + outputs, _pairs(inputs)) if curvature else 0)
    for start in range(part.start, part.stop, _ROWS):
        here = slice(start, min(start + _ROWS, part.stop))
        x, weight, winner = rows.x[here], rows.weight[here], rows.winner[here]
        losses, p, slope = _softmax(x @ theta.T, rows, here, features)
        nll += float(weight @ losses)
        gradient += (_pull_back(slope, winner, features) * weight[:, None]).T @ x
        if curvature:
            q = _pull_back(p, winner, features).T
            weighted = np.concatenate((_products(q * np.sqrt(weight)), np.abs(q) * weight))
            products += weighted @ _products(np.ascontiguousarray(x.T)).T
    return nll, gradient, products


def _vector_sums(rows: Rows, theta: FloatArray, part: slice, features: Features, curvature: bool) -> _Part:
    """NLL, gradient and, on request, curvature ``(2 C, 2 C)`` of vector scaling ``theta (C, 2)``.

    With ``u = (p_k z_k, p_k)`` of all classes it is ``sum w (D - u u')``; D has the blocks ``p_k (z_k, 1) (z_k, 1)'``.
    """
    (scale, bias), classes = theta.T, len(theta)
    nll, gradient = 0.0, np.zeros(theta.shape)
    products = np.zeros((2 * classes, 2 * classes) if curvature else 0)
    blocks = np.zeros((classes, 2, 2))
    for start in range(part.start, part.stop, _ROWS):
        here = slice(start, min(start + _ROWS, part.stop))
        z, weight = rows.x[here, :-1], rows.weight[here]
        losses, p, slope = _softmax(z * scale + bias, rows, here, features)
        nll += float(weight @ losses)
        gradient += np.stack((weight @ (slope * z), weight @ slope), 1)
        if curvature:
            u = np.stack((p * z, p), 2).reshape(len(z), -1) * np.sqrt(weight)[:, None]
            products -= u.T @ u
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
    subtracted, added, where = curvature_places(outputs, inputs, nested=nested)
    full: FloatArray = -products.reshape(-1).take(subtracted)
    full.reshape(-1)[where] += products.reshape(-1).take(added)
    return full


@lru_cache(maxsize=4)
def curvature_places(outputs: int, inputs: int, *, nested: bool) -> tuple[NDArray[np.int64], ...]:
    """Where ``full_curvature`` finds its terms among the products: those that it subtracts ``(P, P)``, those that it
    adds ``(n,)``, and where in the flat result it adds them ``(n,)``.
    """
    ranks, within = np.arange(outputs), places(inputs)

    def spread(rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of rows ``(K, K)`` of products, with every product of features, ``(P, P)``."""
        return (rows[:, None, :, None] * _pairs(inputs) + within[:, None, :]).reshape(outputs * inputs, -1)

    # M'diag(p)M is diagonal, but nested at (k, l) the probability of all ranks beyond max(k, l).
    added = spread(_pairs(outputs) + np.maximum.outer(ranks, ranks)).ravel()
    there = np.ones((outputs, outputs)) if nested else np.eye(outputs)
    where = np.flatnonzero(np.kron(there, np.ones((inputs, inputs))))
    return spread(places(outputs)), added[where], where


def _softmax(
    mapped: FloatArray, rows: Rows, piece: slice, features: Features
) -> tuple[FloatArray, FloatArray, FloatArray]:
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
