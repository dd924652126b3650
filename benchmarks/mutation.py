"""Do the tests notice when the source is wrong? Small changes of the source, one at a time, and the tests that run it.

A change (a mutant) is one of cosmic-ray's: another operator, a number one larger or smaller, a condition turned round,
a loop that is never entered, a decorator left out. Places are drawn at random, with a seed, of each module in
proportion to its size, and one change at each place. Annotations, ``__all__`` and the words of errors are left out. A
mutant is killed if a test fails, crashes or takes far too long. Every test that kills must pass without the change,
after the same tests. Tests are those that run the changed statement, fastest first, until ``--seconds`` of CPU time are
spent.

Results are kept in ``build/mutation``: a run goes on where the last one ended. ``--again`` tests the survivors again.

    pip install cosmic-ray coverage
    python benchmarks/mutation.py [--mutants 1500] [--seed 0] [--only metrics,scores] [--seconds 5] [--again]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from mutating import choosing, covering, swapping
from mutating.mutants import MODULES, Mutant, sample
from mutating.report import report
from mutating.serving import KILLED

# What a run of its tests has shown of a mutant.
Result = dict[str, Any]
# Git ignores it.
CACHE = covering.ROOT / "build" / "mutation"
# Node ids on the command line of a fresh run: enough for its time, few enough to collect.
FRESH_TESTS = 60


def mutants_of(count: int, seed: int, only: list[str]) -> list[Mutant]:
    """The sample, kept on disk: to find it takes a minute."""
    stamp = hashlib.sha256(f"{covering.source_stamp()} {count} {seed} {only}".encode()).hexdigest()[:24]
    file = CACHE / f"mutants-{stamp}.json"
    if not file.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps([asdict(mutant) for mutant in sample(count, seed, only)]))
    return [Mutant(**one) for one in json.loads(file.read_text())]


def job(mutant: Mutant, known: covering.TestMap, seconds: float, before: list[Result]) -> dict[str, Any]:
    """How to test a mutant, and with what: in living modules first, which is faster, but what ran on import stays.

    Tests that it has survived ``before`` are left out, unless they have changed. Those that are newer come first.
    """
    path = covering.ROOT / mutant.file
    living = swapping.can_be_swapped(str(path), path.read_text(encoding="utf-8"), mutant.code)
    living &= not before or not choosing.imported(mutant, known)
    how = "living" if living else "imported"
    survived = {(name, one["when"]) for one in before if one.get("how") == how for name in one["ran"]}
    done = {name for name, when in survived if changed(name) < when}
    last = max((one.get("when", 0.0) for one in before), default=0.0)
    tests, estimate = [], 0.0
    for name in sorted(choosing.tests_of(mutant, known), key=lambda name: changed(name) < last):
        if estimate > seconds or (not living and len(tests) == FRESH_TESTS):
            break
        if name not in done:
            tests.append(name)
            estimate += known.seconds[name]
    about = {"key": mutant.key, "file": mutant.file, "code": mutant.code, "how": how, "tests": tests}
    return {**about, "seconds": seconds, "estimate": estimate}


@cache
def changed(test: str) -> float:
    """When the file of a test was last written."""
    return (covering.ROOT / test.partition("::")[0]).stat().st_mtime


def results(file: Path) -> dict[str, list[Result]]:
    """The results of each mutant, in the order of the runs."""
    found: dict[str, list[Result]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        result = json.loads(line)
        found.setdefault(result["key"], []).append(result)
    return found


def killed(found: list[Result]) -> bool:
    """Whether one of the runs has killed it."""
    return any(result["outcome"] in KILLED for result in found)


def outcome(found: list[Result]) -> str:
    """What became of a mutant."""
    return next((result["outcome"] for result in found if result["outcome"] in KILLED), found[-1]["outcome"])


def test(mutants: list[Mutant], seconds: float, again: bool) -> dict[str, list[Result]]:
    """Test those that have not been tested; ``again``: also those that have survived."""
    CACHE.mkdir(parents=True, exist_ok=True)
    file = CACHE / "results.jsonl"
    done = results(file)
    left = [one for one in mutants if one.key not in done or (again and not killed(done[one.key]))]
    known = covering.load(CACHE / "tests") if left else covering.TestMap({}, {})
    jobs = [job(mutant, known, seconds, done.get(mutant.key, [])) for mutant in left]
    for how in ("living", "imported"):
        wanted = [one for one in jobs if one["how"] == how]
        if not wanted:
            continue
        print(f"{len(wanted)} mutants, {how}", file=sys.stderr, flush=True)
        source = CACHE / f"{how}-{os.getpid()}.jsonl"
        source.write_text("".join(json.dumps(one) + "\n" for one in wanted))
        command = covering.command("serving", how, str(source), str(file))
        began = len(file.read_text().splitlines()) if file.exists() else 0
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "cwd": covering.ROOT, "env": covering.environment()}
        process = subprocess.Popen(command, **quiet)
        while process.poll() is None:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                lines = [json.loads(line) for line in file.read_text().splitlines()[began:]]
                counts = Counter(line["outcome"] for line in lines)
                print(f"{counts.total()} of {len(wanted)}: {dict(counts)}", file=sys.stderr, flush=True)
        source.unlink()
        if process.returncode:
            raise SystemExit(f"the tests of {how} mutants ended with {process.returncode}")
    return results(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(MODULES)}")
    parser.add_argument("--seconds", type=float, default=5.0, help="CPU seconds of tests for a mutant that survives")
    parser.add_argument("--again", action="store_true", help="test the survivors of earlier runs again")
    asked = parser.parse_args()
    mutants = mutants_of(asked.mutants, asked.seed, asked.only.split(",") if asked.only else list(MODULES))
    found = test(mutants, asked.seconds, asked.again)
    outcomes = {mutant.key: outcome(found[mutant.key]) for mutant in mutants}
    if "broken" in outcomes.values():
        raise SystemExit(f"the machinery failed: see 'broken' in {CACHE / 'results.jsonl'}")
    print(report(mutants, outcomes, asked.seed))


if __name__ == "__main__":
    main()
