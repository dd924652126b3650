"""The main charts as files for a paper: PNG and SVG, in the style of ``segcal.plots``. Needs torch and matplotlib."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from segcal.files.plain import number
from segcal.plots import style
from segcal.plots.reliability import from_bins, reliability_diagram
from segcal.study.settings import UNCALIBRATED

_ACCENT = "#0D6E66"
_INTERVAL_METRICS = ("nll", "ece", "ba-ece", "brier")
_QUALITY = ("dsc", "miou", "accuracy")


def write_figures(study: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw every figure the study has numbers for. Returns their names."""
    drawn = list(_figures(study))
    for name, figure in drawn:
        for suffix in ("png", "svg"):
            style.save(figure, folder / f"{name}.{suffix}")
    return [name for name, _ in drawn]


def _figures(study: Mapping[str, Any]) -> Iterator[tuple[str, style.Figure]]:
    after = _after(study)
    regions = list(dict.fromkeys(row["region"] for row in study["summary"]))
    yield from _reliability(study, after, regions)
    if not regions:
        return
    region = "everything" if "everything" in regions else regions[0]
    rows = {(row["method"], row["metric"]): row for row in study["summary"] if row["region"] == region}
    names = {metric["id"]: metric["name"] for metric in study["metrics"]}
    shown = [metric for metric in _INTERVAL_METRICS if any(metric == found for _, found in rows)]
    if shown:
        yield "methods", _methods(study, rows, {metric: names.get(metric, metric) for metric in shown}, after)
    quality = next((metric for metric in _QUALITY if (UNCALIBRATED, metric) in rows), None)
    if quality and (UNCALIBRATED, "ece") in rows:
        yield "tradeoff", _tradeoff(rows, quality, names.get(quality, quality), after)
    if study["bands"]:
        yield "bands", _bands(study, after)


def _after(study: Mapping[str, Any]) -> str:
    working = [method["key"] for method in study["methods"] if method["status"] == "ok"]
    advice = study["recommendation"]
    wanted = (advice.get("shown"), advice.get("method"), advice.get("best"), working[-1])
    return next((key for key in wanted if key in working and key != UNCALIBRATED), UNCALIBRATED)


def _reliability(study: Mapping[str, Any], after: str, regions: Sequence[str]) -> Iterator[tuple[str, style.Figure]]:
    found = {
        (row["method"], row["region"], row.get("channel", "")): from_bins(row)
        for row in study["reliability"]
        if row["class"] is None and row["method"] in (UNCALIBRATED, after)
    }
    channels = study["about"]["data"].get("channel_names") or [""]
    for region, (index, channel) in itertools.product(regions, enumerate(channels)):
        own, before = found.get((after, region, channel)), found.get((UNCALIBRATED, region, channel))
        if own is not None and before is not None:
            title = ", ".join(part for part in (_names(study)[after], channel, region) if part)
            # Users name regions, and file names must stay inside the folder.
            safe = re.sub(r"[^\w-]+", "-", region) + (f"-channel-{index}" if channel else "")
            yield f"reliability-{safe}", reliability_diagram(own, before=before, title=title)


def _names(study: Mapping[str, Any]) -> dict[str, str]:
    return {method["key"]: method["name"] for method in study["methods"]}


def _colour(key: str, after: str) -> str:
    return _ACCENT if key == after else style.MUTED if key == UNCALIBRATED else style.INK


def _methods(
    study: Mapping[str, Any], rows: Mapping[tuple[str, str], Mapping[str, Any]], shown: Mapping[str, str], after: str
) -> style.Figure:
    """Dots with 95% intervals, one panel per metric, methods sorted by the first."""
    first = next(iter(shown))
    means = {method: number(row["mean"]) for (method, metric), row in rows.items() if metric == first}
    keys = sorted((key for key, mean in means.items() if not math.isnan(mean)), key=means.__getitem__)
    names = _names(study)
    canvas = style.canvas(None, 2.2 + 2.1 * len(shown), 0.9 + 0.26 * len(keys))
    grid = canvas.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for ax, (metric, name) in zip(grid, shown.items(), strict=True):
        for place, key in enumerate(keys):
            row, colour = rows.get((key, metric), {}), _colour(key, after)
            low, mean, high = (number(row.get(name)) for name in ("low", "mean", "high"))
            ax.plot([low, high], [place, place], color=colour, linewidth=1.4, zorder=2)
            ax.plot([mean], [place], "o", color=colour, markersize=4.5, zorder=3)
        baseline = number(rows.get((UNCALIBRATED, metric), {}).get("mean"))
        ax.axvline(baseline, color=style.FAINT, linewidth=1, linestyle="--", zorder=1)
        style.tidy(ax, title=name)
    grid[0].set_yticks(range(len(keys)), [style.shortened(names[key], 36) for key in keys])
    grid[0].invert_yaxis()
    return style.root(canvas)


def _tradeoff(rows: Mapping[tuple[str, str], Mapping[str, Any]], quality: str, name: str, after: str) -> style.Figure:
    keys = [key for key in dict.fromkeys(method for method, _ in rows) if {(key, "ece"), (key, quality)} <= rows.keys()]
    canvas = style.canvas(None, 5.6, 3.8)
    ax = canvas.subplots()
    for index, (key, colour) in enumerate(zip(keys, style.class_colours(len(keys)), strict=True)):
        x, y = (number(rows[key, metric]["mean"]) for metric in ("ece", quality))
        # Methods that keep every label are close together: names next to the marks would overlap.
        size = 8 if key == after else 5.5
        ax.plot([x], [y], "osD^v"[index % 5], color=colour, markersize=size, linestyle="none", label=key, zorder=3)
    ax.grid(color=style.IGNORED, linewidth=0.8, zorder=0)
    style.tidy(ax, xlabel="ECE (lower is better)", ylabel=name)
    canvas.legend(loc="outside right upper", **style.LEGEND)
    return style.root(canvas)


def _bands(study: Mapping[str, Any], after: str) -> style.Figure:
    bands = {row["band"]: row for row in study["bands"]}
    canvas = style.canvas(None, 5.0, 3.4)
    ax = canvas.subplots()
    for key in dict.fromkeys((UNCALIBRATED, after)):
        own = {row["band"]: number(row["ece"]) for row in study["bands"] if row["method"] == key}
        values = [own.get(band, math.nan) for band in bands]
        ax.plot(range(len(bands)), values, "o-", color=_colour(key, after), label=_names(study)[key], markersize=4.5)
    ends = [
        f"{row['low']:g}+" if row["high"] is None else f"{row['low']:g} to {row['high']:g}" for row in bands.values()
    ]
    ax.set_xticks(range(len(bands)), ends)
    ax.set_ylim(bottom=0)
    ax.legend(**style.LEGEND)
    unit = next(iter(bands.values()))["unit"]
    style.tidy(ax, xlabel=f"distance to the nearest boundary ({unit})", ylabel="ECE")
    return style.root(canvas)
