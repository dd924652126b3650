"""A folder being filled: every file appears complete or not at all, is read back and compared, and can be resumed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from segcal.cases.disk import DiskCase
from segcal.cases.formats import Array, ArraySink, Geometry, Index, create_array, open_array
from segcal.errors import OutputError, SegcalError
from segcal.files import atomic_path
from segcal.scores import keep_argmax
from segcal.types import Case, Kind

JOURNAL = ".segcal-journal.jsonl"
_NUMPY: dict[torch.dtype, DTypeLike] = {torch.float16: np.float16, torch.float32: np.float32}
# What nnU-Net's own tools want beside the npz files; copied as bytes, never opened.
_NNUNET_FILES = ("dataset.json", "plans.json", "dataset_fingerprint.json", "predict_from_raw_data_args.json")
# What the journal says of a finished file.
_FINISHED = {"file", "source", "parts", "digest"}


class OutputFolder:
    """Writes arrays into a folder and remembers, in a journal, what each was made from and what it must contain.

    Args:
        folder: The folder; it must be new or empty, unless ``resume``.
        settings: What determines the outputs beside the input files; a file made with other settings is made again.
        resume: Keep the finished files that still read back as they were written.
    """

    def __init__(self, folder: Path, *, settings: dict[str, Any], resume: bool = False) -> None:
        self.folder, self._journal = folder, folder / JOURNAL
        self._settings = json.dumps(settings, sort_keys=True, default=str)
        self._records: dict[str, dict[str, Any]] = {}
        self._known: set[str] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()) and not resume:
                raise OutputError(
                    "is not empty", where=str(folder), fix="choose another folder, or --resume to continue"
                )
            if self._journal.is_file():
                text = self._journal.read_text()
                if text and not text.endswith("\n"):  # The program was killed while it wrote this line.
                    self._append("\n")
                lines = [record for record in map(_parse_line, text.splitlines()) if record]
                self._known = {record["file"] for record in lines}
                self._records = {record["file"]: record for record in lines if record.keys() >= _FINISHED}
        except OSError as error:
            raise _unwritable(folder, error) from None

    def finished(self, relative: str, case: Case) -> bool:
        """Whether this file was made from the case as it is now, with these settings, and still reads back right."""
        record = self._records.get(relative)
        if record is None or record["source"] != self._source(case):
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
        replace = relative in self._known
        self._note({"file": relative})
        with create_array(path, shape, dtype, row_axis=row_axis, key=key, geometry=geometry, replace=replace) as sink:
            verified = VerifiedSink(sink)
            yield verified
        digest = verified.digest.hexdigest()
        if _digest(path, verified.parts) != digest:
            raise OutputError("reads back differently from what was written", where=str(path), fix="check the disk")
        record = {"file": relative, "source": self._source(case), "parts": verified.parts, "digest": digest}
        self._records[relative] = record
        self._note(record)

    def _note(self, record: dict[str, Any]) -> None:
        """Add a line to the journal: a file is named before it is written, so that it is known as ours ever after."""
        self._known.add(record["file"])
        try:
            self._append(json.dumps(record) + "\n")
        except OSError as error:
            raise _unwritable(self._journal, error) from None

    def _append(self, text: str) -> None:
        with self._journal.open("a") as journal:
            journal.write(text)

    def text(self, relative: str, content: str) -> None:
        """Write a text file."""
        with atomic_path(self.folder / relative) as temporary:
            temporary.write_text(content)

    def copy(self, source: Path, relative: str) -> None:
        """Copy a file as it is."""
        with atomic_path(self.folder / relative) as temporary:
            shutil.copyfile(source, temporary)

    def _source(self, case: Case) -> str:
        digest = hashlib.blake2b(f"{self._settings}|{case.id}|{case.shape}".encode(), digest_size=16)
        if isinstance(case.source, DiskCase):
            files = case.source.files
            digest.update(repr(case.source.config).encode())
            for path in (*files.members, files.label, *files.images, files.mask, files.posterior):
                if path is not None:
                    status = path.stat()
                    digest.update(f"{path}|{status.st_size}|{status.st_mtime_ns}".encode())
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
            return f"{self.kind}/{case.id}.npy"
        name = case.id + case.source.suffix
        return name if case.source.config.layout == "nnunet" else f"{self.kind}/{name}"

    @contextmanager
    def scores(self, case: Case, dtype: torch.dtype = torch.float32) -> Iterator[OrientedSink]:
        """Write the log-probabilities ``(N, C, *spatial)`` of a case, rows at a time, as the declared kind."""
        source = case.source
        shape: tuple[int, ...] = (source.num_classes, *source.spatial)
        multilabel = reverse = squeeze = False
        key: str = self.kind
        geometry = None
        if isinstance(source, DiskCase):
            stored = source.members[0]
            shape, reverse, squeeze = stored.file.shape, stored.reverse, stored.squeeze
            multilabel = source.multilabel
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


def _parse_line(line: str) -> dict[str, Any] | None:
    """A journal record; the last line may have been cut off when the program was killed."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "file" in record else None


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot be written ({error.strerror})", where=str(path), expected="a writable folder")
