"""Commands that are killed, run out of disk, lose their input or meet another run: does the rerun mend it?

Each command runs in a process that has a fault planted in it, on a fresh copy of a small dataset:

    killed     kill -9 just before a random file operation, or after a random time; of a torchrun job, a random rank
    disk full  no file may grow beyond a random size
    input cut  a score file or an image loses its second half just as it is opened
    together   a second run of the same command starts in the same folder after a random time

Afterwards the command runs again without a fault, with ``--resume``. Its results must equal those of a run that nothing
disturbed, byte for byte, except for time stamps and measured seconds (``faulting/scenarios.py`` lists them), which are
left out, and for the journal. Every other file of the folder must be as it was, and nothing temporary may be left.

    python benchmarks/faults.py [--points 50] [--seed 0] [--commands apply,pack]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from faulting.processes import Ended, Fault, begin, run
from faulting.scenarios import OUT, SCENARIOS, Scenario, hashes, results, write_data

KINDS = ("killed", "disk full", "input cut", "together")
# What a command that has no checkpoint yet says to --resume.
_ANEW = "start without --resume"
_SECOND = ("another process", "is not empty", "holds a run already")


@dataclass
class Trial:
    """A command, its results when undisturbed, and what came of the faults."""

    scenario: Scenario
    data: Path
    place: Path
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = hashes(self.data)
        self.whole, first = self._undisturbed()
        _, self.truth = self._undisturbed()
        different = sorted(name for name in {*first, *self.truth} if first.get(name) != self.truth.get(name))
        assert not different, f"two undisturbed runs of {self.scenario.name} differ in {different}"

    def _undisturbed(self) -> tuple[Ended, dict[str, str]]:
        ended = run(self.scenario, self._fresh())
        assert set(ended.codes) == {0}, ended.text
        return ended, results(self.place)

    def _fresh(self) -> Path:
        """A new copy of the data."""
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.data, self.place)
        return self.place

    def attempt(self, kind: str, rng: random.Random, name: str) -> None:
        """One fault of this kind, and the run after it."""
        self._fresh()
        if kind == "together":
            problem, what = self._together(rng)
        else:
            problem, what = self._disturbed(kind, rng)
        problem = problem or self._finish()
        self.counts[kind, "failed" if problem else "equal"] += 1
        self.counts[kind, "tried"] += 1
        if problem:
            self.failures.append(f"{self.scenario.name}, {kind}, {name} ({what}): {problem}")

    def _disturbed(self, kind: str, rng: random.Random) -> tuple[str, str]:
        """Why the answer to a fault was wrong, if it was; and what was done."""
        hit = rng.randrange(self.scenario.ranks)
        if kind == "killed":
            whole = self.whole
            by_operation = rng.random() < 0.5 and hit == 0
            operation = rng.randint(1, whole.operations)
            fault = Fault(operation=operation) if by_operation else Fault(seconds=rng.random() * whole.seconds)
        elif kind == "disk full":
            largest = max(path.stat().st_size for path in self.place.rglob("*") if path.is_file())
            fault = Fault(largest=rng.randint(1, largest))
        else:
            fault = Fault(cut=rng.randint(1, 16))
        ended = run(self.scenario, self.place, fault=fault, rank=hit)
        # torchrun ends the ranks that are left with SIGTERM.
        usual = {-9, -15} if kind == "killed" else {-15} if self.scenario.ranks > 1 else set()
        died = [code for code in ended.codes if code < 0 and code not in usual]
        if not set(ended.codes) - {0}:
            self.counts[kind, "ended before"] += 1
        if "Traceback" in ended.text or died or 70 in ended.codes:
            return f"exit codes {ended.codes}\n{ended.text}", str(fault)
        if kind == "input cut":
            for path in self.data.glob("ds/*/*"):
                shutil.copy2(path, self.place / path.relative_to(self.data))
        return "", str(fault)

    def _together(self, rng: random.Random) -> tuple[str, str]:
        """Two runs of the command; one may refuse, and then says why."""
        delay = rng.random() * self.whole.seconds
        started = time.perf_counter()
        first = begin(self.scenario, self.place)
        time.sleep(delay)
        second = begin(self.scenario, self.place)(time.perf_counter())
        ends, what = [first(started), second], f"after {delay:.2f} s"
        good = [ended for ended in ends if set(ended.codes) == {0}]
        refused = [ended for ended in ends if set(ended.codes) != {0}]
        if not good or any("Traceback" in ended.text for ended in ends):
            return "".join(f"{ended.codes} {ended.text}" for ended in ends), what
        if any(not any(words in ended.text for words in _SECOND) for ended in refused):
            return f"an unclear answer: {refused[0].text}", what
        self.counts["together", "refused"] += bool(refused)
        return "", what

    def _finish(self) -> str:
        """Run the command again, and compare; returns what is wrong."""
        ended = run(self.scenario, self.place, again=True)
        if set(ended.codes) != {0} and _ANEW in ended.text:
            ended = run(self.scenario, self.place)
        if set(ended.codes) != {0}:
            return f"the rerun ends with {ended.codes}\n{ended.text}"
        found = results(self.place)
        different = sorted(name for name in {*found, *self.truth} if found.get(name) != self.truth.get(name))
        if different:
            return f"other results: {different}"
        changed = {name for name, digest in self.before.items() if hashes(self.place, OUT).get(name) != digest}
        extra = hashes(self.place, OUT).keys() - self.before.keys()
        return f"changed {sorted(changed)}, new {sorted(extra)}" if changed or extra else ""


def share(scenario: Scenario, points: int, seed: int, folder: Path) -> Trial:
    """All faults of a command: ``points`` kills, and a fifth as many of each other kind."""
    write_data(folder / "data")
    trial = Trial(scenario, folder / "data", folder / "run")
    for kind in KINDS:
        for point in range(points if kind == "killed" else max(1, points // 5)):
            trial.attempt(kind, random.Random(f"{seed}/{scenario.name}/{kind}/{point}"), f"point {point}")
    return trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=10, help="kills of each command; 50 is the full run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", default=",".join(scenario.name for scenario in SCENARIOS))
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # Forked processes have no threads but their own.
    import segcal.cli.commands
    import segcal.report  # imported once, for all processes

    del segcal
    print(f"{asked.points} kills of each command, a fifth as many of each other fault, seed {asked.seed}\n")
    heads = f"{'tried':>7}{'ended before':>14}{'second refused':>16}{'equal after':>13}{'failed':>8}"
    print(f"{'command':<10}{'fault':<11}{heads}")
    failures: list[str] = []
    for scenario in SCENARIOS:
        if scenario.name in asked.commands.split(","):
            with tempfile.TemporaryDirectory() as folder:
                trial = share(scenario, asked.points, asked.seed, Path(folder))
            for kind in KINDS:
                tried, before, refused, equal, failed = (
                    trial.counts[kind, name] for name in ("tried", "ended before", "refused", "equal", "failed")
                )
                second = str(refused) if kind == "together" else "-"
                print(
                    f"{scenario.name:<10}{kind:<11}{tried:>7}{before:>14}{second:>16}{equal:>13}{failed:>8}", flush=True
                )
            failures += trial.failures
    print("\n" + ("\n".join(failures) or "no failures"))
    sys.exit(bool(failures))


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
