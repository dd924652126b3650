"""``Study``: what ``compare`` found, as a document, tables and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from segcal.errors import InputError
from segcal.files.atomic import atomic_path
from segcal.files.plain import plain
from segcal.files.study import read_study
from segcal.statistics import EVERYTHING
from segcal.study.results.tables import csv_text, latex_text


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
        """Mean, 95% interval and pooled value of a metric for every method."""
        rows = [row for row in self.document["summary"] if (row["metric"], row["region"]) == (metric, region)]
        if not rows:
            known = sorted({f"{row['metric']} in {row['region']}" for row in self.document["summary"]})
            raise InputError(f"no summary of {metric!r} in {region!r}", expected=f"one of {', '.join(known)}")
        return rows

    def to_json(self, path: str | Path | None = None) -> str:
        """The document as JSON; also written to ``path`` if given."""
        text = json.dumps(plain(self.document), indent=1, allow_nan=False, ensure_ascii=False)
        if path is not None:
            _write(path, text)
        return text

    @classmethod
    def from_json(cls, path: str | Path) -> Study:
        """Read what ``to_json`` wrote."""
        return cls(read_study(Path(path)))

    def to_csv(self, path: str | Path) -> None:
        """The summary as CSV: a row for every method, region and metric."""
        _write(path, csv_text(self.document))

    def to_latex(self, path: str | Path) -> None:
        """The summary as LaTeX tables (package ``booktabs``), one for each region; the best of a column is bold."""
        _write(path, latex_text(self.document))


def _write(path: str | Path, text: str) -> None:
    with atomic_path(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")
