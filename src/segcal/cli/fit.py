"""``segcal fit`` and ``segcal apply``."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from segcal.apply import apply
from segcal.calibrators import CALIBRATORS, load
from segcal.cases import open_cases
from segcal.cli.console import out, progress, waiting
from segcal.cli.data import Data, Json, LabelsOption, LayoutOption, StoredType, declared
from segcal.errors import InputError
from segcal.evaluate import evaluate
from segcal.results import plain
from segcal.tuning import tune


class Selection(str, Enum):
    """The metric that tuning lowers."""

    nll = "nll"
    ece = "ece"
    brier = "brier"


class Voxels(str, Enum):
    """How many voxels a fit uses."""

    auto = "auto"
    all = "all"


_SHOWN = ("nll", "ece", "ba-ece", "brier", "accuracy", "flip")


def fit_command(
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="The calibrator's file, cal.safetensors.")],
    method: Annotated[str, typer.Option(help="One of: " + ", ".join(CALIBRATORS) + ".")] = "ts",
    layout: LayoutOption = None,
    labels: LabelsOption = None,
    tune_by: Annotated[
        Selection | None,
        typer.Option("--tune", help="Choose the strength of regularisation on left-out images, by this metric."),
    ] = None,
    voxels: Annotated[Voxels, typer.Option(help="auto may fit to a sample of the voxels, all is exact.")] = Voxels.auto,
    test: Annotated[float, typer.Option(help="Share of the cases held out for the table; 0 fits to all.")] = 0.3,
    seed: Annotated[int, typer.Option(help="Of the split and the solver's start.")] = 0,
    as_json: Json = False,
) -> None:
    """Fit one calibrator and show before and after on held-out cases.

    Example: segcal fit study/ --method cms-op --tune nll -o cal.safetensors
    """
    if method not in CALIBRATORS:
        raise InputError(f"method is '{method}'", where="--method", expected=f"one of {', '.join(CALIBRATORS)}")
    cases = open_cases(data, **declared(layout, labels))
    split = cases.split(1 - test, 0.0, test, seed=seed)
    with waiting(f"fitting {method}") as step:
        if tune_by is None:
            calibrator = CALIBRATORS[method]().fit(split.calibration, voxels=voxels.value, seed=seed)
        else:
            calibrator = tune(method, split.calibration, select=tune_by.value, seed=seed, progress=step)
    calibrator.save(output)
    assert calibrator.fit_report is not None
    shown: dict[str, dict[str, float]] = {}
    if len(split.test):
        for name, chosen in (("before", None), ("after", calibrator)):
            with progress(f"evaluating {name}", len(split.test)) as step:
                results = evaluate(split.test, chosen, metrics=_SHOWN, progress=step)
            shown[name] = {metric: results.value(metric) for metric in _SHOWN if chosen or metric != "flip"}
    if as_json:
        report = {"fit": asdict(calibrator.fit_report), "held_out": {"cases": len(split.test), **shown}}
        out.print_json(json.dumps(plain(report)))
        return
    report_line = calibrator.fit_report
    state = "converged" if report_line.converged else "[red]not converged[/]"
    out.print(
        f"{method}: {state} in {report_line.iterations} passes, {report_line.seconds:.1f} s, "
        f"{report_line.voxels_used:,} voxels of {len(split.calibration)} cases, gradient {report_line.certificate:.1e}"
    )
    for note in report_line.notes:
        out.print(f"[yellow]note[/] {escape(note)}")
    if shown:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column(f"{len(split.test)} held-out cases")
        for name in shown:
            table.add_column(name, justify="right")
        for metric in _SHOWN:
            table.add_row(metric, *(f"{values[metric]:.4f}" if metric in values else "" for values in shown.values()))
        out.print(table)
    out.print(f"written to [bold]{escape(str(output))}[/]")


def apply_command(
    calibrator: Annotated[Path, typer.Argument(metavar="CALIBRATOR", help="A file written by segcal fit.")],
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write; new, empty, or with --resume.")],
    layout: LayoutOption = None,
    dtype: Annotated[StoredType, typer.Option(help="Precision of the written scores.")] = StoredType.float32,
    confidence: Annotated[bool, typer.Option("--confidence", help="Also write confidence maps.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip outputs that are finished and read back right.")
    ] = False,
) -> None:
    """Write calibrated probabilities in the input's own format and geometry. Needs no labels.

    Example: segcal apply cal.safetensors new/ -o calibrated/
    """
    fitted = load(calibrator)
    cases = open_cases(data, need_labels=False, **declared(layout, None))
    with progress("applying", len(cases)) as step:
        report = apply(
            fitted,
            cases,
            output,
            dtype=getattr(torch, dtype.value),
            confidence=confidence,
            resume=resume,
            progress=step,
        )
    skipped = f", {report.skipped} were finished already" if report.skipped else ""
    kept = "every label kept" if fitted.preserves else f"{report.flips:,} of {report.voxels:,} labels changed"
    out.print(f"{report.written} cases written to [bold]{escape(str(output))}[/]{skipped}; {kept}")
