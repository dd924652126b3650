"""``segcal compare``, and a study in the terminal: tables of methods, the advice in words, where the files are."""

from __future__ import annotations

import math
import os
import pkgutil
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from rich.markup import escape
from rich.table import Table
from typer import Option

from segcal.calibrators import CALIBRATORS
from segcal.cli.completion import several
from segcal.cli.console import WIDE, new_table, out, show_notes, show_table, study_progress
from segcal.cli.data import Data, DeviceOption, Json, Labels, Layout, Workers, open_data, seed_option, split_names
from segcal.cli.evaluate import REGIONS_DEFAULT, Metrics, Regions, split_metrics
from segcal.errors import InputError, SegcalError
from segcal.files.plain import number
from segcal.files.remote import as_path
from segcal.study import Study, compare
from segcal.study.advice.choice import NEGLIGIBLE, Rows, by_method
from segcal.study.settings import FLIPS, STUDY_METRICS, UNCALIBRATED, Pooling, Preserve, Select, Sensitivity, Tune

_SETS = {"all": "every method", "decision-preserving": "those that keep the labels"}
Methods = Annotated[
    str,
    Option(
        help="'all', 'decision-preserving', or comma-separated: " + ", ".join(CALIBRATORS) + ".",
        autocompletion=several({id: own.title for id, own in CALIBRATORS.items()}, alone=_SETS),
    ),
]
Repeats = Annotated[
    int | None, Option(min=1, help="Number of random splits: 3, or 1 if segcal.toml declares \\[splits].")
]
_METRICS = ",".join(STUDY_METRICS)
# Metrics of the tables. Methods are sorted by the first, by which they are also chosen.
_SHOWN = ("nll", "ece", "ba-ece")
# From this width of the terminal on, there is room for the pooled ECE.
_ROOMY = WIDE + 24
_TONES = {"plain": "bold", "worse": "bold red"}


def compare_command(
    data: Data,
    output: Annotated[
        Path, Option("--output", "-o", help="Folder for the report: new or empty, unless --resume is given.")
    ] = Path("report"),
    methods: Methods = "trust,ts,lts-ti,cms-op",
    layout: Layout = None,
    labels: Labels = None,
    repeats: Repeats = None,
    fractions: Annotated[str, Option(help="Shares of calibration, validation and test.")] = "0.5,0.2,0.3",
    tune: Annotated[
        Tune, Option(help="How to choose strengths: on validation cases (path), as published (paper), none.")
    ] = "path",
    select: Annotated[Select, Option(help="The metric that tuning minimises.")] = "nll",
    metrics: Metrics = _METRICS,
    regions: Regions = REGIONS_DEFAULT,
    preserve: Annotated[
        Preserve, Option(help="What a recommended method keeps: the label, the order of all classes, or nothing.")
    ] = "argmax",
    translation_invariant: Annotated[
        bool, Option("--translation-invariant", help="Recommend only methods that ignore offsets of the logits.")
    ] = False,
    robust: Annotated[bool, Option("--robust", help="Recommend only methods that never lose on shifted data.")] = False,
    pooling: Annotated[
        str | None,
        Option(
            help="Ways to pool an ensemble, with commas: single, probs, logits.",
            autocompletion=several(dict.fromkeys(get_args(Pooling), "")),
        ),
    ] = None,
    shifted: Annotated[
        list[Path] | None, Option(parser=as_path, metavar="PATH", help="Another dataset to test on. May be repeated.")
    ] = None,
    shift: Annotated[bool, Option("--shift", help="Also test on corrupted images. Needs images and --model.")] = False,
    model: Annotated[
        str | None, Option(help="For --shift, module:function from an image (1, channels, *spatial) to logits.")
    ] = None,
    sensitivity: Annotated[
        str | None,
        Option(
            help="Also vary, comma-separated: bins, size (of calibration), members (of an ensemble).",
            autocompletion=several(dict.fromkeys(get_args(Sensitivity), "")),
        ),
    ] = None,
    workers: Workers = 1,
    device: DeviceOption = "auto",
    seed: Annotated[int, seed_option("Seed of the splits, the fits and the bootstrap.")] = 0,
    resume: Annotated[bool, Option("--resume", help="Continue a study that was stopped.")] = False,
    as_json: Json = False,
) -> None:
    """Compare calibrators on your data, and recommend one to deploy.

    Each repeat splits the cases into a part to fit to, one to choose on and one to test on.
    The cases of a patient stay together.

    The output folder gets the report (index.html), results.json, tables.csv, tables.tex, and the
    recommended calibrator (calibrator.safetensors) for 'segcal apply'.

    Example: segcal compare study/ --methods decision-preserving -o report/ --workers 2
    """
    cases = open_data(data, layout, labels, device=device)
    with study_progress() as step:
        study = compare(
            cases,
            method_names(methods),
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
            shifted={_unique(path, shifted or []): open_data(path, device=device) for path in shifted or []},
            model=_model(model, shift),
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


def method_names(text: str) -> str | tuple[str, ...]:
    """What ``--methods`` asks for."""
    return text if text in _SETS else split_names(text, "--methods")


def _model(text: str | None, shift: bool) -> Callable[..., Any] | None:
    found = load_model(text) if text else None
    if text and not shift:
        raise InputError("came without --shift", where="--model", expected="both, or neither")
    return found


def load_model(text: str) -> Callable[..., Any]:
    """The function that ``module:function`` names. Modules in the current folder are found."""
    where, expected = f"--model {text}", "module:function, such as mynet:predict"
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = pkgutil.resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"cannot be imported ({error})", where=where, expected=expected) from None
    if not callable(found):
        raise InputError(f"is a {type(found).__name__}", where=where, expected=expected)
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


def show_study(study: Study, report: Path) -> None:
    """Print the tables of methods, the recommendation in words, and where the report is."""
    document, found = study.document, study.recommendation
    data = document["about"]["data"]
    out.print(f"[dim]{data['cases']} cases, {escape(data['splits'])}[/]")
    tables = [_method_table(study)]
    tables += [_channel_table(study)] if document.get("channels") else []
    tables += [_shift_table(study, entry) for entry in document["shift"] or ()]
    for table, notes in tables:
        show_table(table)
        for note in notes:
            out.print(f"[dim]{escape(note)}[/]")
        out.print()
    for sentence in found["headline"]:
        out.print(f"[{_TONES[sentence['tone']]}]{escape(sentence['text'])}[/]")
    out.print()
    for text in found["sentences"]:
        out.print(escape(text))
    show_notes((*found["caveats"], *document["warnings"]))
    out.print(f"\nreport      [bold]{escape(str(report))}[/]")
    if found["file"]:
        file = report.parent / found["file"]
        out.print(f"calibrator  [bold]{escape(str(file))}[/]")
        out.print(f"Next: segcal apply {escape(shlex.quote(str(file)))} NEW -o calibrated/")


def _method_table(study: Study) -> tuple[Table, list[str]]:
    """All methods on the test cases, and the notes below the table."""
    document = study.document
    summary, differences = by_method(document["summary"]), by_method(document["differences"])
    flips = {row["method"]: row for row in document["flips"]}
    methods = {method["key"]: method for method in document["methods"]}
    shown = _known(summary, _SHOWN)
    pooled = "ece" in shown and (not out.is_terminal or out.width >= _ROOMY)
    table = _metric_table(study, shown, "labels moved", pooled=pooled)
    for key in _sorted(methods, summary, shown):
        if methods[key]["status"] == "failed":
            table.add_row(f"[red]{escape(key)}[/]", *["failed"] * (len(shown) + pooled), "")
            continue
        cells = [_cell(summary[key, metric], _verdict(differences, key, metric)) for metric in shown]
        if pooled:
            cells.insert(shown.index("ece") + 1, _cell(_pooled(summary[key, "ece"]), None))
        same = methods[key]["same_as"]
        name = _name(study, key) + (f" [dim](is {escape(same)} here)[/]" if same else "")
        changed = sum(flips[key][kind] for kind in FLIPS)
        table.add_row(name, *cells, f"{changed / flips[key]['compared']:.3%}" if changed else "none")
    notes = ["* recommended, chosen by NLL on the validation cases"]
    bins = {metric["bins"] for metric in document["metrics"] if metric["id"] in shown and metric.get("bins")}
    notes += [f"ECE uses {count} bins" for count in bins]
    notes += ["pooled: all test voxels together; else means over test cases"] if pooled else []
    if any(_verdict(differences, key, metric) == "worse" for key in methods for metric in shown):
        notes.append("! worse than uncalibrated: the 95% interval of the paired difference excludes 0")
    return table, [*notes, _costs(study)]


def _channel_table(study: Study) -> tuple[Table, list[str]]:
    """NLL and ECE of all methods in every channel of multi-label data."""
    channels = {channel["name"]: by_method(channel["summary"]) for channel in study.document["channels"]}
    first = next(iter(channels.values()))
    shown = _known(first, _SHOWN[:2])
    heads = [f"{escape(name)} {metric.upper()}" for name in channels for metric in shown]
    table = new_table("method", *heads, left=("method",), title="Channels")
    whole = by_method(study.document["summary"])
    for key in _sorted(sorted({method for method, _ in first}), whole, shown):
        values = [number(own[key, metric]["mean"]) for own in channels.values() for metric in shown]
        table.add_row(_name(study, key), *("-" if math.isnan(value) else f"{value:.4f}" for value in values))
    return table, [f"the table above has means over these {len(channels)} channels, by which methods are chosen"]


def _shift_table(study: Study, entry: Mapping[str, Any]) -> tuple[Table, list[str]]:
    """All methods on shifted cases, and where their NLL is higher than that of ``ts``."""
    summary = by_method(entry["summary"])
    differences, against = (
        by_method(row for row in entry["differences"] if (row["baseline"] == UNCALIBRATED) == wanted)
        for wanted in (True, False)
    )
    # As in the rule of --robust, a difference that is too small to matter is no loss.
    nll = {key: row for (key, metric), row in against.items() if metric == "nll"}
    lost = {key: number(row["mean"]) > NEGLIGIBLE and row["verdict"] for key, row in nll.items()}
    shown = _known(summary, _SHOWN[:2])
    table = _metric_table(study, shown, *(["NLL minus ts (95%)"] if lost else []))
    table.title = f"Shifted: {escape(entry['name'])}"
    for key in _sorted(dict.fromkeys(key for key, _ in summary), summary, shown):
        cells = [_cell(summary[key, metric], _verdict(differences, key, metric)) for metric in shown]
        cells += [_cell(nll[key], lost[key], "+.4f")] if key in lost else [""] if lost else []
        table.add_row(_name(study, key), *cells)
    notes = ["! worse than uncalibrated; in the last column worse than ts, and not recommended with --robust"]
    worse = "worse" in (*(row["verdict"] for row in differences.values()), *lost.values())
    return table, notes if worse else []


def _known(summary: Rows, metrics: Sequence[str]) -> list[str]:
    """Those of the metrics that the study has."""
    return [metric for metric in metrics if any(metric == known for _, known in summary)]


def _metric_table(study: Study, shown: Sequence[str], *more: str, pooled: bool = False) -> Table:
    """An empty table of the metrics; ``pooled`` adds a column for the pooled value beside ECE."""
    titles = {metric["id"]: metric["name"] for metric in study.document["metrics"]}
    heads = [f"{titles[metric]} (95%)" for metric in shown]
    if pooled:
        heads.insert(shown.index("ece") + 1, "pooled ECE (95%)")
    table = new_table("method", *heads, *more, left=("method",))
    table.columns[0].no_wrap = True
    return table


def _name(study: Study, key: str) -> str:
    return f"[bold]{escape(key)} *[/]" if key == study.recommendation["method"] else escape(key)


def _verdict(differences: Rows, key: str, metric: str) -> Any:
    return differences.get((key, metric), {}).get("verdict")


def _sorted(keys: Iterable[str], summary: Rows, shown: Sequence[str]) -> list[str]:
    """Lowest first by the first metric. Failed methods and undefined values come last."""
    first = shown[0] if shown else ""
    value = {key: number(summary[key, first]["mean"]) if (key, first) in summary else math.nan for key in keys}
    return sorted(value, key=lambda key: (math.isnan(value[key]), value[key]))


def _costs(study: Study) -> str:
    """Time and memory of every fit, all repeats together."""
    timings = study.document["timings"]
    fitted = {key: own for key, own in timings["per_method"].items() if own["fit_seconds"]}
    costs = [f"{key} {own['fit_seconds']:.1f} s, {own['peak_memory_mb']:,.0f} MB" for key, own in fitted.items()]
    whole = f"the whole study {timings['total_seconds']:.0f} s"
    return f"fitting: {'; '.join(costs)}; {whole}" if costs else whole


def _pooled(row: Mapping[str, Any]) -> dict[str, Any]:
    """The pooled value in place of the mean. Studies of earlier versions have no interval of it."""
    return {"mean": row["pooled"], "low": row.get("pooled_low"), "high": row.get("pooled_high")}


def _cell(row: Mapping[str, Any], verdict: object, form: str = ".4f") -> str:
    """A value with its interval. Values that are worse than before are marked, and red if there are colours."""
    numbers = [number(row[name]) for name in ("mean", "low", "high")]
    # Adding 0 turns -0 into 0.
    mean, low, high = ("-" if math.isnan(value) else f"{round(value, 4) + 0.0:{form}}" for value in numbers)
    # In a narrow terminal, the interval goes below the value.
    gap, between = " " if out.width >= WIDE else "\n", "-" if form == ".4f" else " to "
    value = f"[red]{mean}![/]" if verdict == "worse" else mean
    return value if low == "-" else f"{value}{gap}{low}{between}{high}"
