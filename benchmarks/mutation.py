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
from pathlib import Path

from mutating import choosing, covering, swapping
from mutating.mutants import MODULES, Mutant, sample
from mutating.report import report
from mutating.serving import KILLED

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


def job(mutant: Mutant, known: covering.TestMap, seconds: float, again: bool) -> tuple[str, dict[str, object]]:
    """How to test a mutant, and with what. In living modules it is faster, but what ran on import is not run again."""
    tests, estimate = [], 0.0
    for name in choosing.tests_of(mutant, known):
        if estimate > seconds:
            break
        tests.append(name)
        estimate += known.seconds[name]
    path = covering.ROOT / mutant.file
    living = swapping.can_be_swapped(str(path), path.read_text(encoding="utf-8"), mutant.code)
    living &= not again or not choosing.imported(mutant, known)
    tests = tests if living else tests[:FRESH_TESTS]
    about = {"key": mutant.key, "file": mutant.file, "code": mutant.code, "tests": tests}
    return "living" if living else "fresh", {**about, "seconds": seconds, "estimate": estimate}


def results(file: Path) -> dict[str, dict[str, object]]:
    """The last result of each mutant; one that was killed stays so."""
    found: dict[str, dict[str, object]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        result = json.loads(line)
        if found.get(result["key"], {}).get("outcome") not in KILLED:
            found[result["key"]] = result
    return found


def test(mutants: list[Mutant], seconds: float, again: bool) -> dict[str, dict[str, object]]:
    """Test those that have not been tested."""
    CACHE.mkdir(parents=True, exist_ok=True)
    file = CACHE / "results.jsonl"
    done = results(file)
    left = [one for one in mutants if one.key not in done or (again and done[one.key]["outcome"] not in KILLED)]
    if left:
        known = covering.load(CACHE / "tests")
        jobs: dict[str, list[dict[str, object]]] = {"living": [], "fresh": []}
        for mutant in left:
            how, found = job(mutant, known, seconds, again)
            jobs[how].append(found)
        for how, wanted in jobs.items():
            print(f"{len(wanted)} mutants, {how}", file=sys.stderr, flush=True)
            source = CACHE / f"{how}-{os.getpid()}.jsonl"
            source.write_text("".join(json.dumps(one) + "\n" for one in wanted))
            command = covering.command("serving", how, str(source), str(file))
            quiet = {"stdout": subprocess.DEVNULL, "cwd": covering.ROOT, "env": covering.environment()}
            process = subprocess.Popen(command, **quiet)
            while process.poll() is None:
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    tested = results(file)
                    counts = Counter(str(tested[str(one["key"])]["outcome"]) for one in wanted if one["key"] in tested)
                    print(f"{counts.total()} of {len(wanted)}: {dict(counts)}", file=sys.stderr, flush=True)
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
    broken = [str(found[mutant.key].get("why")) for mutant in mutants if found[mutant.key]["outcome"] == "broken"]
    if broken:
        raise SystemExit("\n".join(["the machinery failed:", *broken]))
    print(report(mutants, found, asked.seed))


if __name__ == "__main__":
    main()
