"""Commands in a torchrun job: rank 0 runs the command, the others work for it."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from segcal.cli.console import end, kept, leave
from segcal.errors import InputError
from segcal.evaluation.evaluate import versions
from segcal.parallel.ranks import joined, under_torchrun

# Commands that share their work, and the one whose processes are equals.
_SHARED, _EQUALS = ("evaluate", "fit", "compare"), "train"
# The exit code of a program that was ended by SIGTERM.
_ENDED = 143


def in_ranks(name: str, command: Callable[..., None]) -> Callable[..., None]:
    """A command that shares its work among the ranks, if torchrun started it."""

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        if not under_torchrun():
            command(**arguments)
            return
        if name == _EQUALS:
            command(**arguments)
            # Gloo's threads outlive a network wrapped for them, and would abort an interpreter that shuts down.
            end(0)
        if name not in _SHARED or arguments.get("workers", 1) > 1:
            if os.environ["RANK"] != "0":  # Rank 0 says why, and fails the job.
                return
            if name in _SHARED:
                raise InputError("came with torchrun", where="--workers", expected="one of them: ranks are processes")
            expected = ", ".join((*_SHARED, _EQUALS))
            raise InputError(f"{name} came with torchrun", expected=f"one of {expected}", fix="run it without torchrun")
        with joined(versions()) as ranks:
            if ranks.rank:
                ranks.serve()
                return
            with _ending(kept(arguments)):
                command(**arguments)

    return run


@contextmanager
def _ending(words: str) -> Iterator[None]:
    """Where a rank dies, torchrun ends the others: say so, as the work of this one just stops."""

    def end(number: int, frame: FrameType | None) -> None:
        leave(f"Another rank ended, or the job was cancelled. {words}", _ENDED)

    before = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)  # not after an error: torchrun may end this rank before it has said why
