"""Losses that keep predictions from becoming too sure: focal, two kinds of label smoothing, two entropy penalties."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import softshrink
from typing_extensions import Unpack

from segcal.losses.base import Loss
from segcal.losses.checks import Batch, PenaltyOptions, VoxelOptions, check_number
from segcal.losses.combine import penalised
from segcal.losses.voxelwise import Part, Terms, correct_voxels, minus_labels, softmax, weighted_loss

__all__ = ["ECP", "MEEP", "Focal", "LabelSmoothing", "MbLS", "ecp", "focal", "label_smoothing", "mbls", "meep"]


# exp(-_DEEP) is 0.
_DEEP = 1e3


def focal(logits: Tensor, labels: Tensor, gamma: float = 3.0, **options: Unpack[VoxelOptions]) -> Tensor:
    """``focal``: ``-w_y (1 - p_y)^gamma log p_y`` (Lin et al. 2017; for calibration Mukhoti et al. 2020).

    ``logits (B, C, *S)``, ``labels (B, *S)``. The mean divides by the sum of ``w_y``. ``gamma=0`` is cross-entropy.

    Examples:
        >>> focal(torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long), gamma=1.0)
        tensor(0.3466)
    """
    check_number("gamma", gamma)
    return weighted_loss(logits, labels, partial(_focal_terms, gamma), **options)


def _focal_terms(gamma: float, batch: Batch, class_weights: Tensor | None, out: Tensor | None) -> Terms:
    z, index = batch.logits, batch.labels.unsqueeze(1)
    soft = softmax(z, out)
    nll = soft.nll(z.gather(1, index))
    # 1 - p without cancellation, kept above 0 so that negative powers of it stay finite.
    miss = torch.expm1(-nll).neg_().clamp_min_(torch.finfo(nll.dtype).tiny)
    factor = miss**gamma if class_weights is None else class_weights[index] * miss**gamma
    value = (factor * nll).squeeze(1)
    if not batch.needs_gradient:
        return Terms(value, None)
    # d value / d nll. Where p is 0, so is p nll, also where nll is infinite.
    slope = factor * (1 + gamma * (-nll).exp() * (nll.clamp_max(_DEEP) / miss))
    return Terms(value, minus_labels(soft.probabilities, index).mul_(slope))


def label_smoothing(logits: Tensor, labels: Tensor, alpha: float = 0.1, **options: Unpack[VoxelOptions]) -> Tensor:
    """``ls``: cross-entropy with targets ``(1 - alpha) onehot(y) + alpha / C`` (Szegedy et al. 2016).

    ``logits (B, C, *S)``, ``labels (B, *S)``. Class weights act as in PyTorch: each class's term has its own weight,
    and the mean divides by the sum of ``w_y``. ``alpha=0`` is cross-entropy.

    Examples:
        >>> z, y = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
        >>> label_smoothing(z, y), torch.nn.functional.cross_entropy(z, y, label_smoothing=0.1)
        (tensor(0.2269), tensor(0.2269))
    """
    check_number("alpha", alpha, highest=1.0)
    return weighted_loss(logits, labels, partial(_smoothing_terms, alpha), **options)


def _smoothing_terms(alpha: float, batch: Batch, weights: Tensor | None, out: Tensor | None) -> Terms:
    z, index = batch.logits, batch.labels.unsqueeze(1)
    soft = softmax(z, out)
    weights = z.new_ones(batch.num_classes) if weights is None else weights
    share = alpha / batch.num_classes * weights.view(1, -1, *[1] * (z.ndim - 2))
    hard = (1 - alpha) * weights[index]
    total = hard + share.sum()  # the sum of a voxel's weighted targets
    # sum_k t_k (logsumexp - z_k), split into the label's term and the uniform term.
    spread = (z - soft.top).mul_(share).nan_to_num_(0.0, torch.inf, -torch.inf).sum(1, keepdim=True)  # -inf * 0
    value = hard * (soft.top - z.gather(1, index)) - spread - total * soft.log_top
    gradient = None
    if batch.needs_gradient:
        gradient = soft.probabilities.mul_(total).sub_(share).scatter_add_(1, index, -hard)
    return Terms(value.squeeze(1), gradient)


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
    terms = partial(_margin_terms, margin)
    return penalised(logits, labels, lambda batch: Part(terms, weight / batch.num_classes), **options)


def _margin_terms(margin: float, batch: Batch, _: Tensor | None) -> Terms:
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


def ecp(logits: Tensor, labels: Tensor, weight: float = 0.1, **options: Unpack[PenaltyOptions]) -> Tensor:
    """``ecp``: ``base - weight * H(p)``, H the entropy over classes (Pereyra et al. 2017).

    ``logits (B, C, *S)``, ``labels (B, *S)``. ``base`` as in ``segcal.losses.combine``. ``weight=0`` is the base.

    Examples:
        >>> ecp(torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long), base=None, weight=1.0)
        tensor(-0.6931)
    """
    return penalised(logits, labels, lambda batch: Part(_confidence_terms, weight), **options)


def meep(logits: Tensor, labels: Tensor, weight: float = 1.0, **options: Unpack[PenaltyOptions]) -> Tensor:
    """``meep``: ``base - weight * H(p)`` of the mispredicted voxels only (Larrazabal et al. 2023).

    ``logits (B, C, *S)``, ``labels (B, *S)``. As in the paper, the entropy is averaged over the mispredicted voxels
    only; if there are none, it is 0. ``base`` as in ``segcal.losses.combine``.

    Examples:
        >>> z = torch.tensor([[[1.0, 1.0], [0.0, 0.0]]])
        >>> meep(z, torch.tensor([[0, 1]]), base=None) == meep(z[..., 1:], torch.tensor([[1]]), base=None)
        tensor(True)
    """
    return penalised(logits, labels, lambda batch: Part(_wrong_confidence_terms, weight, mass=_wrong(batch)), **options)


@torch.no_grad()
def _wrong(batch: Batch) -> Tensor:
    """``(B, *S)``, 1 where the prediction is not the label, 0 elsewhere."""
    return (~correct_voxels(batch, batch.logits.amax(1, keepdim=True))).to(batch.logits.dtype)


def _confidence_terms(batch: Batch, _: Tensor | None = None) -> Terms:
    """The negative entropy ``sum_k p_k log p_k`` and its gradient ``p (log p + H)``."""
    probabilities = softmax(batch.logits).probabilities
    surprise = torch.special.entr(probabilities)  # -p log p, 0 at 0
    value = -surprise.sum(1, keepdim=True)
    gradient = surprise.addcmul_(probabilities, value).neg_() if batch.needs_gradient else None
    return Terms(value.squeeze(1), gradient)


def _wrong_confidence_terms(batch: Batch, _: Tensor | None = None) -> Terms:
    value, gradient = _confidence_terms(batch)
    wrong = _wrong(batch)
    return Terms(value * wrong, None if gradient is None else gradient.mul_(wrong.unsqueeze(1)))


class Focal(Loss, id="focal", function=focal):
    """``focal`` as a module.

    Examples:
        >>> Focal(gamma=0.0)(torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long)).exp()
        tensor(2.)
    """


class LabelSmoothing(Loss, id="ls", function=label_smoothing):
    """``ls``, see ``label_smoothing``, as a module.

    Examples:
        >>> LabelSmoothing(0.2)(torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long)).exp()
        tensor(2.)
    """


class MbLS(Loss, id="mbls", function=mbls):
    """``mbls`` as a module.

    Examples:
        >>> MbLS(margin=5.0)
        MbLS(weight=0.1, margin=5.0, ignore_index=255, reduction='mean')
    """


class ECP(Loss, id="ecp", function=ecp):
    """``ecp`` as a module.

    Examples:
        >>> ECP(weight=1.0)(torch.zeros(1, 2, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long))
        tensor(0.)
    """


class MEEP(Loss, id="meep", function=meep):
    """``meep`` as a module.

    Examples:
        >>> MEEP()(torch.tensor([[[[1.0]], [[0.0]]]]), torch.ones(1, 1, 1, dtype=torch.long))
        tensor(0.7311)
    """
