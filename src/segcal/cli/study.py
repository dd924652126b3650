"""A study in the terminal: tables of methods, the advice in words, where the files are."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from segcal.cli.console import out, show_table
from segcal.files.plain import number
from segcal.study import Study
from segcal.study.advice.choice import NEGLIGIBLE

#: The first is what methods are chosen and sorted by.
_SHOWN = ("nll", "ece", "ba-ece")
_TONES = {"plain": "bold", "worse": "bold red"}
# Columns of text from which on a value and its interval fit on one line.
_WIDE = 110


def show_study(study: Study, report: Path) -> None:
    """Print the tables of methods, the recommendation in words, and where the report is."""
    data, found = study.document["about"]["data"], study.recommendation
    out.print(f"[dim]{data['cases']} cases, {escape(data['splits'])}[/]", soft_wrap=True)
    channels = [_channel_table(study)] if study.document.get("channels") else []
    shifted = [_shift_table(study, entry) for entry in study.document["shift"] or ()]
    tables = [_method_table(study), *channels, *shifted]
    for table, notes in tables:
        show_table(table)
        for note in notes:
            out.print(f"[dim]{escape(note)}[/]", soft_wrap=True)
        out.print()
    for sentence in found["headline"]:
        out.print(f"[{_TONES[sentence['tone']]}]{escape(sentence['text'])}[/]", soft_wrap=True)
    out.print()
    for text in found["sentences"]:
        out.print(escape(text), soft_wrap=True)
    for caveat in (*found["caveats"], *study.document["warnings"]):
        out.print(f"[yellow]note[/] {escape(caveat)}", soft_wrap=True)
    out.print(f"\nreport      [bold]{escape(str(report))}[/]", soft_wrap=True)
    if found["file"]:
        file = report.parent / found["file"]
        out.print(f"calibrator  [bold]{escape(str(file))}[/]", soft_wrap=True)
        out.print(f"Next: segcal apply {escape(shlex.quote(str(file)))} NEW -o calibrated/", soft_wrap=True)


def _method_table(study: Study) -> tuple[Table, list[str]]:
    """All methods on the test cases, sorted by what they are chosen by, and the remarks beneath."""
    document, chosen = study.document, study.recommendation["method"]
    summary = {(row["method"], row["metric"]): row for row in document["summary"] if row["region"] == "everything"}
    verdicts = _verdicts(document["differences"], "uncalibrated")
    flips = {row["method"]: row for row in document["flips"]}
    shown = [metric for metric in _SHOWN if any(metric == known for _, known in summary)]
    table = _metric_table(study, shown)
    table.add_column("labels moved", justify="right")
    for method in sorted(document["methods"], key=lambda method: _place(summary, method["key"], shown)):
        key = method["key"]
        if method["status"] == "failed":
            table.add_row(f"[red]{escape(key)}[/]", *["failed"] * len(shown), "")
            continue
        cells = [_cell(summary[key, metric], verdicts.get((key, metric))) for metric in shown]
        name = f"[bold]{escape(key)} *[/]" if key == chosen else escape(key)
        if method["same_as"]:
            name += f" [dim](is {escape(method['same_as'])} here)[/]"
        table.add_row(name, *cells, _moved(flips[key]))
    bins = {metric["bins"] for metric in document["metrics"] if metric["id"] in shown and metric.get("bins")}
    notes = ["* recommended, chosen by NLL on validation cases"]
    notes += [f"ECE is over {count} bins" for count in bins]
    if any(verdicts.get((method["key"], metric)) == "worse" for method in document["methods"] for metric in shown):
        notes.append("! worse than uncalibrated: the 95% interval of the paired difference does not hold 0")
    return table, [*notes, _costs(study)]


def _channel_table(study: Study) -> tuple[Table, list[str]]:
    """NLL and ECE of all methods in every channel of multi-label data."""
    channels = study.document["channels"]
    known = {row["metric"] for row in channels[0]["summary"] if row["region"] == "everything"}
    shown = [metric for metric in _SHOWN[:2] if metric in known]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title="Channels", title_justify="left")
    table.add_column("method", no_wrap=True)
    for channel in channels:
        for metric in shown:
            table.add_column(f"{escape(channel['name'])} {metric.upper()}", justify="right")
    rows = {
        (channel["name"], row["method"], row["metric"]): number(row["mean"])
        for channel in channels
        for row in channel["summary"]
        if row["region"] == "everything"
    }
    whole = {(row["method"], row["metric"]): row for row in study.document["summary"] if row["region"] == "everything"}
    for key in sorted({method for _, method, _ in rows}, key=lambda key: (_place(whole, key, shown), key)):
        values = [rows[channel["name"], key, metric] for channel in channels for metric in shown]
        cells = ["-" if math.isnan(value) else f"{value:.4f}" for value in values]
        table.add_row(f"[bold]{escape(key)} *[/]" if key == study.recommendation["method"] else escape(key), *cells)
    return table, [f"the table above has means over these {len(channels)} channels, by which methods are chosen"]


def _shift_table(study: Study, entry: Mapping[str, Any]) -> tuple[Table, list[str]]:
    """All methods on shifted cases, and where they lose to ``ts`` by NLL."""
    summary = {(row["method"], row["metric"]): row for row in entry["summary"] if row["region"] == "everything"}
    verdicts = _verdicts(entry["differences"], "uncalibrated")
    against = {
        row["method"]: row
        for row in entry["differences"]
        if row["baseline"] != "uncalibrated" and (row["metric"], row["region"]) == ("nll", "everything")
    }
    shown = [metric for metric in _SHOWN[:2] if any(metric == known for _, known in summary)]
    table = _metric_table(study, shown)
    table.title, table.title_justify = f"Shifted: {escape(entry['name'])}", "left"
    if against:
        table.add_column("NLL minus ts (95%)", justify="right")
    for key in sorted({key for key, _ in summary}, key=lambda key: _place(summary, key, shown)):
        cells = [_cell(summary[key, metric], verdicts.get((key, metric))) for metric in shown]
        if against:
            cells.append(_cell(against[key], _lost(against[key]), "+.4f") if key in against else "")
        table.add_row(f"[bold]{escape(key)} *[/]" if key == study.recommendation["method"] else escape(key), *cells)
    notes = ["! worse than uncalibrated; in the last column worse than ts, not recommended with --robust"]
    return table, notes if "worse" in [*verdicts.values(), *map(_lost, against.values())] else []


def _lost(row: Mapping[str, Any]) -> str | None:
    """The verdict on a difference to ``ts``, by the rule of ``--robust``: what nobody can see is no loss."""
    return None if number(row["mean"]) <= NEGLIGIBLE else row["verdict"]


def _metric_table(study: Study, shown: Sequence[str]) -> Table:
    titles = {metric["id"]: metric["name"] for metric in study.document["metrics"]}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("method", no_wrap=True)
    for metric in shown:
        table.add_column(f"{titles[metric]} (95%)", justify="right")
    return table


def _verdicts(rows: Sequence[Mapping[str, Any]], baseline: str) -> dict[tuple[str, str], str | None]:
    chosen = (row for row in rows if (row["baseline"], row["region"]) == (baseline, "everything"))
    return {(row["method"], row["metric"]): row["verdict"] for row in chosen}


def _place(summary: Mapping[tuple[str, str], Mapping[str, Any]], key: str, shown: Sequence[str]) -> float:
    """Lowest first by the first metric; what failed or is undefined comes last."""
    row = summary.get((key, shown[0])) if shown else None
    return math.inf if row is None else _defined(row["mean"], math.inf)


def _defined(value: Any, otherwise: float) -> float:
    found = number(value)
    return otherwise if math.isnan(found) else found


def _costs(study: Study) -> str:
    """Time and memory of every fit, all repeats together."""
    timings = study.document["timings"]
    fitted = {key: own for key, own in timings["per_method"].items() if own["fit_seconds"]}
    costs = [f"{key} {own['fit_seconds']:.1f} s, {own['peak_memory_mb']:,.0f} MB" for key, own in fitted.items()]
    whole = f"the whole study {timings['total_seconds']:.0f} s"
    return f"fitting: {'; '.join(costs)}; {whole}" if costs else whole


def _cell(row: Mapping[str, Any], verdict: str | None, form: str = ".4f") -> str:
    """A value with its interval; what is worse than it was is marked, and red where there are colours."""
    # Adding 0 makes a 0 of what rounds to -0.
    mean, low, high = ("-" if math.isnan(value) else f"{round(value, 4) + 0.0:{form}}" for value in _numbers(row))
    # In a narrow window the interval goes below, rather than breaking where it may.
    gap, between = " " if out.width >= _WIDE else "\n", "-" if form == ".4f" else " to "
    value = f"[red]{mean}![/]" if verdict == "worse" else mean
    return value if low == "-" else f"{value}{gap}{low}{between}{high}"


def _numbers(row: Mapping[str, Any]) -> list[float]:
    return [number(row[name]) for name in ("mean", "low", "high")]


def _moved(row: Mapping[str, Any]) -> str:
    changed = row["harmful"] + row["beneficial"] + row["neutral"]
    return f"{changed / row['compared']:.3%}" if changed else "none"
