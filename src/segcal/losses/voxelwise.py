"""Losses of one voxel at a time, with their derivative computed in the forward pass, and cross-entropy itself.

The gradient of such a loss is known in closed form and costs little more than its value, so the forward pass computes
both and the backward pass is one multiplication. What these losses cost is memory traffic, fresh pages above all, so
summands share one gradient tensor, and on a CPU the batch goes through in pieces that fit its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import Unpack

from segcal.losses.base import Loss, VoxelOptions
from segcal.losses.checks import Batch, ClassWeights, Reduction, check_choice, class_weight_tensor, prepare

# Logits in a piece of a batch on the CPU: up to 4 MB of float32.
CACHED_VALUES = 2**20


class Terms(NamedTuple):
    """The loss of every voxel ``(B, *S)``, and its derivative by the logits ``(B, C, *S)`` if asked for."""

    value: Tensor
    gradient: Tensor | None


class Part(NamedTuple):
    """A summand of a voxelwise loss.

    Attributes:
        terms: Loss and derivative of a batch, or of some images of it. The derivative may be put into the tensor given
            as second argument, where there is one. What is returned belongs to the caller, who changes it.
        weight: What they are multiplied by.
        mass: What each voxel ``(B, *S)`` counts in the denominator of the mean; None counts valid voxels.
        add: ``(batch, terms, scale)`` adds the scaled terms to given ones in a single pass; None where there is no such
            pass for this kind of batch.
    """

    terms: Callable[[Batch, Tensor | None], Terms]
    weight: float = 1.0
    mass: Tensor | None = None
    add: Callable[[Batch, Terms, float], None] | None = None


class Softmax(NamedTuple):
    """Probabilities ``(B, C, *S)``, and the largest logit and its log-probability, both ``(B, 1, *S)``."""

    probabilities: Tensor
    top: Tensor
    log_top: Tensor

    def nll(self, scores: Tensor) -> Tensor:
        """``logsumexp(z) - scores`` in an order that large logits do not spoil."""
        return (self.top - scores).sub_(self.log_top)


def softmax(logits: Tensor, out: Tensor | None = None) -> Softmax:
    """Softmax with what is needed for log-probabilities, in ``out`` if given."""
    probabilities = torch.softmax(logits, 1, out=out) if out is not None else torch.softmax(logits, 1)
    return Softmax(probabilities, logits.amax(1, keepdim=True), probabilities.amax(1, keepdim=True).log_())


class _Attach(Function):
    """Gives a computed loss the derivative that was computed with it.

    The first backward pass uses the gradient up: it is scaled in place and handed on, for fresh memory costs more than
    the arithmetic. Should there be another one (``retain_graph``), ``again`` computes it anew. Compiled graphs plan
    their memory themselves and pass no ``again``.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, loss: Tensor, gradient: Tensor, scale: Tensor, again: Callable[[], Tensor] | None
    ) -> Tensor:
        ctx.again = again
        if again is None:
            ctx.save_for_backward(scale, gradient)
        else:
            ctx.save_for_backward(scale, logits)
            ctx.gradient = gradient
        return loss.clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale, saved = ctx.saved_tensors
        factor = upstream * scale
        factor = factor.unsqueeze(1) if factor.ndim else factor
        if ctx.again is None:
            return saved * factor, None, None, None, None
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            gradient = ctx.again()
        return gradient.mul_(factor), None, None, None, None


def voxel_loss(batch: Batch, parts: Sequence[Part], reduction: Reduction) -> Tensor:
    """The sum of the parts as the user asked for it: per voxel, summed, or averaged over the valid voxels.

    A part's mean divides by its mass in the valid voxels; without any it is 0, and so is its gradient. Sums are taken
    in float64. The first part's weight must not be 0 if there are others.
    """
    check_choice("reduction", reduction, Reduction)
    detached = batch._replace(logits=batch.logits.detach())
    first, *rest = [_scale(batch, part, reduction) for part in parts]
    scales = [1.0, *(scale / first for scale in rest)]
    value, gradient = _evaluate(detached, parts, scales, reduction)
    scale = torch.as_tensor(first, dtype=value.dtype, device=value.device)
    loss = (value * scale).to(batch.logits.dtype)
    if gradient is None:
        return loss

    def again() -> Tensor:
        recomputed = _evaluate(detached, parts, scales, reduction)[1]
        assert recomputed is not None
        return recomputed

    attached: Tensor = _Attach.apply(  # type: ignore[no-untyped-call, unused-ignore]
        batch.logits, loss, gradient, scale.to(loss.dtype), None if torch.compiler.is_compiling() else again
    )
    return attached


def _evaluate(batch: Batch, parts: Sequence[Part], scales: Sequence[float | Tensor], reduction: Reduction) -> Terms:
    """Loss, per voxel or summed, and derivative of the scaled parts."""
    pieces = _pieces(batch)
    if len(pieces) == 1:
        value, gradient = _weighted_sum(batch, parts, scales, None)
        return Terms(value if reduction == "none" else value.sum(dtype=torch.float64), gradient)
    gradient = torch.empty_like(batch.logits) if batch.needs_gradient else None
    values = []
    for piece in pieces:
        some = Batch(*(whole[piece] if isinstance(whole, Tensor) else whole for whole in batch))  # type: ignore[arg-type]
        value, _ = _weighted_sum(some, parts, scales, None if gradient is None else gradient[piece])
        values.append(value if reduction == "none" else value.sum(dtype=torch.float64))
    return Terms(torch.cat(values) if reduction == "none" else torch.stack(values).sum(), gradient)


def _weighted_sum(batch: Batch, parts: Sequence[Part], scales: Sequence[float | Tensor], out: Tensor | None) -> Terms:
    """Value and derivative of the sum of scaled parts, the derivative in ``out`` if there is one."""
    value, gradient = parts[0].terms(batch, out)
    for part, scale in zip(parts[1:], scales[1:], strict=True):
        if part.add is not None:
            part.add(batch, Terms(value, gradient), float(scale))
            continue
        terms = part.terms(batch, None)
        _add_scaled(value, terms.value, scale)
        if gradient is not None and terms.gradient is not None:
            _add_scaled(gradient, terms.gradient, scale)
    if batch.valid is not None:
        value = value * batch.valid
    if gradient is not None and out is not None and gradient is not out:
        gradient = out.copy_(gradient)
    return Terms(value, gradient)


def _add_scaled(total: Tensor, step: Tensor, scale: float | Tensor) -> None:
    """``total += scale * step``, in one pass where the scale is a number."""
    if isinstance(scale, Tensor):
        total.add_(step.mul_(scale))
    else:
        total.add_(step, alpha=scale)


def _pieces(batch: Batch) -> list[slice]:
    """All images, or on a CPU a few at a time: intermediate results then stay in its cache."""
    images, values = len(batch.labels), batch.logits.numel()
    if torch.compiler.is_compiling() or batch.logits.device.type != "cpu" or values <= CACHED_VALUES:
        return [slice(None)]
    step = -(-images // -(-values // CACHED_VALUES))
    return [slice(start, start + step) for start in range(0, images, step)]


def _scale(batch: Batch, part: Part, reduction: Reduction) -> float | Tensor:
    """What a part's values are multiplied by; a float where that is known without looking at the labels."""
    if reduction != "mean":
        return part.weight
    if part.mass is not None:
        total = (part.mass if batch.valid is None else part.mass * batch.valid).sum(dtype=torch.float64)
    elif batch.valid is not None:
        total = batch.valid.sum().double()
    else:
        return part.weight / max(batch.labels.numel(), 1)
    return (part.weight / torch.where(total > 0, total, 1.0)).to(batch.logits.dtype)


def correct_voxels(batch: Batch, top: Tensor) -> Tensor:
    """``(B, *S)`` bool: whether the label is the argmax, the first of equals. ``top`` is the largest logit.

    ``Tensor.argmax`` over an axis that is not the last is many times slower than this on a CPU.
    """
    logits = batch.logits
    small = torch.uint8 if batch.num_classes < 256 else torch.int32
    priority = torch.arange(batch.num_classes, 0, -1, dtype=small, device=logits.device)
    priority = priority.view(-1, *[1] * (logits.ndim - 2)).expand(logits.shape[1:]).contiguous()
    first = (priority * (logits == top)).amax(1)
    return first == batch.num_classes - batch.labels


def label_weights(class_weights: Tensor | None, labels: Tensor) -> Tensor | None:
    """The weight of every voxel's own class ``(B, *S)``."""
    return None if class_weights is None else class_weights[labels]


def cross_entropy_part(batch: Batch, class_weights: ClassWeights | None) -> Part:
    """Cross-entropy as a summand."""
    weights = class_weight_tensor(class_weights, batch.logits)
    return Part(lambda piece, out: _cross_entropy_terms(piece, weights, out), mass=label_weights(weights, batch.labels))


def _cross_entropy_terms(batch: Batch, class_weights: Tensor | None, out: Tensor | None) -> Terms:
    """``w_y * nll`` and its derivative ``w_y (p - onehot(y))``."""
    logits, index = batch.logits, batch.labels.unsqueeze(1)
    soft = softmax(logits, out)
    value = soft.nll(logits.gather(1, index))
    gradient = None
    if batch.needs_gradient:
        gradient = soft.probabilities.scatter_add_(1, index, value.new_tensor(-1).expand_as(value))
    weights = label_weights(class_weights, index)
    if weights is not None:
        value = value * weights
        gradient = None if gradient is None else gradient.mul_(weights)
    return Terms(value.squeeze(1), gradient)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    class_weights: ClassWeights | None = None,
    ignore_index: int = 255,
    reduction: Reduction = "mean",
) -> Tensor:
    """``ce``: ``-w_y log S(z)_y``, as ``torch.nn.functional.cross_entropy``, but 0 where every voxel is ignored.

    ``logits (B, C, *S)``, ``labels (B, *S)``. The mean divides by the sum of the weights ``w_y`` of the valid voxels.

    Examples:
        >>> cross_entropy(torch.zeros(1, 4, 2, 2), torch.tensor([[[0, 1], [2, 255]]])).exp()
        tensor(4.)
    """
    batch = prepare(logits, labels, ignore_index)
    return voxel_loss(batch, [cross_entropy_part(batch, class_weights)], reduction)


class CrossEntropy(Loss):
    """``ce`` as a module; see ``cross_entropy``.

    Examples:
        >>> CrossEntropy()(torch.zeros(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.long)).exp()
        tensor(2.)
    """

    id = "ce"
    function = staticmethod(cross_entropy)

    def __init__(self, **options: Unpack[VoxelOptions]) -> None:
        super().__init__(**options)
