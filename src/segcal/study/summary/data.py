"""Facts about the data: the voxels of each class, warnings about them, and what the report says of the dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from segcal.cases import CaseSet
from segcal.cases.caseset import Split
from segcal.errors import SegcalError
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
        try:
            for rows in row_slices(case.shape):
                labels, mask = case.rows("labels", rows), case.rows("mask", rows)
                valid = labels != case.ignore_index
                valid = valid if mask is None else valid & mask
                if cases.channel_names is None:
                    total += torch.bincount(labels[valid], minlength=cases.num_classes)
                else:
                    total += (valid & (labels == 1)).flatten(1).sum(1)
        except SegcalError as error:
            raise error.at(case=case.id) from None
        counts[ref.id] = total.tolist()
    return store.write("labels", key, counts)


def part_voxels(cases: CaseSet, part: CaseSet, counts: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Voxels of every class or channel, by its name, in a part of the cases."""
    return {name: sum(counts[i][k] for i in part.ids) for k, name in enumerate(labelled(cases))}


def absent_classes(cases: CaseSet, splits: Sequence[Split], counts: Mapping[str, Sequence[int]]) -> list[str]:
    """A warning for every class that occurs in the cases but not in a calibration part."""
    everywhere = part_voxels(cases, cases, counts)
    what = "Class" if cases.channel_names is None else "Channel"
    return [
        f"{what} '{name}' does not occur in the calibration part of repeat {repeat + 1}: nothing is learnt about it."
        for repeat, split in enumerate(splits)
        for name, count in part_voxels(cases, split.calibration, counts).items()
        if count == 0 < everywhere[name]
    ]


def missed_classes(uncalibrated: Evaluation, columns: Sequence[tuple[str, str]]) -> list[str]:
    """A warning for every surface metric that met classes without a distance."""
    missed = {metric: uncalibrated.missed(metric) for metric, _ in columns}
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
