"""Bases and penalties: how losses add up.

All penalised losses work the same way. ``base="ce"`` (the default) adds cross-entropy with the same ``class_weights``,
``ignore_index`` and ``reduction``. ``base=None`` gives ``weight * penalty`` alone. Any other callable
``base(logits, labels)``, such as MONAI's ``DiceCELoss``, replaces cross-entropy. ``CombinedLoss`` adds whole losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from segcal.errors import InputError
from segcal.losses.checks import Base, Batch, Reduction, Weights, prepare
from segcal.losses.voxelwise import Part, cross_entropy_terms, voxel_loss, weighted_part


def penalised(
    logits: Tensor,
    labels: Tensor,
    make_penalty: Callable[[Batch], Part | Tensor],
    *,
    base: Base = "ce",
    class_weights: Weights | None = None,
    ignore_index: int = 255,
    reduction: Reduction = "mean",
) -> Tensor:
    """The weighted penalty that ``make_penalty`` computes from the checked batch, plus its base."""
    batch = prepare(logits, labels, ignore_index)
    penalty = make_penalty(batch)
    if base == "ce":
        cross_entropy = weighted_part(batch, class_weights, cross_entropy_terms)
        if isinstance(penalty, Part):  # The two share one gradient.
            return voxel_loss(batch, [cross_entropy, penalty], reduction)
        return voxel_loss(batch, [cross_entropy], reduction) + penalty
    if class_weights is not None:
        raise InputError(
            f"class_weights with base={base!r}", expected="base='ce'", fix="give the weights to the base loss"
        )
    if isinstance(penalty, Part):
        penalty = voxel_loss(batch, [penalty], reduction)
    if base is None:
        return penalty
    if not callable(base):
        raise InputError(f"base is {base!r}", expected="'ce', None or a callable base(logits, labels)")
    return base(logits, labels) + penalty


class CombinedLoss(nn.Module):
    """``sum_i w_i loss_i(logits, labels)`` of any losses, from segcal or elsewhere.

    Examples:
        >>> import torch
        >>> from segcal import losses
        >>> loss = CombinedLoss([(1.0, losses.Dice()), (0.1, losses.NACL(weight=1, base=None))])
        >>> loss(torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long))
        tensor(0.6544)
    """

    def __init__(self, parts: Sequence[tuple[float, nn.Module | Callable[[Tensor, Tensor], Tensor]]]) -> None:
        super().__init__()
        if not parts:
            raise InputError("parts are empty", expected="at least one (weight, loss)")
        self.weights = [float(weight) for weight, _ in parts]
        self.losses = nn.ModuleList(loss if isinstance(loss, nn.Module) else _Plain(loss) for _, loss in parts)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The weighted sum."""
        first, *rest = [weight * loss(logits, labels) for weight, loss in zip(self.weights, self.losses, strict=True)]
        total: Tensor = sum(rest, start=first)
        return total

    def extra_repr(self) -> str:
        """The weights."""
        return f"weights={self.weights}"


class _Plain(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.function(logits, labels)
