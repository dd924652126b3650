"""Write any dataset in the plain convention: as npy, the fastest format, or in any other."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from segcal.cases.caseset import CaseSet
from segcal.cases.config import CONFIG_NAME, background_line
from segcal.cases.formats import SCORE_FORMATS
from segcal.cases.output import OutputFolder
from segcal.cases.toml import toml_text, toml_texts
from segcal.errors import DataError, InputError, check_name
from segcal.files.atomic import file_name
from segcal.scores import round_keeping_argmax
from segcal.types import Case, row_slices

StoredType = Literal["float16", "float32"]
# What the journal of the folder says that it holds; ``resume`` continues only such a folder.
DATASET = "a dataset"


@dataclass
class PackReport:
    """What was written, and the mean negative log-likelihood over all valid voxels as read and as stored."""

    cases: int = 0
    skipped: int = 0
    bytes: int = 0
    seconds: float = 0.0
    voxels: int = 0
    nll_input: float = 0.0
    nll_stored: float = 0.0


def write_dataset(
    cases: CaseSet,
    folder: str | Path,
    *,
    dtype: StoredType = "float32",
    format: str = "npy",
    resume: bool = False,
    progress: Callable[[str], None] = lambda case: None,
) -> PackReport:
    """Write cases as ``logits/``, ``labels/`` (``images/``, ``masks/``, ``posteriors/``) and ``segcal.toml``.

    Members are pooled, probabilities become logits, volumes are streamed. Every file is atomic and read back after
    writing. float16 halves the size and keeps every argmax (``segcal.scores.round_keeping_argmax``).

    Examples:
        >>> import tempfile, segcal
        >>> report = write_dataset(segcal.synthetic.scenes(2, size=(32, 40)), tempfile.mkdtemp(), dtype="float16")
        >>> report.cases, abs(report.nll_stored - report.nll_input) < 1e-4
        (2, True)
    """
    check_name("format", format, SCORE_FORMATS)
    check_name("dtype", dtype, get_args(StoredType))
    if not len(cases):
        raise InputError("no cases to write", where="cases", expected="at least one")
    started = time.perf_counter()
    spacing: dict[str, tuple[float, ...]] = {}
    report = PackReport(cases=len(cases))
    label_type = _LabelType.of(cases, format)
    settings = {"dtype": dtype, "format": format, "classes": cases.num_classes, "ignore_index": cases.ignore_index}
    with OutputFolder(Path(folder), cases, DATASET, settings=settings, resume=resume) as output:
        for case in cases:
            progress(case.id)
            if case.spacing:
                spacing[case.id] = case.spacing
            name = f"{file_name(case.id)}.{format}"
            if _finished(output, case, name):
                report.skipped += 1
                continue
            output.require_one(case)
            labels = label_type.stored(case, cases.num_classes)
            _write_extras(output, case, name)
            _write_scores(output, case, name, dtype, report, multilabel=output.multilabel)
            array = (labels if output.multilabel else labels[0]).numpy()
            axis = int(output.multilabel)
            _write_whole(output, f"labels/{name}", array, label_type.dtype, case, "labels", row_axis=axis)
        output.text(CONFIG_NAME, _describe(cases, spacing, label_type.ignore_index))
    report.bytes = sum(path.stat().st_size for path in output.folder.rglob("*") if path.is_file())
    report.seconds = time.perf_counter() - started
    for name in ("nll_input", "nll_stored"):  # sums until now
        setattr(report, name, getattr(report, name) / report.voxels if report.voxels else math.nan)
    return report


def _finished(output: OutputFolder, case: Case, name: str) -> bool:
    """Whether all files of a case are as they were written. The journal knows which optional files there are."""
    needed = [f"{folder}/{name}" for folder in ("logits", "labels")]
    extras = [f"{folder}/{name}" for folder in ("images", "masks", "posteriors")]
    return all(output.finished(file, case) for file in (*needed, *filter(output.recorded, extras)))


def _write_scores(
    output: OutputFolder, case: Case, name: str, dtype: StoredType, report: PackReport, *, multilabel: bool
) -> None:
    batch, classes, *spatial = case.shape
    shape = (batch if multilabel else classes, *spatial)
    with output.array(f"logits/{name}", shape, dtype, case=case, row_axis=1, key="logits") as sink:
        for chunk in case.chunks():
            logits = chunk.logits
            if multilabel:  # Each two-class problem is stored as one sigmoid logit.
                difference = logits[:, 1] - logits[:, 0]
                logits = torch.stack((torch.zeros_like(difference), difference), 1)
            stored = round_keeping_argmax(logits, getattr(torch, dtype))
            valid = chunk.valid
            report.voxels += int(valid.sum())
            report.nll_input += _nll(logits, chunk.labels, valid)
            report.nll_stored += _nll(stored, chunk.labels, valid)
            block = stored[:, 1] if multilabel else stored[0]
            sink.write(chunk.rows, block.numpy())


def _nll(logits: Tensor, labels: Tensor, valid: Tensor) -> float:
    """Sum of the negative log-likelihood over the valid voxels."""
    log_probs = torch.log_softmax(logits.float(), 1)
    picked = log_probs.gather(1, torch.where(valid, labels, 0)[:, None])[:, 0]
    return float(-torch.where(valid, picked, 0.0).sum(dtype=torch.float64))


class _LabelType(NamedTuple):
    """How labels are stored: the type, and the label of ignored voxels."""

    dtype: DTypeLike
    ignore_index: int

    @classmethod
    def of(cls, cases: CaseSet, format: str) -> _LabelType:
        """The smallest type that holds all labels. An ignored label that the format cannot hold is replaced."""
        widest = np.iinfo(SCORE_FORMATS[format].widest_label)
        ignored, highest = cases.ignore_index, cases.num_classes - 1
        if not widest.min <= ignored <= widest.max:
            ignored = 255 if highest < 255 else -1
        fitting = (
            dtype
            for dtype in (np.uint8, np.int16, np.int32, np.int64)
            if np.iinfo(dtype).min <= min(0, ignored) and max(highest, ignored) <= np.iinfo(dtype).max
        )
        return cls(next(fitting), ignored)

    def stored(self, case: Case, num_classes: int) -> Tensor:
        """The labels of a case as they are stored. Labels of no class are allowed where the mask excludes them."""
        labels, valid = case.labels, case.valid
        unknown = (labels < 0) | (labels >= num_classes)
        if bool((wrong := unknown & valid).any()):
            raise DataError(
                f"label {int(labels[wrong][0])} at {int(wrong.sum())} voxels",
                case=case.id,
                expected=f"0..{num_classes - 1}, or {case.ignore_index} to ignore",
            )
        return labels.masked_fill(unknown | (labels == case.ignore_index), self.ignore_index)


def _write_extras(output: OutputFolder, case: Case, name: str) -> None:
    if case.mask is not None:
        _write_whole(output, f"masks/{name}", case.mask[0].numpy(), np.bool_, case, "mask", row_axis=0)
    if case.image is not None:
        image = case.image[0].numpy()
        small = image.astype(np.uint8) if image.size and image.min() >= 0 and image.max() <= 255 else None
        exact = small is not None and np.array_equal(small, image)
        _write_whole(output, f"images/{name}", image, np.uint8 if exact else np.float32, case, "image", row_axis=1)
    if case.posterior is not None:
        posterior = case.posterior[0].numpy()
        _write_whole(output, f"posteriors/{name}", posterior, np.float32, case, "posterior", row_axis=1)


def _write_whole(
    output: OutputFolder, relative: str, array: Any, dtype: DTypeLike, case: Case, key: str, *, row_axis: int
) -> None:
    with output.array(relative, array.shape, dtype, case=case, row_axis=row_axis, key=key) as sink:
        for rows in row_slices((1, 1, *array.shape[row_axis:])):
            index = (*(slice(None),) * row_axis, rows)
            sink.write(rows, array[index])


def _describe(cases: CaseSet, spacing: dict[str, tuple[float, ...]], ignored: int) -> str:
    """The ``segcal.toml`` of the written dataset. Numbers and lists of them look the same in JSON and TOML."""
    lines = ["# Written by segcal.", 'kind = "logits"', f"ignore_index = {ignored}"]
    if ignored != cases.ignore_index:
        lines[-1] += f"  # {cases.ignore_index} in the data that this was made from, which the format cannot hold"
    if cases.channel_names is not None:
        lines.append("multilabel = true")
    else:
        lines.append(f"classes = {cases.num_classes}")
        lines.append(background_line(cases.background))
    if names := cases.channel_names or cases.class_names:
        lines.append(f"class_names = {toml_texts(names)}")
    if isinstance(cases.groups, str):
        lines.append(f"groups = {toml_text(cases.groups)}")
    values = set(spacing.values())
    if len(values) == 1 and len(spacing) == len(cases):
        lines.append(f"spacing = {json.dumps(values.pop())}")
    elif spacing:
        lines += ["", "[spacing]", *(f"{toml_text(name)} = {json.dumps(value)}" for name, value in spacing.items())]
    if cases.splits:
        lines += ["", "[splits]", *(f"{part} = {toml_texts(ids)}" for part, ids in cases.splits.items())]
    return "\n".join(lines) + "\n"
