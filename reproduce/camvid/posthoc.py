"""Fills the tables: ``python reproduce/camvid/posthoc.py DATA OUT [--tables lts] [--minutes 9] [--parallel 5]``.

Reads OUT/weights, which ``run.py`` wrote. Every calibrator is fitted twice: to the validation images (of a sequence
that is in the training images, too; they also chose the epoch of the network) and measured on all test images; and to
a half of the test images, drawn once, and measured on the other half. Numbers go to ``<table>.csv`` (every image),
``<table>_pooled.csv`` and ``<table>_fits.csv``, each calibrator's as soon as it is measured, and a second call goes on
with the others. Several calls may run at a time, each for other tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import segcal
from reproduce.camvid.logits import cases_of, prepare, weights
from reproduce.camvid.methods import TABLES, Method, Table
from reproduce.common import Row, case_rows, in_processes, machine, read_rows, write_rows
from segcal.cases import CaseSet
from segcal.errors import SegcalError
from segcal.files.atomic import write_text

# Decimals of the values of single images, which are many.
DIGITS = 5
# What calibrators are fitted to. The seed is that of the halves of the test images.
PROTOCOLS = ("validation", "test half")
SEED = 0
# In miniature: local temperatures are trained for a few epochs, and one table has the second protocol.
SMOKE_OPTIONS, SMOKE_TABLE = {name: {"epochs": 3} for name in ("lts", "lts-ti", "ibts")}, "selective"
# The files of a table end so: rows of images, of all images together, and of fits.
ENDINGS = {"images": "", "pooled": "_pooled", "fits": "_fits"}


class Task(NamedTuple):
    """A method of a table, to be fitted by a protocol and measured."""

    table: str
    protocol: str
    name: str

    @property
    def method(self) -> Method:
        """Network and calibrator."""
        return TABLES[self.table].methods[self.name]

    @property
    def network(self) -> str:
        """The network, or ``unet`` for the ensemble."""
        return self.method.source.partition(":")[0]

    @property
    def file(self) -> str:
        """What is found goes to this file."""
        places = list(PROTOCOLS).index(self.protocol), list(TABLES[self.table].methods).index(self.name)
        return "{}-{}-{:02d}.json".format(self.table, *places)


def tasks(tables: Sequence[str], smoke: bool) -> list[Task]:
    """All methods of some tables."""
    return [
        Task(table, protocol, method)
        for table in tables
        for protocol in (PROTOCOLS if table == SMOKE_TABLE or not smoke else PROTOCOLS[:1])
        for method in TABLES[table].methods
    ]


def parts(task: Task, out: Path) -> tuple[CaseSet, dict[str, CaseSet]]:
    """The cases that a method is fitted to, and those that it is measured on."""
    tested = {part: cases_of(task.method.source, part, out) for part in TABLES[task.table].parts}
    if task.protocol == "validation":
        return cases_of(task.method.source, "validation", out), tested
    fit, _, rest = tested["test"].split(calibration=0.5, test=0.5, seed=SEED)
    return fit, {part: cases.select(rest.ids) for part, cases in tested.items()}


def measure(table: Table, key: Row, cases: CaseSet, calibrator: segcal.Calibrator | None) -> tuple[list[Row], Row]:
    """A row for every image, and one for all of them with the intervals of pooled values."""
    needed = [column for column in table.columns if calibrator is not None or column.metric != "flip"]
    results = segcal.evaluate(cases, calibrator, metrics=needed, device="auto")
    keys = {name: own for name, own in table.images.items() if calibrator is not None or own[0] != "flip"}
    no_flips = {"flip": 0.0} if "flip" in table.images and calibrator is None else {}
    pooled: Row = dict(key)
    for name, column in table.pooled.items():
        low, high = results.pooled_intervals.get(("", column.region, column.id), (float("nan"),) * 2)
        pooled |= {name: results.value(*column.key), f"{name} low": low, f"{name} high": high}
    rows = [{**key, "case": row.pop("case"), **row, **no_flips} for row in case_rows(results, keys)]
    return [{name: round(v, DIGITS) if isinstance(v, float) else v for name, v in row.items()} for row in rows], pooled


def perform(task: Task, out: Path, smoke: bool) -> None:
    """Fit and measure a method, and write what was found."""
    method, key = task.method, {"protocol": task.protocol, "method": task.name}
    fit_cases, tested = parts(task, out)
    notes, images, pooled = "", [], []
    started = fitted = time.time()
    try:
        calibrator = None
        if method.calibrator is not None:
            options = {**method.options, **(SMOKE_OPTIONS.get(method.calibrator, {}) if smoke else {})}
            calibrator = segcal.CALIBRATORS[method.calibrator](**options)
            report = calibrator.fit(fit_cases, device="auto").fit_report
            notes = "; ".join(report.notes if report else ())
        fitted = time.time()
        for part, cases in tested.items():
            rows, whole = measure(TABLES[task.table], {**key, "part": part}, cases, calibrator)
            images += rows
            pooled.append(whole)
    except SegcalError as error:  # One that cannot be fitted is a finding, and the others go on.
        notes, images, pooled = f"failed: {error}", [], []
    fit = {**key, "fit_seconds": round(fitted - started, 1), "notes": notes, **machine()}
    found = {"table": task.table, "images": images, "pooled": pooled, "fits": [fit]}
    write_text(out / "posthoc" / task.file, json.dumps(found))
    print(f"{task.table}, {task.protocol}, {task.name}: {time.time() - started:.0f} s {notes}", flush=True)


def collect(out: Path, results: Path, tables: Sequence[str]) -> set[Task]:
    """Add what was found to the CSV files of some tables; returns all that is in them."""
    done = set()
    for table in tables:
        files = {kind: results / f"{table}{ending}.csv" for kind, ending in ENDINGS.items()}
        fits = read_rows(files["fits"])
        there = {(row["protocol"], row["method"]) for row in fits}
        new = [json.loads(path.read_text()) for path in sorted((out / "posthoc").glob(f"{table}-*.json"))]
        new = [own for own in new if own["table"] == table]
        new = [own for own in new if (own["fits"][0]["protocol"], own["fits"][0]["method"]) not in there]
        for kind, path in files.items() if new else ():
            write_rows(path, [*read_rows(path), *(row for own in new for row in own[kind])])
        there |= {(own["fits"][0]["protocol"], own["fits"][0]["method"]) for own in new}
        done |= {Task(table, *key) for key in there}
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill some tables until all is done or time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--minutes", type=float, default=9.0, help="fits that go on are ended after this time")
    parser.add_argument("--parallel", type=int, default=5, help="methods at a time")
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--smoke", action="store_true", help="fewer fits, as run.py --smoke asks for")
    given = parser.parse_args(arguments)
    deadline = time.time() + 60 * given.minutes
    (given.out / "posthoc").mkdir(parents=True, exist_ok=True)
    collected = partial(collect, given.out, given.results, given.tables)
    wanted, done = tasks(given.tables, given.smoke), collected()
    left = [task for task in wanted if task not in done]
    ready = [task for task in left if all(path.is_file() for path in weights(task.network, given.out))]
    if missing := sorted({task.network for task in left} - {task.network for task in ready}):
        print(f"no weights yet: {' '.join(missing)}", flush=True)
    for network, table in sorted({(task.network, task.table) for task in ready}):
        for part in ("validation", *TABLES[table].parts):
            prepare(network, part, given.data, given.out)
    work = partial(perform, out=given.out, smoke=given.smoke)
    in_processes(ready, work, deadline, given.parallel, lambda: done.update(collected()))
    print(f"{len(set(wanted) & done)} of {len(wanted)} rows are done")


if __name__ == "__main__":
    main()
