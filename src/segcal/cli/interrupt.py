"""Ctrl-C: a command ends within moments, and says what is kept and how to go on."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from segcal.cli.console import err, out

Command = TypeVar("Command", bound=Callable[..., None])
#: What shells expect of a program that was stopped by Ctrl-C.
STOPPED = 130
# Seconds that a command has to remove its temporary files; threads that are at work are not waited for.
_PATIENCE = 1.0


def stoppable(command: Command) -> Command:
    """A command that answers Ctrl-C with one line and exit code 130."""
    signature = inspect.signature(command)

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        words = kept(bound.arguments)
        stopped = False
        with _ending_soon(words):
            try:
                command(*args, **kwargs)
            except KeyboardInterrupt:
                stopped = True
        if stopped:
            gc.collect()  # Semaphores of worker processes are let go of, or the system would complain of them.
            _leave(words)

    return run  # type: ignore[return-value]


def kept(arguments: Mapping[str, Any]) -> str:
    """What is left of a command that was stopped.

    Examples:
        >>> kept({"output": "report", "resume": False})
        'Stopped. What is finished is kept in report: the same command with --resume goes on from there.'
        >>> kept({"data": "study"})
        'Stopped. Nothing is left half-written.'
    """
    if "resume" not in arguments:
        return "Stopped. Nothing is left half-written."
    where = f" in {arguments['output']}" if "output" in arguments else ""
    return f"Stopped. What is finished is kept{where}: the same command with --resume goes on from there."


@contextmanager
def _ending_soon(words: str) -> Iterator[None]:
    """Ctrl-C stops the work here, and ends the process should that take too long."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda number, frame: _leave(words))  # the second time, at once
        patience = threading.Timer(_PATIENCE, _leave, (words,))
        patience.daemon = True
        patience.start()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # Only that one may handle signals.
        yield
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(words: str) -> None:
    """End this process here and now: a pool of threads would be waited for at the usual exit."""
    err.print(words, markup=False, soft_wrap=True)
    for console in (out, err):
        console.file.flush()
    sys.stdout.flush()
    os._exit(STOPPED)
