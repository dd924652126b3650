"""How many threads torch and numpy may use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` threads in this block.

    Light work on many small tensors is fastest on one thread: torch's threads spin while they wait, and if other
    threads need the cores (those of numba, or of reading ahead) each operation may take many times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def blas_threads(count: int) -> Iterator[None]:
    """Let the linear algebra of numpy and scipy use ``count`` threads in this block, for the same reason."""
    with _blas().limit(limits=count):
        yield


@cache
def _blas() -> Any:
    """The libraries of linear algebra, looked for once: that takes longer than a small fit."""
    import scipy.linalg  # noqa: F401 (loads one beside numpy's)
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController().select(user_api="blas")
