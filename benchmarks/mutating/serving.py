"""Runs the tests of each mutant in a fork of a process that has imported what they need.

In ``living`` the process has imported segcal and collected the tests, and the fork gives functions new code. In
``imported`` it has only imported the libraries; the fork imports segcal with the changed source, and collects.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mutating.covering import OPTIONS, ROOT, warm
from mutating.swapping import import_changed, living_functions, swap

# A mutant that takes this many times what its tests took has timed out; tests are slower without others before them.
_PATIENCE, _START = 4.0, 12.0
# Bytes more than the process had.
_MEMORY = 6 * 2**30
# Wall-clock time for one second of CPU time, on a machine with other work.
_WAIT = 8.0

#: How a mutant is killed: a test failed, took far too long, or ended the process.
KILLED = ("failed", "timeout", "crashed")
Job = dict[str, Any]
# What a fork reports: the test that failed, how many were run, and in how much CPU time.
Report = dict[str, Any]
Send = Callable[[Report], Any]


def forked(body: Callable[[Send], None], seconds: float) -> Report:
    """Run in a fork; the last report that it made, and how it ended."""
    read, write = os.pipe()
    folder = tempfile.mkdtemp(prefix="mutant-")
    started = time.monotonic()
    child = os.fork()
    if not child:
        send = lambda report: os.write(write, json.dumps(report).encode() + b"\n")  # noqa: E731
        try:
            os.setsid()
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
            body(send)
        except BaseException as error:
            send({"test": None, "count": 0, "seconds": 0.0, "outcome": "broken", "why": repr(error)})
        os._exit(0)
    os.close(write)
    text, limit = b"", started + _WAIT * seconds
    while time.monotonic() < limit and select.select([read], [], [], limit - time.monotonic())[0]:
        part = os.read(read, 2**16)
        if not part:
            break
        text += part
    ended = time.monotonic() < limit
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(read)
    shutil.rmtree(folder, ignore_errors=True)
    reports = [json.loads(line) for line in text.splitlines()]
    last: Report = reports[-1] if reports else {"test": None, "count": 0, "seconds": 0.0}
    late = not ended or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
    if last.get("outcome") is None:
        last["outcome"] = "timeout" if late else "crashed"
    return last


def run_items(session: pytest.Session, items: list[pytest.Item], seconds: float, report: Send) -> None:
    """One test after the other until one fails, or the time is spent."""
    for count, item in enumerate(items, 1):
        now: Report = {"test": item.nodeid, "count": count, "seconds": time.process_time()}
        report(now)
        following = items[count] if count < len(items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        now["seconds"] = time.process_time()
        if session.testsfailed:
            report({**now, "outcome": "failed"})
            return
        if now["seconds"] > seconds:
            break
    report({**now, "test": None, "outcome": "passed"})


class Living:
    """The tests are collected once, and run in forks instead of a run of their own."""

    def __init__(self, serve: Callable[[Callable[[Job, bool], Report]], None]) -> None:
        self.serve = serve

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Serve all mutants."""
        self.items = {item.nodeid: item for item in session.items}
        self.functions = living_functions()
        warm()
        gc.collect()
        gc.freeze()

        def attempt(job: Job, control: bool) -> Report:
            return forked(lambda report: self.attempt(session, job, control, report), limit(job))

        self.serve(attempt)
        return True

    def attempt(self, session: pytest.Session, job: Job, control: bool, report: Send) -> None:
        """In the fork."""
        if not control:
            path = str(ROOT / job["file"])
            swap(path, Path(path).read_text(encoding="utf-8"), job["code"], self.functions)
            import_changed(path, job["code"])
        session.config._tmp_path_factory._basetemp = Path(tempfile.mkdtemp())  # type: ignore[attr-defined]
        run_items(session, [self.items[name] for name in job["tests"] if name in self.items], job["seconds"], report)


class Chosen:
    """A pytest plugin that runs chosen tests in their order."""

    def __init__(self, job: Job, report: Send) -> None:
        self.job, self.report = job, report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected has failed."""
        if report.failed:
            self.report({"test": report.nodeid, "count": 0, "seconds": time.process_time(), "outcome": "failed"})

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In the order of the job."""
        if session.testsfailed:
            return True
        items = {item.nodeid: item for item in session.items}
        chosen = [items[name] for name in self.job["tests"] if name in items]
        run_items(session, chosen, self.job["seconds"] + time.process_time(), self.report)
        return True


def attempt_fresh(job: Job, control: bool) -> Report:
    """Import and collect in a fork."""

    def body(report: Send) -> None:
        if not control:
            import_changed(str(ROOT / job["file"]), job["code"])
        code = pytest.main([*OPTIONS, f"--basetemp={tempfile.mkdtemp()}", *job["tests"]], plugins=[Chosen(job, report)])
        if code == pytest.ExitCode.USAGE_ERROR:  # conftest.py could not be imported
            report({"test": "conftest.py", "count": 0, "seconds": time.process_time(), "outcome": "failed"})

    return forked(body, limit(job) + _START)


def limit(job: Job) -> float:
    """CPU seconds."""
    return float(_PATIENCE * min(job["estimate"], job["seconds"]) + _START)


def serve(jobs: Iterator[Job], results: Path, attempt: Callable[[Job, bool], Report]) -> None:
    """Test all mutants. A test that is the first to kill one must pass without the change, after the same tests."""
    verified: set[str] = set()
    broken: set[str] = set()
    killers: dict[str, Counter[str]] = {}
    for job in jobs:
        known = killers.setdefault(job["file"], Counter())
        favourites = [name for name, _ in known.most_common(8) if name in set(job["tests"])]
        names = [*favourites, *(name for name in job["tests"] if name not in favourites)]
        while True:
            job["tests"] = [name for name in names if name not in broken]
            report = attempt(job, False) if job["tests"] else {"outcome": "untested", "test": None}
            killer = report["test"]
            if report["outcome"] not in KILLED or killer in verified:
                break
            control = attempt({**job, "tests": job["tests"][: report["count"] or None]}, True)
            if control["outcome"] == "passed":
                verified.add(killer)
                break
            broken.add(control["test"] or killer)
            print(f"not used, as it fails without a change: {control['test'] or killer}", file=sys.stderr, flush=True)
        if report["outcome"] == "failed":
            known[report["test"]] += 1
        with results.open("a") as file:
            ran = job["tests"][: report["count"]] if report["outcome"] == "passed" else []
            about = {"key": job["key"], "how": job["how"], "when": time.time(), "ran": ran}
            file.write(json.dumps({**about, **report}) + "\n")


def _without_shrinking() -> None:
    """The first example that fails is enough."""
    from hypothesis.internal.conjecture.engine import ConjectureRunner

    ConjectureRunner.shrink_interesting_examples = lambda self: None  # type: ignore[method-assign]


def main() -> None:
    """``living`` or ``imported``, the file of jobs, and that of results."""
    how, source, target = sys.argv[1:]
    jobs = [json.loads(line) for line in Path(source).read_text().splitlines()]
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    _without_shrinking()
    if how == "living":
        files = sorted({name.partition("::")[0] for job in jobs for name in job["tests"]})
        plugin = Living(lambda attempt: serve(iter(jobs), Path(target), attempt))
        sys.exit(pytest.main([*OPTIONS, *files], plugins=[plugin]))
    else:
        warm()
        gc.collect()
        gc.freeze()
        serve(iter(jobs), Path(target), attempt_fresh)


if __name__ == "__main__":
    main()
