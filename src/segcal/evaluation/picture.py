"""Reliability diagrams as text, for terminals. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

RIGHT, TOO_SURE, NOT_SURE, PERFECT = "█", "░", "▒", "·"
_MARKS = {RIGHT: "accuracy", TOO_SURE: "too sure", NOT_SURE: "not sure enough", PERFECT: "perfect"}
_LEGEND = "  ".join([*(f"{mark} {word}" for mark, word in _MARKS.items()), "below: voxels, log scale"])
_EIGHTHS = " ▁▂▃▄▅▆▇█"
# Characters of a bin and of what stands left of the axis. With one row a bin, the diagram looks square.
_CELL, _MARGIN = 2, 4


def reliability_picture(panels: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Reliability diagrams side by side, by title: ``count``, ``confidence`` and ``correct`` of each bin, as sums.

    Two diagrams of 15 bins take 74 columns.

    Examples:
        >>> print(reliability_picture({"two bins": {"count": [0, 8], "confidence": [0, 7.2], "correct": [0, 6]}}))
        two bins
        ECE 0.1500  right 75.0%  sure 90.0%
        accuracy
        1.0 ┤  ▄▄
        0.5 ┤··██
        0.0 ┼────
            0.0 confidence 1.0
               ██
        █ accuracy  ░ too sure  ▒ not sure enough  · perfect  below: voxels, log scale
    """
    drawn = [_panel(title, bins) for title, bins in panels.items()]
    widths = [max(map(len, lines)) for lines in drawn]
    rows = zip(*drawn, strict=True)
    texts = ["    ".join(line.ljust(width) for line, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(text.rstrip() for text in (*texts, _LEGEND))


def _panel(title: str, bins: Mapping[str, Sequence[float]]) -> list[str]:
    count = bins["count"]
    size, total = len(count), sum(count)
    accuracy = [right / n if n else None for right, n in zip(bins["correct"], count, strict=True)]
    gap = sum(abs(sure - right) for sure, right in zip(bins["confidence"], bins["correct"], strict=True))
    numbers = [value / total if total else math.nan for value in (gap, sum(bins["correct"]), sum(bins["confidence"]))]
    grid = [
        "".join(_CELL * _cell(accuracy[column], row, column, size) for column in range(size)) for row in range(size)
    ]
    ticks = {size - 1: "1.0 ┤", (size - 1) // 2: "0.5 ┤"}
    width = size * _CELL
    return [
        title,
        "ECE {:.4f}  right {:.1%}  sure {:.1%}".format(*numbers),
        "accuracy",
        *(ticks.get(row, "    │") + grid[row] for row in reversed(range(size))),
        "0.0 ┼" + width * "─",
        " " * _MARGIN + "0.0" + " confidence ".center(width - 5) + "1.0",
        " " * (_MARGIN + 1) + _histogram(count),
    ]


def _cell(accuracy: float | None, row: int, column: int, size: int) -> str:
    """What stands in a row of a bin. The mean confidence of a bin lies in the row of the same number."""
    if accuracy is None:
        return PERFECT if row == column else " "
    eighths = round(8 * min(1.0, max(0.0, accuracy * size - row)))
    if row > column:
        return NOT_SURE if eighths >= 4 else " "
    return _EIGHTHS[eighths] if eighths else TOO_SURE


def _histogram(count: Sequence[float]) -> str:
    """How many voxels each bin has, on a logarithmic scale: bins next to the last would not be seen otherwise."""
    most = math.log1p(max(count, default=0)) or 1.0
    return "".join(_CELL * _EIGHTHS[math.ceil(8 * math.log1p(n) / most)] for n in count)
