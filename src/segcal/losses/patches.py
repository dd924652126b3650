"""Counts of the labels around a voxel, over square or cubic patches, and priors over classes made from them.

Sums over a patch are separable, so each axis needs a few shifted additions, and counts fit into one byte. On a CPU that
is an order of magnitude less memory traffic than a convolution of float one-hots. Ignored voxels and voxels outside the
image are in no count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from segcal.errors import check_name
from segcal.losses.checks import Batch, check_number, check_patch

Prior = Literal["mean", "gaussian", "max", "min", "median", "mode"]


class Counts(NamedTuple):
    """Voxels of each class in the patch around every voxel ``(B, C, *S)``, and in total ``(B or 1, 1, *S)``; uint8."""

    classes: Tensor
    total: Tensor


def label_codes(batch: Batch) -> Tensor:
    """The labels ``(B, *S)`` in the smallest type that holds 0..C; C means ignored."""
    codes = batch.labels.to(torch.uint8 if batch.num_classes < 256 else torch.int32)
    return codes if batch.valid is None else codes.masked_fill(~batch.valid, batch.num_classes)


def class_planes(batch: Batch) -> Tensor:
    """``(B, C, *S)`` uint8, 1 where the label is the class; ignored voxels are 0 everywhere."""
    classes = batch.num_classes
    codes = label_codes(batch)
    space = codes.shape[1:]
    # Expanded to whole planes, because comparing with one broadcast number per plane does not vectorise.
    numbers = torch.arange(classes, dtype=codes.dtype, device=codes.device)
    numbers = numbers.view(-1, *[1] * len(space)).expand(classes, *space).contiguous()
    return (codes.unsqueeze(1) == numbers).to(torch.uint8)


def patch_counts(batch: Batch, patch: int) -> Counts:
    """Count labels in the patch around every voxel, itself included.

    Examples:
        >>> from segcal.losses.checks import prepare
        >>> labels = torch.tensor([[[0, 0, 1], [0, 1, 1], [1, 1, 255]]])
        >>> counts = patch_counts(prepare(torch.zeros(1, 2, 3, 3), labels), 3)
        >>> counts.classes[0, :, 1, 1], counts.total[0, 0]
        (tensor([3, 5], dtype=torch.uint8),
         tensor([[4, 6, 4], [6, 8, 5], [4, 5, 3]], dtype=torch.uint8))
    """
    space = batch.labels.shape[1:]
    check_patch(patch, space)
    counts = window_sums(class_planes(batch), (1,) * (patch // 2))
    if batch.valid is not None:
        return Counts(counts, counts.sum(1, keepdim=True, dtype=torch.uint8))
    total = counts.new_ones(1, 1, *[1] * len(space))
    for axis, size in enumerate(space, 2):  # The part of a patch inside the image is a product over axes.
        place = torch.arange(size, device=counts.device)
        line = place.clamp_max(patch // 2) + place.flip(0).clamp_max(patch // 2) + 1
        total = total * line.to(torch.uint8).view(-1, *[1] * (len(space) + 1 - axis))
    return Counts(counts, total)


def window_sums(planes: Tensor, weights: Sequence[float]) -> Tensor:
    """Separable weighted sums: along every axis, offset 0 has weight 1 and offsets ``+-s`` have ``weights[s - 1]``."""
    for axis in range(2, planes.ndim):
        source, planes = planes, planes.clone()
        for shift, weight in enumerate(weights, 1):
            length = source.shape[axis] - shift
            planes.narrow(axis, shift, length).add_(source.narrow(axis, 0, length), alpha=weight)
            planes.narrow(axis, 0, length).add_(source.narrow(axis, shift, length), alpha=weight)
    return planes


def gaussian_weights(sigma: float, radius: int) -> list[float]:
    """``exp(-s^2 / (2 sigma^2))`` at the offsets s = 1..radius."""
    check_number("sigma", sigma, lowest=1e-3)
    return [math.exp(-(shift**2) / (2 * sigma**2)) for shift in range(1, radius + 1)]


def label_prior(batch: Batch, prior: Prior, patch: int, sigma: float) -> Tensor:
    """tau ``(B, C, *S)`` in the dtype of the logits: a prior over classes from the labels around each voxel.

    ``mean``: the share of each class in the patch; ``gaussian``: the same with Gaussian weights; the others put 1 on
    the largest, smallest, (lower) median or most frequent (of ties, the smallest) label of the patch. If the whole
    patch is ignored, tau is 0.
    """
    check_name("prior", prior, get_args(Prior))
    dtype = batch.logits.dtype
    if prior == "gaussian":
        check_patch(patch, batch.labels.shape[1:])
        sums = window_sums(class_planes(batch).to(dtype), gaussian_weights(sigma, patch // 2))
        total = sums.sum(1, keepdim=True)
        return sums.div_(total.masked_fill_(total == 0, 1))
    counts = patch_counts(batch, patch)
    if prior == "mean":
        return counts.classes.to(dtype).mul_(counts.total.clamp_min(1).to(dtype).reciprocal_())
    return _one_label(counts, prior).to(dtype)


def _one_label(counts: Counts, prior: Prior) -> Tensor:
    """``(B, C, *S)`` bool, True at the chosen class; False everywhere if the patch holds no label."""
    classes, total = counts
    if prior in ("max", "min"):
        chosen = classes > 0
    elif prior == "mode":
        chosen = classes == classes.amax(1, keepdim=True)
    else:  # The lower median is the first label at which the running count reaches half of the patch.
        chosen = 2 * classes.cumsum(1, dtype=torch.int32) >= total
    number = torch.arange(1, chosen.shape[1] + 1, dtype=torch.int32, device=chosen.device)
    number = number.flip(0) if prior != "max" else number
    rank = chosen * number.view(-1, *[1] * (chosen.ndim - 2))
    return (rank == rank.amax(1, keepdim=True)) & chosen & (total > 0)
