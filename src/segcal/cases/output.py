"""Arrays written to a folder: each is complete or absent, is read back and compared, and is kept on resuming."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from segcal.cases.caseset import CaseRef, CaseSet
from segcal.cases.disk import DiskCase
from segcal.cases.formats import Array, ArraySpec, create_array, open_array
from segcal.errors import DataError, InputError, OutputError, SegcalError
from segcal.files.atomic import atomic_path, file_name, file_state
from segcal.files.folders import OwnFolder, same_place
from segcal.files.remote import RemotePath
from segcal.files.versions import SEGCAL
from segcal.types import Case

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
        self._opened: dict[str, str] = {}  # the sources of cases when they were opened
        self._finished = {record["file"]: record for record in self.records if record.keys() >= _FINISHED}

    def watched(self, cases: CaseSet) -> CaseSet:
        """The same cases, whose files are compared when they are opened and when an array of them is written."""
        return replace(cases, refs=[replace(ref, open=partial(self._open, ref)) for ref in cases.refs])

    def _open(self, ref: CaseRef) -> Case:
        case = ref.open()
        self._opened[case.id] = self._source(case)
        return case

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
        source = self._source(case)
        if self._opened.get(case.id, source) != source:
            raise DataError("its files changed while they were read", case=case.id, fix="run again with --resume")
        record = {"file": relative, "source": source, "parts": parts, "digest": digest.hexdigest()}
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


def _digest(path: Path, parts: list[list[list[int]]]) -> str:
    file = open_array(path)
    digest = hashlib.blake2b(digest_size=16)
    for bounds in parts:
        digest.update(np.ascontiguousarray(file.read(tuple(slice(*bound) for bound in bounds))).tobytes())
    return digest.hexdigest()
