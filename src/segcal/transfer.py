"""Tensors on their way to a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def moved(
    tensor: Tensor | None, device: torch.device | None, convert: Callable[[Tensor], Tensor] = lambda there: there
) -> Tensor | None:
    """A tensor on a device, converted there; None for the device leaves it where it is.

    CUDA devices get it from page-locked memory by a stream of its own, so that they compute while they read.
    """
    if tensor is None:
        return None
    if device is None or tensor.device == device:
        return convert(tensor)
    if device.type != "cuda":
        return convert(tensor.to(device))
    with torch.cuda.stream(_copies(device)) as _:
        there = convert(tensor.pin_memory().to(device, non_blocking=True))
        torch.cuda.current_stream(device).synchronize()
    there.record_stream(torch.cuda.default_stream(device))
    return there


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies to a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
