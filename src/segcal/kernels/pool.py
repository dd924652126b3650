"""Threads for compiled loops, which run without the interpreter lock; ``cpu`` explains why they are not numba's."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

# Threads are kept: on busy cores, starting a new one takes as long as a small image.
_POOLS: dict[int, ThreadPoolExecutor] = {}
if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=_POOLS.clear)


def _pool(threads: int) -> ThreadPoolExecutor:
    if threads not in _POOLS:
        _POOLS.setdefault(threads, ThreadPoolExecutor(threads, "segcal"))
    return _POOLS[threads]


def in_threads(work: Callable[[int], Result], count: int) -> list[Result]:
    """Results of ``work(0)`` to ``work(count - 1)``, which run at the same time, the first in this thread."""
    others = [_pool(count - 1).submit(work, turn) for turn in range(1, count)]
    return [work(0), *(other.result() for other in others)]
