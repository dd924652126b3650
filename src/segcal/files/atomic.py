"""Files that appear complete or not at all, and never overwrite what segcal did not write."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import platform
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from segcal.errors import OutputError
from segcal.files.remote import RemotePath, check_local, file_sizes, replaced

# A temporary name contains the machine and the process, so that the files of killed processes can be found.
_TEMPORARY = re.compile(r"\.segcal-tmp-([0-9a-f]{8})-(\d+)-([0-9a-f]{8})-\d+")
# Bytes written to test whether a disk has space: one block.
_PROBE = 4096
# Zeros written at once if the file system cannot reserve space.
_ZEROS = 2**20
_TOKEN, _NUMBERS = secrets.token_hex(4), itertools.count()


def write_text(path: str | Path, text: str) -> None:
    """Write a text file that appears complete or not at all."""
    with atomic_path(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_path(path: Path, *, folder: bool = False, replace: bool = False) -> Iterator[Path]:
    """A temporary name beside ``path``. It is renamed to ``path`` if the block succeeds, and removed if it fails.

    A file replaces an existing file, as opening for writing does. A folder replaces only an empty folder. Object stores
    cannot rename: there it is ``path`` itself (see ``replaced``).

    Args:
        path: Where the result goes. Missing parent folders are created.
        folder: The block creates a folder instead of a file.
        replace: An existing folder may be replaced, because segcal wrote it.
    """
    if isinstance(path, RemotePath):
        with replaced(path, replace=replace):
            yield path
        return
    with writing(path):
        target = _folder_target(path, replace) if folder else _file_target(path)
        temporary = _temporary(target)
        made = make_folders(target.parent)
        try:
            remove_leftovers(target.parent)
            yield temporary
            if folder and replace and target.is_dir():
                _exchange(temporary, target)
            else:
                temporary.replace(target)
            made = []
        finally:
            _remove(temporary)
            for parent in reversed(made):
                with suppress(OSError):  # It is not empty: another process already uses it.
                    parent.rmdir()


def check_writable(path: str | Path, *, folder: bool = False) -> None:
    """Raise unless a file, or with ``folder`` a folder, can be written here. For use before long work; changes nothing.

    Examples:
        >>> check_writable("results.json")
        >>> check_writable(".")
        Traceback (most recent call last):
        segcal.errors.OutputError: .: is a folder; expected the name of a file...
    """
    if isinstance(path, RemotePath):
        path.check_writable()
        return
    path = Path(path)
    check_local(path)
    with writing(path):
        target = Path(os.path.realpath(path)) if folder else _file_target(path)
        if folder and target.exists() and not target.is_dir():
            raise OutputError("is a file", where=str(path), expected="a folder")
        start = target if folder else target.parent
        there = next(item for item in (start, *start.parents) if item.exists())
        with tempfile.TemporaryFile(dir=there, buffering=0) as file:
            file.write(bytes(_PROBE))  # Even with permission, the disk may be full.


def file_name(name: Any) -> str:
    """Check that the name of a case can be part of a file name, in its folder and not hidden. Returns the name.

    Examples:
        >>> file_name("patient001_frame01")
        'patient001_frame01'
        >>> file_name("../../x")
        Traceback (most recent call last):
        segcal.errors.OutputError: the name '../../x' contains '/'; expected a valid file name...
    """
    problem = None
    if not isinstance(name, str):
        problem = f"is a {type(name).__name__}"
    elif not name:
        problem = "is empty"
    elif bad := next((character for character in "/\\\0" if character in name), None):
        problem = f"contains {bad!r}"
    elif name.startswith("."):
        problem = "starts with a dot: its files would be hidden"
    if problem:
        raise OutputError(f"the name {name!r} {problem}", expected="a valid file name", fix="rename it and try again")
    return str(name)


def file_state(path: Path) -> Any:
    """Name, size and time of a file, or of all files of a folder such as a zarr store. It changes with the file."""
    if isinstance(path, RemotePath):
        return path.state()
    if path.is_dir():
        return [path.name, [file_state(item) for item in sorted(path.iterdir())]]
    try:
        about = path.stat()
    except OSError:
        return [path.name, None]
    return [path.name, about.st_size, about.st_mtime_ns]


def file_size(path: Path) -> int | None:
    """Bytes of a file, or of all files of a folder, on this machine; None if it is missing, 0 in an object store."""
    if isinstance(path, RemotePath):  # Asking takes time, and all machines see the same.
        return 0
    try:
        return sum(size or 0 for size in file_sizes(path).values()) if path.is_dir() else path.stat().st_size
    except OSError:
        return None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's errors about a file that cannot be written into one clear error that names it."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"cannot be written ({error.strerror or str(error).partition(chr(10))[0]})",
            where=str(path),
            expected="a writable folder with enough space",
            fix="free some space or choose another place, and run it again",
        ) from error


def reserve(file: BinaryIO, size: int) -> None:
    """Reserve space in a file from its position on: a full disk is an error now, not a crash of a mapped write."""
    start = file.tell()
    file.flush()
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), start, size)
            return
        except OSError as error:
            # These mean that the file system cannot reserve space.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    end = file.seek(0, os.SEEK_END)  # Existing content stays.
    for part in range(end, start + size, _ZEROS):
        file.write(bytes(min(_ZEROS, start + size - part)))


def make_folders(folder: Path) -> list[Path]:
    """Create a folder and its parents. Returns those that were missing, outermost first."""
    if isinstance(folder, RemotePath):  # Object stores have only files.
        return []
    missing = [item for item in (folder, *folder.parents) if not item.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


@cache  # Once for each folder: a study writes thousands of files to one.
def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed processes of this machine. No other files have such names."""
    with suppress(OSError):
        for item in list(folder.iterdir()):
            found = _TEMPORARY.match(item.name)
            if found and found[1] == _machine() and not _alive(int(found[2]), found[3]):
                _remove(item)


def _file_target(path: Path) -> Path:
    """The file that a path leads to, following links as ``open`` does. Only plain files may be replaced."""
    check_local(path)
    if "\0" in str(path):
        raise OutputError("contains a NUL character", where=repr(str(path)), expected="the name of a file")
    target = Path(os.path.realpath(path))
    if target.is_dir() or path.name in ("", ".."):
        raise OutputError(
            "is a folder", where=str(path), expected="the name of a file", fix="name a file, in this folder or another"
        )
    if target.exists() and not target.is_file():
        raise OutputError("is a device or pipe", where=str(path), expected="the name of a plain file")
    if target.exists() and not os.access(target, os.W_OK):
        raise OutputError("is write-protected", where=str(path), fix="choose another name")
    return target


def _folder_target(path: Path, replace: bool) -> Path:
    """The folder that a path leads to. It never replaces a file, a link, or a folder that is not empty."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise OutputError("is a file or a link", where=str(path), expected="a new folder")
    if path.is_dir() and any(path.iterdir()) and not replace:
        raise OutputError("is not empty", where=str(path), fix="choose another folder")
    return Path(os.path.realpath(path))


def _exchange(new: Path, old: Path) -> None:
    """Replace a folder by another one. The old one is removed last."""
    aside = new.with_name(f"{new.name}-old")
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise
    _remove(aside)


def _temporary(target: Path) -> Path:
    # Libraries choose the format by the extension. The whole name could become too long.
    suffix = "".join(target.suffixes[-2:])[-16:]
    return target.with_name(f".segcal-tmp-{_machine()}-{os.getpid()}-{_TOKEN}-{next(_NUMBERS)}{suffix}")


@cache
def _machine() -> str:
    """An id of this machine or container, within which process ids are unique."""
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        space = ""
    return hashlib.sha256(f"{platform.node()} {space}".encode()).hexdigest()[:8]


def _alive(process: int, token: str) -> bool:
    """Whether the process that created a temporary file may still be running."""
    if process == os.getpid():
        return token == _TOKEN
    try:
        if os.name != "nt":  # On Windows, os.kill ends the process.
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # It runs, but belongs to another user.
        pass
    return True


def _remove(path: Path) -> None:
    """Remove a temporary file or folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
