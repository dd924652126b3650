"""Ctrl-C: a command ends within a second, and says what is kept and how to continue."""

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
#: The exit code of a program that was stopped by Ctrl-C.
STOPPED = 130
# Seconds a command has to remove its temporary files. Running threads are not waited for.
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
            gc.collect()  # Release the semaphores of worker processes, or Python would warn about them.
            _leave(words)

    return run  # type: ignore[return-value]


def kept(arguments: Mapping[str, Any]) -> str:
    """What a stopped command leaves behind.

    Examples:
        >>> kept({"output": "report", "resume": False})
        'Stopped. Finished work is kept in report. Run the same command with --resume to continue.'
        >>> kept({"data": "study"})
        'Stopped. Nothing is left half-written.'
    """
    if "resume" not in arguments:
        return "Stopped. Nothing is left half-written."
    where = f" in {arguments['output']}" if "output" in arguments else ""
    return f"Stopped. Finished work is kept{where}. Run the same command with --resume to continue."


@contextmanager
def _ending_soon(words: str) -> Iterator[None]:
    """Ctrl-C stops the work, and ends the process if that takes too long."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, lambda number, frame: _leave(words))  # A second Ctrl-C ends it at once.
        patience = threading.Timer(_PATIENCE, _leave, (words,))
        patience.daemon = True
        patience.start()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # Only the main thread may handle signals.
        yield
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(words: str) -> None:
    """End this process at once: a normal exit would wait for running threads."""
    err.print(words, markup=False, soft_wrap=True)
    for console in (out, err):
        console.file.flush()
    sys.stdout.flush()
    os._exit(STOPPED)
