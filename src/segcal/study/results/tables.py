"""The summary of a study as CSV and as LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
_ARROWS = {"lower": r" $\downarrow$", "higher": r" $\uparrow$", "zero": r" $\to 0$", "neither": ""}


def csv_text(document: Mapping[str, Any]) -> str:
    """Method, region, metric, mean, interval, number of cases and pooled value.

    Of multi-label data also the channel; rows without one are means over channels.
    """
    text = io.StringIO(newline="")
    columns = ["method", "region", "metric", "mean", "low", "high", "n", "pooled"]
    channels = document.get("channels") or ()
    writer = csv.DictWriter(
        text, [*columns, "channel"] if channels else columns, extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(document["summary"])
    writer.writerows({**row, "channel": channel["name"]} for channel in channels for row in channel["summary"])
    return text.getvalue()


def latex_text(document: Mapping[str, Any]) -> str:
    """A ``booktabs`` table for each region; mean over cases, the best of each column in bold."""
    metrics = {metric["id"]: metric for metric in document["metrics"]}
    regions = dict.fromkeys(row["region"] for row in document["summary"])
    tables = [
        _table(region, [row for row in document["summary"] if row["region"] == region], metrics) for region in regions
    ]
    return "% needs \\usepackage{booktabs}\n" + "\n".join(tables)


def _table(region: str, rows: Sequence[Mapping[str, Any]], metrics: Mapping[str, Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(row["metric"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    shown = {(row["method"], row["metric"]): _shown(row["mean"]) for row in rows}
    best = {metric: _best([row for row in rows if row["metric"] == metric], metrics[metric]) for metric in columns}
    heads = [escape_latex(metrics[metric]["name"]) + _ARROWS[metrics[metric]["better"]] for metric in columns]
    lines = [" & ".join(["Method", *heads]) + r" \\"]
    for method in methods:
        cells = [
            rf"\textbf{{{shown[method, metric]}}}" if shown[method, metric] == best[metric] else shown[method, metric]
            for metric in columns
        ]
        lines.append(" & ".join([escape_latex(method), *cells]) + r" \\")
    head, *body = lines
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{Mean over test cases, region {escape_latex(region)}.}}",
            rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _best(rows: Sequence[Mapping[str, Any]], metric: Mapping[str, Any]) -> str | None:
    """The best value as it is shown, so that all that are shown alike are bold."""
    sign = {"lower": 1, "higher": -1, "zero": 1, "neither": 0}[metric["better"]]
    values = [row["mean"] for row in rows if isinstance(row["mean"], float)]
    if not values or not sign:
        return None
    return _shown(min(values, key=abs) if metric["better"] == "zero" else sign * min(sign * value for value in values))


def _shown(value: Any) -> str:
    return (
        "--"
        if value is None
        else f"{value:.4f}"
        if isinstance(value, float)
        else str(value).replace("inf", r"$\infty$")
    )


def escape_latex(text: str) -> str:
    """Text that LaTeX prints as it is.

    Examples:
        >>> escape_latex("50%_a")
        '50\\\\%\\\\_a'
    """
    return "".join(_LATEX.get(character, character) for character in text)
