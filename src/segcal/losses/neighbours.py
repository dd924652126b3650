"""Losses that depend on the labels around a voxel: SVLS, NACL and boundary-weighted consistency."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from segcal.errors import InputError, check_name
from segcal.losses.base import Loss
from segcal.losses.checks import (
    Batch,
    PenaltyOptions,
    Reduction,
    VoxelOptions,
    check_number,
    check_patch,
    takes_labels_for_valid,
)
from segcal.losses.combine import penalised
from segcal.losses.patches import Prior, class_planes, gaussian_weights, label_prior
from segcal.losses.voxelwise import Part, Terms, softmax, weighted_loss
from segcal.regions.boundary import label_boundary

__all__ = ["BWCR", "NACL", "SVLS", "bwcr", "nacl", "svls"]

# Distance to a boundary, in voxels, from which on the weight is FLOOR.
REACH = 10
# Weight of a voxel far from every boundary.
FLOOR = 0.01

Penalty = Literal["l1", "l2"]
On = Literal["logits", "softmax"]


def svls(
    logits: Tensor, labels: Tensor, sigma: float = 2.0, share: float = 0.5, **options: Unpack[VoxelOptions]
) -> Tensor:
    """``svls``: cross-entropy with labels smoothed by their neighbours (Islam and Glocker 2021).

    The target of a voxel gives ``1 - share`` to its own label and ``share`` to the labels of its 3x3(x3) neighbours,
    weighted by ``exp(-d^2 / (2 sigma^2))``. The image is padded with its border values. Ignored neighbours are left
    out, and a voxel without valid neighbours keeps its label. ``share=0`` is cross-entropy; so is any ``sigma`` where
    all labels around a voxel are the same. ``logits (B, C, *S)``, ``labels (B, *S)``; class weights act as in ``ls``.

    Examples:
        >>> z, y = torch.randn(1, 3, 8, 8), torch.ones(1, 8, 8, dtype=torch.long)
        >>> torch.isclose(svls(z, y), torch.nn.functional.cross_entropy(z, y))
        tensor(True)
    """
    check_number("share", share, highest=1.0)

    def terms(piece: Batch, weights: Tensor | None, out: Tensor | None) -> Terms:
        return _soft_target_terms(piece, smoothed_labels(piece, sigma, share), weights, out)

    return weighted_loss(logits, labels, terms, **options)


def smoothed_labels(batch: Batch, sigma: float, share: float) -> Tensor:
    """The targets of ``svls``, ``(B, C, *S)``; they sum to 1 at valid voxels."""
    space = batch.labels.shape[1:]
    check_patch(3, space)
    (step,) = gaussian_weights(sigma, 1)
    own = class_planes(batch).to(batch.logits.dtype)
    # The sum M over the neighbours without the voxel itself, over ``step``, axis by axis: M <- M + S(own + step M)
    # with S the sum of both sides. This neither cancels nor underflows for small sigma.
    around = torch.zeros_like(own)
    for axis, size in enumerate(space, 2):
        line = own if axis == 2 else own + around * step
        around.narrow(axis, 1, size - 1).add_(line.narrow(axis, 0, size - 1))
        around.narrow(axis, 0, size - 1).add_(line.narrow(axis, 1, size - 1))
        around.narrow(axis, 0, 1).add_(line.narrow(axis, 0, 1))
        around.narrow(axis, size - 1, 1).add_(line.narrow(axis, size - 1, 1))
    if batch.valid is None:
        total = ((1 + 2 * step) ** len(space) - 1) / step if step > 1e-6 else 2.0 * len(space)
        return around.mul_(share / total).add_(own, alpha=1 - share)
    mass = around.sum(1, keepdim=True)
    alone = mass == 0
    around.mul_(share / mass.masked_fill(alone, 1))
    return around.addcmul_(own, torch.where(alone, 1.0, 1 - share).to(own.dtype))


def _soft_target_terms(batch: Batch, targets: Tensor, weights: Tensor | None, out: Tensor | None) -> Terms:
    """``-sum_k w_k t_k log p_k`` and its gradient; overwrites ``targets``."""
    z = batch.logits
    soft = softmax(z, out)
    value = soft.log_top
    gradient = soft.probabilities if batch.needs_gradient else None
    if weights is not None:
        targets.mul_(weights.view(-1, *[1] * (z.ndim - 2)))
        total = targets.sum(1, keepdim=True)
        value = value * total
        gradient = None if gradient is None else gradient.mul_(total)
    gradient = None if gradient is None else gradient.sub_(targets)
    # A target of 0 times an infinite gap counts as 0. NaN logits stay visible in log_top.
    parts = targets.mul_(soft.top - z).nan_to_num_(0.0, posinf=torch.inf, neginf=-torch.inf)
    return Terms(parts.sum(1).sub_(value.squeeze(1)), gradient)


def nacl(
    logits: Tensor,
    labels: Tensor,
    weight: float = 0.1,
    prior: Prior = "mean",
    *,
    patch: int = 3,
    penalty: Penalty = "l1",
    on: On = "logits",
    sigma: float = 2.0,
    **options: Unpack[PenaltyOptions],
) -> Tensor:
    """``nacl``: ``base + weight * mean over k of |tau_k - z_k|`` (Murugesan et al. 2023).

    tau is the prior over classes given by the labels of the patch around a voxel; see
    ``segcal.losses.patches.label_prior``. ``penalty="l2"`` squares the difference; ``on="softmax"`` compares tau with
    probabilities instead of logits; ``sigma`` belongs to the prior ``gaussian``. ``logits (B, C, *S)``,
    ``labels (B, *S)``, two or three spatial axes. ``base`` as in ``segcal.losses.combine``; ``weight=0`` is the base.

    Examples:
        >>> labels = torch.zeros(1, 4, 4, dtype=torch.long)
        >>> nacl(torch.zeros(1, 2, 4, 4), labels, weight=1.0, base=None)
        tensor(0.5000)
    """
    check_name("penalty", penalty, get_args(Penalty))
    check_name("on", on, get_args(On))

    def terms(piece: Batch, _: Tensor | None) -> Terms:
        return _nacl_terms(piece, label_prior(piece, prior, patch, sigma), penalty, on)

    return penalised(logits, labels, lambda batch: Part(terms, weight / batch.num_classes), **options)


def _nacl_terms(batch: Batch, tau: Tensor, penalty: Penalty, on: On) -> Terms:
    """The penalty and its gradient; overwrites ``tau``."""
    z = batch.logits
    scores = z if on == "logits" else softmax(z).probabilities
    gap = torch.sub(scores, tau, out=tau)
    value = (gap.abs() if penalty == "l1" else gap * gap).sum(1)
    if not batch.needs_gradient:
        return Terms(value, None)
    gradient = gap.sign_() if penalty == "l1" else gap.mul_(2)
    if on == "softmax":
        gradient = gradient.sub_((gradient * scores).sum(1, keepdim=True)).mul_(scores)
    return Terms(value, gradient)


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
    if not takes_labels_for_valid(labels) and bool(((labels != others) & valid).any()):
        raise InputError(
            "labels of the two views differ",
            expected="the second half of the batch to show the same voxels as the first",
            fix="undo spatial augmentations before the loss, and set labels that left the frame to ignore_index",
        )
    first, second = batch.logits.chunk(2)
    gap = torch.where(first == second, 0.0, first - second)  # -inf in both views is agreement
    pairs = gap.square().mean(1) * boundary_weights(labels, valid, first.dtype) * valid
    if reduction == "none":
        return torch.cat((pairs, pairs)) / 2
    total = pairs.sum(dtype=torch.float64)
    return (total / valid.sum().clamp_min(1) if reduction == "mean" else total).to(pairs.dtype)


def boundary_weights(labels: Tensor, valid: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``max(10 - d, 0) / 10 + 0.01`` per voxel.

    d is the Euclidean distance to the nearest boundary voxel of ``segcal.regions.label_boundary``. Squared distances
    are separable and only matter up to the reach, so minima over a few shifts along each axis are exact.

    Examples:
        >>> boundary_weights(torch.tensor([[0, 0, 0, 1, 1]]), torch.ones(1, 5, dtype=torch.bool))
        tensor([[0.8100, 0.9100, 1.0100, 1.0100, 0.9100]])
    """
    if not labels.numel():
        return torch.zeros(labels.shape, dtype=dtype, device=labels.device)
    square = torch.where(label_boundary(labels, valid), 0.0, float(REACH**2))
    for axis in range(1, labels.ndim):
        source, square = square, square.clone()
        for shift in range(1, min(REACH, labels.shape[axis])):
            length = labels.shape[axis] - shift
            for to, start in ((0, shift), (shift, 0)):
                target = square.narrow(axis, to, length)
                target.copy_(torch.minimum(target, source.narrow(axis, start, length) + shift**2))
    return (1 - square.to(dtype).sqrt() / REACH).clamp_min(0) + FLOOR


class SVLS(Loss, id="svls", function=svls, neighbourhood=True):
    """``svls`` as a module.

    Examples:
        >>> SVLS(sigma=1.0)
        SVLS(sigma=1.0, share=0.5, ignore_index=255, reduction='mean')
    """


class NACL(Loss, id="nacl", function=nacl, neighbourhood=True, translation_invariant=False):
    """``nacl`` as a module.

    Examples:
        >>> loss = NACL(weight=0.1, prior="mean")
        >>> loss(torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long))
        tensor(0.7431)
    """


class BWCR(Loss, id="bwcr", function=bwcr, neighbourhood=True, translation_invariant=False, views=2):
    """``bwcr`` as a module.

    Examples:
        >>> BWCR()
        BWCR(weight=1.0, ignore_index=255, reduction='mean')
    """
