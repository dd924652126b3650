"""Which tests run a line of the source, and how long each takes: the tests are run once, traced by coverage.py."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "segcal"
#: Tests of the mutated modules and of what is made of them, and the examples in the docstrings.
SUITES = (
    *(f"tests/{name}" for name in ("metrics", "calibrators", "losses", "inference", "solvers", "kernels")),
    *(f"tests/{name}" for name in ("properties", "fitting", "evaluation")),
    *(f"tests/test_{name}.py" for name in ("scores", "statistics", "fusion", "regions")),
    *(f"src/segcal/{name}" for name in ("metrics", "calibrators", "losses", "inference", "solvers")),
    *(f"src/segcal/{name}.py" for name in ("scores", "statistics", "kernels/reference")),
)
#: The options of pyproject.toml without its processes, and with nothing left behind.
OPTIONS = ("-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "console_output_style=classic")
OPTIONS += ("--doctest-modules", "--import-mode=importlib", "--strict-markers", "-q")
OPTIONS += ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of libraries that are imported before pytest starts
# Seconds around every test.
_OVERHEAD = 0.02
# What compiles or starts processes takes long, and the processes import the source as it is.
_SKIPPED = "not compile and not export and not process"


@dataclass
class Traced:
    """What the traced run of a test has shown: CPU seconds, and the lines that were run, by source file."""

    seconds: float
    passed: bool
    lines: dict[str, list[int]]


class TestMap:
    """The tests that run each line. ``imported`` are lines that are run while a module is imported."""

    def __init__(self, traced: dict[str, Traced], imported: dict[str, list[int]]) -> None:
        self.seconds = {name: test.seconds for name, test in traced.items() if test.passed}
        self.imported = {(file, line) for file, lines in imported.items() for line in lines}
        self._files: dict[str, set[str]] = {}
        for name in self.seconds:
            self._files.setdefault(name.partition("::")[0], set()).add(name)
        self._tests: dict[tuple[str, int], list[str]] = {}
        for name, test in traced.items():
            if test.passed:
                for file, lines in test.lines.items():
                    for line in lines:
                        self._tests.setdefault((file, line), []).append(name)

    def running(self, ranges: list[tuple[str, int, int]]) -> list[str]:
        """The tests that run one of the lines: the fastest first, but one of another function before many of one."""
        lines = ((file, line) for file, first, last in ranges for line in range(first, last + 1))
        return self._ranked({name for line in lines for name in self._tests.get(line, ())})

    def speaking_of(self, words: set[str], module: str) -> list[str]:
        """The tests in files that hold one of the words, or that are called after a module."""
        found = set()
        for path, names in self._files.items():
            text = set(re.findall(r"\w+", (ROOT / path).read_text(encoding="utf-8")))
            if text & words or Path(path).stem == f"test_{module}":
                found |= names
        return self._ranked(found)

    def _ranked(self, names: set[str]) -> list[str]:
        rank: dict[str, int] = {}
        ranked = []
        for name in sorted(names, key=lambda name: (self.seconds[name], name)):
            function = name.partition("[")[0]
            rank[function] = rank.get(function, -1) + 1
            ranked.append(((1 + rank[function]) * (self.seconds[name] + _OVERHEAD), name))
        return [name for _, name in sorted(ranked)]


def environment() -> dict[str, str]:
    """For processes that run tests: this checkout's segcal, one thread."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def command(module: str, *arguments: str) -> list[str]:
    """Runs ``main`` of a module of this package, without this folder on the path: its names are also those of tests."""
    code = f"import sys; sys.path.insert(0, sys.argv.pop(1)); from mutating import {module} as it; del sys.path[0]"
    return [sys.executable, "-c", f"{code}; it.main()", str(ROOT / "benchmarks"), *arguments]


def source_stamp() -> str:
    """Changes with the source."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCE.rglob("*.py")))).hexdigest()


def load(cache: Path) -> TestMap:
    """The map; files whose tests have changed since, or all after a change of the source, are traced again."""
    cache.mkdir(parents=True, exist_ok=True)
    source = bytes.fromhex(source_stamp())
    traced: dict[str, Traced] = {}
    imported: dict[str, list[int]] = {}
    for suite in SUITES:
        wanted = {str(path.relative_to(ROOT)): cache / _stamp(path, source) for path in _files(suite)}
        missing = {path: str(file) for path, file in wanted.items() if not file.exists()}
        if missing:
            print(f"tracing the tests of {suite}, {len(missing)} files", file=sys.stderr, flush=True)
            run = command("covering", json.dumps(missing))
            subprocess.run(run, check=True, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
        for file in wanted.values():
            found = json.loads(file.read_text())
            traced |= {name: Traced(**test) for name, test in found["tests"].items()}
            for name, lines in found["imported"].items():
                imported.setdefault(name, []).extend(lines)
    return TestMap(traced, imported)


def _files(suite: str) -> list[Path]:
    """The files of tests, or the source files with examples."""
    path = ROOT / suite
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob("test_*.py" if suite.startswith("tests") else "*.py"))
    return [file for file in found if file.name.startswith("test_") or ">>>" in file.read_text()]


def _stamp(path: Path, source: bytes) -> str:
    stamp = hashlib.sha256(str(path.relative_to(ROOT)).encode() + path.read_bytes() + source)
    return f"{stamp.hexdigest()[:24]}.json"


class Tracer:
    """A pytest plugin that notes the lines of every test."""

    def __init__(self) -> None:
        import coverage

        self.coverage = coverage.Coverage(data_file=None, include=[f"{SOURCE}/*"], config_file=False)
        self.tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """One test, with what is set up for it."""
        failed = item.session.testsfailed
        self.coverage.switch_context(item.nodeid)
        started = time.process_time()
        result = yield
        seconds = time.process_time() - started
        self.coverage.switch_context("")
        self.tests[item.nodeid] = {"seconds": seconds, "passed": item.session.testsfailed == failed, "lines": {}}
        return result

    def write(self, targets: dict[str, str]) -> None:
        """The tests of each file to a file of their own."""
        self.coverage.stop()
        data = self.coverage.get_data()
        imported: dict[str, list[int]] = {}
        for file in data.measured_files():
            name = str(Path(file).relative_to(ROOT))
            for line, contexts in data.contexts_by_lineno(file).items():
                for context in contexts:
                    lines = self.tests[context]["lines"] if context in self.tests else imported
                    lines.setdefault(name, []).append(line)
        for path, target in targets.items():
            tests = {name: test for name, test in self.tests.items() if name.partition("::")[0] == path}
            Path(target).write_text(json.dumps({"tests": tests, "imported": imported}))


def warm() -> None:
    """Import once what every fork would import when it is first used."""
    import numba  # noqa: F401
    import scipy.ndimage
    import scipy.optimize
    import scipy.stats  # noqa: F401
    import torch

    torch.testing.assert_close(torch.zeros(1), torch.zeros(1))
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()


def main() -> None:
    """Trace the tests of the files named in the first argument."""
    targets = json.loads(sys.argv[1])
    warm()
    tracer = Tracer()
    tracer.coverage.start()
    pytest.main([*OPTIONS, "-k", _SKIPPED, *targets], plugins=[tracer])
    tracer.write(targets)


if __name__ == "__main__":
    main()
