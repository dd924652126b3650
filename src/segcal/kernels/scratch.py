"""Scratch memory of compiled loops: named arrays for one block of voxels, made once for each thread."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from segcal.kernels.tiles import TILE

FLOAT, DOUBLE, INDEX = torch.float32, torch.float64, torch.int32


class PerClass(NamedTuple):
    """The type of an array that has a row for each class."""

    dtype: torch.dtype = FLOAT


def zeros(*shape: int, dtype: torch.dtype = FLOAT) -> NDArray[Any]:
    """An array that starts at a cache line, as torch's arrays do, so that no vector crosses two lines."""
    array: NDArray[Any] = torch.zeros(shape, dtype=dtype).numpy()
    return array


def new_block(kind: Any, classes: int, size: int, **others: Any) -> Any:
    """The arrays of a NamedTuple whose defaults are types: ``(B,)``, or ``(C, B)`` for ``PerClass``; B is ``size``.

    Rows of ``(C, B)`` get a cache line more: rows a power of 2 apart would compete for the same lines of the cache.
    ``others`` are arrays of other shapes.
    """
    for name, dtype in kind._field_defaults.items():
        if isinstance(dtype, PerClass):
            others[name] = zeros(classes, size + TILE, dtype=dtype.dtype)
        else:
            others.setdefault(name, zeros(size, dtype=dtype))
    return kind(**others)
