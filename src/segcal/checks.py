"""Checks of the tensors that belong to scores: labels, masks, and all that has their shape."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from segcal.errors import InputError


def checked_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Labels ``(N, *spatial)`` of logits ``(N, C, *spatial)``, from those or from ``(N, 1, *spatial)``.

    Everything in segcal that takes logits and labels checks their shapes and types here.

    Examples:
        >>> checked_labels(torch.zeros(2, 3, 4, 5), torch.zeros(2, 1, 4, 5).long()).shape
        torch.Size([2, 4, 5])
        >>> checked_labels(torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5).long())
        Traceback (most recent call last):
        segcal.errors.InputError: labels have the shape of the logits, (2, 3, 4, 5): they are one-hot; expected class...
    """
    for name, given in (("logits", logits), ("labels", labels)):
        if not isinstance(given, Tensor):
            raise InputError(f"{name} are {type(given).__name__}", expected="a tensor", fix="torch.from_numpy")
    if logits.ndim < 2 or not logits.is_floating_point():
        raise InputError(
            f"logits have shape {tuple(logits.shape)} and dtype {logits.dtype}",
            expected="(N, C, *spatial), floating point",
        )
    batch, classes, *space = logits.shape
    if classes < 2:
        raise InputError(
            f"logits have {classes} channel",
            expected="at least two classes",
            fix="turn one sigmoid channel x into two: torch.cat((torch.zeros_like(x), x), 1)",
        )
    if labels.shape == logits.shape:
        raise InputError(
            f"labels have the shape of the logits, {tuple(labels.shape)}: they are one-hot",
            expected=f"class indices of shape {(batch, *space)}",
            fix="labels.argmax(1)",
        )
    if tuple(labels.shape) not in ((batch, *space), (batch, 1, *space)):
        raise InputError(
            f"labels have shape {tuple(labels.shape)}",
            expected=f"{(batch, *space)} or {(batch, 1, *space)}, to go with logits of shape {tuple(logits.shape)}",
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(
            f"labels have dtype {labels.dtype}", expected="class indices of an integer type", fix="labels.long()"
        )
    return labels.squeeze(1) if labels.ndim == logits.ndim else labels


def holding(labels: Tensor, ignore_index: int | None) -> Tensor:
    """Labels in a type that holds the ignored label: compared with others, it would wrap, and 256 be 0 of uint8.

    Examples:
        >>> holding(torch.tensor([0, 1], dtype=torch.uint8), 256).dtype
        torch.int64
    """
    if ignore_index is None or labels.dtype == torch.bool:
        return labels
    numbers = torch.iinfo(labels.dtype)
    return labels if numbers.min <= ignore_index <= numbers.max else labels.long()


def check_ignored(ignore_index: object) -> None:
    """Raise unless the label to be ignored is a whole number."""
    if not isinstance(ignore_index, Integral) or isinstance(ignore_index, bool):
        raise InputError(
            f"ignore_index is {ignore_index!r}", expected="a whole number", fix="say -1 if no label is to be ignored"
        )


def checked_mask(mask: Tensor, labels: Tensor, name: str) -> Tensor:
    """A bool mask of the labels' shape, on their device."""
    check_like(name, mask, labels, "bool", f"pass {name} as (N, *spatial), True where a voxel belongs")
    return mask.to(labels.device)


def check_like(name: str, tensor: Tensor, like: Tensor, dtype: str, fix: str | None = None) -> None:
    """Raise unless a tensor has the shape of another, and is ``bool``, ``floating point`` or of ``integers``."""
    kinds = {
        "bool": tensor.dtype == torch.bool,
        "floating point": tensor.is_floating_point(),
        "integers": not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool,
    }
    if tensor.shape != like.shape or not kinds[dtype]:
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}",
            expected=f"shape {tuple(like.shape)}, {dtype}",
            fix=fix or "scores are (N, C, *spatial), all else (N, *spatial)",
        )
