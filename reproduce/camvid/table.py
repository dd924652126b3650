"""Prints the tables, ours beside the published ones: ``python reproduce/camvid/table.py``.

A cell is the published value, then ours with its 95% bootstrap interval over images: of the mean over images or, for
mIoU, of the value of all images together, as is ACE of the second table, which has no interval. Published are Tiramisu
on CamVid (LTS, table 3), Cityscapes (Kirscher et al., tables 4 and 7) and K-Net with DeepLab on BDD100K (Wang et al.,
table 1).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reproduce.camvid.methods import LTS_METRICS, REGIONS, TABLES
from reproduce.camvid.posthoc import PROTOCOLS
from reproduce.common import Row, read_rows, results_of, show
from segcal.inference import hierarchical_bootstrap

# Of each table: the parts that it has, by the name of the test images and the settings of the published table, and the
# columns shown. A column is the metric's name and where our value is: in the rows of images or in the pooled row.
# Table, setting, method and metric of a published value.
Cell = tuple[str, str, str, str]
Shown = Mapping[str, tuple[str, bool]]
IMAGES, POOLED = False, True
SELECTIVE: Shown = {
    "miou": ("miou", POOLED),
    "ece": ("ece", IMAGES),
    "pooled ece": ("ece", POOLED),
    "nll": ("nll", IMAGES),
}
RETHINKING: Shown = {
    **{name: (name, IMAGES) for name in ("nll", "dsc", "ece", "ba-ece")},
    "ace": ("ace", POOLED), "flip": ("flip", IMAGES), "miou": ("miou", POOLED), "pooled ece": ("ece", POOLED),
}  # fmt: skip
# Table, part of the test images, setting of the published table, columns.
SECTIONS: tuple[tuple[str, str, str, Shown], ...] = (
    *(
        (table, "test", region, columns)
        for table in ("lts", "lts-unet")
        for region, columns in (
            *((region, {m: (f"{m} {region}", IMAGES) for m in LTS_METRICS}) for region in REGIONS),
            ("everything", {"miou": ("miou", POOLED), "pooled ece": ("ece", POOLED), "nll": ("nll", IMAGES)}),
        )
    ),
    *(
        ("rethinking", part, setting, RETHINKING)
        for part, setting in (("test", "clean"), ("mild", "mild"), ("strong", "strong"))
    ),
    ("selective", "test", "test", SELECTIVE),
)


def of_images(rows: Sequence[Row], column: str) -> str:
    """The mean over images and its interval, as text."""
    found = hierarchical_bootstrap(np.array([[float(row[column]) for row in rows]]))
    return f"{found.estimate:.4f} [{found.low:.4f}, {found.high:.4f}]"


def of_all(row: Row, column: str) -> str:
    """The value of all images together and its interval, if it has one, as text."""
    mean, low, high = (float(row[name]) for name in (column, f"{column} low", f"{column} high"))
    return f"{mean:.4f}" if math.isnan(low) else f"{mean:.4f} [{low:.4f}, {high:.4f}]"


def section(
    results: Path,
    published: Mapping[Cell, str],
    protocol: str,
    table: str,
    part: str,
    setting: str,
    shown: Shown,
) -> None:
    """Print one table."""
    key = {"protocol": protocol, "part": part}
    images, pooled = (
        [row for row in read_rows(results / name) if all(row[k] == v for k, v in key.items())]
        for name in (f"{table}.csv", f"{table}_pooled.csv")
    )
    lines, count = [], len({row["case"] for row in images})
    for method in TABLES[table].methods:
        own = [row for row in images if row["method"] == method]
        whole = [row for row in pooled if row["method"] == method]
        if not own:
            continue
        cells = []
        for metric, (column, from_pooled) in shown.items():
            known = published.get((table.removesuffix("-unet"), setting, method, metric))
            ours = of_all(whole[0], column) if from_pooled else of_images(own, column)
            cells.append(f"{known} / {ours}" if known else ours)
        lines.append([method, *cells])
    if lines:
        show(f"{table}, {setting}: fitted to {protocol}, {count} test images", ["", *shown], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all tables that there are numbers for."""
    here = Path(__file__).parent
    results = results_of(__doc__, here, arguments)
    published = {
        (row["table"], row["setting"], row["method"], row["metric"]): row["value"]
        for row in read_rows(here / "published.csv")
    }
    if runs := read_rows(results / "runs.csv"):
        names = ("run", "seed", "epochs", "best_epoch", "validation_dice", "test_miou", "seconds", "device")
        show("Networks", names, [[row[name] for name in names] for row in sorted(runs, key=lambda row: row["run"])])
    for table, part, setting, shown in SECTIONS:
        for protocol in PROTOCOLS:
            section(results, published, protocol, table, part, setting, shown)


if __name__ == "__main__":
    main()
