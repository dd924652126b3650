"""``Study``: what ``compare`` found, as a document, tables (CSV and LaTeX) and files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segcal.errors import InputError
from segcal.files.atomic import write_text
from segcal.files.plain import plain
from segcal.files.study import read_study
from segcal.statistics import EVERYTHING

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
_LATEX_TABLE = r"""\begin{table}
\centering
\caption{Mean over test cases, region %s.}
\begin{tabular}{l%s}
\toprule
%s
\midrule
%s
\bottomrule
\end{tabular}
\end{table}
"""
_ARROWS = {"lower": r" $\downarrow$", "higher": r" $\uparrow$", "zero": r" $\to 0$", "neither": ""}


@dataclass(frozen=True)
class Study:
    """The results of a study. ``pandas.DataFrame(study.document["summary"])`` is a data frame.

    Attributes:
        document: Everything, in plain dictionaries, lists and numbers; None stands for NaN. ``docs/compare.md`` lists
            its tables.

    Examples:
        >>> from segcal.study import compare
        >>> from segcal.synthetic import Temperature, scenes
        >>> cases = scenes(6, size=(32, 40), plant=[Temperature(2.0)])
        >>> study = compare(cases, methods=("ts",), repeats=1)
        >>> study.recommendation["method"]
        'ts'
        >>> [row["method"] for row in study.summary("ece")]
        ['uncalibrated', 'ts']
    """

    document: Mapping[str, Any]

    @property
    def recommendation(self) -> Mapping[str, Any]:
        """What to deploy, in words and numbers."""
        found: Mapping[str, Any] = self.document["recommendation"]
        return found

    def summary(self, metric: str, region: str = EVERYTHING) -> list[dict[str, Any]]:
        """Mean and pooled value of a metric for every method, with their 95% intervals."""
        rows = [row for row in self.document["summary"] if (row["metric"], row["region"]) == (metric, region)]
        if not rows:
            known = sorted({f"{row['metric']} in {row['region']}" for row in self.document["summary"]})
            raise InputError(f"no summary of {metric!r} in {region!r}", expected=f"one of {', '.join(known)}")
        return rows

    def to_json(self, path: str | Path | None = None) -> str:
        """The document as JSON; also written to ``path`` if given."""
        text = json.dumps(plain(self.document), indent=1, allow_nan=False, ensure_ascii=False)
        if path is not None:
            write_text(path, text)
        return text

    @classmethod
    def from_json(cls, path: str | Path) -> Study:
        """Read what ``to_json`` wrote."""
        return cls(read_study(Path(path)))

    def to_csv(self, path: str | Path) -> None:
        """The summary as CSV: a row for every method, region and metric."""
        write_text(path, csv_text(self.document))

    def to_latex(self, path: str | Path) -> None:
        """The summary as LaTeX tables (package ``booktabs``), one for each region; the best of a column is bold."""
        write_text(path, latex_text(self.document))


def csv_text(document: Mapping[str, Any]) -> str:
    """Method, region, metric, mean, interval, number of cases, pooled value and its interval.

    For multi-label data also the channel; rows without one are means over the channels.
    """
    channels = document.get("channels") or ()
    columns = ["method", "region", "metric", "mean", "low", "high", "n", "pooled", "pooled_low", "pooled_high"]
    columns += ["channel"] if channels else []
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(document["summary"])
    writer.writerows({**row, "channel": channel["name"]} for channel in channels for row in channel["summary"])
    return text.getvalue()


def latex_text(document: Mapping[str, Any]) -> str:
    """A ``booktabs`` table for each region: means over cases, the best of each column in bold."""
    metrics = {metric["id"]: metric for metric in document["metrics"]}
    regions = dict.fromkeys(row["region"] for row in document["summary"])
    tables = [
        _table(region, [row for row in document["summary"] if row["region"] == region], metrics) for region in regions
    ]
    return "% needs \\usepackage{booktabs}\n" + "\n".join(tables)


def _table(region: str, rows: Sequence[Mapping[str, Any]], metrics: Mapping[str, Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(row["metric"] for row in rows))
    best = {metric: _best([row for row in rows if row["metric"] == metric], metrics[metric]) for metric in columns}
    lines: dict[str, list[str]] = {}
    for row in rows:
        text = _shown(row["mean"])
        cell = rf"\textbf{{{text}}}" if text == best[row["metric"]] else text
        lines.setdefault(escape_latex(row["method"]), []).append(cell)
    heads = [escape_latex(metrics[metric]["name"]) + _ARROWS[metrics[metric]["better"]] for metric in columns]
    head, *body = (" & ".join([name, *cells]) + r" \\" for name, cells in {"Method": heads, **lines}.items())
    return _LATEX_TABLE % (escape_latex(region), "r" * len(columns), head, "\n".join(body))


def _best(rows: Sequence[Mapping[str, Any]], metric: Mapping[str, Any]) -> str | None:
    """The best value as it is shown, so that all values shown alike are bold."""
    values = [row["mean"] for row in rows if isinstance(row["mean"], float)]
    if not values or metric["better"] == "neither":
        return None
    loss = {"lower": lambda value: value, "higher": lambda value: -value, "zero": abs}[metric["better"]]
    return _shown(min(values, key=loss))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "--" if value is None else str(value).replace("inf", r"$\infty$")


def escape_latex(text: str) -> str:
    """Text that LaTeX prints as it is.

    Examples:
        >>> escape_latex("50%_a")
        '50\\\\%\\\\_a'
    """
    return "".join(_LATEX.get(character, character) for character in text)
