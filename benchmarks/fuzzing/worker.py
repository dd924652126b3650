"""A process that judges inputs, started anew when it hangs or dies."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Protocol

# Seconds after which an answer counts as hanging; a valid input takes a fraction of a second.
LIMIT = 30.0


class Target(Protocol):
    """What is fuzzed. ``judge`` runs in the worker, first on the valid input."""

    name: str
    #: Bytes that an answer may take beside twice those of the valid input.
    room: int

    def write(self, root: Path) -> None:
        """Write the valid input to a new folder."""

    def damage(self, root: Path, rng: random.Random) -> str:
        """Damage it; returns what was done."""

    def judge(self, root: Path, kind: str) -> str:
        """``refused``, ``accepted`` (the same numbers), ``changed`` (others, rightly), or ``FAIL`` and why."""


class Answer(NamedTuple):
    """An outcome, the CPU seconds and the bytes it took, and what a failure says."""

    outcome: str
    seconds: float
    memory: int
    detail: str = ""


def _resident(name: str) -> int:
    """VmRSS or VmHWM (the highest since the last reset) in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def judged(target: Target, root: Path, kind: str) -> Answer:
    """What a target says of an input, in this process."""
    before, started = _resident("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")  # Resets the high-water mark.
    try:
        outcome, _, detail = target.judge(root, kind).partition(" ")
    except BaseException:
        outcome, detail = "FAIL", traceback.format_exc()
    return Answer(outcome, time.process_time() - started, _resident("VmHWM") - before, detail)


def _work(connection: Connection, target: Target) -> None:
    sys.stderr = io.StringIO()  # Libraries log what they find odd.
    warnings.simplefilter("ignore")
    while True:
        connection.send(judged(target, *connection.recv()))


class Worker:
    """Judges inputs of a target in another process."""

    def __init__(self, target: Target, original: Path) -> None:
        self._target, self._original = target, original
        # Large blocks go back to the system when they are freed, so that every answer starts from the same memory.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_work, args=(there, self._target), daemon=False)
        self._process.start()
        there.close()
        for _ in range(2):  # The second time, nothing is imported or compiled any more.
            self._here.send((self._original, "[]"))
            answer = self._here.recv()
            assert answer.outcome == "accepted", answer
        self.memory = answer.memory

    def judge(self, root: Path, kind: str) -> Answer:
        """The answer for an input."""
        self._here.send((root, kind))
        try:
            if self._here.poll(LIMIT):
                answer: Answer = self._here.recv()
                if answer.memory > 2 * self.memory + self._target.room:
                    detail = f"{answer.memory / 1e6:.0f} MB, the valid input takes {self.memory / 1e6:.0f}"
                    return answer._replace(outcome="FAIL", detail=detail)
                return answer
            detail = f"hangs for {LIMIT:.0f} s"
        except EOFError:
            detail = "the process died"
        self.close()
        self._start()
        return Answer("FAIL", LIMIT, 0, detail)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
