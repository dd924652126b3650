"""Tensors on their way to a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    if device.type != "cuda" or tensor.is_cuda:
        return convert(tensor.to(device))
    user = torch.cuda.current_stream(device)
    with torch.cuda.stream(_copies(device)) as _:
        # Not ``tensor.pin_memory()``, which locks all that strides reach over: of some rows of a file all of it.
        pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        there = convert(pinned.to(device, non_blocking=True))
        torch.cuda.current_stream(device).synchronize()
    for stream in (torch.cuda.default_stream(device), user):
        there.record_stream(stream)
    return there


def received(tensors: Iterable[Tensor | None]) -> None:
    """What another thread has read to a GPU, on the default stream, is used by this one, perhaps on another stream."""
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            first, user = torch.cuda.default_stream(tensor.device), torch.cuda.current_stream(tensor.device)
            if user != first:
                user.wait_stream(first)
                tensor.record_stream(user)


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies to a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
