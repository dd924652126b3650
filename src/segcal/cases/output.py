"""Arrays written to a folder: each is complete or absent, is read back and compared, and is kept on resuming."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from segcal.cases.caseset import CaseSet
from segcal.cases.disk import DiskCase
from segcal.cases.formats import Array, ArraySpec, create_array, open_array
from segcal.errors import InputError, OutputError, SegcalError
from segcal.files.atomic import atomic_path, file_name, file_state
from segcal.files.folders import OwnFolder, same_place
from segcal.files.remote import RemotePath
from segcal.files.versions import SEGCAL
from segcal.scores import keep_argmax
from segcal.types import Case

_NUMPY: dict[torch.dtype, DTypeLike] = {torch.float16: np.float16, torch.float32: np.float32}
# Files that nnU-Net's own tools need beside the npz files; they are copied, never opened.
_NNUNET_FILES = ("dataset.json", "plans.json", "dataset_fingerprint.json", "predict_from_raw_data_args.json")
# Keys of the journal's record of a finished file.
_FINISHED = {"file", "source", "parts", "digest"}


class OutputFolder(OwnFolder):
    """Writes arrays into a folder, and records in a journal what each was made from and what it must contain.

    Args:
        folder: The folder; it must be new or empty, unless ``resume``.
        cases: The input. The folder must be apart from theirs, and their names must be valid file names.
        holds: What the folder holds, in a few words.
        settings: What determines the outputs besides the input files. Files made with other settings are made again.
        **options: ``resume``, which keeps finished files that still read back as they were written, and ``shared``;
            see ``OwnFolder``.
    """

    def __init__(self, folder: Path, cases: CaseSet, holds: str, *, settings: dict[str, Any], **options: bool) -> None:
        for name in cases.ids:
            file_name(name)
        super().__init__(folder, holds, inputs=cases.folders, **options)
        #: How the names of arrays end that have no format of their own to keep.
        self.suffix = ".zarr" if isinstance(folder, RemotePath) else ".npy"
        self.multilabel = cases.channel_names is not None
        self._settings = json.dumps([SEGCAL, settings], sort_keys=True)
        self._finished = {record["file"]: record for record in self.records if record.keys() >= _FINISHED}

    def require_one(self, case: Case) -> None:
        """Raise if a case is a batch of images: a file holds one image, or the channels of one."""
        if case.shape[0] > 1 and not self.multilabel:
            raise InputError(
                f"a batch of {case.shape[0]} images", case=case.id, expected="one image a case", fix="split the batch"
            )

    def recorded(self, relative: str) -> bool:
        """Whether this run or an earlier one finished this file."""
        return relative in self._finished

    def finished(self, relative: str, case: Case) -> bool:
        """Whether this file was made from the case as it is now, with these settings, and still reads back right.

        Only cases that are read from files can be compared with what they were; others are written again.
        """
        record = self._finished.get(relative)
        if record is None or not isinstance(case.source, DiskCase) or record["source"] != self._source(case):
            return False
        try:
            return bool(_digest(self.folder / relative, record["parts"]) == record["digest"])
        except SegcalError:
            return False

    @contextmanager
    def array(self, relative: str, case: Case, spec: ArraySpec) -> Iterator[Callable[[slice, Array], None]]:
        """Write one array: yields a function of rows along its row axis and their values.

        At the end the file is read back and compared, then recorded as finished.
        """
        path = self.folder / relative
        if isinstance(case.source, DiskCase) and any(same_place(path, own) for own in case.source.paths):
            raise OutputError("is also an input", where=str(path), case=case.id, fix="choose another folder")
        self.claim(relative)  # Raises if the file exists and segcal did not write it.
        parts: list[list[list[int]]] = []
        digest = hashlib.blake2b(digest_size=16)
        with create_array(path, spec, replace=True) as sink:

            def write(rows: slice, block: Array) -> None:
                block = np.ascontiguousarray(block, sink.dtype)
                bounds = [[0, size] for size in sink.shape]
                bounds[sink.row_axis] = [rows.start, rows.stop]
                parts.append(bounds)
                digest.update(block.tobytes())
                sink.write(tuple(slice(*bound) for bound in bounds), block)

            yield write
        record = {"file": relative, "source": self._source(case), "parts": parts, "digest": digest.hexdigest()}
        if _digest(path, parts) != record["digest"]:
            raise OutputError("reads back differently from what was written", where=str(path), fix="check the disk")
        self.note(record)
        self._finished[relative] = record

    def text(self, relative: str, content: str) -> None:
        """Write a text file."""
        with atomic_path(self.claim(relative)) as temporary:
            temporary.write_text(content, encoding="utf-8")

    def copy(self, source: Path, relative: str) -> None:
        """Copy a file as it is."""
        with atomic_path(self.claim(relative)) as temporary:
            shutil.copyfile(source, temporary)

    def _source(self, case: Case) -> str:
        digest = hashlib.blake2b(f"{self._settings}|{case.id}|{case.shape}".encode(), digest_size=16)
        if isinstance(case.source, DiskCase):
            digest.update(repr(case.source.config).encode())
            for path in case.source.paths:
                digest.update(json.dumps([str(path), file_state(path)]).encode())
        return digest.hexdigest()


def score_path(output: OutputFolder, case: Case) -> str:
    """Where the scores of a case go, relative to the output folder."""
    if not isinstance(case.source, DiskCase):
        return f"probs/{file_name(case.id)}{output.suffix}"
    name = file_name(case.id) + case.source.suffix
    return name if case.source.config.layout == "nnunet" else f"probs/{name}"


def write_scores(
    output: OutputFolder, case: Case, pieces: Iterable[tuple[slice, Tensor]], dtype: torch.dtype = torch.float32
) -> None:
    """Write the probabilities of a case in the format, geometry and layout of its input.

    The pieces are rows and their log-probabilities ``(N, C, rows, ...)``.
    """
    output.require_one(case)
    batch, classes, *spatial = case.shape
    spec = ArraySpec((batch if output.multilabel else classes, *spatial), _NUMPY[dtype], row_axis=1, key="probs")
    disk = case.source if isinstance(case.source, DiskCase) else None
    if disk:
        like, file = disk.members[0], disk.members[0].file
        spec = ArraySpec(file.shape, spec.dtype, like.row_axis, file.key or spec.key, file.geometry)
        if disk.config.layout == "nnunet":
            _copy_sidecars(output, disk)
    with output.array(score_path(output, case), case, spec) as write:
        for rows, log_probs in pieces:
            scores = _probabilities(log_probs, dtype, output.multilabel)
            if disk and (outside := disk.exterior(rows)) is not None:
                # Padding stays exactly as it was, so that readers of the file recognise it.
                scores[:, torch.from_numpy(outside)] = 0
                scores[0, torch.from_numpy(outside)] = 0 if output.multilabel else 1
            write(rows, like.as_stored(scores.cpu().numpy()) if disk else scores.cpu().numpy())


def _copy_sidecars(output: OutputFolder, source: DiskCase) -> None:
    folder = source.files.members[0].parent
    for near in (folder, folder.parent, folder.parent.parent):
        for name in _NNUNET_FILES:
            if (near / name).is_file() and not (output.folder / name).exists():
                output.copy(near / name, name)
    sidecar = folder / f"{source.id}.pkl"
    if sidecar.is_file():
        output.copy(sidecar, sidecar.name)


def _probabilities(log_probs: Tensor, dtype: torch.dtype, multilabel: bool) -> Tensor:
    """Probabilities ``(channels, rows, ...)``. No argmax changes by the exponential or by rounding."""
    winner = log_probs.argmax(1)
    if not multilabel:
        return keep_argmax(log_probs.exp().to(dtype), winner)[0]
    inside = (log_probs[:, 1] - log_probs[:, 0]).sigmoid().to(dtype)
    half = torch.full_like(inside, 0.5)
    above = torch.nextafter(half, torch.ones_like(half))
    return torch.where(winner == 1, torch.maximum(inside, above), torch.minimum(inside, half))


def _digest(path: Path, parts: list[list[list[int]]]) -> str:
    file = open_array(path)
    digest = hashlib.blake2b(digest_size=16)
    for bounds in parts:
        digest.update(np.ascontiguousarray(file.read(tuple(slice(*bound) for bound in bounds))).tobytes())
    return digest.hexdigest()
