"""CRaC: the constraint of NACL with one multiplier per class and region, learned on the validation set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, Unpack

from segcal.errors import InputError
from segcal.kernels import fast_penalties
from segcal.losses.base import Loss
from segcal.losses.checks import Batch, PenaltyOptions, check_number, check_patch, prepare
from segcal.losses.combine import penalised
from segcal.losses.lagrangian import Multipliers
from segcal.losses.patches import label_codes, patch_counts
from segcal.losses.voxelwise import Part, Terms

__all__ = ["CRaC", "crac"]


def crac(
    logits: Tensor,
    labels: Tensor,
    multipliers: Tensor,
    rho: Tensor,
    margin: float = 1.0,
    *,
    patch: int = 3,
    **options: Unpack[PenaltyOptions],
) -> Tensor:
    """``crac``: ``base + mean over k of lambda h + rho h^2 / 2``, ``h = |tau_k - z_k|`` (Murugesan et al. 2024).

    The penalty is the augmented Lagrangian of Powell, Hestenes and Rockafellar (PHR), ``(x^2 - lambda^2) / (2 rho)``
    with ``x = lambda + rho h``. ``multipliers`` and ``rho`` are ``(2, C)``: one row for voxels whose patch holds one
    label (inner), one for voxels whose patch holds several (outer). tau is the share of each class in the patch, times
    ``margin`` in the inner region (the paper has 1, its released code 5). ``logits (B, C, *S)``, ``labels (B, *S)``,
    two or three spatial axes. ``base`` as in ``segcal.losses.combine``.

    Examples:
        >>> labels = torch.zeros(1, 4, 4, dtype=torch.long)
        >>> crac(torch.zeros(1, 2, 4, 4), labels, torch.ones(2, 2), torch.ones(2, 2), base=None)
        tensor(0.7500)
    """
    check_number("margin", margin)

    def penalty(batch: Batch) -> Part:
        for name, table in (("multipliers", multipliers), ("rho", rho)):
            if table.shape != (2, batch.num_classes):
                raise InputError(f"{name} have shape {tuple(table.shape)}", expected=f"(2, {batch.num_classes})")
        check_patch(patch, batch.labels.shape[1:])
        return Part(
            lambda piece, _: _phr_terms(piece, multipliers, rho, margin, patch),
            1 / batch.num_classes,
            add=_one_pass(batch, (multipliers, rho), margin, patch),
        )

    return penalised(logits, labels, penalty, **options)


def constraint(batch: Batch, margin: float, patch: int) -> tuple[Tensor, Tensor]:
    """``z - tau (B, C, *S)``, and 1 where the patch holds several labels, 0 elsewhere ``(B, 1, *S)``."""
    z = batch.logits
    counts = patch_counts(batch, patch)
    # A patch holds one label if the count of that label is the total. Converting bytes to floats is much faster than
    # converting bools.
    outer = (counts.classes.amax(1, keepdim=True) != counts.total).to(torch.uint8).to(z.dtype)
    share = counts.total.clamp_min(1).to(z.dtype).reciprocal_()
    if margin != 1:
        share = share * torch.where(outer > 0, 1.0, margin).to(z.dtype)
    return counts.classes.to(z.dtype).mul_(share.neg_()).add_(z), outer


def by_region(table: Tensor, outer: Tensor) -> Tensor:
    """The inner or outer values of a table ``(2, C)``, chosen for every voxel: ``(B, C, *S)``."""
    inside, outside = table.to(outer).view(2, -1, *[1] * (outer.ndim - 2))
    entries: Tensor = (outer * (outside - inside)).add_(inside)
    return entries


def _phr_terms(batch: Batch, multipliers: Tensor, rho: Tensor, margin: float, patch: int) -> Terms:
    """``sum_k lambda h + rho h^2 / 2`` and its gradient ``(lambda + rho h) sign(z - tau)``."""
    gap, outer = constraint(batch, margin, patch)
    linear = by_region(multipliers, outer).mul_(gap.sign())
    gradient = by_region(rho, outer).mul_(gap).add_(linear)
    # h (lambda + rho h / 2) = (z - tau) (gradient + linear) / 2
    value = linear.add_(gradient).mul_(gap).sum(1).mul_(0.5)
    return Terms(value, gradient if batch.needs_gradient else None)


def _one_pass(
    batch: Batch, tables: tuple[Tensor, Tensor], margin: float, patch: int
) -> Callable[[Batch, Terms, float], None] | None:
    """A function that adds the penalty to other terms in a compiled loop; None if there is none for these logits."""
    fast = fast_penalties(batch.logits)
    if fast is None:
        return None
    return lambda piece, terms, scale: fast.add_phr(
        *terms, piece.logits, label_codes(piece), tables, margin=margin, patch=patch, scale=scale
    )


@torch.no_grad()
def violation_sums(
    logits: Tensor, labels: Tensor, *, margin: float = 1.0, patch: int = 3, ignore_index: int = 255
) -> tuple[Tensor, Tensor]:
    """Sums of h ``(2, C)`` float64 over the inner and the outer valid voxels, and their counts ``(2,)`` int64.

    Examples:
        >>> violation_sums(torch.ones(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.long))
        (tensor([[0., 9.], [0., 0.]], dtype=torch.float64), tensor([9, 0]))
    """
    check_number("margin", margin)
    batch = prepare(logits, labels, ignore_index)
    gap, outer = constraint(batch, margin, patch)
    valid = torch.ones_like(outer) if batch.valid is None else batch.valid.unsqueeze(1).to(outer)
    regions = torch.stack((valid * (1 - outer), valid * outer))
    violation = gap.abs_().movedim(1, 0).flatten(1).double()
    regions = regions.flatten(1)
    return regions.double() @ violation.T, regions.sum(1, dtype=torch.float64).long()


class CRaC(Loss):
    """``crac`` as a module that holds its multipliers and learns them.

    After every epoch pass the validation batches to ``observe`` and call ``update``, or use a helper of
    ``segcal.losses.callbacks``. ``state_dict`` holds the multipliers and their trace: save it with your checkpoint.

    Examples:
        >>> loss = CRaC(num_classes=2)
        >>> logits, labels = torch.ones(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long)
        >>> loss.observe(logits, labels)
        >>> loss.update()
        >>> loss.multipliers.values  # class 1 violates by 1; there are no outer voxels
        tensor([[1.0000e-06, 1.0000e-01],
                [1.0000e-06, 1.0000e-06]], dtype=torch.float64)
    """

    id = "crac"
    function = staticmethod(crac)
    neighbourhood = True
    translation_invariant = False

    def __init__(self, num_classes: int, margin: float = 1.0, **options: Any) -> None:
        super().__init__(margin=margin, **options)
        self.multipliers = Multipliers(num_classes)

    @classmethod
    def of_classes(cls, num_classes: int, **options: Any) -> Self:
        """The loss with multipliers for this many classes."""
        return cls(num_classes, **options)

    def _arguments(self) -> tuple[Tensor, ...]:
        return self.multipliers.values, self.multipliers.rho

    def observe(self, logits: Tensor, labels: Tensor) -> None:
        """Add a validation batch to the sums that the next ``update`` uses."""
        options = {name: self._options[name] for name in ("margin", "patch", "ignore_index")}
        self.multipliers.add(*violation_sums(logits, labels, **options))

    def update(self) -> None:
        """End an epoch: update the multipliers from the validation batches observed since the last update."""
        self.multipliers.update()
