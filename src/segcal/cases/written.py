"""Calibrated scores of a case as files: in the format, geometry and layout of the input.

Beside the probabilities of an nnU-Net folder go the files that nnU-Net's own tools read: copies of the sidecars, which
are never opened, and segmentations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from segcal.cases.disk import DiskCase
from segcal.cases.formats import Array, ArrayFile, ArraySpec, open_array
from segcal.cases.output import OutputFolder
from segcal.errors import DataError, InputError
from segcal.files.atomic import file_name
from segcal.scores import presence, probabilities
from segcal.types import Case

# Files that nnU-Net's own tools need beside the npz files.
_NNUNET_FILES = ("dataset.json", "plans.json", "dataset_fingerprint.json", "predict_from_raw_data_args.json")
_NUMPY: dict[torch.dtype, DTypeLike] = {torch.float16: np.float16, torch.float32: np.float32}
Write = Callable[[slice, Array], None]


def score_path(output: OutputFolder, case: Case) -> str:
    """Where the scores of a case go, relative to the output folder."""
    if not isinstance(case.source, DiskCase):
        return f"probs/{file_name(case.id)}{output.suffix}"
    name = file_name(case.id) + case.source.suffix
    return name if case.source.config.layout == "nnunet" else f"probs/{name}"


def nifti_path(case: Case) -> str:
    """Where the probabilities of an nnU-Net case go as NIfTI, relative to the output folder."""
    return f"nifti/{file_name(case.id)}.nii.gz"


def write_scores(
    output: OutputFolder,
    case: Case,
    pieces: Iterable[tuple[slice, Tensor]],
    dtype: torch.dtype = torch.float32,
    *,
    same_labels: bool = True,
    nifti: bool = False,
) -> None:
    """Write the probabilities of a case in the format, geometry and layout of its input.

    The pieces are rows and their log-probabilities ``(N, C, rows, ...)``. In nnU-Net's layout, ``same_labels`` says
    that no label changed, so that nnU-Net's segmentation is copied; ``nifti`` also writes the probabilities as NIfTI.
    """
    output.require_one(case)
    batch, classes, *spatial = case.shape
    spec = ArraySpec((batch if output.multilabel else classes, *spatial), _NUMPY[dtype], row_axis=1, key="probs")
    disk = case.source if isinstance(case.source, DiskCase) else None
    if disk:
        like, file = disk.members[0], disk.members[0].file
        spec = ArraySpec(file.shape, spec.dtype, like.row_axis, file.key or spec.key, file.geometry)
    if nifti and not (disk and disk.config.layout == "nnunet"):
        raise InputError("nifti = True", expected="cases of an nnU-Net folder; others keep the format they have")
    with ExitStack() as stack:
        # The scores are finished last: whoever finds them finds the files beside them.
        write = stack.enter_context(output.array(score_path(output, case), case, spec))
        beside: list[Write] = []
        if disk and disk.config.layout == "nnunet":
            beside = [stack.enter_context(one) for one in _beside(output, case, disk, same_labels, nifti)]
        for rows, log_probs in pieces:
            scores = as_probabilities(log_probs, dtype, multilabel=output.multilabel)
            if disk and (outside := disk.exterior(rows)) is not None:
                # Padding stays exactly as it was, so that readers of the file recognise it.
                scores[:, torch.from_numpy(outside)] = 0
                scores[0, torch.from_numpy(outside)] = 0 if output.multilabel else 1
            block = scores.cpu().numpy()
            write(rows, like.as_stored(block) if disk else block)
            for own in beside:
                own(rows, block)


def as_probabilities(log_probs: Tensor, dtype: torch.dtype, *, multilabel: bool) -> Tensor:
    """Probabilities ``(channels, rows, ...)`` of a case. No argmax changes by the exponential or by rounding.

    Examples:
        >>> as_probabilities(torch.tensor([[[-1e-9], [-20.0]]]), torch.float16, multilabel=False)
        tensor([[1.],
                [0.]], dtype=torch.float16)
    """
    return presence(log_probs, dtype) if multilabel else probabilities(log_probs, dtype)[0]


# -- beside nnU-Net's probabilities -----------------------------------------------------------------------------------


def _beside(
    output: OutputFolder, case: Case, disk: DiskCase, same_labels: bool, nifti: bool
) -> Iterator[AbstractContextManager[Write]]:
    """Copy what nnU-Net's tools need beside the probabilities, and give the files that are still to be written."""
    _copy_sidecars(output, disk)
    prediction = disk.files.prediction
    if prediction is not None and same_labels and disk.num_members is None:
        output.copy(prediction, prediction.name)
    elif prediction is not None:
        yield _segmentation(output, case, disk, open_array(prediction))
    if nifti:
        yield _as_nifti(output, case, disk)


def _copy_sidecars(output: OutputFolder, source: DiskCase) -> None:
    for near in _near(source):
        for name in _NNUNET_FILES:
            if (near / name).is_file() and not (output.folder / name).exists():
                output.copy(near / name, name)
    sidecar = source.files.members[0].with_suffix(".pkl")
    if sidecar.is_file():
        output.copy(sidecar, sidecar.name)


def _near(source: DiskCase) -> tuple[Path, ...]:
    """Where the files that describe a case may be: beside it, or in the folder of the model that was validated."""
    folder = source.files.members[0].parent
    return (folder, folder.parent, folder.parent.parent)


@contextmanager
def _segmentation(output: OutputFolder, case: Case, disk: DiskCase, like: ArrayFile) -> Iterator[Write]:
    """Write the segmentation of the scores, as nnU-Net derives it from probabilities, in the format of its own."""
    order = _class_order(disk)
    if like.shape != disk.spatial:
        raise DataError(f"has shape {like.shape}", where=str(like.path), expected=f"{disk.spatial}, as the scores have")
    highest = max(order) if order else disk.num_classes - 1
    spec = ArraySpec(like.shape, np.min_scalar_type(highest), geometry=like.geometry)
    with output.array(like.path.name, case, spec) as write:

        def segment(rows: slice, scores: Array) -> None:
            if not order:
                write(rows, scores.argmax(0))
                return
            labels = np.zeros(scores.shape[1:], spec.dtype)
            for channel, label in zip(scores, order, strict=True):
                labels[channel > 0.5] = label
            write(rows, labels)

        yield segment


def _class_order(disk: DiskCase) -> list[int]:
    """For regions, the labels that nnU-Net paints one over the other, in the order of the channels."""
    if not disk.multilabel:
        return []
    path = next((near / "dataset.json" for near in _near(disk) if (near / "dataset.json").is_file()), None)
    order = None if path is None else json.loads(path.read_text("utf-8")).get("regions_class_order")
    if order is None:
        raise DataError(
            "no regions_class_order, by which regions become a segmentation",
            where=str(path or disk.files.members[0].parent),
            expected="nnU-Net's dataset.json with it",
            fix="copy it there, or take the segmentations away: then scores alone are written",
        )
    return [int(label) for label in order]


@contextmanager
def _as_nifti(output: OutputFolder, case: Case, disk: DiskCase) -> Iterator[Write]:
    """Write the probabilities ``(x, y, z, C)`` with the geometry of nnU-Net's segmentation."""
    prediction = disk.files.prediction
    geometry = None if prediction is None else open_array(prediction).geometry
    if geometry is None:
        raise DataError(
            "no NIfTI segmentation, which has the geometry that npz files lack",
            where=str(disk.files.members[0]),
            expected=f"{disk.id}.nii.gz beside the npz file",
            fix="leave out --nifti, or predict again",
        )
    channels = disk.members[0].shape[0]
    spec = ArraySpec((channels, *disk.spatial), np.float32, row_axis=1, geometry=geometry)
    with output.array(nifti_path(case), case, spec) as write:
        yield write
