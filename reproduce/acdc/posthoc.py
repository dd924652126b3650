"""Post-hoc calibration of the kept networks: ``python reproduce/acdc/posthoc.py DATA OUT [--minutes 9]``.

Every calibrator of ``segcal.CALIBRATORS`` is fitted to the logits of the validation patients (10 of 100, 20 volumes;
they also chose the epoch of the network) and measured on the test volumes. ``ensemble`` is left out: a single network
has no members. Reads OUT/weights, which ``run.py`` wrote. Numbers go to ``posthoc.csv`` and
``posthoc_fits.csv``, each calibrator's as soon as it is measured, and a second call goes on with the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import segcal
from reproduce.acdc import config
from reproduce.common import COLUMNS, in_processes, machine, measure, read_rows, write_rows
from segcal.cases import CaseSet
from segcal.errors import SegcalError
from segcal.files.atomic import write_text
from segcal.metrics import Column
from segcal.training import load_network, parse_config
from segcal.training.data import open_dataset
from segcal.training.prediction import predictions, write_logits

# The network as it is, then every calibrator for single networks.
METHODS = ("none", *(name for name in segcal.CALIBRATORS if name != "ensemble"))
# As for the networks, and the share of voxels whose label changed.
MEASURED = {**COLUMNS, "flip": Column("flip")}


def logits(name: str, data: Path, out: Path) -> dict[str, CaseSet]:
    """Cases of the validation and the test patients with a network's logits, which are computed once."""
    folder = out / "logits" / name
    keys = parse_config({"data": str(config.images(data, out)), "output": str(folder), "logits": "float16"})
    if not (folder / "done").is_file():
        dataset = open_dataset(keys)
        network = load_network(out / "weights" / f"{name}.safetensors")
        network.to("cuda" if torch.cuda.is_available() else "cpu")
        for part in ("validation", "test"):
            scans = [dataset.scans[scan] for scan in dataset.parts(None, 0)[part]]
            write_logits(predictions(network, dataset, scans, keys), folder / part, keys, lambda case: None)
        (folder / "done").touch()
    return {part: segcal.open_cases(folder / part) for part in ("validation", "test")}


def perform(piece: tuple[str, str], data: Path, out: Path) -> None:
    """Fit a calibrator to a network, measure it, and write what was found."""
    name, method = piece
    cases, key = logits(name, data, out), {"run": name, "calibrator": method}
    notes, measured = "", []
    started = fitted = time.time()
    try:
        calibrator = None if method == "none" else segcal.CALIBRATORS[method]()
        if calibrator is not None:
            report = calibrator.fit(cases["validation"], device="auto").fit_report
            notes = "; ".join(report.notes if report else ())
        fitted = time.time()
        measured = measure(cases["test"], calibrator, MEASURED if calibrator else COLUMNS)
    except SegcalError as error:  # One that cannot be fitted is a finding, and the others go on.
        notes = f"failed: {error}"
    rows = [{**key, **row, "flip": row.get("flip", 0.0)} for row in measured]
    fit = {**key, "fit_seconds": round(fitted - started, 1), "notes": notes, **machine()}
    write_text(out / "posthoc" / f"{name}-{method}.json", json.dumps({"posthoc": rows, "posthoc_fits": [fit]}))
    print(f"{name} {method}: {time.time() - started:.0f} s {notes}", flush=True)


def collect(out: Path, results: Path) -> set[tuple[str, str]]:
    """Add what was found to the CSV files; returns all pieces that are in them."""
    files = {kind: results / f"{kind}.csv" for kind in ("posthoc", "posthoc_fits")}
    done = {(row["run"], row["calibrator"]) for row in read_rows(files["posthoc_fits"])}
    for path in sorted((out / "posthoc").glob("*.json")):
        found = json.loads(path.read_text())
        piece = found["posthoc_fits"][0]["run"], found["posthoc_fits"][0]["calibrator"]
        if piece not in done:
            done.add(piece)
            for kind, file in files.items():
                write_rows(file, [*read_rows(file), *found[kind]])
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit and measure until all is done or time is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--parallel", type=int, default=4, help="calibrators at a time")
    given = parser.parse_args(arguments)
    deadline = time.time() + 60 * given.minutes
    (given.out / "posthoc").mkdir(parents=True, exist_ok=True)
    ready = [name for name in config.KEPT if (given.out / "weights" / f"{name}.safetensors").is_file()]
    if missing := [name for name in config.KEPT if name not in ready]:
        print(f"no weights yet: {' '.join(missing)}", flush=True)
    for name in ready:
        logits(name, given.data, given.out)
    done = collect(given.out, given.results)
    left = [(name, method) for name in ready for method in METHODS if (name, method) not in done]
    work = partial(perform, data=given.data, out=given.out)
    in_processes(left, work, deadline, given.parallel, lambda: done.update(collect(given.out, given.results)))


if __name__ == "__main__":
    main()
