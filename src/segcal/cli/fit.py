"""``segcal fit`` and ``segcal apply``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
from rich.markup import escape
from typer import Argument, Option

from segcal.calibrators import CALIBRATORS, Calibrator, load
from segcal.cases import CaseSet, Split
from segcal.cases.pack import StoredType
from segcal.cases.splits import in_no_part, some
from segcal.cli.completion import one_of
from segcal.cli.console import new_table, out, progress, show_notes, show_table, waiting
from segcal.cli.data import Data, DeviceOption, Json, Labels, Layout, Resume, check_files, open_data, seed_option
from segcal.errors import InputError, check_name
from segcal.evaluation.apply import apply
from segcal.evaluation.evaluate import evaluate_many
from segcal.evaluation.plan import Plan
from segcal.files.plain import plain
from segcal.files.remote import as_path
from segcal.fitting.data import VoxelBudget
from segcal.statistics import EVERYTHING
from segcal.study.settings import Select
from segcal.study.tuning import tune

MethodOption = Annotated[
    str,
    Option(
        help="One of: " + ", ".join(CALIBRATORS) + ".",
        autocompletion=one_of({id: own.title for id, own in CALIBRATORS.items()}),
    ),
]
# Share of the cases held out for the table.
_HELD_OUT = 0.3
_SHOWN = ("nll", "ece", "ba-ece", "brier", "accuracy", "flip")


def fit_command(
    data: Data,
    output: Annotated[Path, Option("--output", "-o", help="File for the calibrator, such as cal.safetensors.")],
    method: MethodOption = "ts",
    layout: Layout = None,
    labels: Labels = None,
    tune_by: Annotated[
        Select | None, Option("--tune", help="Choose the regularisation by this metric, on images left out.")
    ] = None,
    voxels: Annotated[VoxelBudget, Option(help="'auto' may fit to a sample of the voxels; 'all' is exact.")] = "auto",
    test: Annotated[
        float | None,
        Option(min=0, max=1, help="Share of the cases to hold out (default 0.3); 0 fits to all. Not with \\[splits]."),
    ] = None,
    device: DeviceOption = "auto",
    seed: Annotated[int, seed_option("Seed of the split and of the fit.")] = 0,
    as_json: Json = False,
) -> None:
    """Fit one calibrator, and compare metrics before and after on held-out cases.

    If segcal.toml declares \\[splits], the calibrator is fitted to the calibration part and shown on
    the test part.

    Example: segcal fit study/ --method cms-op --tune nll -o cal.safetensors
    """
    check_name("method", method, CALIBRATORS, where="--method")
    cases = open_data(data, layout, labels, device=device)
    check_files([output], cases)
    split = _split(cases, test, seed)
    validation = split.validation if len(split.validation) else None
    with waiting(f"fitting {method}") as step:
        if tune_by is None:
            calibrator = CALIBRATORS[method]()
            calibrator.fit(split.calibration, validation=validation, voxels=voxels, seed=seed)
        else:
            calibrator = tune(
                method, split.calibration, validation, select=tune_by, voxels=voxels, seed=seed, progress=step
            )
    calibrator.save(output)
    report = calibrator.fit_report
    assert report is not None
    shown = _before_and_after(calibrator, split.test) if len(split.test) else {}
    if as_json:
        held_out = {"cases": len(split.test), "names": list(split.test.ids), **shown.pop("", {})}
        document = {"fit": asdict(report), "map": calibrator.summary(), "held_out": held_out}
        out.print_json(json.dumps(plain({**document, **({"held_out_channels": shown} if shown else {})})))
        return
    state = "converged" if report.converged else "[red]not converged[/]"
    out.print(
        f"{method}: {state} in {report.iterations} steps, {report.seconds:.1f} s, "
        f"{report.voxels_used:,} voxels of {len(split.calibration)} cases, gradient {report.certificate:.1e}"
    )
    out.print(f"map: {escape(calibrator.summary())}")
    show_notes((*report.notes, *in_no_part(cases.undeclared)))
    if shown:
        how = "the declared test part" if cases.splits else f"drawn at random, seed {seed}"
        out.print(f"held out, {how}: {escape(some(split.test.ids))}")
        title = f"{len(split.test)} held-out cases"
        table = new_table(title, *shown[""], left=(title,))
        for channel, found in sorted(shown.items(), key=lambda item: not item[0]):  # the mean comes last
            if cases.channel_names is not None:
                table.add_row(escape(channel) or f"mean over {len(shown) - 1} channels", style="bold")
            for metric in _SHOWN:
                table.add_row(metric, *(f"{own[metric]:.4f}" if metric in own else "" for own in found.values()))
        show_table(table)
    out.print(f"written to [bold]{escape(str(output))}[/]")


def _before_and_after(calibrator: Calibrator, cases: CaseSet) -> dict[str, dict[str, dict[str, float]]]:
    """Metrics before and after calibration, of the whole ("") and of each channel of multi-label data."""
    plan = Plan.make(_SHOWN, (EVERYTHING,), background=cases.background)
    with progress("evaluating before and after", len(cases)) as step:
        found = evaluate_many(plan, cases, {"before": None, "after": calibrator}, progress=step)
    shown: dict[str, dict[str, dict[str, float]]] = {}
    for channel in ("", *found["after"].channels):
        values = {name: {m: own.value(m, channel=channel) for m in _SHOWN} for name, own in found.items()}
        del values["before"]["flip"]  # There is nothing to compare with.
        shown[channel] = values
    return shown


def _split(cases: CaseSet, test: float | None, seed: int) -> Split:
    """The parts that the dataset declares, or a random split."""
    if not cases.splits:
        share = _HELD_OUT if test is None else test
        return cases.split(1 - share, 0.0, share, seed=seed)
    if test is not None:
        raise InputError(
            f"a share of {test:g}, but segcal.toml declares the splits",
            where="--test",
            expected="one of the two",
            fix="leave out --test to hold out the declared test part, or remove [splits]",
        )
    if not len(cases.part("calibration")):
        raise InputError("the declared calibration part is empty", where="splits", expected="cases to fit to")
    return cases.split()


def apply_command(
    calibrator: Annotated[Path, Argument(metavar="CALIBRATOR", help="A file of segcal fit or compare.")],
    data: Data,
    output: Annotated[
        Path,
        Option(
            "--output",
            "-o",
            parser=as_path,
            metavar="PATH",
            help="Folder or URL to write to; new, empty or --resume.",
        ),
    ],
    layout: Layout = None,
    dtype: Annotated[StoredType, Option(help="Precision of the written scores.")] = "float32",
    confidence: Annotated[bool, Option("--confidence", help="Also write confidence maps.")] = False,
    nifti: Annotated[
        bool, Option("--nifti", help="nnU-Net layout: also write NIfTI probabilities, with their geometry.")
    ] = False,
    device: DeviceOption = "auto",
    resume: Resume = False,
) -> None:
    """Write calibrated probabilities in the format and geometry of the input. Needs no labels.

    Example: segcal apply cal.safetensors new/ -o calibrated/
    """
    fitted = load(calibrator)
    cases = open_data(data, layout, need_labels=False, device=device)
    with progress("applying", len(cases)) as step:
        options = {"dtype": getattr(torch, dtype), "confidence": confidence, "nifti": nifti, "resume": resume}
        report = apply(fitted, cases, output, **options, progress=step)
    skipped = f", {report.skipped} were finished already" if report.skipped else ""
    kept = "every label kept" if fitted.preserves else f"{report.flips:,} of {report.voxels:,} labels changed"
    out.print(f"{report.written} cases written to [bold]{escape(str(output))}[/]{skipped}; {kept}")
