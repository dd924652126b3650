"""Prints the tables, ours beside the published ones: ``python reproduce/hippocampus/table.py``.

A cell is the mean over the test volumes of all folds, with its 95% bootstrap interval over volumes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reproduce.common import Row, read_rows, results_of, show
from reproduce.hippocampus import config
from segcal.inference import hierarchical_bootstrap

# What identifies a row of the CSV files; all other columns are measured.
KEYS = ("run", "fold", "seed", "calibrator", "vote", "case")
# Which of our tables a published one stands beside.
UNET, VOTES, FUSION = "LTS table 1, U-Net", "LTS table 1, VoteNet+", "LTS table 2"


def grouped(rows: Sequence[Row], *keys: str) -> dict[str, list[Row]]:
    """The rows of every method, in the order of the configuration; what needs no calibrator comes last."""
    order = {name: place for place, name in enumerate((*config.METHODS, ""))}
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: order[row["calibrator"]]):
        found.setdefault(" ".join(row[key] for key in keys if row[key]), []).append(row)
    return found


def values(rows: Sequence[Row], metrics: Sequence[str]) -> NDArray[np.float64]:
    """``(volumes, metrics)``; NaN where nothing could be measured."""
    return np.array([[float(row[metric] or "nan") for metric in metrics] for row in rows])


def ours(title: str, methods: Mapping[str, Sequence[Row]]) -> None:
    """Means and intervals of all metrics."""
    metrics = [name for name in next(iter(methods.values()))[0] if name not in KEYS]
    lines = []
    for method, rows in methods.items():
        found = hierarchical_bootstrap(values(rows, metrics)[None])
        ends = zip(found.estimate, found.low, found.high, strict=True)
        lines.append([method, len(rows), *(f"{mean:.4f} [{low:.4f}, {high:.4f}]" for mean, low, high in ends)])
    show(title, ["", "volumes", *metrics], lines)


def beside(title: str, methods: Mapping[str, Sequence[Row]], published: Sequence[Row]) -> None:
    """The paper's numbers, on other data, with ours beside them."""
    published = [row for row in published if row["ours"] in methods]
    metrics = [name for name in list(published[0])[3:] if any(row[name] for row in published)] if published else []
    lines = []
    for row in published:
        own = methods[row["ours"]]
        cells = (f"{row[name]} / {np.nanmean(values(own, [name])):.4f}" if row[name] else "" for name in metrics)
        lines.append([row["method"], *cells])
    if lines:
        show(f"{title}: published / ours", ["", *metrics], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all tables that there are numbers for."""
    here = Path(__file__).parent
    results = results_of(__doc__, here, arguments)
    published = read_rows(here / "published.csv")
    rows = read_rows(results / "posthoc.csv")
    for loss in config.LOSSES:
        if own := [row for row in rows if row["run"] == loss]:
            methods = grouped(own, "calibrator")
            ours(f"Calibrators on networks trained with {loss}", methods)
            if loss == "ce":
                beside(UNET, methods, [row for row in published if row["table"] == UNET])
    if rows := read_rows(results / "votes.csv"):
        ours("Votes on atlases", methods := grouped(rows, "calibrator"))
        beside(VOTES, methods, [row for row in published if row["table"] == VOTES])
    if rows := read_rows(results / "fusion.csv"):
        ours("Fused labels", methods := grouped(rows, "vote", "calibrator"))
        beside(FUSION, methods, [row for row in published if row["table"] == FUSION])


if __name__ == "__main__":
    main()
