"""Worker processes. They end with their parent, are killed when it stops, and a dead worker is a clear error."""

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
# Seconds between two checks for progress of the workers.
_INTERVAL = 0.2
_queue: SimpleQueue[str] | None = None  # in a worker: where it reports progress


class _Pool(ProcessPoolExecutor):
    """A pool whose processes, which start with the first tasks, ignore Ctrl-C."""

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        with _ctrl_c_blocked():
            return super().submit(*args, **kwargs)


@contextmanager
def worker_pool(workers: int, queue: SimpleQueue[str] | None = None) -> Iterator[ProcessPoolExecutor]:
    """Processes that share torch's threads. Leaving the block by an error or Ctrl-C kills them at once.

    They are spawned, not forked: a fork of a process that has used OpenMP or numba threads may hang.
    """
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // workers)
    pool = _Pool(workers, context, _begin, (threads, queue))
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        # A pool waits for running tasks, which may take minutes, and has no public way to kill its processes.
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(cancel_futures=True)
        raise


def in_workers(function: Callable[..., _T], calls: Sequence[tuple[Any, ...]], progress: Progress) -> list[_T]:
    """``function(*call, progress=...)`` for every call, each in its own process; a single call runs in this one."""
    if len(calls) == 1:
        return [function(*calls[0], progress=progress)]
    queue: SimpleQueue[str] = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        with worker_pool(len(calls), queue) as pool:
            pending = futures = [pool.submit(_call, function, call) for call in calls]
            while pending and not any(future.done() and future.exception() for future in futures):
                pending = list(wait(pending, _INTERVAL, FIRST_EXCEPTION).not_done)
                while not queue.empty():
                    progress(queue.get())
            return [future.result() for future in futures]
    except BrokenProcessPool:
        raise WorkerError() from None


def _call(function: Callable[..., _T], call: tuple[Any, ...]) -> _T:
    assert _queue is not None
    return function(*call, progress=_queue.put)


@contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Block Ctrl-C in processes started here. It is sent to all processes, and the parent kills its workers."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(threads: int, queue: SimpleQueue[str] | None) -> None:
    global _queue
    _queue = queue
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent is killed; otherwise it would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
