"""Arrays written to a folder: each is complete or absent, is read back and compared, and is kept on resuming."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from segcal.cases.caseset import CaseSet
from segcal.cases.disk import DiskCase
from segcal.cases.formats import Array, ArraySink, Geometry, create_array, open_array
from segcal.errors import InputError, OutputError, SegcalError
from segcal.files.atomic import atomic_path, file_name, file_state
from segcal.files.folders import OwnFolder
from segcal.scores import keep_argmax
from segcal.types import Case, Kind

_VERSION = version("segcal")
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
        resume: Keep finished files that still read back as they were written.
        shared: The folder may hold other files, which are left alone.
    """

    def __init__(
        self,
        folder: Path,
        cases: CaseSet,
        holds: str,
        *,
        settings: dict[str, Any],
        resume: bool = False,
        shared: bool = False,
    ) -> None:
        for name in cases.ids:
            file_name(name)
        super().__init__(folder, holds, inputs=cases.folders, resume=resume, shared=shared)
        self.multilabel = cases.channel_names is not None
        self._settings = json.dumps([_VERSION, settings], sort_keys=True)
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
    def array(
        self,
        relative: str,
        shape: Sequence[int],
        dtype: DTypeLike,
        *,
        case: Case,
        row_axis: int,
        key: str = "array",
        geometry: Geometry | None = None,
    ) -> Iterator[VerifiedSink]:
        """Write one array part by part. At the end it is read back and compared, then recorded as finished."""
        path = self.folder / relative
        if isinstance(case.source, DiskCase) and path.exists() and any(map(path.samefile, case.source.paths)):
            raise OutputError("is also an input", where=str(path), case=case.id, fix="choose another folder")
        self.claim(relative)  # Raises if the file exists and segcal did not write it.
        with create_array(path, shape, dtype, row_axis=row_axis, key=key, geometry=geometry, replace=True) as sink:
            verified = VerifiedSink(sink)
            yield verified
        digest = verified.digest.hexdigest()
        if _digest(path, verified.parts) != digest:
            raise OutputError("reads back differently from what was written", where=str(path), fix="check the disk")
        record = {"file": relative, "source": self._source(case), "parts": verified.parts, "digest": digest}
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


class VerifiedSink:
    """Writes parts to a sink and computes their digest."""

    def __init__(self, sink: ArraySink) -> None:
        self._sink, self.parts = sink, list[list[list[int]]]()
        self.digest = hashlib.blake2b(digest_size=16)

    def write(self, rows: slice, block: Array) -> None:
        """Store some rows, along the row axis of the array."""
        block = np.ascontiguousarray(block, self._sink.dtype)
        bounds = [[0, size] for size in self._sink.shape]
        bounds[self._sink.row_axis] = [rows.start, rows.stop]
        self.parts.append(bounds)
        self.digest.update(block.tobytes())
        self._sink.write(tuple(slice(*bound) for bound in bounds), block)


class ScoreWriter:
    """Writes calibrated scores in the format, geometry and layout of their input."""

    def __init__(self, output: OutputFolder, kind: Kind) -> None:
        self.output, self.kind = output, kind

    def path(self, case: Case) -> str:
        """Where the scores of a case go, relative to the output folder."""
        if not isinstance(case.source, DiskCase):
            return f"{self.kind}/{file_name(case.id)}.npy"
        name = file_name(case.id) + case.source.suffix
        return name if case.source.config.layout == "nnunet" else f"{self.kind}/{name}"

    def write(self, case: Case, pieces: Iterable[tuple[slice, Tensor]], dtype: torch.dtype = torch.float32) -> None:
        """Write a case, given as rows and their log-probabilities ``(N, C, rows, ...)``, as scores of this kind."""
        self.output.require_one(case)
        multilabel = self.output.multilabel
        disk = case.source if isinstance(case.source, DiskCase) else None
        stored = disk.members[0] if disk else None
        batch, classes, *spatial = case.shape
        shape = stored.file.shape if stored else (batch if multilabel else classes, *spatial)
        reverse, squeeze = (stored.reverse, stored.squeeze) if stored else (False, False)
        axis = len(shape) - 1 if reverse else 1 + squeeze
        key, geometry = (stored.file.key or self.kind, stored.file.geometry) if stored else (self.kind, None)
        if disk and disk.config.layout == "nnunet":
            self._copy_sidecars(disk)
        with self.output.array(
            self.path(case), shape, _NUMPY[dtype], case=case, row_axis=axis, key=key, geometry=geometry
        ) as sink:
            for rows, log_probs in pieces:
                scores = _stored_scores(log_probs, self.kind, dtype, multilabel)
                if disk and self.kind == "probs" and (outside := disk.exterior(rows)) is not None:
                    # Padding stays exactly as it was, so that readers of the file recognise it.
                    scores[:, torch.from_numpy(outside)] = 0
                    scores[0, torch.from_numpy(outside)] = 0 if multilabel else 1
                block = scores.cpu().numpy()
                if reverse:
                    block = block.transpose(0, *reversed(range(1, block.ndim)))
                if squeeze:
                    block = block[:, None]
                sink.write(rows, block)

    def _copy_sidecars(self, source: DiskCase) -> None:
        folder = source.files.members[0].parent
        for near in (folder, folder.parent, folder.parent.parent):
            for name in _NNUNET_FILES:
                if (near / name).is_file() and not (self.output.folder / name).exists():
                    self.output.copy(near / name, name)
        sidecar = folder / f"{source.id}.pkl"
        if sidecar.is_file():
            self.output.copy(sidecar, sidecar.name)


def _stored_scores(log_probs: Tensor, kind: Kind, dtype: torch.dtype, multilabel: bool) -> Tensor:
    """Scores ``(channels, rows, ...)`` of this kind and type. No argmax changes by the exponential or by rounding."""
    winner = log_probs.argmax(1)
    if not multilabel:
        mapped = log_probs.exp() if kind == "probs" else log_probs
        return keep_argmax(mapped.to(dtype), winner)[0]
    difference = log_probs[:, 1] - log_probs[:, 0]
    scores = (difference.sigmoid() if kind == "probs" else difference).to(dtype)
    middle = torch.full_like(scores, 0.5 if kind == "probs" else 0.0)
    above = torch.nextafter(middle, torch.ones_like(middle))
    return torch.where(winner == 1, torch.maximum(scores, above), torch.minimum(scores, middle))


def _digest(path: Path, parts: list[list[list[int]]]) -> str:
    file = open_array(path)
    digest = hashlib.blake2b(digest_size=16)
    for bounds in parts:
        digest.update(np.ascontiguousarray(file.read(tuple(slice(*bound) for bound in bounds))).tobytes())
    return digest.hexdigest()
