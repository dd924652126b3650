"""One piece of the work: fit one calibrator to a network's calibration volumes and measure its test volumes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import segcal
from reproduce.common import Row, Run, machine, measure
from reproduce.hippocampus import config
from segcal.cases import CaseSet
from segcal.errors import SegcalError
from segcal.metrics import Column
from segcal.training import load_network, parse_config
from segcal.training.data import open_dataset
from segcal.training.prediction import predictions, write_logits

PARTS = ("calibration", "test")


def weights(run: Run, out: Path) -> Path:
    """The file of a trained network."""
    return out / "weights" / f"{run.id}.safetensors"


def write_parts(run: Run, out: Path) -> bool:
    """Write a network's logits of the calibration and the test volumes, once. False if there is no network yet."""
    folder = out / "logits" / run.id
    if not weights(run, out).is_file():
        return False
    if not (folder / "done").is_file():
        keys = parse_config({**run.keys, "output": str(folder), "logits": "float16"})
        dataset = open_dataset(keys)
        network = load_network(weights(run, out)).to("cuda" if torch.cuda.is_available() else "cpu")
        for part in PARTS:
            scans = [dataset.scans[name] for name in dataset.declared.splits[part]]
            write_logits(predictions(network, dataset, scans, keys), folder / part, keys, lambda case: None)
        (folder / "done").touch()
    return True


def parts(run: Run, out: Path) -> dict[str, CaseSet]:
    """The cases that ``write_parts`` wrote."""
    return {part: segcal.open_cases(out / "logits" / run.id / part) for part in PARTS}


def fitted(method: str, cases: CaseSet) -> tuple[Any, Row]:
    """A calibrator fitted to cases (None for the network as it is), and the seconds and notes of the fit."""
    started = time.time()
    calibrator = None if method == "none" else segcal.CALIBRATORS[method]()
    report = calibrator and calibrator.fit(cases, device="auto", seed=config.SEED).fit_report
    return calibrator, {
        "fit_seconds": round(time.time() - started, 1),
        "notes": "; ".join(report.notes) if report else "",
    }


def calibrate(run: Run, method: str, out: Path) -> dict[str, list[Row]]:
    """The rows of one method: those of the test volumes, and one about the fit."""
    loss, fold = run.name.split("-fold")
    key = {"run": loss, "fold": fold, "seed": run.seed, "calibrator": method}
    data = parts(run, out)
    measured: list[Row] = []
    try:
        calibrator, fit = fitted(method, data["calibration"])
        columns = {**config.COLUMNS, **({"flip": Column("flip")} if calibrator else {})}
        measured = measure(data["test"], calibrator, columns)
    except SegcalError as error:  # One that cannot be fitted is a finding, and the others go on.
        fit = {"fit_seconds": "", "notes": f"failed: {error}"}
    rows = [{**key, **row, "flip": row.get("flip", 0.0)} for row in measured]
    return {"posthoc": rows, "posthoc_fits": [{**key, **fit, **machine()}]}
