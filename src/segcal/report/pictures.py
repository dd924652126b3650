"""Pictures of cases as text in the page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_PICTURE_BYTES = 8_000_000

_PNG = b"\x89PNG\r\n\x1a\n"


def embed_pictures(
    browser: Sequence[Mapping[str, Any]], folder: Path, *, most_bytes: int = MOST_PICTURE_BYTES
) -> tuple[list[dict[str, Any]], list[str]]:
    """The browser's cases with their PNG files as base64, and remarks on what could not be shown.

    Where all would be more than ``most_bytes``, every case keeps fewer slices, evenly spaced; then the last cases go.
    Only PNG files inside ``folder`` are read.
    """
    cases = []
    missing = 0
    for case in browser:
        slices = []
        for each in case["slices"]:
            panels = []
            for panel in each["panels"]:
                code = _picture(folder, str(panel["file"]))
                missing += code is None
                if code is not None:
                    panels.append({"name": panel["name"], "picture": code})
            if panels:
                slices.append({"index": each["index"], "panels": panels})
        cases.append(
            {
                "case": case["case"],
                "channel": case.get("channel", ""),
                "title": case.get("title"),
                "numbers": case.get("numbers") or {},
                "slices": slices,
            }
        )
    remarks = [f"{missing} pictures of cases are not there or are no PNG files."] if missing else []
    kept = _within(cases, most_bytes)
    if sum(map(_size, kept)) < sum(map(_size, cases)):
        remarks.append("Some slices or cases are left out of the pictures, as this page would become too large.")
    return kept, remarks


def _picture(folder: Path, name: str) -> str | None:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        return None
    content = path.read_bytes()
    return base64.b64encode(content).decode() if content.startswith(_PNG) else None


def _size(case: Mapping[str, Any]) -> int:
    return sum(len(panel["picture"]) for each in case["slices"] for panel in each["panels"])


def _within(cases: list[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    for slices in range(max((len(case["slices"]) for case in cases), default=0), 0, -1):
        kept = [{**case, "slices": _evenly(case["slices"], slices)} for case in cases]
        if sum(map(_size, kept)) <= most_bytes:
            return kept
    kept = [{**case, "slices": _evenly(case["slices"], 1)} for case in cases]
    while kept and sum(map(_size, kept)) > most_bytes:
        kept.pop()
    return kept


def _evenly(items: list[Any], count: int) -> list[Any]:
    """At most ``count`` items, from the middle of equal parts."""
    if len(items) <= count:
        return items
    return [items[int((i + 0.5) * len(items) / count)] for i in range(count)]
