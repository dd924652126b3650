"""Losses of whole regions: soft Dice, and its sum with cross-entropy."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from segcal.errors import check_name
from segcal.losses.base import Loss
from segcal.losses.checks import Batch, Options, Reduction, VoxelOptions, check_number, class_weight_tensor, prepare
from segcal.losses.combine import penalised

__all__ = ["CrossEntropyDice", "Dice", "cross_entropy_dice", "dice"]


def dice(logits: Tensor, labels: Tensor, smooth: float = 1.0, **options: Unpack[VoxelOptions]) -> Tensor:
    """``dice``: ``1 - (2 sum p_k y_k + s) / (sum p_k + sum y_k + s)`` per image and class (Milletari et al. 2016).

    ``logits (B, C, *S)``, ``labels (B, *S)``; the background is a class like any other. ``reduction="none"`` gives
    ``(B, C)``. The mean is over images and, weighted by ``class_weights``, over classes. An image without valid voxels
    has loss 0.

    Examples:
        >>> z = torch.tensor([[[[20.0, -20.0]], [[-20.0, 20.0]]]])
        >>> dice(z, torch.tensor([[[0, 1]]])), dice(z, torch.tensor([[[1, 0]]]))
        (tensor(0.), tensor(0.6667))
    """
    return _batch_dice(prepare(logits, labels, options.get("ignore_index", 255)), smooth, options)


def cross_entropy_dice(logits: Tensor, labels: Tensor, smooth: float = 1.0, **options: Unpack[Options]) -> Tensor:
    """``ce-dice``: the sum of the means of ``ce`` and ``dice``, each with the class weights.

    ``logits (B, C, *S)``, ``labels (B, *S)``.

    Examples:
        >>> z, y = torch.randn(1, 3, 4, 4), torch.randint(0, 3, (1, 4, 4))
        >>> torch.isclose(cross_entropy_dice(z, y), torch.nn.functional.cross_entropy(z, y) + dice(z, y))
        tensor(True)
    """
    own: VoxelOptions = {**options, "reduction": "mean"}
    return penalised(logits, labels, lambda batch: _batch_dice(batch, smooth, own), **options)


def _batch_dice(batch: Batch, smooth: float, options: VoxelOptions) -> Tensor:
    reduction = options.get("reduction", "mean")
    check_number("smooth", smooth, lowest=torch.finfo(torch.float32).tiny)
    check_name("reduction", reduction, get_args(Reduction))
    p = batch.logits.unsqueeze(-1).flatten(2).softmax(1)
    labels = batch.labels.unsqueeze(-1).flatten(1)
    ones = torch.ones_like(labels, dtype=p.dtype)
    if batch.valid is not None:
        ones = batch.valid.unsqueeze(-1).flatten(1).to(p.dtype)
        p = p * ones.unsqueeze(1)
    zeros = p.new_zeros(p.shape[:2], dtype=torch.float64)
    # Sums over voxels are in float64. Scattering by label needs no one-hot tensor.
    overlap = zeros.scatter_add(1, labels, p.gather(1, labels.unsqueeze(1)).squeeze(1).double())
    size = zeros.scatter_add(1, labels, ones.double())
    loss = 1 - (2 * overlap + smooth) / (p.sum(2, dtype=torch.float64) + size + smooth)
    weights = class_weight_tensor(options.get("class_weights"), loss)
    if weights is not None:
        loss = loss * weights
    if reduction == "mean":
        images = max(len(loss), 1)  # A batch without images has loss 0.
        loss = loss.sum() / (images * loss.shape[1] if weights is None else images * weights.sum().clamp_min(1e-30))
    elif reduction == "sum":
        loss = loss.sum()
    return loss.to(p.dtype)


class Dice(Loss):
    """``dice`` as a module.

    Examples:
        >>> Dice()(torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long))
        tensor(0.6044)
    """

    id = "dice"
    function = staticmethod(dice)


class CrossEntropyDice(Loss):
    """``ce-dice``, see ``cross_entropy_dice``, as a module.

    Examples:
        >>> CrossEntropyDice()(torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long))
        tensor(1.2976)
    """

    id = "ce-dice"
    function = staticmethod(cross_entropy_dice)
