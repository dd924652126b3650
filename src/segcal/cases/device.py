"""Which device to work on, and what to do when it has too little memory."""

from __future__ import annotations

import warnings

import torch

from segcal.errors import InputError

#: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``, or a torch device.
Device = str | torch.device


def values_at_once(device: torch.device, here: int, there: int, size: float) -> int:
    """How many values to work on at once: ``here`` on the CPU, ``there`` on a GPU.

    Fewer there where ``size`` bytes for each would take more than half of its free memory, but not fewer than here.

    Examples:
        >>> values_at_once(torch.device("cpu"), 2**19, 2**25, 40)
        524288
    """
    if device.type != "cuda":
        return here
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(here, min(there, int((torch.cuda.mem_get_info(device)[0] + unused) / (2 * size))))


def resolved(device: Device) -> torch.device:
    """The device of this name; ``auto`` is a GPU if there is one. Raises if there is no such device here.

    Examples:
        >>> resolved("cpu")
        device(type='cpu')
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise InputError(f"device is {str(device)!r}", expected="auto, cpu, cuda or cuda:N")
    if found.type == "cuda":
        count = torch.cuda.device_count()
        if (found.index or 0) >= count:
            raise InputError(
                f"device is {str(device)!r}, but PyTorch sees {count or 'no'} CUDA device{'s' * (count != 1)}",
                expected="a device of this machine",
                fix="install a CUDA build of PyTorch, or leave the device to 'auto'",
            )
        found = torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
    return found


def fewer_rows(rows: slice) -> tuple[slice, slice]:
    """Both halves of rows for which a GPU has too little memory; called where that error is handled.

    A single row cannot be halved: the error is raised again.
    """
    if rows.stop - rows.start < 2:
        raise
    warnings.warn("the GPU has too little memory for these rows: going on with half as many", stacklevel=3)
    torch.cuda.empty_cache()
    middle = (rows.start + rows.stop) // 2
    return slice(rows.start, middle), slice(middle, rows.stop)
