"""What the page needs of a study, in few bytes: rounded numbers, packed values per case, pictures as text."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from segcal.files.plain import number
from segcal.inference import mean_over_repeats
from segcal.report.pictures import embed_pictures

# With the numbers of the charts, this keeps the page below 15 MB, which mail and phones still accept.
MOST_CASE_BYTES = 4_000_000

_UNDEFINED, _INFINITE, _LARGEST = 65535, 65534, 65533
_AS_THEY_ARE = (
    "about", "metrics", "methods", "splits", "fits", "summary", "differences", "ranks", "sum_rank", "mean_case_rank",
    "flips", "bands", "diagnosis", "recommendation", "warnings", "sensitivity", "timings",
    "channels",
)  # fmt: skip
_FILES = (
    ("results.json", "every number of this page"),
    ("tables.csv", "the summary as a table"),
    ("tables.tex", "the summary as a LaTeX table"),
    ("calibrator.safetensors", "the recommended calibrator, for segcal apply"),
)
# Parts that a study may lack, and what the page takes instead.
_DEFAULTS: dict[str, Any] = {
    **{name: [] for name in ("fits", "warnings", "channels")},
    **{name: {} for name in ("sum_rank", "sensitivity", "timings")},
}


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
    shift = study.get("shift") or []
    # The page shows shifted data beside the regions.
    shifted = [{**row, "region": f"shifted: {each['name']}"} for each in shift for row in each.get("reliability") or []]
    result = {name: study.get(name, _DEFAULTS.get(name)) for name in _AS_THEY_ARE}
    result.update(
        reliability=[_reliability(row, study["about"]["data"]) for row in (*study["reliability"], *shifted)],
        cases=cases,
        browser=browser,
        shift=[{name: each.get(name, []) for name in ("name", "summary", "differences")} for each in shift],
        files=[[name, what] for name, what in _FILES if (folder / name).is_file() and _belongs_to(study, name)],
        figures=figures,
        notes=[*notes, *remarks],
    )
    rounded: dict[str, Any] = _rounded(result)
    return rounded


def _belongs_to(study: Mapping[str, Any], name: str) -> bool:
    """Whether a file belongs to this study: a calibrator may be left over from an earlier study in the folder."""
    return not name.endswith(".safetensors") or study["recommendation"].get("file") == name


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
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    step = (high - low) / _LARGEST
    codes = np.full(values.shape, _UNDEFINED, "<u2")
    codes[np.isinf(values)] = _INFINITE
    known = np.isfinite(values)
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


def _rounded(value: Any) -> Any:
    """Six significant digits; null for NaN and a text for infinity."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return str(value) if math.isinf(value) else float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
