"""The input of a loss: checked once, with ignored voxels taken out of the logits.

Shape conventions of all losses: logits are ``(B, C, *S)`` with C >= 2; labels are ``(B, *S)`` of any integer type, or
``(B, 1, *S)`` as MONAI and nnU-Net keep them. A voxel is valid if its label is not ``ignore_index``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from segcal.checks import checked_labels
from segcal.errors import InputError

Reduction = Literal["mean", "sum", "none"]
Weights = Tensor | Sequence[float]
Base = Literal["ce"] | Callable[[Tensor, Tensor], Tensor] | None


class Options(TypedDict, total=False):
    """The options of every loss.

    ``class_weights``: one per class, of the voxel's label; None, the default, weighs all alike.
    ``ignore_index``: the label of ignored voxels; 255 by default.
    """

    class_weights: Weights | None
    ignore_index: int


class VoxelOptions(Options, total=False):
    """The options of a loss that is a sum over voxels; ``reduction`` is "mean" by default."""

    reduction: Reduction


class BaseOptions(Options, total=False):
    """The options of a penalty on a whole batch; ``base`` is "ce" by default, see ``segcal.losses.combine``."""

    base: Base


class PenaltyOptions(VoxelOptions, BaseOptions, total=False):
    """The options of a penalty that is a sum over voxels."""


# Whether labels on a GPU are known to be valid: checking them waits for the GPU in every step.
_CHECKED: ContextVar[bool] = ContextVar("_CHECKED", default=False)


@contextmanager
def checked_before() -> Iterator[None]:
    """Within, losses of logits on a GPU take labels to be in range (and, of two views, alike) without a look.

    Examples:
        >>> with checked_before():
        ...     prepare(torch.zeros(1, 2, 3), torch.tensor([[0, 1, 255]])).labels
        tensor([[0, 1, 0]])
    """
    token = _CHECKED.set(True)
    try:
        yield
    finally:
        _CHECKED.reset(token)


def takes_labels_for_valid(labels: Tensor) -> bool:
    """Whether a check that waits for the device is to be left out."""
    return torch.compiler.is_compiling() or (labels.device.type != "cpu" and _CHECKED.get())


#: The defaults of these options.
DEFAULTS = {"class_weights": None, "ignore_index": 255, "reduction": "mean", "base": "ce"}


class Batch(NamedTuple):
    """Checked input of a loss.

    Attributes:
        logits: ``(B, C, *S)``, float32 or float64, part of the graph. Ignored voxels hold 0, whatever they held before,
            and the gradient that flows back to them is exactly 0.
        labels: ``(B, *S)`` int64 in [0, C); ignored voxels hold 0.
        valid: ``(B, *S)`` bool, or None if all voxels are known to be valid.
        needs_gradient: Whether the backward pass may be called.
    """

    logits: Tensor
    labels: Tensor
    valid: Tensor | None
    needs_gradient: bool

    @property
    def num_classes(self) -> int:
        """C."""
        return self.logits.shape[1]

    def class_weights(self, class_weights: Weights | None, dtype: torch.dtype | None = None) -> Tensor | None:
        """Checked class weights ``(C,)`` on the device of the logits, with their dtype unless another is given."""
        if class_weights is None:
            return None
        weights = torch.as_tensor(class_weights, dtype=dtype or self.logits.dtype, device=self.logits.device)
        if weights.shape != (self.num_classes,):
            raise InputError(
                f"class_weights have shape {tuple(weights.shape)}", expected=f"({self.num_classes},), one per class"
            )
        return weights


def prepare(logits: Tensor, labels: Tensor, ignore_index: int = 255) -> Batch:
    """Check logits and labels, convert half precision to float32, and set the logits of ignored voxels to 0.

    Examples:
        >>> batch = prepare(torch.tensor([[[1.0, float("nan")], [2.0, 3.0]]]), torch.tensor([[1, 255]]))
        >>> batch.logits, batch.valid
        (tensor([[[1., 0.], [2., 0.]]]), tensor([[ True, False]]))
    """
    labels = checked_labels(logits, labels)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    labels, valid = _check_labels(labels.long(), logits.shape[1], ignore_index)
    if valid is not None:
        # Done first, so that an infinite or NaN logit of an ignored voxel reaches neither sums nor gradients.
        logits = logits.masked_fill(~valid.unsqueeze(1), 0)
    return Batch(logits, labels, valid, logits.requires_grad and torch.is_grad_enabled())


def _check_labels(labels: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """The labels with ignored ones set to 0, and a mask of the valid ones, or None if all are valid."""
    compiling = torch.compiler.is_compiling()
    if not compiling:
        if not labels.numel():
            return labels, None
        if not takes_labels_for_valid(labels):
            lowest, highest = torch.stack(torch.aminmax(labels)).tolist()
            if lowest >= 0 and highest < classes and not lowest <= ignore_index <= highest:
                return labels, None
    valid = labels != ignore_index
    labels = labels.where(valid, 0)
    if not compiling and takes_labels_for_valid(labels):
        return labels, valid
    outside = (labels < 0) | (labels >= classes)
    expected = f"0..{classes - 1}, or ignore_index = {ignore_index}"
    if compiling:  # A compiled graph cannot raise an InputError, but it can assert.
        torch._assert_async(~outside.any(), f"segcal: labels outside {expected}")
        return labels, valid
    if bool(outside.any()):
        raise InputError(
            f"labels contain {labels[outside][0].item()} ({int(outside.sum())} voxels out of range)",
            expected=expected,
            fix="set ignore_index, or map the labels to 0..C-1",
        )
    return labels, valid


def check_number(name: str, value: float, *, lowest: float = 0.0, highest: float = math.inf) -> None:
    """Raise unless ``lowest <= value <= highest``; NaN raises."""
    if not lowest <= value <= highest:
        raise InputError(f"{name} is {value}", expected=f"a number in [{lowest:g}, {highest:g}]")


def check_patch(patch: int, space: Sequence[int]) -> None:
    """Raise unless ``patch`` is a valid side length and a patch of that size fits into the image."""
    if len(space) not in (2, 3):
        raise InputError(f"logits have {len(space)} spatial axes", expected="2 (images) or 3 (volumes)")
    if patch not in (3, 5):
        raise InputError(f"patch is {patch!r}", expected="3 or 5")
    if min(space) < patch:
        raise InputError(
            f"patch is {patch} but the image has shape {tuple(space)}", expected="an image no smaller than the patch"
        )
