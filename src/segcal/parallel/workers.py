"""Worker processes: they end with their parent, are not waited for when it stops, and it says so when one dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeVar

import torch

from segcal.errors import WorkerError

Progress = Callable[[str], None]
_T = TypeVar("_T")
# Seconds between two looks at what the workers have told; a person sees no delay.
_LOOK = 0.2
_told: SimpleQueue[str] | None = None  # in a worker, where its progress goes


class _Pool(ProcessPoolExecutor):
    """Starts its processes when it is given tasks."""

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        with _deaf_to_ctrl_c():
            return super().submit(*args, **kwargs)


@contextmanager
def worker_pool(workers: int, told: SimpleQueue[str] | None = None) -> Iterator[ProcessPoolExecutor]:
    """Processes that share torch's threads. Leaving by an error, a break or Ctrl-C ends them at once.

    They are spawned, not forked: a forked copy of a process that has used OpenMP or numba threads may hang.
    """
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // workers)
    pool = _Pool(workers, context, _begin, (threads, told))
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        # A pool waits for what is running, which may take minutes; it has no public way to end its processes.
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(cancel_futures=True)
        raise


def in_workers(function: Callable[..., _T], calls: Sequence[tuple[Any, ...]], progress: Progress) -> list[_T]:
    """``function(*call, progress=...)`` for every call, each in its own process; a single call runs in this one."""
    if len(calls) == 1:
        return [function(*calls[0], progress=progress)]
    told: SimpleQueue[str] = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        with worker_pool(len(calls), told) as pool:
            futures = [pool.submit(_call, function, call) for call in calls]
            _follow(futures, told, progress)
            return [future.result() for future in futures]
    except BrokenProcessPool:
        raise WorkerError() from None


def _follow(futures: Sequence[Future[_T]], told: SimpleQueue[str], progress: Progress) -> None:
    """Pass on what the workers tell until all are done or one has failed."""
    pending: set[Future[_T]] = set(futures)
    while pending:
        done, pending = wait(pending, _LOOK, FIRST_EXCEPTION)
        while not told.empty():
            progress(told.get())
        if any(future.exception() for future in done):
            return


def _call(function: Callable[..., _T], call: tuple[Any, ...]) -> _T:
    assert _told is not None
    return function(*call, progress=_told.put)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that start here never hear of Ctrl-C, which reaches all of them: the parent ends its own."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(threads: int, told: SimpleQueue[str] | None) -> None:
    global _told
    _told = told
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
