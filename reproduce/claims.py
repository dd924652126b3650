"""The papers' claims as paired comparisons on the same test cases: ``python reproduce/claims.py``.

Reads the CSV files of the three recipes and prints, for every claim, what was compared: the mean difference of two
methods over test cases with its 95% bootstrap interval, over images of CamVid, volumes of hippocampus and patients of
ACDC (means over seeds there). A comparison supports its claim if the interval lies on the claimed side of 0, and
contradicts it if it lies on the other. A claim is reproduced if all comparisons support it, not reproduced if none
does, and mixed otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reproduce.camvid.posthoc import PROTOCOLS
from reproduce.common import Row, read_rows, show
from segcal.inference import hierarchical_bootstrap

HERE = Path(__file__).parent
# Metrics that are better when higher; all others are better when lower.
HIGHER = ("dsc",)
# Calibrators that keep every label, by their names in the tables of CamVid, and by their ids.
KEEPING = {"UC", "IsoReg", "ETS", "TS", "IBTS", "LTS", "z-mean", "LTS-TI", "CMS_ap", "CMS_op", "Uncal", "Meta-Cal*"}
KEEPING |= {"Selective", "Selective, T1 by NLL", "none", "ts", "ets", "ibts", "lts", "lts-ti", "cms-ap", "cms-op"}
KEEPING |= {"isotonic", "meta-cal", "selective"}
# The label-changing maps whose Dice is at stake, and invariant maps with their matched non-invariant ones.
MOVING = {"camvid": ("MS", "DC", "CDC"), "": ("ms", "dc", "cdc")}
MATCHED = {"camvid": (("LTS-TI", "LTS"), ("MS_c", "MS")), "": (("lts-ti", "lts"), ("ms-c", "ms"))}
# The losses that claim (a) is about.
CALIBRATED, OTHERS = ("nacl", "crac", "crac-margin5", "crac-code"), ("fl", "ls", "svls", "mbls-10", "mbls-5")


class Setting(NamedTuple):
    """Rows of test cases that were measured under the same conditions: a file, which rows of it, and their method."""

    recipe: str
    file: str
    where: tuple[tuple[str, str], ...]
    method: str = "method"

    @property
    def title(self) -> str:
        """Its name in a table."""
        return ", ".join((self.recipe, self.file.removesuffix(".csv"), *(value for _, value in self.where)))


class Comparison(NamedTuple):
    """One method against another by one metric, and whether not being worse is all that is claimed."""

    setting: Setting
    metric: str
    one: str
    other: str
    tied: bool = False


def camvid(table: str, part: str = "test") -> list[Setting]:
    """A table of CamVid by both protocols."""
    return [Setting("camvid", f"{table}.csv", (("protocol", name), ("part", part))) for name in PROTOCOLS]


ACDC = Setting("acdc", "posthoc.csv", (("run", "ce-dice-0"),), "calibrator")
ACDC_NACL = Setting("acdc", "posthoc.csv", (("run", "nacl-0"),), "calibrator")
LOSSES = Setting("acdc", "cases.csv", (), "run")
HIPPOCAMPUS = [Setting("hippocampus", "posthoc.csv", (("run", run),), "calibrator") for run in ("ce", "ce-dice")]
FUSION = Setting("hippocampus", "fusion.csv", (("vote", "joint"),), "calibrator")
SINGLE = [ACDC, ACDC_NACL, *HIPPOCAMPUS]


@cache
def values(setting: Setting) -> dict[str, dict[str, list[Row]]]:
    """The rows of every method by test case, one for each seed."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in read_rows(HERE / setting.recipe / "results" / setting.file):
        if all(row[name] == value for name, value in setting.where):
            found.setdefault(row[setting.method], {}).setdefault(row["case"], []).append(row)
    return found


def value(rows: Sequence[Row], metric: str) -> float:
    """A metric of a test case, the mean over seeds."""
    return float(np.mean([float(row[metric]) for row in rows]))


def of_losses() -> Iterator[Comparison]:
    """(a) CRaC and NACL rank above FL, LS, SVLS and MbLS."""
    for one in CALIBRATED:
        for other in OTHERS:
            for metric in ("ece", "cece"):
                yield Comparison(LOSSES, metric, one, other)


def of_local() -> Iterator[Comparison]:
    """(b) LTS beats TS and IBTS near boundaries and locally."""
    for setting in (*camvid("lts"), *camvid("lts-unet")):
        for metric in ("ece boundary", "ece local-mean", "ece local-max"):
            for other in ("TS", "IBTS"):
                yield Comparison(setting, metric, "LTS", other)
    for setting in HIPPOCAMPUS:
        for other in ("ts", "ibts"):
            yield Comparison(setting, "ece-boundary", "lts", other)


def of_invariance(part: str = "test") -> Iterator[Comparison]:
    """(c) Invariant maps beat their matched non-invariant ones."""
    for setting in (*camvid("rethinking", part), *(SINGLE if part == "test" else ())):
        for one, other in MATCHED.get(setting.recipe, MATCHED[""]):
            for metric in ("nll", "ece"):
                yield Comparison(setting, metric, one, other)


def of_decisions(part: str = "test") -> Iterator[Comparison]:
    """(d) Maps that preserve decisions keep the Dice score that MS, DC and CDC lose."""
    for setting in (*camvid("rethinking", part), *(SINGLE if part == "test" else ())):
        for other in MOVING.get(setting.recipe, MOVING[""]):
            yield Comparison(setting, "dsc", "TS" if setting.recipe == "camvid" else "ts", other)


def of_selective() -> Iterator[Comparison]:
    """(e) Selective scaling lowers ECE most."""
    for setting in camvid("selective"):
        for other in ("Uncal", "TS", "LogS", "DirS", "Meta-Cal*", "LTS", "Ensemble"):
            yield Comparison(setting, "ece", "Selective", other)
    for setting in SINGLE:
        for other in ("none", "ts", "vs", "dc", "meta-cal", "lts"):
            yield Comparison(setting, "ece", "selective", other)


def of_shift() -> Iterator[Comparison]:
    """(f) The trends of (c) and (d) persist under corruption."""
    for part in ("mild", "strong"):
        yield from of_invariance(part)
        yield from of_decisions(part)


def of_trust() -> Iterator[Comparison]:
    """(g) ``trust`` is best or tied on every metric among the methods that keep every label."""
    settings = [
        *camvid("lts"),
        *camvid("lts-unet"),
        *(own for part in ("test", "mild", "strong") for own in camvid("rethinking", part)),
    ]
    for setting in (*settings, *camvid("selective"), *SINGLE):
        found = values(setting)
        if "trust" not in found:
            continue
        first = next(iter(found["trust"].values()))[0]
        for metric in ("nll", "brier", "ece", "ece all", "ece boundary", "ba-ece", "ece-boundary"):
            if metric in first:
                means = {name: _mean(rows, metric) for name, rows in found.items() if name in KEEPING}
                yield Comparison(setting, metric, "trust", min(means, key=lambda name: means[name]), tied=True)


def of_fusion() -> Iterator[Comparison]:
    """(h) Labels fused by calibrated votes are better, most with LTS."""
    for one in ("ts", "ibts", "lts", "lts-ti", "trust"):
        for metric in ("dsc", "hd95"):
            yield Comparison(FUSION, metric, one, "none")


def _mean(cases: dict[str, list[Row]], metric: str) -> float:
    return float(np.nanmean([value(rows, metric) for rows in cases.values()]))


CLAIMS: Sequence[Callable[[], Iterator[Comparison]]] = (
    of_losses, of_local, of_invariance, of_decisions, of_selective, of_shift, of_trust, of_fusion,
)  # fmt: skip


def compare(one: Comparison) -> tuple[str, str] | None:
    """The difference with its interval, and what it says of the claim; nothing if a method has not been run."""
    found = values(one.setting)
    if one.one not in found or one.other not in found:
        return None
    mine, theirs = found[one.one], found[one.other]
    cases = sorted(mine.keys() & theirs.keys())
    differences = [value(mine[case], one.metric) - value(theirs[case], one.metric) for case in cases]
    patients = [case.split("_")[0] for case in cases] if one.setting.recipe == "acdc" else None
    interval = hierarchical_bootstrap(np.array([differences]), groups=patients)
    low, high = float(interval.low), float(interval.high)
    worse, better = (high < 0, low > 0) if one.metric in HIGHER else (low > 0, high < 0)
    verdict = "contradicts" if worse else "supports" if better or one.tied else "undecided"
    return f"{float(interval.estimate):+.4f} [{low:+.4f}, {high:+.4f}]", verdict


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for every claim, and before them the verdicts."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    tables, verdicts = [], []
    for claim in CLAIMS:
        found = [(one, compare(one)) for one in claim()]
        rows = [
            [one.setting.title, one.metric, f"{one.one} - {one.other}", *outcome] for one, outcome in found if outcome
        ]
        assert claim.__doc__ is not None
        count = {name: sum(row[-1] == name for row in rows) for name in ("supports", "undecided", "contradicts")}
        mark = "reproduced" if count["supports"] == len(rows) else "mixed" if count["supports"] else "not reproduced"
        missing = len(found) - len(rows)
        verdicts.append([claim.__doc__, mark if rows else "not run", *count.values(), missing])
        tables.append((claim.__doc__, rows))
    show("Claims", ["", "", "comparisons that support it", "undecided", "contradict it", "not run"], verdicts)
    for title, rows in tables:
        if rows:
            show(title, ["on", "metric", "", "mean difference", ""], rows)


if __name__ == "__main__":
    main()
