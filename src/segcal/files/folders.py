"""Folders that segcal fills: apart from what it reads, and never over what it did not write.

A journal in the folder says what the folder holds and which files were begun or finished, so that a run that was killed
can go on, and a file of someone else's is told from one's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from segcal.errors import OutputError
from segcal.files.atomic import check_writable, make_folders, remove_leftovers, writing

JOURNAL = ".segcal-journal.jsonl"


class OwnFolder:
    """A folder to write to. Nothing is made before the first file; a run that fails before it finished one leaves none.

    Args:
        folder: It must be new or empty, or with ``resume`` one that an earlier run began.
        holds: What it holds, in a few words; another kind of folder is not resumed.
        inputs: Folders that are read: it is none of them, lies in none and, unless ``shared``, holds none.
        resume: Go on with what is there.
        shared: The folder may hold other things, which stay.

    Examples:
        >>> import tempfile
        >>> with OwnFolder(Path(tempfile.mkdtemp()), "an example") as folder:
        ...     folder.claim("labels/a.npy").name
        'a.npy'
    """

    def __init__(
        self,
        folder: Path,
        holds: str,
        *,
        inputs: Sequence[Path] = (),
        resume: bool = False,
        shared: bool = False,
    ) -> None:
        self.folder, self._holds, self._journal, self._cut = folder, holds, folder / JOURNAL, False
        check_apart(folder, inputs, may_hold=shared)
        check_writable(folder, folder=True)
        with writing(folder):
            header, *self.records = self._read() or [{}]
            self._own = header.get("holds") == holds
            if folder.is_dir() and any(folder.iterdir()) and not self._own and (header or not shared):
                raise self._foreign(header.get("holds"), resume)
            if self._own and not resume and not shared:
                raise OutputError(
                    "is not empty", where=str(folder), fix="choose another folder, or --resume to continue"
                )
            for item in (folder, *folder.iterdir()) if folder.is_dir() else ():
                if item.is_dir() and not item.is_symlink():
                    remove_leftovers(item)
        self._known = {record["file"] for record in self.records if "file" in record}
        self._claimed: set[str] = set()
        self._made: list[Path] | None = None

    def _read(self) -> list[dict[str, Any]]:
        if not self._journal.is_file():
            return []
        text = self._journal.read_text(encoding="utf-8", errors="replace")
        self._cut = bool(text) and not text.endswith("\n")
        return [record for record in map(_parse_line, text.splitlines()) if record is not None]

    def _foreign(self, holds: str | None, resume: bool) -> OutputError:
        problem = f"holds {holds} already" if holds else "is not empty"
        if resume:
            problem += f", and not {self._holds} that could be resumed"
        return OutputError(problem, where=str(self.folder), expected="a new folder", fix="choose another folder")

    def check_own(self, relative: str) -> None:
        """Raise if there is something in a folder of this one that no earlier run wrote."""
        with writing(self.folder):
            items = sorted((self.folder / relative).iterdir()) if (self.folder / relative).is_dir() else []
        for path in items:
            if f"{relative}/{path.name}" not in self._known:
                raise self._not_ours(path)

    def claim(self, relative: str) -> Path:
        """The path of a file to write, which is ours from now on: it was not there, or an earlier run wrote it."""
        path = self.folder / relative
        parent = Path(os.path.realpath(path.parent))
        if not parent.is_relative_to(os.path.realpath(self.folder)):
            raise OutputError("leads out of the output folder", where=str(path), fix="choose another folder")
        if relative in self._claimed:
            raise OutputError("is written a second time", where=str(path), expected="a name of its own for every case")
        if path.is_symlink() or (path.exists() and relative not in self._known):
            raise self._not_ours(path)
        self._claimed.add(relative)
        self.note({"file": relative})
        return path

    def _not_ours(self, path: Path) -> OutputError:
        return OutputError(
            "is there already, and segcal did not write it", where=str(path), fix="choose another folder"
        )

    def note(self, record: dict[str, Any]) -> None:
        """Add a line to the journal."""
        self.begin()
        self._append(json.dumps(record) + "\n")
        self.records.append(record)

    def begin(self) -> None:
        """Make the folder, if it is not there, and say in its journal what it holds."""
        if self._made is not None:
            return
        with writing(self.folder):
            self._made = make_folders(self.folder)
        if not self._own:
            self._append(json.dumps({"holds": self._holds}) + "\n")
        elif self._cut:  # The program was killed while it wrote the last line.
            self._append("\n")

    def _append(self, text: str) -> None:
        with writing(self._journal), self._journal.open("a", encoding="utf-8") as journal:
            journal.write(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._own or self._made is None:
            return
        with suppress(OSError):
            if [item.name for item in self.folder.iterdir()] == [JOURNAL]:
                self._journal.unlink()
                for item in reversed(self._made):
                    item.rmdir()


def check_apart(output: Path, inputs: Sequence[Path], *, may_hold: bool = False) -> None:
    """Raise if an output folder is one of the folders that are read, lies in one or holds one, through links too.

    With ``may_hold`` it may hold them: for files that have names of their own, or are never written over others.

    Examples:
        >>> check_apart(Path("study/calibrated"), [Path("study/logits"), Path("study/labels")])
        >>> check_apart(Path("study"), [Path("study/logits"), Path("study/labels")])
        Traceback (most recent call last):
        segcal.errors.OutputError: study: holds study/logits, which is read; ...
    """
    for folder in inputs:
        if _same(output, folder):
            problem = "is also an input"
        elif any(_same(parent, folder) for parent in Path(os.path.realpath(output)).parents):
            problem = f"lies in {folder}, which is read"
        elif not may_hold and any(_same(parent, output) for parent in Path(os.path.realpath(folder)).parents):
            problem = f"holds {folder}, which is read"
        else:
            continue
        raise OutputError(
            problem, where=str(output), expected="a folder apart from the input", fix="choose another folder"
        )


def _same(one: Path, other: Path) -> bool:
    """Whether two paths lead to one folder, by name or, where both exist, by what the file system says."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return one.samefile(other)
    except OSError:
        return False


def _parse_line(line: str) -> dict[str, Any] | None:
    """A journal record; one may have been cut off when the program was killed."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
