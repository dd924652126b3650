"""The page of a report: template, style sheet, scripts, and what they need of a study in few bytes, in one text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from segcal.files.plain import number, plain
from segcal.inference import mean_over_repeats

# The order matters: later scripts use what earlier ones define.
_SCRIPTS = (
    "dom", "format", "model", "charts", "lines", "headline", "methods", "matrix", "channels", "pooled", "reliability",
    "classes", "bands", "tradeoff", "paired", "browser", "diagnosis", "statistics", "robustness", "definitions", "main",
)  # fmt: skip

# Characters that could end the script element or start a comment in it. json itself escapes all that is not ASCII.
_UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}


# With the numbers of the charts, this keeps the page below 15 MB, which mail and phones still accept.
MOST_CASE_BYTES, MOST_PICTURE_BYTES = 4_000_000, 8_000_000

_PNG = b"\x89PNG\r\n\x1a\n"
_UNDEFINED, _INFINITE, _LARGEST = 65535, 65534, 65533
_AS_THEY_ARE = (
    "about", "metrics", "methods", "splits", "fits", "summary", "differences", "ranks", "sum_rank", "mean_case_rank",
    "flips", "bands", "diagnosis", "recommendation", "warnings", "sensitivity", "timings",
    "channels", "scores", "classes",
)  # fmt: skip
_FILES = (
    ("results.json", "every number of this page"),
    ("tables.csv", "the summary as a table"),
    ("tables.tex", "the summary as a LaTeX table"),
    ("calibrator.safetensors", "the recommended calibrator, for segcal apply"),
)
# Parts that a study may lack, and what the page takes instead.
_DEFAULTS: dict[str, Any] = {
    **{name: [] for name in ("fits", "warnings", "channels", "scores", "classes")},
    **{name: {} for name in ("sum_rank", "sensitivity", "timings")},
}


def page(data: Mapping[str, Any], *, title: str) -> str:
    """The whole HTML text. Nothing in ``data`` or ``title`` can become markup.

    Examples:
        >>> text = page({"case": "</script><b>"}, title="<i>")
        >>> "</script><b>" in text, "<title>&lt;i&gt;</title>" in text
        (False, True)
    """
    script = '(() => {\n"use strict";\n' + "\n".join(_asset(f"{name}.js") for name in _SCRIPTS) + "})();"
    style = f"\n{_asset('style.css')}\n"
    parts = {
        "title": escape(title.encode(errors="replace").decode()),
        # The browser enforces that the page loads nothing, sends nothing, and has only this script and this style.
        "policy": f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "style": style,
        "data": embedded(data),
        "script": script,
    }
    # A single pass, so that placeholders in the text of the study are not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def _source(text: str) -> str:
    """An inline script or style as a Content-Security-Policy names it: by its hash."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element.

    Examples:
        >>> embedded({"case": "</script>"})
        '{"case":"\\\\u003c/script\\\\u003e"}'
    """
    return json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_UNSAFE)


def _asset(name: str) -> str:
    return (resources.files("segcal.report") / "assets" / name).read_text(encoding="utf-8")


def payload(
    study: Mapping[str, Any], folder: Path, *, figures: Sequence[str] = (), notes: Sequence[str] = ()
) -> dict[str, Any]:
    """The study as the scripts of the page read it.

    Args:
        study: The document of ``read_study``.
        folder: Where the pictures of cases are.
        figures: Names of the figures that were drawn, without their endings.
        notes: Notes to show at the end of the page.
    """
    cases, left_out = pack_cases(study)
    browser, remarks = embed_pictures(study.get("browser") or [], folder)
    if left_out:
        remarks.append(
            f"The values per case of {left_out} combinations of metric and region are only in results.json, to keep "
            "this page small."
        )
    # A calibrator may be left over from an earlier study in the folder.
    left_over = {"calibrator.safetensors"} - {study["recommendation"].get("file")}
    shift = study.get("shift") or []
    # The page shows shifted data beside the regions.
    shifted = [{**row, "region": f"shifted: {each['name']}"} for each in shift for row in each.get("reliability") or []]
    result = {name: study.get(name, _DEFAULTS.get(name)) for name in _AS_THEY_ARE}
    result.update(
        reliability=[_reliability(row, study["about"]["data"]) for row in (*study["reliability"], *shifted)],
        cases=cases,
        browser=browser,
        shift=[{name: each.get(name, []) for name in ("name", "summary", "differences")} for each in shift],
        files=[[name, what] for name, what in _FILES if (folder / name).is_file() and name not in left_over],
        figures=figures,
        notes=[*notes, *remarks],
    )
    rounded: dict[str, Any] = plain(result, digits=6)
    return rounded


def pack_cases(study: Mapping[str, Any], *, most_bytes: int = MOST_CASE_BYTES) -> tuple[dict[str, Any], int]:
    """Values of every case (means over the repeats that tested it) as 16-bit codes, and how many blocks are left out.

    A block holds one metric in one region, methods x cases, little-endian: ``value = low + step * code``. 65535 is
    undefined and 65534 infinite. Beyond ``most_bytes``, the last regions are left out first.
    """
    methods = [method["key"] for method in study["methods"]]
    ids = list(dict.fromkeys(name for split in study["splits"] for name in split["test"]))
    place = {name: index for index, name in enumerate(ids)}
    tested = [[place[name] for name in split["test"]] for split in study["splits"]]
    regions = list(dict.fromkeys(entry["region"] for entry in study["cases"]))
    columns: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in sorted(study["cases"], key=lambda entry: regions.index(entry["region"])):
        columns.setdefault((entry["region"], entry["metric"]), []).append(entry)
    fitting = max(1, int(most_bytes // max(1, 8 * len(methods) * len(ids) / 3)))
    blocks = []
    for (region, metric), entries in list(columns.items())[:fitting]:
        values = np.full((len(tested), len(ids), len(methods)), np.nan)
        for entry in entries:
            repeat, method = entry["repeat"], methods.index(entry["method"])
            values[repeat, tested[repeat], method] = [number(value) for value in entry["values"]]
        blocks.append({"region": region, "metric": metric, **_codes(mean_over_repeats(values).T)})
    return {"methods": methods, "ids": ids, "blocks": blocks}, len(columns) - len(blocks)


def _codes(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
    known = np.isfinite(values)
    low, high = (float(values[known].min()), float(values[known].max())) if known.any() else (0.0, 0.0)
    step = (high - low) / _LARGEST
    codes = np.where(np.isinf(values), _INFINITE, _UNDEFINED).astype("<u2")
    codes[known] = np.rint((values[known] - low) / step) if step else 0
    return {"low": low, "step": step, "codes": base64.b64encode(codes.tobytes()).decode()}


def _reliability(row: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Means instead of sums, with few digits. A channel takes the place of a class."""
    label = data["channel_names"].index(row["channel"]) if row.get("channel") else row["class"]
    count = [int(value) for value in row["count"]]
    mean = {
        name: [None if not n else round(number(value) / n, 5) for value, n in zip(row[sums], count, strict=True)]
        for name, sums in (("confidence", "confidence"), ("accuracy", "correct"))
    }
    return {"method": row["method"], "region": row["region"], "class": label, "count": count, **mean}


def embed_pictures(
    browser: Sequence[Mapping[str, Any]], folder: Path, *, most_bytes: int = MOST_PICTURE_BYTES
) -> tuple[list[dict[str, Any]], list[str]]:
    """The browser's cases with their PNG files as base64, and remarks on what could not be shown.

    If all pictures exceed ``most_bytes``, every case keeps fewer slices, evenly spaced; then the last cases are left
    out. Only PNG files inside ``folder`` are read.
    """
    cases = []
    missing = 0
    for case in browser:
        slices = []
        for each in case["slices"]:
            read = [{"name": panel["name"], "picture": _picture(folder, panel["file"])} for panel in each["panels"]]
            panels = [panel for panel in read if panel["picture"] is not None]
            missing += len(read) - len(panels)
            if panels:
                slices.append({"index": each["index"], "panels": panels})
        about = {"channel": "", "title": None, **case, "numbers": case.get("numbers") or {}}
        cases.append({**{name: about[name] for name in ("case", "channel", "title", "numbers")}, "slices": slices})
    remarks = [f"{missing} pictures of cases are missing or are not PNG files."] if missing else []
    kept = _within(cases, most_bytes)
    if _size(kept) < _size(cases):
        remarks.append("Some slices or cases are left out of the pictures, to keep this page small.")
    return kept, remarks


def _picture(folder: Path, name: str) -> str | None:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        return None
    content = path.read_bytes()
    return base64.b64encode(content).decode() if content.startswith(_PNG) else None


def _size(cases: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(panel["picture"]) for case in cases for each in case["slices"] for panel in each["panels"])


def _within(cases: list[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    kept = cases
    for slices in range(max((len(case["slices"]) for case in cases), default=0), 0, -1):
        kept = [{**case, "slices": _evenly(case["slices"], slices)} for case in cases]
        if _size(kept) <= most_bytes:
            return kept
    while _size(kept) > most_bytes:
        kept.pop()
    return kept


def _evenly(items: list[Any], count: int) -> list[Any]:
    """At most ``count`` items, from the middle of equal parts."""
    count = min(count, len(items))
    return [items[int((i + 0.5) * len(items) / count)] for i in range(count)]
