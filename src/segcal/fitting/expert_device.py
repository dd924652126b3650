"""``segcal.fitting.expert_sums`` where the logits are on an accelerator: torch, float64, in large steps.

The sums are matrix products, which accelerators do in float64 at nearly the speed of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from segcal.fitting.expert_sums import Sums, curvature_places
from segcal.kernels.experts import Features, describe
from segcal.types import FloatArray

# Rows whose products are summed at a time: for 19 classes these, 419 x 2^16 float64, take 220 MB.
_ROWS = 2**16
# Features of rows without products, 134 MB: with fewer, starting the operations takes Python longer than they take.
_FEATURES = 2**24


class DeviceRows(NamedTuple):
    """Voxels as the experts see them, as ``expert_sums.Rows``, in tensors."""

    x: Tensor
    target: Tensor
    weight: Tensor
    winner: Tensor
    first: list[int]
    impossible: Tensor | None = None

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, weights: Tensor, features: Features, experts: int) -> DeviceRows:
        """From ``logits (n, C)``, ``labels (n,)`` and how many voxels each stands for."""
        order = torch.argsort(logits.argmax(1), stable=True) if experts > 1 else slice(None)
        seen, y = describe(logits[order].double(), features), labels[order].long()
        never = seen.never
        if seen.order is not None:
            y = (seen.order == y[:, None]).to(torch.int64).argmax(1)
            never = never.gather(1, seen.order)
        x = torch.cat((seen.x, torch.ones_like(seen.x[:, :1])), 1)
        first = [0, len(logits)]
        if experts > 1:
            first = torch.searchsorted(seen.winner, torch.arange(experts + 1, device=x.device)).tolist()
        return cls(x, y, weights[order], seen.winner, first, never if bool(never.any()) else None)


def device_sums(
    rows: DeviceRows,
    theta: FloatArray,
    features: Features,
    *,
    curvature: bool = False,
    experts: Sequence[int] | None = None,
) -> Sums:
    """Sums over the rows of all experts, or of some, at ``theta (E, K, J + 1)``."""
    at = torch.from_numpy(theta).to(rows.x.device)
    nll, gradient, products = tensor_sums(rows, at, features, curvature=curvature, experts=experts)
    if curvature and features != "own-logit":
        products = tensor_curvature(products, *theta.shape[1:], nested=features == "gaps")
    return Sums(nll.cpu().numpy(), gradient.cpu().numpy(), products.cpu().numpy())


def tensor_sums(
    rows: DeviceRows, at: Tensor, features: Features, *, curvature: bool, experts: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """NLL ``(E,)``, gradient like ``at (E, K, J + 1)`` and, on request, products that the curvature is made of."""
    outputs, inputs = at.shape[1:]
    nll, gradient = at.new_zeros(len(at)), torch.zeros_like(at)
    vector = features == "own-logit"
    shape = (2 * outputs, 2 * outputs) if vector else (_pairs(outputs) + outputs, _pairs(inputs))
    products = at.new_zeros((len(at), *shape) if curvature else 0)
    step = _ROWS if curvature else max(_ROWS, _FEATURES // inputs)
    for e in range(len(at)) if experts is None else experts:
        for start in range(rows.first[e], rows.first[e + 1], step):
            piece = slice(start, min(start + step, rows.first[e + 1]))
            if vector:
                _add_vector(rows, at[0], piece, nll, gradient[0], products[0] if curvature else None)
            else:
                _add(rows, at[e], piece, features, nll[e], gradient[e], products[e] if curvature else None)
    return nll, gradient, products


def tensor_curvature(products: Tensor, outputs: int, inputs: int, *, nested: bool = False) -> Tensor:
    """``expert_sums.full_curvature`` of all experts ``(E, P, P)``."""
    minus, plus, where = _places(outputs, inputs, nested, products.device)
    flat = products.flatten(1)
    full = -flat[:, minus.flatten()]
    full[:, where] += flat[:, plus]
    return full.view(len(products), *minus.shape)


@lru_cache(maxsize=4)
def _places(outputs: int, inputs: int, nested: bool, device: torch.device) -> list[Tensor]:
    """``curvature_places`` on a device, to which copying them takes as long as the sums."""
    return [torch.from_numpy(own).to(device) for own in curvature_places(outputs, inputs, nested=nested)]


def _add(
    rows: DeviceRows, theta: Tensor, piece: slice, features: Features, nll: Tensor, gradient: Tensor,
    products: Tensor | None,
) -> None:  # fmt: skip
    x, weight, winner = rows.x[piece], rows.weight[piece], rows.winner[piece]
    losses, p, slope = _softmax(x @ theta.T, rows, piece, features)
    nll += weight @ losses
    gradient += (_pull_back(slope, winner, features) * weight[:, None]).T @ x
    if products is not None:
        q = _pull_back(p, winner, features)
        weighted = torch.cat((_products(q * weight.sqrt()[:, None]), q.abs() * weight[:, None]), 1)
        products += weighted.T @ _products(x)


def _add_vector(
    rows: DeviceRows, theta: Tensor, piece: slice, nll: Tensor, gradient: Tensor, products: Tensor | None
) -> None:
    z, weight = rows.x[piece, :-1], rows.weight[piece]
    losses, p, slope = _softmax(z * theta[:, 0] + theta[:, 1], rows, piece, "own-logit")
    nll += weight @ losses
    gradient += torch.stack((weight @ (slope * z), weight @ slope), 1)
    if products is not None:
        u = torch.stack((p * z, p), 2).flatten(1)
        products -= (u * weight[:, None]).T @ u
        first, own = weight @ (p * z), torch.arange(z.shape[1], device=z.device)
        blocks = torch.stack((weight @ (p * z * z), first, first, weight @ p), 1).view(-1, 2, 2)
        products.view(z.shape[1], 2, z.shape[1], 2)[own, :, own] += blocks


def _softmax(mapped: Tensor, rows: DeviceRows, piece: slice, features: Features) -> tuple[Tensor, Tensor, Tensor]:
    """Losses ``(n,)``, probabilities and gradients ``(n, C)``, in rank order for gaps, of what the experts return."""
    scores = mapped
    if features == "gaps":
        scores = torch.nn.functional.pad(-mapped @ _running(mapped), (1, 0))
    elif features == "margins":
        scores = (-mapped).scatter(1, rows.winner[piece, None], 0.0)
    if rows.impossible is not None:
        scores = scores.masked_fill(rows.impossible[piece], -torch.inf)
    log_p, target = scores.log_softmax(1), rows.target[piece, None]
    p = log_p.exp()
    return -log_p.gather(1, target)[:, 0], p, p.scatter_add(1, target, p.new_full((1, 1), -1.0).expand(target.shape))


def _pull_back(slope: Tensor, winner: Tensor, features: Features) -> Tensor:
    """``M'slope (n, K)`` of ``slope (n, C)``, M being the matrix from what the expert returns to the scores."""
    if features == "gaps":
        return -slope[:, 1:] @ _running(slope[:, 1:]).T
    return (-slope).scatter(1, winner[:, None], 0.0) if features == "margins" else slope


def _running(columns: Tensor) -> Tensor:
    """The matrix of running sums over columns: along short rows a product with it is far faster than ``cumsum``."""
    return columns.new_ones((columns.shape[1], columns.shape[1])).triu()


def _pairs(columns: int) -> int:
    return columns * (columns + 1) // 2


def _products(columns: Tensor) -> Tensor:
    """The products of all pairs of columns, in the order of ``expert_sums``."""
    first, second = torch.triu_indices(columns.shape[1], columns.shape[1], device=columns.device)
    return columns[:, first] * columns[:, second]
