"""A study in the terminal: tables of methods, the advice in words, where the files are."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from segcal.cli.console import new_table, out, show_notes, show_table
from segcal.files.plain import number
from segcal.study import Study
from segcal.study.advice.choice import NEGLIGIBLE, Rows, by_method
from segcal.study.settings import FLIPS, UNCALIBRATED

# Metrics of the tables. Methods are sorted by the first, by which they are also chosen.
_SHOWN = ("nll", "ece", "ba-ece")
_TONES = {"plain": "bold", "worse": "bold red"}
# From this width of the terminal on, a value and its interval fit on one line.
_WIDE = 110


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
    table = _metric_table(study, shown, "labels moved")
    for key in _sorted(methods, summary, shown):
        if methods[key]["status"] == "failed":
            table.add_row(f"[red]{escape(key)}[/]", *["failed"] * len(shown), "")
            continue
        cells = [_cell(summary[key, metric], _verdict(differences, key, metric)) for metric in shown]
        same = methods[key]["same_as"]
        name = _name(study, key) + (f" [dim](is {escape(same)} here)[/]" if same else "")
        changed = sum(flips[key][kind] for kind in FLIPS)
        table.add_row(name, *cells, f"{changed / flips[key]['compared']:.3%}" if changed else "none")
    notes = ["* recommended, chosen by NLL on the validation cases"]
    bins = {metric["bins"] for metric in document["metrics"] if metric["id"] in shown and metric.get("bins")}
    notes += [f"ECE uses {count} bins" for count in bins]
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


def _metric_table(study: Study, shown: Sequence[str], *more: str) -> Table:
    titles = {metric["id"]: metric["name"] for metric in study.document["metrics"]}
    table = new_table("method", *(f"{titles[metric]} (95%)" for metric in shown), *more, left=("method",))
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


def _cell(row: Mapping[str, Any], verdict: object, form: str = ".4f") -> str:
    """A value with its interval. Values that are worse than before are marked, and red if there are colours."""
    numbers = [number(row[name]) for name in ("mean", "low", "high")]
    # Adding 0 turns -0 into 0.
    mean, low, high = ("-" if math.isnan(value) else f"{round(value, 4) + 0.0:{form}}" for value in numbers)
    # In a narrow terminal, the interval goes below the value.
    gap, between = " " if out.width >= _WIDE else "\n", "-" if form == ".4f" else " to "
    value = f"[red]{mean}![/]" if verdict == "worse" else mean
    return value if low == "-" else f"{value}{gap}{low}{between}{high}"
