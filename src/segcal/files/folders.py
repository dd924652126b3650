"""Output folders: apart from the input, and never overwriting what segcal did not write.

A journal in the folder records what the folder holds and which files were begun or finished. So a killed run can be
resumed, and files of segcal are told from other files. It is locked while a run writes to the folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import Self

from segcal.errors import OutputError, UnreachableError
from segcal.files.atomic import check_writable, make_folders, remove_leftovers, writing
from segcal.files.lock import Lock
from segcal.files.remote import append_text, appended_text

JOURNAL = ".segcal-journal.jsonl"


class OwnFolder:
    """A folder to write to. It is created with the first file, and removed if the run fails before finishing one.

    From the first file to the end of the block, no other process can write to it.

    Args:
        folder: It must be new or empty, or with ``resume`` one that an earlier run began.
        holds: What it holds, in a few words; folders that hold something else are not resumed.
        inputs: Folders that are read. It must not be one of them, lie in one or, unless ``shared``, contain one.
        resume: Continue an earlier run.
        shared: The folder may hold other files, which are left alone.

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
        self._lock = Lock(self._journal, folder)
        check_apart(folder, inputs, may_hold=shared)
        check_writable(folder, folder=True)
        with writing(folder):
            self._lock.check()
            self._text = appended_text(self._journal)
            header, *self.records = self._read() or [{}]
            self._own = header.get("holds") == holds
            # A run that was killed just as it began leaves a journal that is empty or cut off.
            unbegun = not header and "\n" not in self._text
            items = list(folder.iterdir()) if folder.is_dir() else []
            if [item.name for item in items] == [JOURNAL] and unbegun:
                items = []
            if items and not self._own and (header or not shared):
                problem = f"holds {header['holds']} already" if "holds" in header else "is not empty"
                problem += f", not {holds} that could be resumed" if resume else ""
                raise OutputError(problem, where=str(folder), expected="a new folder", fix="choose another folder")
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
        text = self._text
        self._cut = bool(text) and not text.endswith("\n")
        records = []
        for line in text.splitlines():
            with suppress(ValueError):  # The line was cut off when the program was killed.
                records.append(json.loads(line))
        return [record for record in records if isinstance(record, dict)]

    @property
    def begun(self) -> bool:
        """Whether an earlier run began this folder."""
        return self._own

    def check_own(self, relative: str) -> None:
        """Raise if a subfolder holds something that no earlier run wrote."""
        with writing(self.folder):
            items = sorted((self.folder / relative).iterdir()) if (self.folder / relative).is_dir() else []
        for path in items:
            if f"{relative}/{path.name}" not in self._known:
                raise self._not_ours(path)

    def claim(self, relative: str) -> Path:
        """The path of a file to write. Raises if it exists and no earlier run wrote it."""
        path = self.folder / relative
        parent = Path(os.path.realpath(path.parent))
        if not parent.is_relative_to(os.path.realpath(self.folder)):
            raise OutputError("leads out of the output folder", where=str(path), fix="choose another folder")
        if relative in self._claimed:
            raise OutputError("is written a second time", where=str(path), expected="a different name for every case")
        if path.is_symlink() or (path.exists() and relative not in self._known):
            raise self._not_ours(path)
        self._claimed.add(relative)
        self.note({"file": relative})
        return path

    def _not_ours(self, path: Path) -> OutputError:
        return OutputError("exists already, and segcal did not write it", where=str(path), fix="choose another folder")

    def note(self, record: dict[str, Any]) -> None:
        """Add a line to the journal."""
        self.begin()
        self._append(json.dumps(record) + "\n")
        self.records.append(record)

    def begin(self) -> None:
        """Create the folder if it is missing, and record in its journal what it holds."""
        if self._made is not None:
            self._lock.hold()
            return
        with writing(self.folder):
            made = make_folders(self.folder)
            self._lock.hold()
            if appended_text(self._journal) != self._text:  # since this run looked at it
                self._lock.release()
                raise OutputError(
                    "another process has written here", where=str(self.folder), fix="choose another folder"
                )
            self._made = made
        if self._cut:  # The program was killed while writing the last line.
            self._append("\n")
        if not self._own:
            self._append(json.dumps({"holds": self._holds}) + "\n")

    def _append(self, text: str) -> None:
        with writing(self._journal):
            append_text(self._journal, text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._clean(error)
        self._lock.release()

    def _clean(self, error: BaseException | None) -> None:
        """Remove what a run that failed made, if it finished nothing."""
        if error is None or self._own or self._made is None or isinstance(error, UnreachableError):
            return
        with suppress(OSError):
            if [item.name for item in self.folder.iterdir()] == [JOURNAL]:
                self._journal.unlink()
                for item in reversed(self._made):
                    item.rmdir()


def check_apart(output: Path, inputs: Sequence[Path], *, may_hold: bool = False) -> None:
    """Raise if an output folder is an input folder, lies in one or contains one. Links are followed.

    With ``may_hold`` it may contain them, for outputs that never overwrite other files.

    Examples:
        >>> check_apart(Path("study/calibrated"), [Path("study/logits"), Path("study/labels")])
        >>> check_apart(Path("study"), [Path("study/logits"), Path("study/labels")])
        Traceback (most recent call last):
        segcal.errors.OutputError: study: holds study/logits, which is read; ...
    """
    for folder in inputs:
        if same_place(output, folder):
            problem = "is also an input"
        elif any(same_place(parent, folder) for parent in Path(os.path.realpath(output)).parents):
            problem = f"lies in {folder}, which is read"
        elif not may_hold and any(same_place(parent, output) for parent in Path(os.path.realpath(folder)).parents):
            problem = f"holds {folder}, which is read"
        else:
            continue
        raise OutputError(
            problem, where=str(output), expected="a folder apart from the input", fix="choose another folder"
        )


def same_place(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same folder, by name or, if both exist, by the file system."""
    same = os.path.realpath(one) == os.path.realpath(other)
    with suppress(OSError):
        same = same or one.samefile(other)
    return same
