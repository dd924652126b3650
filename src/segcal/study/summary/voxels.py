"""Counts of voxels: changed labels, reliability, and calibration by distance to the boundary.

A case that several repeats tested is counted in one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from segcal.regions import BANDS
from segcal.study.settings import FLIPS
from segcal.study.summary.table import mean
from segcal.study.work.run import Repeats


def flips(repeats: Repeats) -> list[dict[str, Any]]:
    """Labels that calibration changed in the test cases of all repeats."""
    rows = []
    for method in repeats[0]:
        counts = dict.fromkeys(("compared", *FLIPS), 0)
        for found in repeats:
            for kind, part in itertools.product(FLIPS, found[method].parts):
                changed, compared = part.counted(f"flip[kind={kind}]")
                counts[kind] += round(changed)
                counts["compared"] += compared if kind == FLIPS[0] else 0
        rows.append({"method": method, **counts})
    return rows


def reliability(
    repeats: Repeats, regions: Sequence[str], *, classes: bool = True, bands: bool = True
) -> list[dict[str, Any]]:
    """Bins of the top label in every region, and of each predicted class in the regions asked for.

    For multi-label data: bins of the top label in each channel.
    """
    if names := channel_names(repeats):
        per_channel = (
            (name, reliability(of_channel(repeats, name), regions, classes=False, bands=bands)) for name in names
        )
        return [{**row, "channel": name} for name, own in per_channel for row in own]
    rows: list[dict[str, Any]] = []
    for method, first in repeats[0].items():
        for region in first.reliability:
            if region not in regions and not (bands and region in BANDS):
                continue
            row = {"method": method, "region": region, "channel": ""}
            found = [own[method].reliability[region] for own in repeats]
            rows.append({**row, "class": None, **_added([own["top"] for own in found])})
            for k in range(len(found[0]["classes"]) if classes and region in regions else 0):
                bins = _added([own["classes"][k] for own in found])
                if any(bins["count"]):
                    rows.append({**row, "class": k, **bins})
    return rows


def bands(repeats: Repeats, unit: str) -> list[dict[str, Any]]:
    """Calibration by distance to the nearest label boundary, all test cases together.

    For multi-label data: means over the channels.
    """
    if names := channel_names(repeats):
        per_channel = [bands(of_channel(repeats, name), unit) for name in names]
        return [_mean_band(own) for own in zip(*per_channel, strict=True)]
    rows = []
    for method, first in repeats[0].items():
        for band in (band for band in BANDS if band in first.reliability):
            low, high = band.removeprefix("band-").split("-")
            bins = _added([found[method].reliability[band]["top"] for found in repeats])
            count, confidence, correct = (np.array(bins[name]) for name in ("count", "confidence", "correct"))
            total = int(count.sum())
            sums = {
                "ece": float(np.abs(confidence - correct).sum()),
                "nll": math.fsum(found[method].counted("nll", band)[0] for found in repeats),
                "confidence": float(confidence.sum()),
                "accuracy": float(correct.sum()),
            }
            rows.append(
                {
                    "method": method,
                    "band": band,
                    "low": float(low),
                    "high": None if high == "inf" else float(high),
                    "unit": unit,
                    "count": total,
                    **{name: value / total if total else math.nan for name, value in sums.items()},
                }
            )
    return rows


def _mean_band(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = {name: mean(row[name] for row in rows) for name in ("ece", "nll", "confidence", "accuracy")}
    return {**rows[0], "count": sum(row["count"] for row in rows), **means}


def channel_names(repeats: Repeats) -> Sequence[str]:
    """The channels of multi-label data; none for other data."""
    return next(iter(repeats[0].values())).channels


def of_channel(repeats: Repeats, name: str) -> Repeats:
    """The evaluations of one channel."""
    return [{method: own.by_channel[name] for method, own in found.items()} for found in repeats]


def _added(bins: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    sums = {name: np.sum([one[name] for one in bins], axis=0).tolist() for name in ("count", "confidence", "correct")}
    return {"bins": len(sums["count"]), **sums}
