"""CRaC: the constraint of NACL with one multiplier per class and region, learned on the validation set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, distributed, nn
from typing_extensions import Self, Unpack

from segcal.errors import InputError, check_name, check_whole
from segcal.kernels import fast_penalties
from segcal.losses.base import Loss
from segcal.losses.checks import Batch, PenaltyOptions, check_number, check_patch, prepare
from segcal.losses.combine import penalised
from segcal.losses.patches import label_codes, patch_counts
from segcal.losses.voxelwise import Part, Terms

__all__ = ["CRaC", "Multipliers", "crac"]

# The voxels that a mean violation is over.
Average = Literal["region", "all"]

# Bounds of the multipliers, which start at the lower one.
LOWEST, HIGHEST = 1e-6, 1e6
# Start, upper bound and growth factor of the penalty parameter rho.
RHO_START, RHO_HIGHEST, RHO_GROWTH = 0.1, 10.0, 1.2
# Epochs between two checks of whether the violation shrinks.
CHECK_EPOCHS = 10
# rho grows if the mean violation exceeds this share of its value at the previous check.
IMPROVEMENT = 0.9


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


class Multipliers(nn.Module):
    """Lagrange multipliers and penalty parameters ``(2, C)``; rows are the inner and the outer region.

    ``average="all"`` takes the mean over all voxels, with no violation outside of the region, as CRaC's released code
    does: the multipliers of a region then grow in proportion to its size, those of the outer one very slowly.

    An update sets ``lambda <- mean of lambda + rho h`` over the validation voxels of the region (h is the violation of
    the constraint), within [1e-6, 1e6]. Every tenth update, rho grows by 1.2, up to 10, where mean h exceeds 0.9 of its
    value ten updates earlier. Only the sums of h are kept, so batches and processes of ``torch.distributed`` add up. A
    region without voxels keeps its values.

    Attributes:
        values: lambda ``(2, C)``.
        rho: ``(2, C)``.
        trace: One dict per update: ``epoch``, and ``multipliers``, ``rho``, ``violation`` (mean h; NaN without voxels)
            as nested lists, inner then outer.

    Examples:
        >>> multipliers = Multipliers(2)
        >>> multipliers.add(torch.tensor([[2.0, 4.0], [9.0, 9.0]]), torch.tensor([2, 3]))
        >>> multipliers.update()
        >>> multipliers.values
        tensor([[0.1000, 0.2000],
                [0.3000, 0.3000]], dtype=torch.float64)
    """

    values: Tensor
    rho: Tensor
    previous: Tensor
    epoch: Tensor
    sums: Tensor
    voxels: Tensor

    def __init__(self, num_classes: int, average: Average = "region") -> None:
        super().__init__()
        check_whole("num_classes", num_classes, 2)
        check_name("average", average, get_args(Average))
        self.average = average
        start = torch.zeros(2, num_classes, dtype=torch.float64)
        self.register_buffer("values", start + LOWEST)
        self.register_buffer("rho", start + RHO_START)
        self.register_buffer("previous", start + torch.nan)
        self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sums", start)
        self.register_buffer("voxels", torch.zeros(2, dtype=torch.int64))
        self.trace: list[dict[str, Any]] = []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Multipliers:
        """Only move: a module in half precision that has the loss within would make its sums stop growing."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def add(self, sums: Tensor, voxels: Tensor) -> None:
        """Add sums of violations ``(2, C)`` over this many voxels ``(2,)`` of each region."""
        self.sums += sums.to(self.sums)
        self.voxels += voxels.to(self.voxels)

    def merge(self, other: Multipliers) -> None:
        """Add the sums that other multipliers have collected since their last update."""
        self.add(other.sums, other.voxels)

    def update(self) -> None:
        """Update from the sums added since the last update, in all processes together."""
        if distributed.is_available() and distributed.is_initialized():
            distributed.all_reduce(self.sums)
            distributed.all_reduce(self.voxels)
        if not int(self.voxels.sum()):
            raise InputError(
                "CRaC was given no validation voxel since the last update",
                expected="a validation set: the multipliers are learned on it",
                fix="call observe(logits, labels) for every validation batch before update()",
            )
        seen = (self.voxels > 0).unsqueeze(1).expand_as(self.sums)
        mean = self.sums / (self.voxels.unsqueeze(1) if self.average == "region" else self.voxels.sum())
        if not bool(mean[seen].isfinite().all()):
            raise InputError("validation logits are not finite", expected="finite logits", fix="lower the step size")
        self.epoch += 1
        self.values.copy_(torch.where(seen, (self.values + self.rho * mean).clamp(LOWEST, HIGHEST), self.values))
        if int(self.epoch) % CHECK_EPOCHS == 0:
            stuck = seen & (mean > IMPROVEMENT * self.previous)  # False at the first check, as NaN compares false
            self.rho.copy_(torch.where(stuck, (self.rho * RHO_GROWTH).clamp_max(RHO_HIGHEST), self.rho))
            self.previous.copy_(torch.where(seen, mean, self.previous))
        entry = {"multipliers": self.values, "rho": self.rho, "violation": mean}
        self.trace.append({"epoch": int(self.epoch)} | {name: values.tolist() for name, values in entry.items()})
        self.sums.zero_()
        self.voxels.zero_()

    def get_extra_state(self) -> list[dict[str, Any]]:
        """The trace, which goes into the checkpoint with the tensors."""
        return self.trace

    def set_extra_state(self, state: list[dict[str, Any]]) -> None:
        """Restore the trace from a checkpoint."""
        self.trace = list(state)


class CRaC(Loss, id="crac", function=crac, neighbourhood=True, translation_invariant=False):
    """``crac`` as a module that holds its multipliers and learns them.

    After every epoch pass the validation batches to ``observe`` and call ``update``, or use a helper of
    ``segcal.losses.callbacks``. ``state_dict`` holds the multipliers and their trace: save it with your checkpoint.
    ``margin=5, average="all"`` is closest to the released code; see ``Multipliers``.

    Examples:
        >>> loss = CRaC(num_classes=2)
        >>> logits, labels = torch.ones(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long)
        >>> loss.observe(logits, labels)
        >>> loss.update()
        >>> loss.multipliers.values  # class 1 violates by 1; there are no outer voxels
        tensor([[1.0000e-06, 1.0000e-01],
                [1.0000e-06, 1.0000e-06]], dtype=torch.float64)
    """

    def __init__(self, num_classes: int, margin: float = 1.0, *, average: Average = "region", **options: Any) -> None:
        super().__init__(margin=margin, **options)
        self.multipliers = Multipliers(num_classes, average)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The options of ``crac``, and what the multipliers average over."""
        return {**super().defaults(), "average": "region"}

    def extra_repr(self) -> str:
        """The options."""
        return f"{super().extra_repr()}, average={self.multipliers.average!r}"

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
