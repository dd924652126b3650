"""Damaged input of every kind: is it refused clearly, or read right? In time, and without taking much memory?

Files of every format, ``segcal.toml``, the file of a training run, calibrators and command lines: each is valid first,
and then damaged over and over. Bits are flipped, ends cut off, blocks overwritten, moved and removed; and the fields of
the format are edited one by one, with its checksums made right again. Each result is judged in a worker process.

    refused   segcal's own error, or exit code 1 or 2 with a message and no traceback
    accepted  the same numbers as the valid input; of command lines: exit code 0, and no other file changed
    changed   other numbers, rightly: nothing in the format says that the damaged values are wrong, or the edited field
              means what it says
    failures  anything else: another exception, a hang, a crash, much memory, a checksum that was ignored

The budget of CPU time is shared equally among the targets. A failure prints its number, which ``--only`` repeats.

    python benchmarks/fuzz.py [--minutes 2] [--seed 0] [--targets npy,png] [--only 17]
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from fuzzing.calibrators import CalibratorFile
from fuzzing.configs import Toml
from fuzzing.datasets import COVERED, FORMATS, Dataset
from fuzzing.options import Options
from fuzzing.worker import Target, Worker

OUTCOMES = ("refused", "accepted", "changed", "FAIL")


def targets() -> dict[str, Target]:
    found: list[Target] = [*map(Dataset, FORMATS), Toml("segcal.toml"), Toml("run.toml"), CalibratorFile(), Options()]
    return {target.name: target for target in found}


def damage(target: Target, original: Path, root: Path, seed: int, number: int) -> str:
    """A damaged copy of the valid input; returns what was done."""
    shutil.copytree(original, root, symlinks=True)
    return target.damage(root, random.Random(f"{seed}/{target.name}/{number}"))


def run(target: Target, seconds: float, seed: int, only: int | None, folder: Path) -> tuple[str, list[str]]:
    """A row of the table, and the failures."""
    original, root = folder / "valid", folder / "damaged"
    target.write(original)
    worker = Worker(target, original)
    outcomes: Counter[str] = Counter()
    spent, slowest, peak, failures, number = 0.0, 0.0, 0, [], only or 0
    while spent < seconds:
        started = time.process_time()
        kind = damage(target, original, root, seed, number)
        answer = worker.judge(root, kind)
        outcomes[answer.outcome] += 1
        slowest, peak = max(slowest, answer.seconds), max(peak, answer.memory)
        if answer.outcome == "FAIL":
            failures.append(f"{target.name} --only {number}, {kind}: {answer.detail}")
        shutil.rmtree(root)
        number += 1
        spent += answer.seconds + time.process_time() - started
        if only is not None:
            break
    worker.close()
    checksum = "yes" if target.name in (*COVERED, "safetensors") else "no" if target.name in FORMATS else "-"
    numbers = "".join(f"{outcomes[name]:>10,}" for name in OUTCOMES)
    row = f"{target.name:<15}{checksum:>8}{outcomes.total():>9,}{numbers}{peak / 1e6:>9.1f}{worker.memory / 1e6:>10.1f}"
    return f"{row}{slowest:>11.2f}", failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="CPU minutes in all; 30 is the full run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", help="comma-separated; all by default")
    parser.add_argument("--only", type=int, help="only this input of each target")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")  # of libraries that write odd files
    known = targets()
    names = asked.targets.split(",") if asked.targets else list(known)
    print(f"damaged input: {asked.minutes:g} CPU minutes, seed {asked.seed}\n")
    heads = "".join(f"{name:>10}" for name in ("refused", "accepted", "changed", "failures"))
    print(f"{'target':<15}{'checksum':>8}{'inputs':>9}{heads}{'peak MB':>9}{'valid MB':>10}{'slowest s':>11}")
    failures: list[str] = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            row, found = run(known[name], 60 * asked.minutes / len(names), asked.seed, asked.only, Path(folder))
        print(row, flush=True)
        failures += found
    print("\n" + ("\n".join(failures) or "no failures"))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
