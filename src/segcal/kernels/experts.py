"""Affine maps of what a voxel's scores say, chosen by its winner: one form for matrix scaling, Dirichlet and CMS.

A voxel is described by features ``x (J)``; the expert ``e`` of its winning class maps them to ``u = W_e x + b_e (K)``,
and ``u`` gives the calibrated scores ``s (C)``, which count up to a constant:

=============  =========================================  ======================================  ======
features       x                                          s                                       J, K
=============  =========================================  ======================================  ======
``logits``     z                                          u                                       C
``own-logit``  z_k, for the score of class k              u                                       1, C
``log-probs``  log S(z)                                   u                                       C
``margins``    z_winner - z_k, by class                   -u, and 0 for the winner                C
``gaps``       differences of neighbours, sorted falling  0, then -cumsum(u), back in class order C - 1
=============  =========================================  ======================================  ======

With ``W, b >= 0`` the maps of margins keep the argmax and those of gaps the order: sums of non-negative terms keep
their sign in any precision. One expert (``E = 1``) serves all voxels, ``E = C`` one winner each.
An impossible class (-inf) enters as ``IMPOSSIBLE`` below the winner, to keep matrices finite, and stays impossible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from segcal.errors import InputError

Features = Literal["logits", "own-logit", "log-probs", "margins", "gaps"]

IMPOSSIBLE = 30.0


@dataclass(frozen=True)
class ExpertMap:
    """``weight (E, K, J)`` and ``bias (E, K)`` of the map in the module's table.

    Examples:
        >>> identity = ExpertMap("gaps", torch.eye(2)[None], torch.zeros(1, 2))
        >>> identity(torch.tensor([[1.0, 5.0, 2.0]]))
        tensor([[-4.,  0., -3.]])
    """

    features: Features
    weight: Tensor
    bias: Tensor

    def __post_init__(self) -> None:
        experts, outputs, inputs = self.weight.shape
        fits = (experts, inputs) == (1, 1) if self.features == "own-logit" else outputs == inputs
        if not fits or self.bias.shape != (experts, outputs) or experts not in (1, self.num_classes):
            raise InputError(
                f"weight has shape {tuple(self.weight.shape)} and bias {tuple(self.bias.shape)}",
                expected="(E, K, K) and (E, K), with one expert or one per class; (1, C, 1) for 'own-logit'",
            )

    @property
    def num_classes(self) -> int:
        """C."""
        return self.weight.shape[1] + (self.features == "gaps")

    def check_classes(self, num_classes: int) -> None:
        """Raise unless this map is one of scores of so many classes."""
        if num_classes != self.num_classes:
            raise InputError(f"logits have {num_classes} classes", expected=f"{self.num_classes}, as the map has")

    def __call__(self, logits: Tensor) -> Tensor:
        """Calibrated scores of logits ``(N, C, *spatial)``, differentiable in everything."""
        seen = describe(logits, self.features)
        weight, bias = self.weight.to(logits), self.bias.to(logits)
        column = (-1, *[1] * (logits.ndim - 2))
        mapped = torch.zeros_like(seen.x)
        for e in range(len(weight)):
            if self.features == "own-logit":
                product = weight[e].view(column) * seen.x
            else:
                product = torch.einsum("kj,nj...->nk...", weight[e], seen.x)
            own = product + bias[e].view(column)
            mapped = own if len(weight) == 1 else torch.where(seen.winner.unsqueeze(1) == e, own, mapped)
        scores = to_scores(mapped, seen, self.features)
        return torch.where(torch.isneginf(logits), -torch.inf, scores)


class Described(NamedTuple):
    """Features ``x (N, J, *spatial)``, the winner ``(N, *spatial)``, and the classes in falling order, for gaps."""

    x: Tensor
    winner: Tensor
    order: Tensor | None


def describe(logits: Tensor, features: Features) -> Described:
    """What a map of these features sees of logits ``(N, C, *spatial)``.

    Examples:
        >>> describe(torch.tensor([[1.0, 5.0, 2.0]]), "gaps").x
        tensor([[3., 1.]])
        >>> describe(torch.tensor([[1.0, 5.0, -torch.inf]]), "margins").x
        tensor([[ 4.,  0., 30.]])
    """
    best, winner = logits.amax(1, keepdim=True), logits.argmax(1)
    possible = torch.where(torch.isneginf(logits), best - IMPOSSIBLE, logits)
    if features in ("logits", "own-logit"):
        return Described(possible, winner, None)
    if features == "log-probs":
        return Described(possible.log_softmax(1), winner, None)
    if features == "margins":
        return Described(best - possible, winner, None)
    falling, order = torch.sort(possible, dim=1, descending=True, stable=True)
    return Described(falling[:, :-1] - falling[:, 1:], winner, order)


def to_scores(mapped: Tensor, seen: Described, features: Features) -> Tensor:
    """Scores ``(N, C, *spatial)`` in class order from what the experts return."""
    if features in ("logits", "own-logit", "log-probs"):
        return mapped
    if features == "margins":
        return (-mapped).scatter(1, seen.winner.unsqueeze(1), 0.0)
    assert seen.order is not None
    falling = -mapped.cumsum(1)
    falling = torch.cat((torch.zeros_like(falling[:, :1]), falling), 1)
    return torch.zeros_like(falling).scatter(1, seen.order, falling)
