"""``segcal fit`` and ``segcal apply``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

from segcal.calibrators import CALIBRATORS, load
from segcal.cases import CaseSet, Split
from segcal.cases.pack import StoredType
from segcal.cases.splits import in_no_part, some
from segcal.cli.console import out, progress, show_table, waiting
from segcal.cli.data import Data, Json, LabelsOption, LayoutOption, open_data, seed_option
from segcal.cli.outputs import check_files
from segcal.errors import InputError, check_name
from segcal.evaluation.apply import apply
from segcal.evaluation.evaluate import evaluate
from segcal.files.plain import plain
from segcal.fitting.data import VoxelBudget
from segcal.study.settings import Select
from segcal.study.tuning import tune

# Of the cases, for the table.
_HELD_OUT = 0.3
_SHOWN = ("nll", "ece", "ba-ece", "brier", "accuracy", "flip")


def fit_command(
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="The calibrator's file, cal.safetensors.")],
    method: Annotated[str, typer.Option(help="One of: " + ", ".join(CALIBRATORS) + ".")] = "ts",
    layout: LayoutOption = None,
    labels: LabelsOption = None,
    tune_by: Annotated[
        Select | None,
        typer.Option("--tune", help="Choose the strength of regularisation on left-out images, by this metric."),
    ] = None,
    voxels: Annotated[VoxelBudget, typer.Option(help="auto may fit to a sample of the voxels, all is exact.")] = "auto",
    test: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of the cases held out for the table, 0.3 by default; 0 fits to all. Not with \\[splits].",
        ),
    ] = None,
    seed: Annotated[int, seed_option("Of the split and the solver's start.")] = 0,
    as_json: Json = False,
) -> None:
    """Fit one calibrator and show before and after on held-out cases.

    Where segcal.toml declares \\[splits], the calibrator is fitted to the calibration part and shown on the test part.

    Example: segcal fit study/ --method cms-op --tune nll -o cal.safetensors
    """
    check_name("method", method, CALIBRATORS, where="--method")
    cases = open_data(data, layout, labels)
    check_files([output], cases)
    split = _split(cases, test, seed)
    validation = split.validation if len(split.validation) else None
    with waiting(f"fitting {method}") as step:
        if tune_by is None:
            calibrator = CALIBRATORS[method]()
            calibrator.fit(split.calibration, validation=validation, voxels=voxels, seed=seed)
        else:
            calibrator = tune(
                method, split.calibration, validation,
                select=tune_by, voxels=voxels, seed=seed, progress=step,
            )  # fmt: skip
    calibrator.save(output)
    assert calibrator.fit_report is not None
    # Of the whole and, of multi-label data, of each channel: before and after, each metric.
    shown: dict[str, dict[str, dict[str, float]]] = {}
    if len(split.test):
        for name, chosen in (("before", None), ("after", calibrator)):
            with progress(f"evaluating {name}", len(split.test)) as step:
                results = evaluate(split.test, chosen, metrics=_SHOWN, progress=step)
            for channel in ("", *results.channels):
                shown.setdefault(channel, {})[name] = {
                    metric: results.value(metric, channel=channel) for metric in _SHOWN if chosen or metric != "flip"
                }
    if as_json:
        report = {
            "fit": asdict(calibrator.fit_report),
            "map": calibrator.summary(),
            "held_out": {"cases": len(split.test), "names": list(split.test.ids), **shown.pop("", {})},
        }
        if shown:
            report["held_out_channels"] = shown
        out.print_json(json.dumps(plain(report)))
        return
    report_line = calibrator.fit_report
    state = "converged" if report_line.converged else "[red]not converged[/]"
    out.print(
        f"{method}: {state} in {report_line.iterations} steps, {report_line.seconds:.1f} s, "
        f"{report_line.voxels_used:,} voxels of {len(split.calibration)} cases, gradient {report_line.certificate:.1e}",
        soft_wrap=True,
    )
    out.print(f"map: {escape(calibrator.summary())}", soft_wrap=True)
    for note in (*report_line.notes, *in_no_part(cases.undeclared)):
        out.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
    if shown:
        how = "the declared test part" if cases.splits else f"drawn at random, seed {seed}"
        out.print(f"held out, {how}: {escape(some(split.test.ids))}", soft_wrap=True)
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column(f"{len(split.test)} held-out cases")
        for name in shown[""]:
            table.add_column(name, justify="right")
        for channel, found in sorted(shown.items(), key=lambda item: not item[0]):  # the mean comes last
            if cases.channel_names is not None:
                table.add_row(escape(channel) or f"mean over {len(shown) - 1} channels", style="bold")
            for metric in _SHOWN:
                values = (f"{own[metric]:.4f}" if metric in own else "" for own in found.values())
                table.add_row(metric, *values)
        show_table(table)
    out.print(f"written to [bold]{escape(str(output))}[/]", soft_wrap=True)


def _split(cases: CaseSet, test: float | None, seed: int) -> Split:
    """The parts that the dataset declares, or a random one held out."""
    if not cases.splits:
        share = _HELD_OUT if test is None else test
        return cases.split(1 - share, 0.0, share, seed=seed)
    if test is not None:
        raise InputError(
            f"a share of {test:g}, but segcal.toml declares the splits",
            where="--test",
            expected="one of the two",
            fix="leave out --test, which holds out the declared test part; or remove [splits]",
        )
    if not len(cases.part("calibration")):
        raise InputError("the declared calibration part is empty", where="splits", expected="cases to fit to")
    return cases.split()


def apply_command(
    calibrator: Annotated[Path, typer.Argument(metavar="CALIBRATOR", help="A file written by segcal fit.")],
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write; new, empty, or with --resume.")],
    layout: LayoutOption = None,
    dtype: Annotated[StoredType, typer.Option(help="Precision of the written scores.")] = "float32",
    confidence: Annotated[bool, typer.Option("--confidence", help="Also write confidence maps.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip outputs that are finished and read back right.")
    ] = False,
) -> None:
    """Write calibrated probabilities in the input's own format and geometry. Needs no labels.

    Example: segcal apply cal.safetensors new/ -o calibrated/
    """
    fitted = load(calibrator)
    cases = open_data(data, layout, need_labels=False)
    with progress("applying", len(cases)) as step:
        report = apply(
            fitted,
            cases,
            output,
            dtype=getattr(torch, dtype),
            confidence=confidence,
            resume=resume,
            progress=step,
        )
    skipped = f", {report.skipped} were finished already" if report.skipped else ""
    kept = "every label kept" if fitted.preserves else f"{report.flips:,} of {report.voxels:,} labels changed"
    out.print(f"{report.written} cases written to [bold]{escape(str(output))}[/]{skipped}; {kept}", soft_wrap=True)
