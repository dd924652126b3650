"""Margin-based label smoothing: a penalty on logits that differ by more than a margin."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softshrink
from typing_extensions import Unpack

from segcal.losses.base import Loss
from segcal.losses.checks import Batch, PenaltyOptions, check_number
from segcal.losses.combine import penalised
from segcal.losses.voxelwise import Part, Terms

__all__ = ["MbLS", "mbls"]


def mbls(
    logits: Tensor, labels: Tensor, weight: float = 0.1, margin: float = 10.0, **options: Unpack[PenaltyOptions]
) -> Tensor:
    """``mbls``: ``base + weight * mean over k of max(0, max(z) - z_k - margin)`` (Liu et al. 2022).

    ``logits (B, C, *S)``, ``labels (B, *S)``. ``base`` as in ``segcal.losses.combine``. With an infinite margin or
    ``weight=0`` only the base is left.

    Examples:
        >>> mbls(torch.tensor([[14.0, 0.0]]), torch.tensor([0]), weight=1.0, base=None)
        tensor(2.)
    """
    check_number("margin", margin)

    def penalty(batch: Batch) -> Part:
        return Part(lambda piece, _: _margin_terms(piece, margin), weight / batch.num_classes)

    return penalised(logits, labels, penalty, **options)


def _margin_terms(batch: Batch, margin: float) -> Terms:
    z = batch.logits
    gap = z.amax(1, keepdim=True) - z
    excess = softshrink(gap, min(margin, torch.finfo(z.dtype).max))  # max(0, gap - margin), as gap >= 0
    value, gradient = excess.sum(1), None
    if batch.needs_gradient:
        active = excess.sign_()
        largest = gap.eq_(0)  # Tied largest logits share the gradient of the maximum.
        pull = active.sum(1, keepdim=True) / largest.sum(1, keepdim=True)
        gradient = largest.mul_(pull).sub_(active)
    return Terms(value, gradient)


class MbLS(Loss):
    """``mbls`` as a module.

    Examples:
        >>> MbLS(margin=5.0)
        MbLS(weight=0.1, margin=5.0, ignore_index=255, reduction='mean')
    """

    id = "mbls"
    function = staticmethod(mbls)
