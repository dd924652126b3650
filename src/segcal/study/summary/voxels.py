"""Voxels and the data: voxels of each class, changed labels, reliability, calibration by distance to the boundary.

A case that several repeats tested is counted in one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from segcal.cases import CaseSet
from segcal.cases.caseset import Split
from segcal.errors import listed, naming
from segcal.regions import BANDS
from segcal.regions.boundary import valid_voxels
from segcal.study.settings import FLIPS
from segcal.study.summary.table import mean
from segcal.study.work.run import Repeats
from segcal.study.work.store import Store, class_key, content_key
from segcal.study.work.tasks import Evaluation
from segcal.types import row_slices


def label_counts(cases: CaseSet, known: Mapping[str, str], store: Store) -> dict[str, list[int]]:
    """Voxels of every class (or inside every channel) in every case, without ignored and masked-out voxels."""
    key = content_key(valid=[(i, known[i]) for i in cases.ids], classes=class_key(cases))
    kept = store.read("labels", key)
    if kept is not None:
        return kept
    counts = {}
    for ref in cases.refs:
        case = ref.open()
        total = torch.zeros(len(labelled(cases)), dtype=torch.int64)
        with naming(case=case.id):
            for rows in row_slices(case.shape):
                labels, mask = case.rows("labels", rows), case.rows("mask", rows)
                valid = valid_voxels(labels, ignore_index=case.ignore_index, mask=mask)
                if cases.channel_names is None:
                    found = torch.bincount(labels[valid], minlength=cases.num_classes)
                else:
                    found = (valid & (labels == 1)).flatten(1).sum(1)
                total += found.cpu()
        counts[ref.id] = total.tolist()
    return store.write("labels", key, counts)


def part_voxels(cases: CaseSet, part: CaseSet, counts: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Voxels of every class or channel, by its name, in a part of the cases."""
    return {name: sum(counts[i][k] for i in part.ids) for k, name in enumerate(labelled(cases))}


def absent_classes(cases: CaseSet, splits: Sequence[Split], counts: Mapping[str, Sequence[int]]) -> list[str]:
    """A warning for every calibration part that lacks classes which occur in the cases."""
    everywhere = part_voxels(cases, cases, counts)
    what = ("Class", "Classes") if cases.channel_names is None else ("Channel", "Channels")
    found = []
    for repeat, split in enumerate(splits):
        own = part_voxels(cases, split.calibration, counts)
        absent = [f"'{name}'" for name, count in own.items() if count == 0 < everywhere[name]]
        some, do, them = (what[1], "do", "them") if len(absent) > 1 else (what[0], "does", "it")
        part = f"the calibration part of repeat {repeat + 1}"
        if absent:
            found.append(f"{some} {listed(absent)} {do} not occur in {part}: nothing is learnt about {them}.")
    return found


def missed_classes(uncalibrated: Evaluation, columns: Sequence[tuple[str, str]]) -> list[str]:
    """A warning for every surface metric that met classes without a distance."""
    rows = [row for row in uncalibrated.rows if not row.channel]
    missed = {metric: sum(row.missed for row in rows if row.metric == metric) for metric, _ in columns}
    return [
        f"{metric}: {count} missed class{'es' * (count > 1)} (only in the prediction or only in the labels of a test "
        "case) without a distance. The option 'absent' says how that counts (by default, as the image diagonal)."
        for metric, count in missed.items()
        if count
    ]


def class_names(cases: CaseSet) -> list[str]:
    """The names of the classes, or their numbers."""
    return list(cases.class_names or map(str, range(cases.num_classes)))


def labelled(cases: CaseSet) -> list[str]:
    """What voxels can be labelled as: classes, or channels of multi-label data."""
    return class_names(cases) if cases.channel_names is None else list(cases.channel_names)


def about_data(cases: CaseSet, name: str) -> dict[str, Any]:
    """What the results say about the data; opens the first case."""
    first = cases[0]
    return {
        "name": name,
        "cases": len(cases),
        "num_classes": cases.num_classes,
        "class_names": class_names(cases),
        "channel_names": None if cases.channel_names is None else list(cases.channel_names),
        "ignore_index": cases.ignore_index,
        "background": cases.background,
        "spatial_rank": len(first.shape) - 2,
        "members": cases.num_members,
        "groups": cases.about_groups(),
        "has_images": first.image is not None,
    }


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
    if channels := by_channel(repeats):
        per_channel = {name: reliability(own, regions, classes=False, bands=bands) for name, own in channels.items()}
        return [{**row, "channel": name} for name, own in per_channel.items() for row in own]
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


def classes(repeats: Repeats) -> list[dict[str, Any]]:
    """The table of classes, or of channels, of every method: means over repeats, each pooled over its test cases."""
    rows = []
    for method, first in repeats[0].items():
        for k, row in enumerate(first.classes):
            own = [found[method].classes[k] for found in repeats]
            means = {name: mean(getattr(one, name) for one in own) for name in ("ece", "dice", "balance")}
            counts = {name: round(mean(getattr(one, name) for one in own)) for name in ("voxels", "predicted")}
            rows.append({"method": method, "class": row.name, **counts, **means})
    return rows


def bands(repeats: Repeats, unit: str) -> list[dict[str, Any]]:
    """Calibration by distance to the nearest label boundary, all test cases together.

    For multi-label data: means over the channels.
    """
    if channels := by_channel(repeats):
        return [_mean_band(own) for own in zip(*(bands(own, unit) for own in channels.values()), strict=True)]
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
            distance = {"low": float(low), "high": None if high == "inf" else float(high), "unit": unit}
            means = {name: value / total if total else math.nan for name, value in sums.items()}
            rows.append({"method": method, "band": band, **distance, "count": total, **means})
    return rows


def _mean_band(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = {name: mean(row[name] for row in rows) for name in ("ece", "nll", "confidence", "accuracy")}
    return {**rows[0], "count": sum(row["count"] for row in rows), **means}


def by_channel(repeats: Repeats) -> dict[str, Repeats]:
    """The evaluations of each channel of multi-label data; empty for other data."""
    names = next(iter(repeats[0].values())).channels
    return {name: [{key: own.by_channel[name] for key, own in found.items()} for found in repeats] for name in names}


def _added(bins: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    sums = {name: np.sum([one[name] for one in bins], axis=0).tolist() for name in ("count", "confidence", "correct")}
    return {"bins": len(sums["count"]), **sums}
