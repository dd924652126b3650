"""Validate a dataset: read every file of every case, collect all problems, and describe what it holds."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segcal.cases import CaseSet, Source, cases_from
from segcal.cases.caseset import numbered_channels
from segcal.cases.disk import DiskCase
from segcal.cases.formats import open_array
from segcal.cases.layout import CaseFiles, Found
from segcal.cases.open import find_cases, missing_labels, wrong_names
from segcal.cases.oriented import SCORE_KEYS, missing_notes
from segcal.cases.splits import in_no_part
from segcal.errors import DataError, SegcalError, UnreachableError, left_for_later, listed
from segcal.files.plain import plain
from segcal.files.remote import as_path
from segcal.metrics import Measure, accuracy, confidence_balance, entropy, nll
from segcal.metrics.diagnosis import verdict, verdicts_in_words
from segcal.parallel.threads import torch_threads
from segcal.scores import sum_to_one
from segcal.statistics import VoxelStatistics
from segcal.types import Case, CaseSource, row_slices

_Metric = Callable[[VoxelStatistics], float]
# Voxels along each axis of the grid on which labels and prediction are compared with their transposes.
_AGREEMENT_SIZE = 64


@dataclass
class CheckReport:
    """What a dataset holds, over all voxels of all cases that could be read.

    In multi-label data every voxel counts once in each channel, and ``statistics`` has an entry for each channel.
    ``blank`` counts the valid voxels where every logit is exactly 0.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> report = check(scenes(2, size=(16, 20)))
        >>> report.cases, report.voxels, report.kind, report.problems
        (2, 640, 'logits', [])
    """

    root: str
    layout: str
    kind: str
    pooling: str | None
    members: tuple[str, ...]
    class_names: tuple[str, ...] | None
    ignore_index: int
    cases: int
    background: int | None = 0
    channels: int | None = None
    multilabel: bool = False
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    spacings: Counter[tuple[float, ...] | None] = field(default_factory=Counter)
    statistics: list[VoxelStatistics] = field(default_factory=list)
    voxels: int = 0
    ignored: int = 0
    masked: int = 0
    blank: int = 0
    like_probabilities: bool | None = None  # None until logits could be read
    problems: list[SegcalError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def valid(self) -> int:
        """Voxels that count."""
        return sum(own.count() for own in self.statistics)

    @property
    def label_counts(self) -> list[int]:
        """Valid voxels of each class or, in multi-label data, inside each channel."""
        return self._counts(1)

    @property
    def predicted_counts(self) -> list[int]:
        """Valid voxels by predicted class or, in multi-label data, predicted inside each channel."""
        return self._counts(0)

    def _counts(self, axis: int) -> list[int]:
        found: list[list[int]] = [own.total().confusion.sum(axis).tolist() for own in self.statistics]
        return [inside for _, inside in found] if self.multilabel else found[0] if found else []

    def mean(self, metric: _Metric) -> float:
        """A metric over all valid voxels, averaged over channels if there are any; NaN without valid voxels."""
        return float(Measure.mean(metric(own) for own in self.statistics))

    @property
    def channel_names(self) -> tuple[str, ...]:
        """The channels of multi-label data; empty for ordinary data."""
        if not self.multilabel:
            return ()
        return self.class_names or numbered_channels(len(self.statistics))

    @property
    def per_channel(self) -> list[dict[str, Any]]:
        """What each channel of multi-label data holds."""
        rows = zip(self.channel_names, self.statistics, self.label_counts, self.predicted_counts, strict=False)
        return [
            {
                **{"name": name, "valid": own.count(), "labels": labels, "predicted": predicted},
                **{id: float(metric(own)) for id, metric in GLANCE.items()},
                "verdict": verdict(confidence_balance(own)),
            }
            for name, own, labels, predicted in rows
        ]

    @property
    def verdict(self) -> str:
        """Over- or underconfident; for multi-label data, which channels are."""
        named = zip(self.channel_names or ("",), self.statistics, strict=False)
        verdicts = {name: verdict(confidence_balance(own)) for name, own in named}
        words = set(verdicts.values())
        return words.pop() if len(words) == 1 else f"mixed: {verdicts_in_words(verdicts)}"

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain JSON types; null stands for NaN, texts for infinities."""
        content = {
            **{name: getattr(self, name) for name in _PLAIN},
            "shapes": [{"shape": shape, "cases": count} for shape, count in self.shapes.most_common()],
            "spacings": [{"spacing": spacing, "cases": count} for spacing, count in self.spacings.most_common()],
            **{name: self.mean(metric) for name, metric in GLANCE.items()},
            "problems": [str(problem) for problem in self.problems],
            "notes": self.notes,
        }
        return dict(plain(content))


# The attributes that a report writes as they are.
_PLAIN = (
    *("root", "layout", "kind", "pooling", "members", "cases", "channels", "multilabel", "per_channel", "class_names"),
    *("ignore_index", "background", "dtypes", "formats", "label_counts", "predicted_counts"),
    *("voxels", "ignored", "masked", "valid"),
)


def _confidence(statistics: VoxelStatistics) -> Measure:
    return Measure.ratio(statistics.total().top_confidence.sum(), statistics.count())


#: The metrics of the report's overview.
GLANCE: dict[str, _Metric] = {"accuracy": accuracy, "confidence": _confidence, "nll": nll, "entropy": entropy}


def check(
    path: str | Path | Source, *, progress: Callable[[str], None] = lambda case: None, **declared: Any
) -> CheckReport:
    """Read all files of a dataset, or all batches, and report what they hold and everything that is wrong with them.

    Problems of single cases are collected in ``problems``; only a folder that is no dataset at all raises an error.
    Takes the keywords of ``segcal.open_cases`` or, for batches, of ``segcal.cases_from``.
    ``progress`` is called with the name of each case before it is read.

    Examples:
        >>> logits, labels = torch.zeros(1, 2, 4, 4), torch.ones(1, 4, 4, dtype=torch.int64)
        >>> report = check((logits, labels))
        >>> report.label_counts, report.blank
        ([0, 16], 16)
    """
    if not isinstance(path, str | os.PathLike):
        return _check_cases(cases_from(path, **declared), progress)
    found = find_cases(as_path(path), **declared)
    if found.config.classes is None:
        found = replace(found, config=replace(found.config, classes=_usual_channels(found)))
    config = found.config
    report = CheckReport(
        root=str(path),
        layout=config.layout,
        kind=str(config.kind),
        pooling=(config.pooling or config.kind) if found.members else None,
        members=found.members,
        class_names=config.names,
        ignore_index=int(config.ignore_index or 0),
        cases=len(found.cases),
        multilabel=bool(config.multilabel),
        problems=found.problems + missing_labels(found),
        notes=found.notes + missing_notes(found.cases),
    )
    with torch_threads(1):  # Short operations are faster on one thread.
        for files in found.cases:
            progress(files.id)
            _check_case(files, found, report)
    if report.channels and (problem := wrong_names(replace(config, classes=report.channels))):
        report.problems.append(problem)
        report.class_names = None
    _add_notes(report)
    if report.channels:
        try:
            report.background = config.background_class(report.channels)
        except SegcalError as error:
            report.problems.append(error)
    if config.splits:
        named = {name for names in config.splits.values() for name in names}
        report.notes += in_no_part([files.id for files in found.cases if files.id not in named])
    return report


def _usual_channels(found: Found) -> int | None:
    """The most common number of channels, so that a single odd case does not make all others look wrong."""
    counts: Counter[int] = Counter()
    for files in found.cases:
        with left_for_later():  # Reported when the case is read.
            counts[open_array(files.members[0], key=found.config.key, usual=SCORE_KEYS).shape[0]] += 1
    return counts.most_common(1)[0][0] if counts else None


def _check_cases(cases: CaseSet, progress: Callable[[str], None]) -> CheckReport:
    """The report of cases that are no files."""
    report = CheckReport(
        root="cases",
        layout="batches",
        kind="logits",
        pooling=None,
        members=(),
        class_names=cases.channel_names or cases.class_names,
        ignore_index=cases.ignore_index,
        cases=len(cases),
        background=cases.background,
        channels=len(cases.channel_names) if cases.channel_names else cases.num_classes,
        multilabel=cases.channel_names is not None,
        notes=list(cases.notes),
    )
    with torch_threads(1):
        for ref in cases.refs:
            progress(ref.id)
            attempt = _Attempts(ref.id, report)
            if (case := attempt("batch", ref.open)) is not None:
                _check_voxels(case, report, attempt)
    _add_notes(report)
    return report


class _Attempts:
    """Reads, and reports the first problem of each kind of file. Any exception is a problem of this case only."""

    def __init__(self, id: str, report: CheckReport) -> None:
        self.id, self.report = id, report
        self.failed: set[str] = set()

    def __call__(self, name: str, read: Callable[[], Any]) -> Any:
        if name in self.failed:
            return None
        try:
            return read()
        except UnreachableError:
            raise
        except SegcalError as error:
            self.report.problems.append(error)
        except Exception as error:
            problem = f"cannot be read ({type(error).__name__}: {error})"
            self.report.problems.append(DataError(problem, case=self.id, where=name))
        self.failed.add(name)
        return None


def _check_case(files: CaseFiles, found: Found, report: CheckReport) -> None:
    attempt = _Attempts(files.id, report)
    source = attempt("files", lambda: DiskCase(files, found.config))
    if source is None:
        return
    stored = source.members[0]
    report.channels = stored.shape[0]
    report.dtypes[str(stored.file.dtype)] += 1
    report.formats[source.suffix.lower()] += 1
    case = Case(source)
    if source.num_members and not source.sliceable:  # Otherwise every part would decode all members again.
        attempt("logits", lambda: case.logits)
    _check_voxels(case, report, attempt, labelled=files.label is not None)


def _check_voxels(case: Case, report: CheckReport, attempt: _Attempts, *, labelled: bool = True) -> None:
    source = case.source
    report.shapes[source.spatial] += 1
    report.spacings[source.spacing] += 1
    if not report.statistics:
        report.statistics = [VoxelStatistics(source.num_classes, (), classwise=False) for _ in range(source.batch)]
    agreement = _Agreement(source)
    for rows in row_slices((source.batch, source.num_classes, *source.spatial)):
        logits = attempt("logits", partial(case.rows, "logits", rows))
        labels = attempt("labels", partial(case.rows, "labels", rows)) if labelled else None
        mask = attempt("mask", partial(case.rows, "mask", rows))
        image = attempt("image", partial(source.image, rows))
        if image is not None and not bool(torch.isfinite(image).all()):
            attempt.failed.add("image")
            report.problems.append(DataError("NaN or infinite values", case=source.id, where="image"))
        if logits is not None and rows.start == 0:
            report.like_probabilities = report.like_probabilities is not False and sum_to_one(logits)
        if logits is not None and labels is not None:
            _add_voxels(report, logits, labels, mask)
            agreement.add(rows, logits, labels)
    if agreement.better_transposed():
        problem = "the labels fit the scores better transposed: wrong axis order? (axes = 'xyz')"
        report.notes.append(f"case '{source.id}': {problem}")


def _add_voxels(report: CheckReport, logits: Tensor, labels: Tensor, mask: Tensor | None) -> None:
    ignored = labels == report.ignore_index
    valid = ~ignored if mask is None else ~ignored & mask
    report.voxels += labels.numel()
    report.ignored += int(ignored.sum())
    report.masked += int((~valid & ~ignored).sum())
    for k, own in enumerate(report.statistics):
        part = slice(k, k + 1)
        own.update(logits[part], labels[part], ignore_index=None, mask=valid[part])
    if report.kind == "logits":
        blank = (logits[:, 0] == 0) & (logits[:, 1] == 0) & valid
        if bool(blank.any()):
            report.blank += int((blank & (logits == 0).all(1)).sum())


class _Agreement:
    """Whether the labels match the prediction better transposed, for shapes that are the same either way.

    Every ``step``-th voxel along every axis is compared: this grid is symmetric, too.
    """

    def __init__(self, source: CaseSource) -> None:
        self.symmetric = source.spatial == source.spatial[::-1] and len(source.spatial) > 1
        self.step = max(1, min(source.spatial) // _AGREEMENT_SIZE)
        self.parts: list[tuple[Tensor, Tensor]] = []

    def add(self, rows: slice, logits: Tensor, labels: Tensor) -> None:
        if self.symmetric:
            others = (slice(None, None, self.step),) * (labels.ndim - 2)
            grid = (slice(None), slice(-rows.start % self.step, None, self.step), *others)
            # A copy: a view would keep all labels in memory.
            self.parts.append((logits[0][grid].argmax(0), labels[:1][grid][0].clone()))

    def better_transposed(self) -> bool:
        """Whether they do; False if some rows could not be read."""
        if not self.parts:
            return False
        prediction, labels = (torch.cat(part) for part in zip(*self.parts, strict=True))
        flipped = labels.permute(*reversed(range(labels.ndim)))
        if flipped.shape != labels.shape:
            return False
        straight = int((prediction == labels)[labels > 0].sum())
        turned = int((prediction == flipped)[flipped > 0].sum())
        return turned > 1.5 * straight + 0.1 * int((labels > 0).sum())


def _add_notes(report: CheckReport) -> None:
    add = report.notes.append
    if report.kind == "logits" and not report.multilabel and report.shapes and report.like_probabilities:
        add("declared as logits, but the values are in [0, 1] and sum to 1: these look like probabilities (probs/)")
    if report.blank:
        why = "padding that should be masked, or an incomplete file?"
        add(f"every logit is exactly 0 at {report.blank:,} valid voxels: {why}")
    if report.valid:
        named = [f"{k} ({name})" for k, name in enumerate(report.class_names or ())]
        names = report.channel_names or named or map(str, range(len(report.label_counts)))
        absent = [name for name, count in zip(names, report.label_counts, strict=True) if count == 0]
        if absent:
            add(f"never in the labels: {listed(absent)}")
    if math.isinf(report.mean(nll)):
        add("some voxels have a label whose score is -inf: the NLL is infinite")
    if report.cases and not report.valid and not report.problems:
        add("no valid voxel: everything is ignored or masked")
    if any(len(shape) == 3 for shape in report.shapes) and None in report.spacings:
        add("volumes without spacing: distances will be in voxels (set spacing in segcal.toml)")
