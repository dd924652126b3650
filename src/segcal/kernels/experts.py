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
An impossible class (at -inf, or ``segcal.scores.DEPTH`` below the winner) enters as ``IMPOSSIBLE`` below the winner, to
keep matrices finite, stays impossible, and comes last in the order. So what a mask was written as does not matter.

``logits`` maps see logit offsets only within ``segcal.scores.OFFSET_LIMIT``. For precision, the multiple of ``STEP``
nearest to the best logit is subtracted from the logits and enters the scores through the row sums of ``W``, of which
only the differences count: an offset of any size then costs no digits, and without one the map is just ``W z + b``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from segcal.errors import InputError
from segcal.scores import DEPTH, OFFSET_LIMIT

Features = Literal["logits", "own-logit", "log-probs", "margins", "gaps"]

IMPOSSIBLE = 30.0
# Offsets of logits count in multiples of this: larger than usual logits, so that these stay as they are.
STEP = 128.0


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
        """Raise unless this map is for this number of classes."""
        if num_classes != self.num_classes:
            raise InputError(f"logits have {num_classes} classes", expected=f"{self.num_classes}, as the map has")

    def __call__(self, logits: Tensor) -> Tensor:
        """Calibrated scores of logits ``(N, C, *spatial)``, differentiable in everything."""
        offset = None
        if self.features in ("logits", "own-logit"):
            logits, offset = _without_offset(logits)
        seen = describe(logits, self.features)
        weight, bias, tilt = (own.to(logits) for own in (self.weight, self.bias, self.tilt))
        column = (-1, *[1] * (logits.ndim - 2))
        mapped = torch.zeros_like(seen.x)
        for e in range(len(weight)):
            if self.features == "own-logit":
                product = weight[e].view(column) * seen.x
            else:
                product = torch.einsum("kj,nj...->nk...", weight[e], seen.x)
            own = product + bias[e].view(column)
            own = own if offset is None else own + offset * tilt[e].view(column)
            mapped = own if len(weight) == 1 else torch.where(seen.winner.unsqueeze(1) == e, own, mapped)
        return torch.where(seen.never, -torch.inf, to_scores(mapped, seen, self.features))

    @property
    def tilt(self) -> Tensor:
        """Row sums of the weights less their mean ``(E, K)``, in float64: what an offset of the logits multiplies."""
        row_sums = self.weight.double().sum(2)
        return row_sums - row_sums.mean(1, keepdim=True)


class Described(NamedTuple):
    """What a map sees of logits ``(N, C, *spatial)``.

    Features ``x (N, J, *spatial)``, the winner ``(N, *spatial)``, which classes are impossible ``(N, C, *spatial)``,
    and for gaps the classes in falling order ``(N, C, *spatial)``.
    """

    x: Tensor
    winner: Tensor
    never: Tensor
    order: Tensor | None = None


def describe(logits: Tensor, features: Features) -> Described:
    """What a map of these features sees of logits ``(N, C, *spatial)``.

    Examples:
        >>> describe(torch.tensor([[1.0, 5.0, 2.0]]), "gaps").x
        tensor([[3., 1.]])
        >>> describe(torch.tensor([[1.0, 5.0, -torch.inf]]), "margins").x
        tensor([[ 4.,  0., 30.]])
    """
    best, winner = logits.amax(1, keepdim=True), logits.argmax(1)
    never = best - logits > DEPTH
    margins = torch.where(never, IMPOSSIBLE, best - logits)
    if features == "margins":
        return Described(margins, winner, never)
    if features == "log-probs":
        return Described((-margins).log_softmax(1), winner, never)
    if features != "gaps":
        level = best.clamp(-OFFSET_LIMIT, OFFSET_LIMIT)
        return Described(torch.where(never | (best != level), level - margins, logits), winner, never)
    falling, order = torch.sort(logits.masked_fill(never, -torch.inf), dim=1, descending=True, stable=True)
    above, below = falling[:, :-1], falling[:, 1:]
    left = (IMPOSSIBLE - (best - above)).clamp(min=0)  # to where an impossible class enters
    return Described(torch.where(torch.isneginf(below), left, above - below), winner, never, order)


def _without_offset(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``(N, C, *spatial)`` less a multiple of ``STEP``, so that the best is small, and that multiple."""
    best = logits.amax(1, keepdim=True)
    level = best.clamp(-OFFSET_LIMIT, OFFSET_LIMIT)
    offset = STEP * (level / STEP).round()
    return torch.where(best == level, logits, logits - best + level) - offset, offset


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
