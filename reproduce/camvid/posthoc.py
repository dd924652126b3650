"""Fills the three tables: ``python reproduce/camvid/posthoc.py DATA OUT [--tables lts] [--minutes 9]``.

Reads OUT/weights, which ``run.py`` wrote. Every calibrator is fitted twice: to the validation images (of a sequence
that is in the training images, too; they also chose the epoch of the network) and measured on all test images; and to
a half of the test images, drawn once, and measured on the other half. Numbers go to ``<table>.csv`` (every image),
``<table>_pooled.csv`` and ``<table>_fits.csv``, each calibrator's as soon as it is measured, and a second call goes on
with the others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import segcal
from reproduce.camvid.logits import cases_of, weights
from reproduce.camvid.methods import TABLES, Method, Table
from reproduce.common import Row, case_rows, machine, read_rows, write_rows
from segcal.cases import CaseSet
from segcal.errors import SegcalError

# Decimals of the values of single images, which are many.
DIGITS = 5
# What calibrators are fitted to. The seed is that of the halves of the test images.
PROTOCOLS = ("validation", "test half")
SEED = 0
# In miniature: local temperatures are trained for a few epochs, and one table has the second protocol.
SMOKE_OPTIONS, SMOKE_TABLE = {name: {"epochs": 3} for name in ("lts", "lts-ti", "ibts")}, "selective"


class Results:
    """The CSV files of a table. Tables have their own, so that they can be filled at the same time."""

    def __init__(self, folder: Path, table: str) -> None:
        self.paths = [folder / f"{table}.csv", folder / f"{table}_pooled.csv", folder / f"{table}_fits.csv"]
        self.images, self.pooled, self.fits = map(read_rows, self.paths)

    def done(self, key: Row) -> bool:
        """Whether a method was measured."""
        return any(all(row[name] == value for name, value in key.items()) for row in self.fits)

    def write(self) -> None:
        """Write all files."""
        for path, rows in zip(self.paths, (self.images, self.pooled, self.fits), strict=True):
            write_rows(path, rows)


def parts(method: Method, table: Table, protocol: str, data: Path, out: Path) -> tuple[CaseSet, dict[str, CaseSet]]:
    """The cases that a method is fitted to, and those that it is measured on."""
    tested = {part: cases_of(method.source, part, data, out) for part in table.parts}
    if protocol == "validation":
        return cases_of(method.source, "validation", data, out), tested
    fit, _, rest = tested["test"].split(calibration=0.5, test=0.5, seed=SEED)
    return fit, {part: cases.select(rest.ids) for part, cases in tested.items()}


def measure(
    table: Table, key: Row, cases: CaseSet, calibrator: segcal.Calibrator | None, how: Mapping[str, Any]
) -> tuple[list[Row], Row]:
    """A row for every image, and one for all of them with the intervals of pooled values."""
    needed = [column for column in table.columns if calibrator is not None or column.metric != "flip"]
    results = segcal.evaluate(cases, calibrator, metrics=needed, **how)
    keys = {name: own for name, own in table.images.items() if calibrator is not None or own[0] != "flip"}
    no_flips = {"flip": 0.0} if "flip" in table.images and calibrator is None else {}
    pooled: Row = dict(key)
    for name, column in table.pooled.items():
        low, high = results.pooled_intervals.get(("", column.region, column.id), (float("nan"),) * 2)
        pooled |= {name: results.value(*column.key), f"{name} low": low, f"{name} high": high}
    rows = [{**key, "case": row.pop("case"), **row, **no_flips} for row in case_rows(results, keys)]
    return [{name: round(v, DIGITS) if isinstance(v, float) else v for name, v in row.items()} for row in rows], pooled


def fill(name: str, given: argparse.Namespace, deadline: float) -> None:
    """Fit and measure what is left of a table until time is up."""
    data, out, folder, smoke = given.data, given.out, given.results, given.smoke
    how = {"device": given.device, "workers": given.workers}
    table, results = TABLES[name], Results(folder, name)
    protocols = PROTOCOLS if name == SMOKE_TABLE or not smoke else PROTOCOLS[:1]
    for protocol in protocols:
        for label, method in table.methods.items():
            key = {"protocol": protocol, "method": label}
            if results.done(key) or time.time() > deadline:
                continue
            if not all(path.is_file() for path in weights(method.source.partition(":")[0], out)):
                print(f"{name} {label}: no weights yet", flush=True)
                continue
            fit_cases, tested = parts(method, table, protocol, data, out)
            options = {**method.options, **(SMOKE_OPTIONS.get(method.calibrator or "", {}) if smoke else {})}
            started, notes, calibrator, images, pooled = time.time(), "", None, [], []
            try:
                if method.calibrator is not None:
                    calibrator = segcal.CALIBRATORS[method.calibrator](**options)
                    report = calibrator.fit(fit_cases, device="auto").fit_report
                    notes = "; ".join(report.notes if report else ())
                fitted = time.time()
                for part, cases in tested.items():
                    found = measure(
                        table, {"protocol": protocol, "part": part, "method": label}, cases, calibrator, how
                    )
                    images += found[0]
                    pooled.append(found[1])
            except SegcalError as error:  # One that cannot be fitted is a finding, and the others go on.
                notes, fitted, images, pooled = f"failed: {error}", time.time(), [], []
            results.images += images
            results.pooled += pooled
            results.fits.append({**key, "fit_seconds": round(fitted - started, 1), "notes": notes, **machine()})
            results.write()
            print(f"{name}, {protocol}, {label}: {time.time() - started:.0f} s {notes}", flush=True)
    left = sum(not results.done({"protocol": p, "method": m}) for p in protocols for m in table.methods)
    print(f"{name}: {left} rows are left")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill some tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--minutes", type=float, default=9.0, help="no fit is started after this time")
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=list(TABLES))
    parser.add_argument(
        "--device", default="auto", help="where calibrators are measured; they are fitted on a GPU if any"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that measure")
    parser.add_argument("--smoke", action="store_true", help="fewer fits, as run.py --smoke asks for")
    given = parser.parse_args(arguments)
    torch.backends.cudnn.benchmark = True
    deadline = time.time() + 60 * given.minutes
    for name in given.tables:
        fill(name, given, deadline)


if __name__ == "__main__":
    main()
