"""A command in a process of its own, forked from one that has imported everything, with a fault planted in it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faulting.scenarios import Scenario

# Audit events that change files or open them. A process is killed just before one of them.
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
# Seconds after which a command counts as hanging.
LIMIT = 300.0


@dataclass(frozen=True)
class Fault:
    """What happens to a process: killed before its n-th file operation or after some seconds; a limit of file sizes;
    an input file cut short as its n-th opening begins."""

    operation: int | None = None
    seconds: float | None = None
    largest: int | None = None
    cut: int | None = None


@dataclass(frozen=True)
class Ended:
    """Exit codes of all ranks (negative: the signal), what they printed, seconds, and operations of the first."""

    codes: tuple[int, ...]
    text: str
    seconds: float
    operations: int


def run(scenario: Scenario, root: Path, again: bool = False, fault: Fault | None = None, rank: int = 0) -> Ended:
    """Run a command to its end; the fault hits one rank, and then, as torchrun does, the others are ended, too."""
    started = time.perf_counter()
    wait = begin(scenario, root, again, fault, rank)
    return wait(started)


def begin(
    scenario: Scenario, root: Path, again: bool = False, fault: Fault | None = None, hit: int = 0
) -> Callable[[float], Ended]:
    """Start a command; returns a function that waits for its end."""
    words, port = [*scenario.command, *(scenario.again if again else ())], _free_port()
    log, count = root.parent / f"{root.name}-{time.monotonic_ns()}.log", root.parent / f"{root.name}.count"
    count.unlink(missing_ok=True)
    processes = []
    for rank in range(scenario.ranks):
        process = os.fork()
        if process == 0:
            world = {"WORLD_SIZE": scenario.ranks, "LOCAL_WORLD_SIZE": scenario.ranks, "TORCHELASTIC_RUN_ID": "faults"}
            place = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if scenario.ranks > 1:
                os.environ |= {name: str(value) for name, value in {**world, **place}.items()}
            _child(words, root, log, count if rank == 0 else None, fault if rank == hit else None)
        processes.append(process)
    if fault is not None and fault.seconds is not None:
        time.sleep(fault.seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[hit], signal.SIGKILL)
    return lambda started: _end(processes, log, count, started)


def _end(processes: list[int], log: Path, count: Path, started: float) -> Ended:
    codes: dict[int, int] = {}
    while len(codes) < len(processes):
        for process in [each for each in processes if each not in codes]:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
                if codes[process]:  # torchrun ends the others.
                    _signal([each for each in processes if each not in codes], signal.SIGTERM)
        if time.perf_counter() - started > LIMIT:
            _signal([each for each in processes if each not in codes], signal.SIGKILL)
        time.sleep(0.005)
    seconds = time.perf_counter() - started
    operations = int(count.read_text()) if count.is_file() else 0
    text = log.read_text(errors="replace") if log.is_file() else ""
    log.unlink(missing_ok=True)
    return Ended(tuple(codes[each] for each in processes), text, seconds, operations)


def _signal(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _child(words: list[str], root: Path, log: Path, count: Path | None, fault: Fault | None) -> None:
    """Run the command line and end the process."""
    from segcal.cli import main
    from segcal.evaluation import unfinished

    unfinished.EVERY = 0.0  # after every case
    os.chdir(root)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    hook = _Hook(root, fault or Fault())
    sys.addaudithook(hook)
    if fault is not None and fault.largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.largest, fault.largest))
    sys.argv, code = ["segcal", *words], 70
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if count is not None and fault is None:
        count.write_text(str(hook.operations))
    os._exit(code)


class _Hook:
    """Counts file operations in the folder, and does what the fault says."""

    def __init__(self, root: Path, fault: Fault) -> None:
        self._root, self._fault, self._busy = str(root), fault, False
        self.operations = self.inputs = 0

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._busy or event not in _EVENTS or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.path.join(self._root, os.fspath(arguments[0]))  # noqa: PTH118 - no pathlib in an audit hook
        if not isinstance(path, str) or not path.startswith(self._root):
            return
        self.operations += 1
        if self.operations == self._fault.operation:
            os.kill(os.getpid(), signal.SIGKILL)
        if event == "open" and path.startswith((f"{self._root}/ds/logits/", f"{self._root}/ds/images/")):
            self.inputs += 1
            if self.inputs == self._fault.cut:
                self._busy = True
                os.truncate(path, os.stat(path).st_size // 2)  # noqa: PTH116


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
