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
    if sum(map(_size, kept)) < sum(map(_size, cases)):
        remarks.append("Some slices or cases are left out of the pictures, to keep this page small.")
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
    kept = cases
    for slices in range(max((len(case["slices"]) for case in cases), default=0), 0, -1):
        kept = [{**case, "slices": _evenly(case["slices"], slices)} for case in cases]
        if sum(map(_size, kept)) <= most_bytes:
            return kept
    while kept and sum(map(_size, kept)) > most_bytes:
        kept.pop()
    return kept


def _evenly(items: list[Any], count: int) -> list[Any]:
    """At most ``count`` items, from the middle of equal parts."""
    if len(items) <= count:
        return items
    return [items[int((i + 0.5) * len(items) / count)] for i in range(count)]
