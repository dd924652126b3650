"""``segcal compare``."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from segcal.calibrators import CALIBRATORS
from segcal.cli.console import out, study_progress
from segcal.cli.data import Data, Json, Labels, Layout, Workers, open_data, seed_option, split_names
from segcal.cli.evaluate import Metrics, Regions, split_metrics
from segcal.cli.study import show_study
from segcal.errors import InputError, SegcalError
from segcal.study import compare
from segcal.study.settings import STUDY_METRICS, Preserve, Select, Tune

_METRICS = ",".join(STUDY_METRICS)


def compare_command(
    data: Data,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the report: new or empty, unless --resume is given.")
    ] = Path("report"),
    methods: Annotated[
        str, typer.Option(help="'all', 'decision-preserving', or comma-separated: " + ", ".join(CALIBRATORS) + ".")
    ] = "ts,lts-ti,cms-op",
    layout: Layout = None,
    labels: Labels = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Number of random splits: 3, or 1 if segcal.toml declares \\[splits].")
    ] = None,
    fractions: Annotated[str, typer.Option(help="Shares of calibration, validation and test.")] = "0.5,0.2,0.3",
    tune: Annotated[
        Tune, typer.Option(help="How to choose strengths: on validation cases (path), as published (paper), none.")
    ] = "path",
    select: Annotated[Select, typer.Option(help="The metric that tuning minimises.")] = "nll",
    metrics: Metrics = _METRICS,
    regions: Regions = "everything,boundary",
    preserve: Annotated[
        Preserve, typer.Option(help="What a recommended method keeps. With order and argmax, labels never change.")
    ] = "order",
    translation_invariant: Annotated[
        bool, typer.Option("--translation-invariant", help="Recommend only methods that ignore offsets of the logits.")
    ] = False,
    robust: Annotated[
        bool, typer.Option("--robust", help="Recommend only methods that do not lose on the shifted data.")
    ] = False,
    pooling: Annotated[
        str | None, typer.Option(help="Ways to pool an ensemble, comma-separated: single, probs, logits.")
    ] = None,
    shifted: Annotated[
        list[Path] | None, typer.Option(help="Another dataset to test on. May be given several times.")
    ] = None,
    shift: Annotated[
        bool, typer.Option("--shift", help="Also test on corrupted images. Needs images and --model.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="For --shift, module:function from an image (1, channels, *spatial) to logits.")
    ] = None,
    sensitivity: Annotated[
        str | None,
        typer.Option(help="Also vary, comma-separated: bins, size (of calibration), members (of an ensemble)."),
    ] = None,
    workers: Workers = 1,
    seed: Annotated[int, seed_option("Seed of the splits, the fits and the bootstrap.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a study that was stopped.")] = False,
    as_json: Json = False,
) -> None:
    """Compare calibrators on your data, and recommend one to deploy.

    Each repeat splits the cases into a part to fit to, one to choose on and one to test on.
    The cases of a patient stay together.

    The output folder gets the report (index.html), results.json, tables.csv, tables.tex, and the
    recommended calibrator (calibrator.safetensors) for 'segcal apply'.

    Example: segcal compare study/ --methods decision-preserving -o report/ --workers 2
    """
    cases = open_data(data, layout, labels)
    with study_progress() as step:
        study = compare(
            cases,
            methods if methods in ("all", "decision-preserving") else split_names(methods, "--methods"),
            repeats,
            output=output,
            fractions=_fractions(fractions),
            tune=tune,
            select=select,
            metrics=split_metrics(metrics),
            regions=split_names(regions, "--regions"),
            preserve=preserve,
            translation_invariant=translation_invariant,
            robust=robust,
            pooling=split_names(pooling, "--pooling"),
            shifted={_unique(path, shifted or []): open_data(path) for path in shifted or []},
            model=load_model(model) if model else None,
            shift=shift,
            sensitivity=split_names(sensitivity, "--sensitivity"),
            workers=workers,
            seed=seed,
            resume=resume,
            name=data.resolve().name if data.is_dir() else data.resolve().parent.name,
            # A resumed study gives the same results, so it names the same command.
            command=shlex.join(["segcal", *(word for word in sys.argv[1:] if word != "--resume")]),
            progress=step,
        )
    from segcal.report import write_report  # matplotlib is slow to import

    report = write_report(output)
    if as_json:
        out.print_json(study.to_json())
    else:
        show_study(study, report)
    if all(method["status"] == "failed" for method in study.document["methods"][1:]):
        raise SegcalError("every method failed", where="--methods", fix="the reasons are in the notes above")


def load_model(text: str) -> Callable[..., Any]:
    """The function that ``module:function`` names. Modules in the current folder are found."""
    module, _, function = text.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"cannot be imported ({error})", where=f"--model {text}", expected="module:function, such as mynet:predict"
        ) from None
    if not callable(found):
        raise InputError(f"is a {type(found).__name__}", where=f"--model {text}", expected="a function")
    return found  # type: ignore[no-any-return]


def _unique(path: Path, paths: list[Path]) -> str:
    """The folder's name, or its path if two have the same name."""
    names = [other.resolve().name for other in paths]
    return os.fspath(path) if names.count(path.resolve().name) > 1 else path.resolve().name


def _fractions(text: str) -> tuple[float, float, float]:
    try:
        calibration, validation, test = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{text!r}", where="--fractions", expected="three numbers, such as 0.5,0.2,0.3") from None
    return calibration, validation, test
