"""Boundary-weighted logit consistency: two views of an image should agree, most of all near label boundaries."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from segcal.errors import InputError, check_name
from segcal.losses.base import Loss
from segcal.losses.checks import Batch, PenaltyOptions, Reduction
from segcal.losses.combine import penalised
from segcal.regions.boundary import label_boundary

__all__ = ["BWCR", "bwcr"]

# Distance in voxels from which on the weight is FLOOR.
REACH = 10
# Weight of a voxel far from every boundary.
FLOOR = 0.01


def bwcr(logits: Tensor, labels: Tensor, weight: float = 1.0, **options: Unpack[PenaltyOptions]) -> Tensor:
    """``bwcr``: ``base + weight * mean of w mean over k of (z_k - z'_k)^2``, two views z, z' (Karani et al. 2023).

    ``w = max(10 - d, 0) / 10 + 0.01``, d the distance in voxels to the nearest label boundary (0 on both its sides).
    ``logits (2B, C, *S)`` are two augmented views of the same B images: first all first views, then all second views,
    with spatial augmentations undone; ``labels (2B, *S)`` likewise. A voxel counts where both views are valid. The mean
    is over those voxels; ``reduction="none"`` gives ``(2B, *S)`` with half of a pair's penalty in each view. ``base``
    as in ``segcal.losses.combine``, over all views.

    Examples:
        >>> view, labels = torch.randn(3, 2, 8, 8), torch.randint(0, 2, (3, 8, 8))
        >>> bwcr(torch.cat((view, view)), torch.cat((labels, labels)), base=None)
        tensor(0.)
    """
    reduction = options.get("reduction", "mean")
    check_name("reduction", reduction, get_args(Reduction))
    return penalised(logits, labels, lambda batch: weight * _consistency(batch, reduction), **options)


def _consistency(batch: Batch, reduction: Reduction) -> Tensor:
    if len(batch.labels) % 2 or batch.labels.ndim < 2:
        raise InputError(
            f"logits have shape {tuple(batch.logits.shape)}",
            expected="two views of every image, (2B, C, *S) with at least one spatial axis",
            fix="torch.cat((logits_of_view_1, logits_of_view_2))",
        )
    labels, others = batch.labels.chunk(2)
    valid = torch.ones_like(labels, dtype=torch.bool)
    if batch.valid is not None:
        valid = torch.logical_and(*batch.valid.chunk(2))
    if not torch.compiler.is_compiling() and bool(((labels != others) & valid).any()):
        raise InputError(
            "labels of the two views differ",
            expected="the second half of the batch to show the same voxels as the first",
            fix="undo spatial augmentations before the loss, and set labels that left the frame to ignore_index",
        )
    first, second = batch.logits.chunk(2)
    gap = torch.where(first == second, 0.0, first - second)  # -inf in both views is agreement
    pairs = gap.square().mean(1) * boundary_weights(labels, valid).to(first.dtype) * valid
    if reduction == "none":
        return torch.cat((pairs, pairs)) / 2
    total = pairs.sum(dtype=torch.float64)
    return (total / valid.sum().clamp_min(1) if reduction == "mean" else total).to(pairs.dtype)


def boundary_weights(labels: Tensor, valid: Tensor) -> Tensor:
    """``max(10 - d, 0) / 10 + 0.01`` per voxel, float32.

    d is the Euclidean distance to the nearest boundary voxel of ``segcal.regions.label_boundary``. Squared distances
    are separable and only matter up to the reach, so minima over a few shifts along each axis are exact.

    Examples:
        >>> boundary_weights(torch.tensor([[0, 0, 0, 1, 1]]), torch.ones(1, 5, dtype=torch.bool))
        tensor([[0.8100, 0.9100, 1.0100, 1.0100, 0.9100]])
    """
    if not labels.numel():
        return torch.zeros(labels.shape, device=labels.device)
    square = torch.where(label_boundary(labels, valid), 0.0, float(REACH**2))
    for axis in range(1, labels.ndim):
        source, square = square, square.clone()
        for shift in range(1, min(REACH, labels.shape[axis])):
            length = labels.shape[axis] - shift
            for to, start in ((0, shift), (shift, 0)):
                target = square.narrow(axis, to, length)
                target.copy_(torch.minimum(target, source.narrow(axis, start, length) + shift**2))
    return (1 - square.sqrt() / REACH).clamp_min(0) + FLOOR


class BWCR(Loss):
    """``bwcr`` as a module.

    Examples:
        >>> BWCR()
        BWCR(weight=1.0, ignore_index=255, reduction='mean')
    """

    id = "bwcr"
    function = staticmethod(bwcr)
    neighbourhood = True
    translation_invariant = False
    views = 2
