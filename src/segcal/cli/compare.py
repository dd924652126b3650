"""``segcal compare``."""

from __future__ import annotations

import importlib
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from segcal.calibrators import CALIBRATORS
from segcal.cases import open_cases
from segcal.cli.console import err, out
from segcal.cli.data import Data, Json, LabelsOption, LayoutOption, declared
from segcal.cli.evaluate import split_metrics
from segcal.cli.fit import Selection
from segcal.compare import Step, Study, compare
from segcal.compare.engine import STUDY_METRICS
from segcal.errors import InputError, SegcalError
from segcal.regions import REGIONS


class Tuning(str, Enum):
    """How strengths are chosen."""

    none = "none"
    path = "path"
    paper = "paper"


class Keep(str, Enum):
    """What a recommended method must keep."""

    order = "order"
    argmax = "argmax"
    none = "none"


_SHOWN = ("nll", "ece", "ba-ece")
_WIDE = 110


def compare_command(
    data: Data,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The report's folder; new, empty, or with --resume.")
    ] = Path("report"),
    methods: Annotated[
        str, typer.Option(help="'all', 'decision-preserving', or comma-separated: " + ", ".join(CALIBRATORS) + ".")
    ] = "ts,lts-ti,cms-op",
    layout: LayoutOption = None,
    labels: LabelsOption = None,
    repeats: Annotated[
        int | None,
        typer.Option(help="Random splits, 3 by default. Where segcal.toml declares \\[splits]: 1, these."),
    ] = None,
    fractions: Annotated[str, typer.Option(help="Shares for calibration, validation, test.")] = "0.5,0.2,0.3",
    tune: Annotated[
        Tuning,
        typer.Option(help="path: strengths chosen on validation cases; paper: Adam and Optuna, as published; none."),
    ] = Tuning.path,
    select: Annotated[Selection, typer.Option(help="The metric that tuning lowers.")] = Selection.nll,
    metrics: Annotated[
        str, typer.Option(help="Comma-separated ids, with options as in 'ece\\[num_bins=50]', or 'all'.")
    ] = ",".join(STUDY_METRICS),
    regions: Annotated[str, typer.Option(help="Comma-separated: " + ", ".join(REGIONS) + ".")] = "everything,boundary",
    preserve: Annotated[
        Keep,
        typer.Option(help="What the recommended method must keep: order and argmax never change a label."),
    ] = Keep.order,
    translation_invariant: Annotated[
        bool, typer.Option("--translation-invariant", help="Recommend only methods that ignore offsets of the logits.")
    ] = False,
    pooling: Annotated[
        str | None, typer.Option(help="For ensembles, comma-separated: single, probs, logits; each is compared.")
    ] = None,
    shifted: Annotated[
        list[Path] | None,
        typer.Option(help="Test on this dataset, too, with calibrators fitted on DATA. May be repeated."),
    ] = None,
    shift: Annotated[
        bool, typer.Option("--shift", help="Test on corrupted images, mild and strong; needs images and --model.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="module:function from an image (1, channels, *spatial) to logits (1, C, *spatial)."),
    ] = None,
    sensitivity: Annotated[
        str | None, typer.Option(help="Comma-separated: bins, size (calibration cases), members (ensemble size).")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes; fits are shared by method, evaluation by case.")] = 1,
    seed: Annotated[int, typer.Option(help="Of splits, fits and bootstrap.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a study that was stopped.")] = False,
    as_json: Json = False,
) -> None:
    """Compare calibrators on your data, and say which one to deploy and how sure that is.

    Every repeat splits the cases (patients stay together) into a part to fit to, one to choose on, and one to test on.
    The folder gets index.html (the report), results.json, tables.csv, tables.tex, and calibrator.safetensors: the
    recommended calibrator, ready for 'segcal apply'.

    Example: segcal compare study/ --methods decision-preserving -o report/ --workers 2
    """
    cases = open_cases(data, **declared(layout, labels))
    with study_progress() as step:
        study = compare(
            cases,
            methods if methods in ("all", "decision-preserving") else _names(methods, "--methods"),
            repeats,
            output=output,
            fractions=_fractions(fractions),
            tune=tune.value,
            select=select.value,
            metrics=split_metrics(metrics),
            regions=_names(regions, "--regions"),
            preserve=preserve.value,
            translation_invariant=translation_invariant,
            pooling=_names(pooling, "--pooling"),  # type: ignore[arg-type]  # compare checks the words
            shifted={_unique(path, shifted or []): open_cases(path) for path in shifted or []},
            model=load_model(model) if model else None,
            shift=shift,
            sensitivity=_names(sensitivity, "--sensitivity"),  # type: ignore[arg-type]
            workers=workers,
            seed=seed,
            resume=resume,
            name=data.resolve().name if data.is_dir() else data.resolve().parent.name,
            # A study that was stopped ends as if it had not been.
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
        raise SegcalError("every method failed", where="--methods", fix="the reasons are among the notes above")


def show_study(study: Study, report: Path) -> None:
    """Print the table of methods, the recommendation in words, and where the report is."""
    data = study.document["about"]["data"]
    out.print(f"[dim]{data['cases']} cases, {escape(data['splits'])}[/]", soft_wrap=True)
    out.print(_method_table(study))
    out.print(f"[dim]{escape(_costs(study))}[/]", soft_wrap=True)
    found = study.recommendation
    out.print()
    for sentence in found["sentences"]:
        out.print(escape(sentence), soft_wrap=True)
    for caveat in (*found["caveats"], *study.document["warnings"]):
        out.print(f"[yellow]note[/] {escape(caveat)}", soft_wrap=True)
    out.print(f"\nreport      [bold]{escape(str(report))}[/]", soft_wrap=True)
    if found["file"]:
        file = report.parent / found["file"]
        out.print(f"calibrator  [bold]{escape(str(file))}[/]", soft_wrap=True)
        out.print(f"Next: segcal apply {escape(shlex.quote(str(file)))} NEW -o calibrated/", soft_wrap=True)


def _method_table(study: Study) -> Table:
    document, chosen = study.document, study.recommendation["method"]
    summary = {(row["method"], row["metric"]): row for row in document["summary"] if row["region"] == "everything"}
    flips = {row["method"]: row for row in document["flips"]}
    shown = [metric for metric in _SHOWN if any(metric == known for _, known in summary)]
    titles = {metric["id"]: metric["name"] for metric in document["metrics"]}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("method", no_wrap=True)
    for metric in shown:
        table.add_column(f"{titles[metric]} (95%)", justify="right")
    table.add_column("labels moved", justify="right")
    for method in document["methods"]:
        key = method["key"]
        if method["status"] == "failed":
            table.add_row(f"[red]{escape(key)}[/]", *["failed"] * len(shown), "")
            continue
        cells = [_interval(summary[key, metric]) for metric in shown]
        table.add_row(f"[bold green]{escape(key)}[/]" if key == chosen else escape(key), *cells, _moved(flips[key]))
    return table


def _costs(study: Study) -> str:
    """Time and memory of every fit, all repeats together."""
    timings = study.document["timings"]
    fitted = {key: own for key, own in timings["per_method"].items() if own["fit_seconds"]}
    costs = [f"{key} {own['fit_seconds']:.1f} s, {own['peak_memory_mb']:,.0f} MB" for key, own in fitted.items()]
    whole = f"the whole study {timings['total_seconds']:.0f} s"
    return f"fitting: {'; '.join(costs)}; {whole}" if costs else whole


def _interval(row: Mapping[str, Any]) -> str:
    values = [math.nan if row[name] is None else float(row[name]) for name in ("mean", "low", "high")]
    mean, low, high = ("-" if math.isnan(value) else f"{value:.4f}" for value in values)
    # In a narrow window the interval goes below, rather than breaking where it may.
    gap = " " if out.width >= _WIDE else "\n"
    return mean if low == "-" else f"{mean}{gap}{low}-{high}"


def _moved(row: Mapping[str, Any]) -> str:
    changed = row["harmful"] + row["beneficial"] + row["neutral"]
    return f"{changed / row['compared']:.3%}" if changed else "none"


@contextmanager
def study_progress() -> Iterator[Callable[[Step], None]]:
    """A progress bar with the time that is left; silent when not a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("comparing", total=None)
        yield lambda step: bar.update(task, description=escape(step.name), completed=step.done, total=step.total)


def load_model(text: str) -> Callable[..., Any]:
    """The function that ``module:function`` names; modules beside the user are found, as scripts find them."""
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
    """The folder's name, or its path where two have the same."""
    names = [other.resolve().name for other in paths]
    return os.fspath(path) if names.count(path.resolve().name) > 1 else path.resolve().name


def _names(text: str | None, option: str) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(item.strip() for item in text.split(",") if item.strip())
    if not names:
        raise InputError("nothing was asked for", where=option, expected="at least one name")
    return names


def _fractions(text: str) -> tuple[float, float, float]:
    try:
        calibration, validation, test = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{text!r}", where="--fractions", expected="three numbers, such as 0.5,0.2,0.3") from None
    return calibration, validation, test
