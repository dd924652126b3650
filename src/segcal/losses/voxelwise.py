"""Sums of per-voxel losses with closed-form gradients, and cross-entropy.

The gradient of such a loss is known in closed form and costs little more than its value. So the forward pass computes
both, and the backward pass is one multiplication. Memory traffic dominates the cost, above all writing to fresh pages.
So the parts of a loss share one gradient tensor, and on a CPU the batch is processed in pieces that fit the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import Unpack

from segcal.errors import check_name
from segcal.losses.base import Loss
from segcal.losses.checks import Batch, Reduction, VoxelOptions, Weights, prepare

__all__ = ["CrossEntropy", "cross_entropy"]

# Most logits in one piece of a batch on a CPU: 4 MB of float32.
CACHED_VALUES = 2**20


class Terms(NamedTuple):
    """The loss of every voxel ``(B, *S)``, and its gradient ``(B, C, *S)`` or None if not needed."""

    value: Tensor
    gradient: Tensor | None


class Part(NamedTuple):
    """One summand of a voxelwise loss.

    Attributes:
        terms: Computes loss and gradient of a batch, or of some images of it. It may write the gradient to the tensor
            given as second argument, if there is one. The caller may overwrite what is returned.
        weight: Factor of the terms.
        mass: What each voxel ``(B, *S)`` adds to the denominator of the mean; None adds 1 for every valid voxel.
        add: ``add(batch, terms, scale)`` adds the scaled terms to given ones in a single pass; None if there is no
            such pass for this kind of batch.
    """

    terms: Callable[[Batch, Tensor | None], Terms]
    weight: float = 1.0
    mass: Tensor | None = None
    add: Callable[[Batch, Terms, float], None] | None = None


class Softmax(NamedTuple):
    """Probabilities ``(B, C, *S)``, the largest logit and its log-probability, both ``(B, 1, *S)``."""

    probabilities: Tensor
    top: Tensor
    log_top: Tensor

    def nll(self, scores: Tensor) -> Tensor:
        """``logsumexp(z) - scores``, without cancellation for large logits."""
        return (self.top - scores).sub_(self.log_top)


def softmax(logits: Tensor, out: Tensor | None = None) -> Softmax:
    """The softmax, written to ``out`` if given, and what log-probabilities need."""
    probabilities = torch.softmax(logits, 1, out=out) if out is not None else torch.softmax(logits, 1)
    return Softmax(probabilities, logits.amax(1, keepdim=True), probabilities.amax(1, keepdim=True).log_())


class _Attach(Function):
    """Attaches the gradient that the forward pass computed to its loss.

    The first backward pass scales the gradient in place and returns it, because allocating memory would cost more than
    the arithmetic. A second one (``retain_graph``) calls ``again`` to recompute it. Compiled graphs plan their memory
    themselves and pass no ``again``.
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
    """The sum of the parts: per voxel, summed, or averaged over the valid voxels.

    The mean of a part divides by its mass in the valid voxels. If that is 0, so are the mean and its gradient. Sums are
    in float64. With several parts, the weight of the first must not be 0.
    """
    check_name("reduction", reduction, get_args(Reduction))
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
    """The loss of the scaled parts, per voxel or summed, and its gradient."""
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
    """Value and gradient of the sum of the scaled parts, the gradient in ``out`` if given."""
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
    """``total += scale * step``, in one pass if the scale is a number."""
    if isinstance(scale, Tensor):
        total.add_(step.mul_(scale))
    else:
        total.add_(step, alpha=scale)


def _pieces(batch: Batch) -> list[slice]:
    """Slices of the batch: one for all images, or on a CPU one for each few that fit its cache."""
    images, values = len(batch.labels), batch.logits.numel()
    if torch.compiler.is_compiling() or batch.logits.device.type != "cpu" or values <= CACHED_VALUES:
        return [slice(None)]
    step = -(-images // -(-values // CACHED_VALUES))
    return [slice(start, start + step) for start in range(0, images, step)]


def _scale(batch: Batch, part: Part, reduction: Reduction) -> float | Tensor:
    """The factor of a part's terms; a float if it does not depend on the labels."""
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
    """``(B, *S)`` bool: whether the label is the argmax (of ties, the first). ``top`` is the largest logit.

    On a CPU this is many times faster than ``Tensor.argmax`` over an axis other than the last.
    """
    logits = batch.logits
    small = torch.uint8 if batch.num_classes < 256 else torch.int32
    priority = torch.arange(batch.num_classes, 0, -1, dtype=small, device=logits.device)
    priority = priority.view(-1, *[1] * (logits.ndim - 2)).expand(logits.shape[1:]).contiguous()
    first = (priority * (logits == top)).amax(1)
    return first == batch.num_classes - batch.labels


WeightedTerms = Callable[[Batch, Tensor | None, Tensor | None], Terms]


def weighted_part(batch: Batch, class_weights: Weights | None, terms: WeightedTerms) -> Part:
    """A part whose mean divides by the class weights of the labels; ``terms`` takes a batch, the weights and out."""
    weights = batch.class_weights(class_weights)
    mass = None if weights is None else weights[batch.labels]
    return Part(lambda piece, out: terms(piece, weights, out), mass=mass)


def weighted_loss(
    logits: Tensor,
    labels: Tensor,
    terms: WeightedTerms,
    *,
    class_weights: Weights | None = None,
    ignore_index: int = 255,
    reduction: Reduction = "mean",
) -> Tensor:
    """A loss of a single weighted part."""
    batch = prepare(logits, labels, ignore_index)
    return voxel_loss(batch, [weighted_part(batch, class_weights, terms)], reduction)


def cross_entropy_terms(batch: Batch, class_weights: Tensor | None, out: Tensor | None) -> Terms:
    """``w_y * nll`` and its gradient ``w_y (p - onehot(y))``."""
    logits, index = batch.logits, batch.labels.unsqueeze(1)
    soft = softmax(logits, out)
    value = soft.nll(logits.gather(1, index))
    gradient = minus_labels(soft.probabilities, index) if batch.needs_gradient else None
    if class_weights is not None:
        weights = class_weights[index]
        value = value * weights
        gradient = None if gradient is None else gradient.mul_(weights)
    return Terms(value.squeeze(1), gradient)


def minus_labels(probabilities: Tensor, index: Tensor) -> Tensor:
    """``p - onehot(y)``, in place; ``index (B, 1, *S)`` are the labels."""
    return probabilities.scatter_add_(1, index, probabilities.new_full((), -1).expand(index.shape))


def cross_entropy(logits: Tensor, labels: Tensor, **options: Unpack[VoxelOptions]) -> Tensor:
    """``ce``: ``-w_y log S(z)_y``, as ``torch.nn.functional.cross_entropy``, but 0 if every voxel is ignored.

    ``logits (B, C, *S)``, ``labels (B, *S)``. The mean divides by the sum of the weights ``w_y`` of the valid voxels.

    Examples:
        >>> cross_entropy(torch.zeros(1, 4, 2, 2), torch.tensor([[[0, 1], [2, 255]]])).exp()
        tensor(4.)
    """
    return weighted_loss(logits, labels, cross_entropy_terms, **options)


class CrossEntropy(Loss, id="ce", function=cross_entropy):
    """``ce`` as a module; see ``cross_entropy``.

    Examples:
        >>> CrossEntropy()(torch.zeros(1, 2, 3, 3), torch.zeros(1, 3, 3, dtype=torch.long)).exp()
        tensor(2.)
    """
