"""Prints the tables, ours beside the published ones: ``python reproduce/acdc/table.py``.

A cell is the mean over test volumes and seeds, with its 95% bootstrap interval over patients (the two volumes of a
patient stay together; seeds are averaged first, as they test the same volumes). Ranks and Friedman tests are over
patients, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reproduce.acdc import config
from reproduce.common import COLUMNS, Row, read_rows, results_of, show
from segcal.inference import friedman, hierarchical_bootstrap, mean_case_rank, mean_over_repeats, sum_rank

Values = NDArray[np.float64]
# The metrics that each paper ranks by. All but Dice are better when lower.
RANKED = {"NACL": ("dsc", "hd95", "ece", "cece"), "CRaC": ("dsc", "hd95", "ece", "tace")}
METRICS = tuple(COLUMNS)


class Measured:
    """The values ``(seeds, cases, metrics)`` of every method; seeds or cases without a value hold NaN."""

    def __init__(self, rows: Sequence[Row], method: str, metrics: Sequence[str] = METRICS) -> None:
        self.metrics = tuple(metrics)
        self.cases = sorted({row["case"] for row in rows})
        self.patients = [case.split("_")[0] for case in self.cases]
        seeds = sorted({row.get("seed", "0") for row in rows})
        shape = (len(seeds), len(self.cases), len(self.metrics))
        self.of: dict[str, Values] = {}
        for row in rows:
            values = self.of.setdefault(row[method], np.full(shape, np.nan))
            place = seeds.index(row.get("seed", "0")), self.cases.index(row["case"])
            values[place] = [float(row[metric]) for metric in self.metrics]

    def seeds(self, method: str) -> int:
        """How many seeds a method has."""
        return int((~np.isnan(self.of[method])).any(axis=(1, 2)).sum())

    def cells(self, method: str) -> list[str]:
        """Mean and interval of every metric, as text."""
        per_case = mean_over_repeats(self.of[method])
        found = hierarchical_bootstrap(per_case[None], groups=self.patients)
        ends = zip(found.estimate, found.low, found.high, strict=True)
        return [f"{mean:.4f} [{low:.4f}, {high:.4f}]" for mean, low, high in ends]

    def stacked(self, methods: Sequence[str], metrics: Sequence[str]) -> Values:
        """``(cases, methods, metrics)``, means over seeds."""
        columns = [self.metrics.index(metric) for metric in metrics]
        return np.stack([mean_over_repeats(self.of[method])[:, columns] for method in methods], 1)


def compare(title: str, measured: Measured, methods: Sequence[str], published: Sequence[Row]) -> None:
    """Our numbers, and in a second table those of the papers with ours beside them."""
    methods = [method for method in methods if method in measured.of]
    head = ["", "seeds", *measured.metrics]
    show(title, head, [[method, measured.seeds(method), *measured.cells(method)] for method in methods])
    lines = []
    for row in published:
        if row["run"] in methods:
            ours = np.nanmean(mean_over_repeats(measured.of[row["run"]]), axis=0)
            own = dict(zip(measured.metrics, ours, strict=True))
            pairs = [
                f"{row[name]} / {own[name]:.3f}" if row[name] else "" for name in ("dsc", "hd95", "ece", "cece", "tace")
            ]
            lines.append([row["table"], row["method"], *pairs])
    if lines:
        show(f"{title}: published / ours", ["", "", "dsc", "hd95", "ece", "cece", "tace"], lines)


def ranks(measured: Measured, methods: Sequence[str]) -> None:
    """The papers' rankings of the methods, and Friedman's test of every metric."""
    methods = [method for method in methods if method in measured.of]
    if len(methods) < 2:
        return
    columns, head = [], [""]
    for paper, metrics in RANKED.items():
        values, lower = measured.stacked(methods, metrics), [metric != "dsc" for metric in metrics]
        means = np.nanmean(values, axis=0)
        columns.append([f"{rank:g}" for rank in sum_rank(means, lower_is_better=lower).ranks])
        by_case = mean_case_rank(values, groups=measured.patients, lower_is_better=lower)
        columns.append([f"{rank:.2f}" for rank in by_case.ranks])
        columns.append([f"{rank:.2f}" for rank in friedman(means.T, lower_is_better=lower).mean_ranks])
        head += [f"{paper}: sum rank", "mean-case rank", "Friedman rank"]
    show("Ranks", head, [[method, *cells] for method, *cells in zip(methods, *columns, strict=True)])
    lines = []
    for metric in measured.metrics:
        values = measured.stacked(methods, [metric])[:, :, 0]
        test = friedman(values, groups=measured.patients, lower_is_better=metric != "dsc")
        best = methods[int(np.nanargmin(test.mean_ranks))]
        lines.append([metric, f"{test.statistic:.1f}", f"{test.p:.2g}", test.count, best])
    show("Friedman's test over patients", ["", "statistic", "p", "patients", "best mean rank"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all tables that there are numbers for."""
    here = Path(__file__).parent
    results = results_of(__doc__, here, arguments)
    published = read_rows(here / "published.csv")
    if rows := read_rows(results / "cases.csv"):
        measured = Measured(rows, "run")
        first = Measured([row for row in rows if row["seed"] == str(config.SEEDS[0])], "run")
        tables = [row for row in published if row["table"].endswith("table 1")]
        compare("Losses", measured, list(config.MAIN), tables)
        ranks(measured, list(config.MAIN))
        tables = [row for row in published if not row["table"].endswith("table 1")]
        compare("Ablations of NACL, first seed", first, ["nacl", *config.ABLATION], tables)
        others = ["nacl", "crac", "crac-margin5", "crac-code", *config.SENSITIVITY]
        compare("Sensitivity of NACL to its weight, beside CRaC and its margin, first seed", first, others, [])
    rows = read_rows(results / "posthoc.csv")
    for name in dict.fromkeys(row["run"] for row in rows):
        own = Measured([row for row in rows if row["run"] == name], "calibrator", (*METRICS, "flip"))
        compare(f"Post-hoc calibration of {name}, fitted to the validation patients", own, list(own.of), [])


if __name__ == "__main__":
    main()
