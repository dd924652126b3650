"""Work that several processes share: the ranks of a torchrun job, or worker processes that this one starts.

Workers end with their parent, are killed when it stops, and a dead worker is a clear error.
"""

from __future__ import annotations

import multiprocessing
import operator
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import reduce
from multiprocessing.queues import SimpleQueue
from queue import Empty
from queue import SimpleQueue as ThreadQueue
from typing import Any, TypeVar

import torch

from segcal.errors import WorkerError
from segcal.parallel.ranks import Progress, current_ranks, this_rank

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


def in_workers(
    function: Callable[..., _T],
    calls: Sequence[tuple[Any, ...]],
    merge: Callable[[_T, _T], _T],
    progress: Progress | None = None,
) -> _T:
    """``function(*call)`` for every call, each in its own process, merged; a single call runs in this one.

    The processes are the ranks of the job, if there are any and they are free. With ``progress``, the function gets a
    callback of that name. There may be at most as many calls as ``crew()`` says.
    """
    if len(calls) == 1:
        return function(*calls[0], **({} if progress is None else {"progress": progress}))
    if (ranks := current_ranks()) is not None:
        merged: _T = ranks.run(function, calls, merge, progress)
        return merged
    queue: SimpleQueue[str] = multiprocessing.get_context("spawn").SimpleQueue()
    try:
        with worker_pool(len(calls), queue) as pool:
            futures = [pool.submit(_call, function, call, progress is not None) for call in calls]
            for ended in _as_they_end(futures):
                while not queue.empty():
                    assert progress is not None
                    progress(queue.get())
                if ended is not None:
                    ended.result()  # raises if it failed
            return reduce(merge, (future.result() for future in futures))
    except BrokenProcessPool:
        raise WorkerError() from None


def in_turn(
    function: Callable[..., _T], calls: Sequence[tuple[Any, ...]], workers: int, done: Callable[[int], None]
) -> dict[int, _T | WorkerError]:
    """``function(*call)`` for many calls, by number: a process that is free takes the next one.

    ``done`` is called with the number of every call that is done. A call that kills its process gives a
    ``WorkerError``; among the ranks of a job, that ends the job.
    """
    if (ranks := current_ranks()) is not None:
        name = f"turns/{ranks.store.add('turns', 1)}"
        shares = [(name, function, calls)] * ranks.world
        return ranks.run(_take_turns, shares, operator.or_, lambda turn: done(int(turn)))  # type: ignore[no-any-return]
    found: dict[int, _T | WorkerError] = {}

    def keep(turn: int, answer: _T | WorkerError) -> None:
        found[turn] = answer
        done(turn)

    if workers == 1:
        for turn, call in enumerate(calls):
            keep(turn, function(*call))
    together = True
    while left := [turn for turn in range(len(calls)) if turn not in found]:
        # After a process died, the next call runs alone. If its process dies too, the call is at fault.
        some = left if together else left[:1]
        try:
            # Each process has its share of torch's threads, however few calls are left.
            with worker_pool(workers) as pool:
                waiting = {pool.submit(function, *calls[turn]): turn for turn in some}
                for future in _as_they_end(list(waiting)):
                    if future is not None:
                        keep(waiting[future], future.result())
        except BrokenProcessPool:
            if not together:
                keep(left[0], WorkerError())
            together = not together
    return found


def _as_they_end(futures: Sequence[Future[_T]]) -> Iterator[Future[_T] | None]:
    """The futures as they end, and None after every ``_INTERVAL`` seconds without one.

    ``wait`` and ``as_completed`` of the standard library take locks in Python code. Ctrl-C may come after such a lock
    is taken and before it is sure to be released: the pool's thread would wait for it, and this process for the pool.
    """
    ended: ThreadQueue[Future[_T]] = ThreadQueue()
    for future in futures:
        future.add_done_callback(ended.put)
    left = len(futures)
    while left:
        try:
            future = ended.get(timeout=_INTERVAL)
        except Empty:
            yield None
            continue
        left -= 1
        yield future


def _take_turns(
    name: str, function: Callable[..., _T], calls: Sequence[tuple[Any, ...]], *, progress: Progress
) -> dict[int, _T]:
    found = {}
    for turn in this_rank().turns(name, len(calls)):
        found[turn] = function(*calls[turn])
        progress(str(turn))
    return found


def _call(function: Callable[..., _T], call: tuple[Any, ...], progress: bool) -> _T:
    assert _queue is not None
    return function(*call, **({"progress": _queue.put} if progress else {}))


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
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """In a thread of a worker: end this process when its parent is killed; otherwise it would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
