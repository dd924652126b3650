"""Arrays written to a folder: each appears complete or not at all, is read back and compared, and can be resumed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from segcal.cases.caseset import CaseSet
from segcal.cases.disk import DiskCase
from segcal.cases.formats import Array, ArraySink, Geometry, Index, create_array, open_array
from segcal.errors import InputError, OutputError, SegcalError
from segcal.files.atomic import atomic_path, file_name, file_state
from segcal.files.folders import OwnFolder
from segcal.scores import keep_argmax
from segcal.types import Case, Kind

_VERSION = version("segcal")
_NUMPY: dict[torch.dtype, DTypeLike] = {torch.float16: np.float16, torch.float32: np.float32}
# What nnU-Net's own tools want beside the npz files; copied as bytes, never opened.
_NNUNET_FILES = ("dataset.json", "plans.json", "dataset_fingerprint.json", "predict_from_raw_data_args.json")
# What the journal says of a finished file.
_FINISHED = {"file", "source", "parts", "digest"}


class OutputFolder(OwnFolder):
    """Writes arrays into a folder and remembers, in a journal, what each was made from and what it must contain.

    Args:
        folder: The folder; it must be new or empty, unless ``resume``.
        cases: What the outputs are made from: the folder is apart from theirs, and their names are fit for files.
        holds: What the folder holds, in a few words.
        settings: What determines the outputs beside the input files; a file made with other settings is made again.
        resume: Keep the finished files that still read back as they were written.
        shared: The folder may hold other things, which stay.
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
        """Raise if a case is a batch of images: a file holds one, or the channels of one."""
        if case.shape[0] > 1 and not self.multilabel:
            raise InputError(
                f"a batch of {case.shape[0]} images", case=case.id, expected="one image a case", fix="split the batch"
            )

    def recorded(self, relative: str) -> bool:
        """Whether this file was finished once, by this run or an earlier one."""
        return relative in self._finished

    def finished(self, relative: str, case: Case) -> bool:
        """Whether this file was made from the case as it is now, with these settings, and still reads back right.

        Of a case that is not read from files nobody knows what it was when the file was made: it is made again.
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
        """Write one array part by part; when the block ends, it is read back and compared before it counts."""
        path = self.folder / relative
        if isinstance(case.source, DiskCase) and path.exists() and any(map(path.samefile, case.source.paths)):
            raise OutputError("is read, too", where=str(path), case=case.id, fix="choose another folder")
        self.claim(relative)  # Whatever is there is ours, or this fails.
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
    """Passes parts on to a sink and remembers their digest."""

    def __init__(self, sink: ArraySink) -> None:
        self._sink, self.parts = sink, list[list[list[int]]]()
        self.digest = hashlib.blake2b(digest_size=16)

    def write(self, index: Index, block: Array) -> None:
        """Store a part; ``index`` has one slice per axis."""
        block = np.ascontiguousarray(block, self._sink.dtype)
        bounds = [
            [part.start or 0, size if part.stop is None else part.stop]
            for part, size in zip(index, self._sink.shape, strict=True)
        ]
        self.parts.append(bounds)
        self.digest.update(block.tobytes())
        self._sink.write(index, block)


class ScoreWriter:
    """Writes calibrated scores in the format, geometry and layout of the input they were made from."""

    def __init__(self, output: OutputFolder, kind: Kind) -> None:
        self.output, self.kind = output, kind

    def path(self, case: Case) -> str:
        """Where the scores of a case go, relative to the output folder."""
        if not isinstance(case.source, DiskCase):
            return f"{self.kind}/{file_name(case.id)}.npy"
        name = file_name(case.id) + case.source.suffix
        return name if case.source.config.layout == "nnunet" else f"{self.kind}/{name}"

    @contextmanager
    def scores(self, case: Case, dtype: torch.dtype = torch.float32) -> Iterator[OrientedSink]:
        """Write the log-probabilities ``(N, C, *spatial)`` of a case, rows at a time, as the declared kind."""
        self.output.require_one(case)
        source, multilabel = case.source, self.output.multilabel
        shape: tuple[int, ...] = (source.batch if multilabel else source.num_classes, *source.spatial)
        reverse = squeeze = False
        key: str = self.kind
        geometry = None
        if isinstance(source, DiskCase):
            stored = source.members[0]
            shape, reverse, squeeze = stored.file.shape, stored.reverse, stored.squeeze
            key, geometry = stored.file.key or key, stored.file.geometry
            if source.config.layout == "nnunet":
                self._copy_sidecars(source)
        axis = len(shape) - 1 if reverse else 1 + squeeze
        with self.output.array(
            self.path(case), shape, _NUMPY[dtype], case=case, row_axis=axis, key=key, geometry=geometry
        ) as sink:
            disk = source if isinstance(source, DiskCase) else None
            yield OrientedSink(sink, disk, self.kind, dtype, multilabel, len(shape), axis, reverse, squeeze)

    def _copy_sidecars(self, source: DiskCase) -> None:
        folder = source.files.members[0].parent
        for near in (folder, folder.parent, folder.parent.parent):
            for name in _NNUNET_FILES:
                if (near / name).is_file() and not (self.output.folder / name).exists():
                    self.output.copy(near / name, name)
        sidecar = folder / f"{source.id}.pkl"
        if sidecar.is_file():
            self.output.copy(sidecar, sidecar.name)


@dataclass(frozen=True)
class OrientedSink:
    """Takes log-probabilities ``(N, C, rows, ...)`` and stores them in the kind, channels and axes of the file."""

    sink: VerifiedSink
    source: DiskCase | None
    kind: Kind
    dtype: torch.dtype
    multilabel: bool
    rank: int
    axis: int
    reverse: bool
    squeeze: bool

    def write(self, rows: slice, log_probs: Tensor) -> None:
        """Store some rows; the argmax of every voxel survives the exponential and the rounding."""
        winner = log_probs.argmax(1)
        if self.multilabel:
            lead = log_probs[:, 1] - log_probs[:, 0]
            scores = (lead.sigmoid() if self.kind == "probs" else lead).to(self.dtype)
            middle = torch.full_like(scores, 0.5 if self.kind == "probs" else 0.0)
            above = torch.nextafter(middle, torch.ones_like(middle))
            scores = torch.where(winner == 1, torch.maximum(scores, above), torch.minimum(scores, middle))
        else:
            mapped = log_probs.exp() if self.kind == "probs" else log_probs
            scores = keep_argmax(mapped.to(self.dtype), winner)[0]
        if self.source is not None and self.kind == "probs" and (outside := self.source.exterior(rows)) is not None:
            # Padding stays exactly that, so that whoever reads the file can still tell.
            scores[:, torch.from_numpy(outside)] = 0
            scores[0, torch.from_numpy(outside)] = 0 if self.multilabel else 1
        block = scores.cpu().numpy()
        if self.reverse:
            block = block.transpose(0, *reversed(range(1, block.ndim)))
        if self.squeeze:
            block = block[:, None]
        index = [slice(None)] * self.rank
        index[self.axis] = rows
        self.sink.write(tuple(index), block)


def _digest(path: Path, parts: list[list[list[int]]]) -> str:
    file = open_array(path)
    digest = hashlib.blake2b(digest_size=16)
    for bounds in parts:
        digest.update(np.ascontiguousarray(file.read(tuple(slice(*bound) for bound in bounds))).tobytes())
    return digest.hexdigest()
