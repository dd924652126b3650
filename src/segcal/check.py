"""Validate a dataset: read every file of every case, collect all problems, and describe what is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from segcal.cases.disk import DiskCase
from segcal.cases.layout import CaseFiles, Found
from segcal.cases.open import find_cases, missing_labels
from segcal.errors import DataError, SegcalError
from segcal.types import row_slices

T = TypeVar("T")


@dataclass
class CheckReport:
    """What a dataset holds, summed over all voxels of all cases that could be read; sums in float64, counts exact.

    ``confidence``, ``correct``, ``nll`` and ``entropy`` are sums over the ``valid`` voxels.
    """

    root: str
    layout: str
    kind: str
    pooling: str | None
    members: tuple[str, ...]
    class_names: tuple[str, ...] | None
    ignore_index: int
    cases: int
    channels: int | None = None
    multilabel: bool = False
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    spacings: Counter[tuple[float, ...] | None] = field(default_factory=Counter)
    label_counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    predicted_counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    voxels: int = 0
    ignored: int = 0
    masked: int = 0
    valid: int = 0
    confidence: float = 0.0
    correct: int = 0
    nll: float = 0.0
    entropy: float = 0.0
    impossible: int = 0
    problems: list[SegcalError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """Mean confidence minus accuracy: above 0 the network says more than it knows."""
        return (self.confidence - self.correct) / self.valid if self.valid else float("nan")

    @property
    def balance(self) -> float:
        """NLL minus entropy, per voxel (LTS Definitions 4-6): above 0 overconfident, below 0 underconfident."""
        return (self.nll - self.entropy) / self.valid if self.valid else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain JSON types."""
        per_voxel = max(self.valid, 1)
        return {
            "root": self.root,
            "layout": self.layout,
            "kind": self.kind,
            "pooling": self.pooling,
            "members": list(self.members),
            "cases": self.cases,
            "channels": self.channels,
            "multilabel": self.multilabel,
            "class_names": list(self.class_names) if self.class_names else None,
            "ignore_index": self.ignore_index,
            "shapes": [{"shape": list(shape), "cases": count} for shape, count in self.shapes.most_common()],
            "dtypes": dict(self.dtypes),
            "formats": dict(self.formats),
            "spacings": [{"spacing": s, "cases": count} for s, count in self.spacings.most_common()],
            "label_counts": self.label_counts.tolist(),
            "predicted_counts": self.predicted_counts.tolist(),
            "voxels": self.voxels,
            "ignored": self.ignored,
            "masked": self.masked,
            "valid": self.valid,
            "accuracy": self.correct / per_voxel if self.valid else None,
            "confidence": self.confidence / per_voxel if self.valid else None,
            "nll": self.nll / per_voxel if self.valid else None,
            "entropy": self.entropy / per_voxel if self.valid else None,
            "problems": [str(problem) for problem in self.problems],
            "notes": self.notes,
        }


def check(path: str | Path, *, progress: Callable[[str], None] = lambda case: None, **declared: Any) -> CheckReport:
    """Read everything in a dataset and report what it holds and all that is wrong with it.

    Problems of single cases are collected in ``problems``; only a folder that is no dataset at all raises. Takes the
    keywords of ``segcal.open_cases``. ``progress`` is called with the name of each case before it is read.
    """
    found = find_cases(Path(path), **declared)
    config = found.config
    report = CheckReport(
        root=str(path),
        layout=config.layout,
        kind=str(config.kind),
        pooling=(config.pooling or config.kind) if found.members else None,
        members=found.members,
        class_names=tuple(config.regions) if config.regions else config.class_names,
        ignore_index=int(config.ignore_index or 0),
        cases=len(found.cases),
        multilabel=bool(config.multilabel),
        problems=found.problems + missing_labels(found),
    )
    for files in found.cases:
        progress(files.id)
        _check_case(files, found, report)
    _add_notes(report)
    return report


def _check_case(files: CaseFiles, found: Found, report: CheckReport) -> None:
    try:
        source = DiskCase(files, replace(found.config, classes=report.channels or found.config.classes))
    except SegcalError as error:
        report.problems.append(error)
        return
    stored = source.members[0]
    report.channels = report.channels or stored.shape[0]
    report.shapes[source.spatial] += 1
    report.dtypes[str(stored.file.dtype)] += 1
    report.formats[source.suffix] += 1
    report.spacings[source.spacing] += 1
    if not len(report.label_counts):
        report.label_counts = torch.zeros(source.num_classes, dtype=torch.int64)
        report.predicted_counts = torch.zeros(source.num_classes, dtype=torch.int64)
    failed: set[str] = set()

    def attempt(read: Callable[[slice], T], rows: slice) -> T | None:
        """Read, noting the first problem of each kind of file."""
        name = read.__name__
        if name in failed or (name == "labels" and files.label is None):
            return None
        try:
            return read(rows)
        except SegcalError as error:
            failed.add(name)
            report.problems.append(error)
            return None

    agreement = _Agreement(source)
    for rows in row_slices((source.batch, source.num_classes, *source.spatial)):
        logits, labels = attempt(source.logits, rows), attempt(source.labels, rows)
        mask = attempt(source.mask, rows)
        image = attempt(source.image, rows)
        if image is not None and not bool(torch.isfinite(image).all()):
            failed.add("image")
            report.problems.append(DataError("NaN or infinite values", case=source.id, where="image"))
        if logits is not None and labels is not None:
            prediction = _add_voxels(report, logits, labels, mask)
            agreement.add(rows, prediction, labels)
    if note := agreement.note():
        report.notes.append(note)


def _add_voxels(report: CheckReport, logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    """Add the sums over one chunk; returns the prediction."""
    ignored = labels == report.ignore_index
    masked = torch.zeros_like(ignored) if mask is None else ~mask & ~ignored
    valid = ~(ignored | masked)
    log_probs = torch.log_softmax(logits, 1)
    best, prediction = log_probs.max(1)
    truth = torch.where(valid, labels, 0)
    log_truth = log_probs.gather(1, truth[:, None])[:, 0]
    possible = valid & torch.isfinite(log_truth)
    # p log p -> 0 as p -> 0; NaN would come from 0 * -inf.
    entropy = -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(1)
    report.voxels += labels.numel()
    report.ignored += int(ignored.sum())
    report.masked += int(masked.sum())
    report.valid += int(valid.sum())
    report.impossible += int((valid & ~possible).sum())
    report.confidence += float(best.exp()[valid].sum(dtype=torch.float64))
    report.correct += int((prediction == labels)[valid].sum())
    report.nll -= float(log_truth[possible].sum(dtype=torch.float64))
    report.entropy += float(entropy[valid].sum(dtype=torch.float64))
    report.label_counts += torch.bincount(labels[valid], minlength=logits.shape[1])
    report.predicted_counts += torch.bincount(prediction[valid], minlength=logits.shape[1])
    if report.kind == "logits" and not report.multilabel and not report.notes:
        sums_to_one = bool((logits.min() >= 0) & ((logits.sum(1) - 1).abs().max() < 1e-3))
        if sums_to_one:
            report.notes.append(
                "declared as logits, but all values are in [0, 1] and sum to 1: these look like probabilities (probs/)"
            )
    return prediction


class _Agreement:
    """Whether labels fit the prediction better transposed: a shape that reads the same backwards cannot tell."""

    def __init__(self, source: DiskCase) -> None:
        self.id = source.id
        symmetric = source.spatial == source.spatial[::-1] and len(source.spatial) > 1
        self.maps = [torch.zeros(source.spatial, dtype=torch.int16) for _ in range(2)] if symmetric else None

    def add(self, rows: slice, prediction: Tensor, labels: Tensor) -> None:
        if self.maps:
            for whole, part in zip(self.maps, (prediction, labels), strict=True):
                whole[rows] = part[0].to(torch.int16)

    def note(self) -> str | None:
        if not self.maps:
            return None
        prediction, labels = self.maps
        foreground = labels > 0
        flipped = labels.permute(*reversed(range(labels.ndim)))
        straight = int((prediction == labels)[foreground].sum())
        turned = int((prediction == flipped)[flipped > 0].sum())
        if turned <= 1.5 * straight + 0.1 * int(foreground.sum()):
            return None
        return f"case '{self.id}': the labels fit the scores better transposed: wrong axis order? (axes = 'xyz')"


def _add_notes(report: CheckReport) -> None:
    if report.valid and not report.multilabel:
        absent = [_name(report, k) for k, count in enumerate(report.label_counts.tolist()) if count == 0]
        if absent:
            report.notes.append(f"never in the labels: {', '.join(absent)}")
    if report.impossible:
        report.notes.append(
            f"{report.impossible} voxels carry a label whose score is -inf: an infinite NLL, left out of the mean"
        )
    if report.cases and not report.valid and not report.problems:
        report.notes.append("no valid voxel: everything is ignored or masked")
    if any(len(shape) == 3 for shape in report.shapes) and None in report.spacings:
        report.notes.append("volumes without spacing: distances will be in voxels (set spacing in segcal.toml)")


def _name(report: CheckReport, index: int) -> str:
    return f"{index} ({report.class_names[index]})" if report.class_names else str(index)
