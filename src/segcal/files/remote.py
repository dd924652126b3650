"""Folders and files in object stores: ``s3://``, ``gs://`` and ``https://``, by way of fsspec.

A ``RemotePath`` has the methods of ``pathlib.Path`` that segcal needs, so the rest of segcal lists, reads and writes
without knowing where. Whatever fails is tried again, unless trying again cannot help, and then is one clear error.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from segcal.errors import InputError, OutputError, SegcalError, UnreachableError, import_extra

# The library behind each scheme; fsspec itself comes with torch.
_LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
# Seconds to wait before each further try.
_WAITS = (1, 2, 4, 8)
# Packages whose errors are about the connection; those of the system that trying again does not mend.
_CONNECTION = ("aiohttp", "aiobotocore", "botocore", "gcsfs", "google", "requests", "urllib3")
_FINAL = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)

_CREDENTIALS = (
    "set them as for other programs, e.g. AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; "
    "gcloud auth application-default login"
)
_NETWORK = "check the network and the address (AWS_ENDPOINT_URL), and run it again"

if TYPE_CHECKING:
    _Base = Path
else:  # Only the class of paths on this system can be a base.
    _Base = type(Path())
Result = TypeVar("Result")


class RemotePath(_Base):
    """A folder or file in an object store.

    Examples:
        >>> folder = RemotePath("s3://bucket/study")
        >>> str(folder / "logits" / "a.zarr"), folder.parent.name, folder == as_path("s3://bucket/study/")
        ('s3://bucket/study/logits/a.zarr', 'bucket', True)
    """

    def __str__(self) -> str:
        return f"{''.join(self.parts[:1])}//{'/'.join(self.parts[1:])}"

    def __fspath__(self) -> str:
        return str(self)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the file system with this path as its first argument."""
        return retried(self, lambda: getattr(self.file_system(), method)(str(self), *args, **options))

    def file_system(self) -> Any:
        """The file system of fsspec; the error of a missing library names the extra that installs it."""
        scheme = self.parts[0][:-1]
        import_extra(_LIBRARIES[scheme], "remote", f"reading and writing {scheme}:// URLs")
        return importlib.import_module("fsspec").filesystem(scheme, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """How the file system is opened, besides what the user configured for fsspec."""
        options: dict[str, Any] = {"use_listings_cache": False}  # A kept listing would not show what was written since.
        if self.parts[0] == "s3:":  # Requests are tried again here, not once more by the library of S3.
            given = importlib.import_module("fsspec.config").conf.get("s3", {}).get("config_kwargs", {})
            options["config_kwargs"] = {"retries": {"total_max_attempts": 1}, **given}
        return options

    @property
    def listed_by_page(self) -> bool:
        """Whether folders are listed by the links of a web page, so that everything looks like a file, too."""
        return self.parts[0] in ("http:", "https:")

    def is_dir(self) -> bool:
        """Whether there is anything under this name."""
        if self.listed_by_page:
            return bool(self.call("isdir"))
        try:
            return bool(self.call("info")["type"] == "directory")
        except FileNotFoundError:
            return False

    def is_file(self) -> bool:
        """Whether this is a file."""
        return self.exists() and not self.is_dir()

    def exists(self) -> bool:
        """Whether this is a file or a folder."""
        if self.listed_by_page:
            return bool(self.call("exists", strict=True))
        try:
            return bool(self.call("info"))
        except FileNotFoundError:
            return False

    def is_symlink(self) -> bool:
        """Object stores have no links."""
        return False

    def samefile(self, other: Any) -> bool:
        """Whether this is the same URL."""
        return str(self) == str(other)

    def absolute(self) -> RemotePath:
        """A URL is absolute."""
        return self

    def resolve(self, strict: bool = False) -> RemotePath:
        """Object stores have no links."""
        return self

    def iterdir(self) -> Generator[RemotePath, None, None]:
        """The files and folders in this folder."""
        names = (self._relative(entry) for entry in self.call("ls", detail=False))
        # A folder may list itself, and a page links to its own sorted forms.
        yield from (self / name for name in dict.fromkeys(names) if name and not {"/", "?"} & set(name))

    def tree(self) -> dict[str, Mapping[str, Any]]:
        """What is known of all files under this folder, by their relative names."""
        found = self.call("find", detail=True)
        return {self._relative(name): about for name, about in found.items()}

    def _relative(self, name: str) -> str:
        own = str(self.file_system()._strip_protocol(str(self))).rstrip("/")
        return name.rstrip("/").removeprefix(own).lstrip("/") if name.startswith(own) else ""

    def state(self) -> Any:
        """Name, size and version of all files. It changes with them."""
        return [
            [name, *(str(about.get(key)) for key in ("size", "ETag", "etag", "LastModified", "mtime", "Last-Modified"))]
            for name, about in sorted(self.tree().items())
            for about in [(self / name).call("info") if about.get("size") is None else about]
        ]

    def read_bytes(self) -> bytes:
        """The content of a file."""
        return bytes(self.call("cat_file"))

    def write_bytes(self, data: Any) -> int:
        """Write a file. It appears complete or not at all."""
        self.call("pipe_file", bytes(data))
        return len(data)

    def write_text(self, data: str, *args: Any, **options: Any) -> int:
        """Write a text file. It appears complete or not at all."""
        return self.write_bytes(data.encode())

    def unlink(self, missing_ok: bool = True) -> None:
        """Remove a file, or a folder with all it holds; first what makes it a zarr store."""
        with suppress(FileNotFoundError):
            if (self / "zarr.json").exists():
                (self / "zarr.json").call("rm")
            self.call("rm", recursive=True)

    def check_writable(self) -> None:
        """Raise unless files can be written here, and removed. For use before long work."""
        if self.listed_by_page:
            raise OutputError("cannot be written to", where=str(self), expected="a folder, s3:// or gs://")
        probe = self / f".segcal-probe-{secrets.token_hex(4)}"
        try:
            probe.write_bytes(b"")
        except FileNotFoundError as error:  # Folders need not exist there, buckets do.
            problem, fix = f"{'//'.join(self.parts[:2])} does not exist", "create it, or correct the URL"
            raise OutputError(problem, where=str(self), expected="a bucket", fix=fix) from error
        probe.unlink()


def as_path(path: str | os.PathLike[str]) -> Path:
    """The path of a folder or file, local or remote.

    Examples:
        >>> as_path("study").name, as_path("s3://bucket/study").name
        ('study', 'study')
        >>> as_path("ftp://host/study")
        Traceback (most recent call last):
        segcal.errors.InputError: ftp://host/study: is of an unknown kind; expected a folder, or a URL ...
    """
    scheme = url_scheme(path)
    if scheme is None or isinstance(path, RemotePath):
        return Path(path) if scheme is None else path  # type: ignore[return-value]
    if scheme not in _LIBRARIES:
        expected = "a folder, or a URL of " + ", ".join(f"{name}://" for name in _LIBRARIES)
        raise InputError("is of an unknown kind", where=str(path), expected=expected)
    return RemotePath(path)


def url_scheme(path: str | os.PathLike[str]) -> str | None:
    """The scheme of a URL; None for a local path. ``pathlib`` makes one slash of two."""
    found = re.match(r"([a-z][a-z0-9+.-]+):/" + ("" if isinstance(path, Path) else "/"), os.fspath(path))
    return found[1] if found else None


def under(root: Path, name: str) -> Path:
    """A place by its name relative to a folder. URLs and absolute names are places of their own."""
    return as_path(name) if url_scheme(name) or Path(name).is_absolute() else root / name


def check_local(path: Path) -> None:
    """Raise if a file or folder is named by a URL where only local ones can be written."""
    if url_scheme(path):
        where = str(RemotePath(path))  # with both slashes
        raise OutputError("is a URL", where=where, expected="a local name: object stores get only datasets")


def retried(path: Path, action: Callable[[], Result]) -> Result:
    """What an action on a path returns. On a remote one it is tried again if the connection fails.

    Files that do not exist, and errors of the content, are raised as they come.
    """
    if not isinstance(path, RemotePath):
        return action()
    for wait in (*_WAITS, None):
        try:
            return action()
        except Exception as failure:
            words = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
            if _denied(failure):
                expected = "credentials that may read, list and, for outputs, write and delete here"
                problem = f"access is denied ({words})"
                raise UnreachableError(problem, where=str(path), expected=expected, fix=_CREDENTIALS) from failure
            if not _passing(failure):
                raise
            if wait is None:
                problem = f"cannot be reached, after {len(_WAITS) + 1} tries ({words})"
                expected = "a server that answers"
                raise UnreachableError(problem, where=str(path), expected=expected, fix=_NETWORK) from failure
            time.sleep(wait)
    raise AssertionError


def _denied(failure: Exception) -> bool:
    named = "Credentials" in type(failure).__name__ or str(failure).startswith("Forbidden")  # botocore's, gcsfs's
    return isinstance(failure, PermissionError) or named or getattr(failure, "status", None) in (401, 403)


def _passing(failure: Exception) -> bool:
    """Whether an error is about the connection, and may be gone at the next try."""
    if isinstance(failure, OSError | asyncio.TimeoutError):
        return not isinstance(failure, (*_FINAL, SegcalError))
    return type(failure).__module__.partition(".")[0] in _CONNECTION


def file_sizes(folder: Path) -> dict[str, int | None]:
    """The sizes of all files under a folder, by their relative names; None if the server does not tell."""
    if isinstance(folder, RemotePath):
        return {name: about.get("size") for name, about in folder.tree().items()}
    paths = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def read_part(folder: Path, names: Sequence[str], start: int, stop: int | None = None) -> list[bytes]:
    """The same part of several files; a negative start counts from the end. Remote ones are fetched together."""
    if not isinstance(folder, RemotePath):
        parts = []
        for name in names:
            with (folder / name).open("rb") as file:
                file.seek(start, os.SEEK_END if start < 0 else os.SEEK_SET)
                parts.append(file.read(-1 if stop is None else stop - start))
        return parts

    def fetch() -> list[bytes]:
        paths, count = [str(folder / name) for name in names], len(names)
        found = folder.file_system().cat_ranges(paths, [start] * count, [stop] * count, on_error="return")
        for part in found:
            if isinstance(part, Exception):
                raise part
        return list(found)

    return retried(folder, fetch)


def append_text(path: Path, text: str) -> None:
    """Add text to a file. Object stores cannot append: there the file is a folder of parts, named by their time."""
    if isinstance(path, RemotePath):
        (path / f"{time.time_ns():020d}").write_text(text)
    else:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)


def appended_text(path: Path) -> str:
    """The text that was added to a file; empty if there is no such file."""
    if isinstance(path, RemotePath):
        names = sorted(path.tree()) if path.is_dir() else []
        return b"".join(read_part(path, names, 0)).decode(errors="replace")
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


@contextmanager
def replaced(path: RemotePath, *, replace: bool) -> Iterator[RemotePath]:
    """A place for a new file or folder. What is there is removed before; what was written is removed after an error.

    A file is written at once. A zarr store gets its metadata last: without them it cannot be read, so a process that
    was killed leaves no store that looks complete.
    """
    if path.is_dir():
        if not replace:
            raise OutputError("is not empty", where=str(path), fix="choose another folder")
        path.unlink()
    try:
        yield path
    except BaseException:
        with suppress(Exception):  # The server may be gone.
            path.file_system().rm(str(path), recursive=True)
        raise
