"""Checks of the tensors of one update, before any kernel sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from segcal.errors import InputError


def check_tensors(
    num_classes: int,
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    distance: Tensor | None,
    uncalibrated: Tensor | None,
) -> None:
    """Raise unless logits are ``(N, C, *spatial)`` and the others, where given, ``(N, *spatial)`` of the right type."""
    if logits.ndim < 2 or not logits.is_floating_point():
        raise InputError(
            f"logits have shape {tuple(logits.shape)} and dtype {logits.dtype}",
            expected="(N, C, *spatial), floating point",
        )
    if logits.shape[1] != num_classes:
        raise InputError(f"logits have {logits.shape[1]} classes", expected=f"{num_classes}")
    for name, tensor, dtype in (
        ("labels", labels, "integers"),
        ("mask", mask, "bool"),
        ("distance", distance, "floating point"),
        ("uncalibrated", uncalibrated, "integers"),
    ):
        if tensor is not None:
            _check_like(name, tensor, logits[:, 0], dtype)


def region_masks(names: Sequence[str], labels: Tensor, regions: Mapping[str, Tensor] | Tensor | None) -> list[Tensor]:
    """One bool mask per region, in the order of ``names``, from masks by name or a tensor of indices."""
    if isinstance(regions, Tensor):
        _check_like("regions", regions, labels, "integers")
        if bool((regions >= len(names)).any()):
            raise InputError(f"region index {int(regions.max())}", expected=f"less than {len(names)}")
        return [regions == index for index in range(len(names))]
    given = {} if regions is None else regions
    if set(given) != set(names):
        raise InputError(f"regions are {sorted(given)}", expected=f"{sorted(names)}, as named at construction")
    for name, mask in given.items():
        _check_like(f"region {name!r}", mask, labels, "bool")
    return [given[name] for name in names]


def _check_like(name: str, tensor: Tensor, like: Tensor, dtype: str) -> None:
    kinds = {
        "bool": tensor.dtype == torch.bool,
        "floating point": tensor.is_floating_point(),
        "integers": not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool,
    }
    if tensor.shape != like.shape or not kinds[dtype]:
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}",
            expected=f"shape {tuple(like.shape)}, {dtype}",
            fix="scores are (N, C, *spatial), all else (N, *spatial)",
        )
