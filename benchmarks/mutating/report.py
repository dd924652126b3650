"""The table, and the mutants that survived with the reasons that were found for them."""

from __future__ import annotations

import platform
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from mutating.mutants import MODULES, Mutant
from mutating.serving import KILLED

# Why mutants survive, written by hand after a look at each: "[why]", then lines of "file | before => after".
REASONS = Path(__file__).with_name("survivors.txt")
UNEXPLAINED = "not explained: a gap, or a test that the limit of CPU time left out"
# Mutants under this heading give the same results as the source: no test can kill them.
EQUIVALENT = "equivalent"
_LIBRARIES = ("torch", "numpy", "scipy", "numba", "pytest", "hypothesis", "coverage", "cosmic-ray")


def change(mutant: Mutant) -> str:
    """The change of a mutant, in one line."""
    return f"{mutant.file.removeprefix('src/segcal/')} | {mutant.before} => {mutant.after}"


def reasons() -> dict[str, str]:
    """The heading of each change that was looked at."""
    found, heading = {}, UNEXPLAINED
    for line in REASONS.read_text(encoding="utf-8").splitlines() if REASONS.exists() else ():
        if line.startswith("["):
            heading = line.strip("[]")
        elif " | " in line:
            found[line] = heading
    return found


def report(mutants: list[Mutant], outcomes: dict[str, str], seed: int) -> str:
    """All of it."""
    known = reasons()
    left = [mutant for mutant in mutants if outcomes[mutant.key] not in KILLED]
    same = [mutant for mutant in left if known.get(change(mutant), "").startswith(EQUIVALENT)]
    lines = [f"mutation testing: {len(mutants):,} mutants, seed {seed}", _versions(), ""]
    heads = ("mutants", "killed", "of these", "", "survived", "of these", "killed", "without")
    lines.append(f"{'':<19}" + "".join(f"{head:>11}" for head in heads))
    heads = ("", "", "timed out", "crashed", "", "equivalent", "", "equivalent")
    lines.append(f"{'module':<19}" + "".join(f"{head:>11}" for head in heads))
    for group in (*MODULES, "all"):
        some = [mutant for mutant in mutants if group in (mutant.group, "all")]
        if some:
            lines.append(_row(group, some, outcomes, [mutant for mutant in same if group in (mutant.group, "all")]))
    by_reason: dict[str, list[Mutant]] = {}
    for mutant in sorted(left, key=lambda one: (one.file, one.line)):
        by_reason.setdefault(known.get(change(mutant), UNEXPLAINED), []).append(mutant)
    lines += ["", f"survivors: {len(left)}"]
    for reason in sorted(by_reason):
        lines += ["", f"{reason}: {len(by_reason[reason])}"]
        for mutant in by_reason[reason]:
            lines.append(f"  {mutant.file.removeprefix('src/segcal/')}:{mutant.line}")
            lines += [f"    - {mutant.before}", f"    + {mutant.after}"]
    return "\n".join(lines)


def _row(group: str, mutants: list[Mutant], outcomes: dict[str, str], same: list[Mutant]) -> str:
    counts = Counter(outcomes[mutant.key] for mutant in mutants)
    killed = sum(counts[name] for name in KILLED)
    numbers = (len(mutants), killed, counts["timeout"], counts["crashed"], len(mutants) - killed, len(same))
    shares = (killed / len(mutants), killed / (len(mutants) - len(same)))
    return f"{group:<19}" + "".join(f"{number:>11,}" for number in numbers) + "".join(f"{s:>11.1%}" for s in shares)


def _versions() -> str:
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in _LIBRARIES)])
