"""Write any dataset in the plain convention: as npy, the fastest format, or in any other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from segcal.cases.caseset import CaseSet
from segcal.cases.config import CONFIG_NAME
from segcal.cases.disk import check_labels
from segcal.cases.formats import SCORE_FORMATS, Array, ArraySpec
from segcal.cases.output import OutputFolder
from segcal.cases.toml import toml_document
from segcal.errors import InputError, check_name, naming
from segcal.files.atomic import file_name
from segcal.files.remote import as_path, file_sizes
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
    label_type, ignored = _label_type(cases, format)
    settings = {"dtype": dtype, "format": format, "classes": cases.num_classes, "ignore_index": cases.ignore_index}
    with OutputFolder(as_path(folder), cases, DATASET, settings=settings, resume=resume) as output:
        for case in output.watched(cases):
            progress(case.id)
            if case.spacing:
                spacing[case.id] = case.spacing
            name = f"{file_name(case.id)}.{format}"
            if _finished(output, case, name):
                report.skipped += 1
                continue
            output.require_one(case)
            for _ in _stored_labels(case, cases.num_classes, ignored):  # raises before anything is written
                pass
            _write_scores(output, case, name, dtype, report)
            for place, key, array, type in _extras(case):
                _write_whole(output, case, f"{place}/{name}", key, array.numpy(), type)
            # Labels come last: a case that has them is complete.
            shape = (case.shape[0], *case.shape[2:]) if output.multilabel else case.shape[2:]
            spec = ArraySpec(shape, label_type, int(output.multilabel), "labels")
            with output.array(f"labels/{name}", case, spec) as write:
                for rows, labels in _stored_labels(case, cases.num_classes, ignored):
                    write(rows, (labels if output.multilabel else labels[0]).numpy())
        output.text(CONFIG_NAME, _describe(cases, spacing, ignored))
    report.bytes = sum(size or 0 for size in file_sizes(output.folder).values())
    report.seconds = time.perf_counter() - started
    for name in ("nll_input", "nll_stored"):  # sums until now
        setattr(report, name, getattr(report, name) / report.voxels if report.voxels else math.nan)
    return report


def _finished(output: OutputFolder, case: Case, name: str) -> bool:
    """Whether all files of a case are as they were written. The journal knows which optional files there are."""
    needed = [f"{folder}/{name}" for folder in ("logits", "labels")]
    extras = [f"{folder}/{name}" for folder in ("images", "masks", "posteriors")]
    return all(output.finished(file, case) for file in (*needed, *filter(output.recorded, extras)))


def _write_scores(output: OutputFolder, case: Case, name: str, dtype: StoredType, report: PackReport) -> None:
    batch, classes, *spatial = case.shape
    spec = ArraySpec((batch if output.multilabel else classes, *spatial), dtype, row_axis=1, key="logits")
    with output.array(f"logits/{name}", case, spec) as write:
        for chunk in case.chunks():
            logits = chunk.logits
            if output.multilabel:  # Each two-class problem is stored as one sigmoid logit.
                difference = logits[:, 1] - logits[:, 0]
                logits = torch.stack((torch.zeros_like(difference), difference), 1)
            stored = round_keeping_argmax(logits, getattr(torch, dtype))
            valid = chunk.valid
            report.voxels += int(valid.sum())
            report.nll_input += _nll(logits, chunk.labels, valid)
            report.nll_stored += _nll(stored, chunk.labels, valid)
            write(chunk.rows, (stored[:, 1] if output.multilabel else stored[0]).numpy())


def _nll(logits: Tensor, labels: Tensor, valid: Tensor) -> float:
    """Sum of the negative log-likelihood over the valid voxels."""
    nll = torch.nn.functional.cross_entropy(
        logits.float(), labels.where(valid, -100), ignore_index=-100, reduction="none"
    )
    return float(nll.sum(dtype=torch.float64))


def _label_type(cases: CaseSet, format: str) -> tuple[DTypeLike, int]:
    """The smallest type that holds all labels, and the ignored label, replaced if the format cannot hold it."""
    widest = np.iinfo(SCORE_FORMATS[format].widest_label)
    ignored, highest = cases.ignore_index, cases.num_classes - 1
    if not widest.min <= ignored <= widest.max:
        ignored = 255 if highest < 255 else -1
    fitting = (
        dtype
        for dtype in (np.uint8, np.int16, np.int32, np.int64)
        if np.iinfo(dtype).min <= min(0, ignored) and max(highest, ignored) <= np.iinfo(dtype).max
    )
    return next(fitting), ignored


def _stored_labels(case: Case, num_classes: int, ignored: int) -> Iterator[tuple[slice, Tensor]]:
    """The labels of a case as they are stored, by rows. Labels of no class are allowed where the mask excludes them."""
    for rows in row_slices(case.shape):
        labels, mask = case.rows("labels", rows), case.rows("mask", rows)
        with naming(case=case.id):
            counted = labels if mask is None else labels.where(mask, case.ignore_index)
            check_labels(counted.numpy(), num_classes, case.ignore_index, rows.start, row_axis=1)
        yield rows, labels.masked_fill((labels < 0) | (labels >= num_classes) | (labels == case.ignore_index), ignored)


def _extras(case: Case) -> Iterator[tuple[str, str, Tensor, DTypeLike]]:
    """Folder, name, values and type of the arrays that a case has besides scores and labels."""
    if case.mask is not None:
        yield "masks", "mask", case.mask[0], np.bool_
    if case.image is not None:
        image = case.image[0]
        small = bool(image.numel()) and bool((image.clamp(0, 255).byte() == image).all())
        yield "images", "image", image, np.uint8 if small else np.float32
    if case.posterior is not None:
        yield "posteriors", "posterior", case.posterior[0], np.float32


def _write_whole(output: OutputFolder, case: Case, relative: str, key: str, array: Array, dtype: DTypeLike) -> None:
    axis = array.ndim - len(case.shape[2:])  # Channels, if there are any, come first.
    with output.array(relative, case, ArraySpec(array.shape, dtype, axis, key)) as write:
        for rows in row_slices((1, 1, *array.shape[axis:])):
            write(rows, array[(slice(None),) * axis + (rows,)])


def _describe(cases: CaseSet, spacing: Mapping[str, tuple[float, ...]], ignored: int) -> str:
    """The ``segcal.toml`` of the written dataset."""
    one = set(spacing.values()).pop() if len(set(spacing.values())) == 1 and len(spacing) == len(cases) else None
    about: dict[str, Any] = {"kind": "logits", "ignore_index": ignored}
    if cases.channel_names is not None:
        about["multilabel"] = True
    else:
        about |= {"classes": cases.num_classes, "background": "none" if cases.background is None else cases.background}
    about["class_names"] = cases.channel_names or cases.class_names
    if isinstance(cases.groups, str):
        about["groups"] = cases.groups
    elif cases.groups is not None:
        about["groups"] = {name: str(group) for name, group in cases.case_groups.items()}
    about |= {"spacing": one or spacing, "splits": cases.splits}
    replaced = f"{cases.ignore_index} in the data that this was made from is {ignored} here: the format cannot hold it."
    return toml_document(about, "" if ignored == cases.ignore_index else replaced)
