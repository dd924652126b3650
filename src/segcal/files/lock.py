"""One writer at a time: a lock on a file, which the system releases when its process ends, however it ends."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from pathlib import Path

from segcal.errors import OutputError
from segcal.files.remote import RemotePath

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

# Seconds before another try: a process that only checks holds the lock for a moment.
_WAITS = (0.02, 0.05, 0.1)


class Lock:
    """The right to write to a folder, held from ``hold`` until ``release`` or the end of the process.

    Object stores and some network file systems have no locks; there, nothing is locked.

    Args:
        file: The file whose lock stands for the folder.
        folder: The folder, which errors name.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> mine, other = Lock(folder / "file", folder), Lock(folder / "file", folder)
        >>> mine.hold()
        >>> other.check()
        Traceback (most recent call last):
        segcal.errors.OutputError: ...: another process is writing here...
        >>> mine.release()
        >>> other.check()
    """

    def __init__(self, file: Path, folder: Path) -> None:
        self._file, self._folder = file, folder
        self._held: int | None = None

    def check(self) -> None:
        """Raise if another process holds the lock."""
        if self._held is None and not isinstance(self._file, RemotePath) and self._file.is_file():
            self._take(os.open(self._file, os.O_RDONLY))
            self.release()

    def hold(self) -> None:
        """Take the lock, and create the file if it is missing; raise if another process holds it."""
        if self._held is None and not isinstance(self._file, RemotePath):
            self._take(os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666))

    def _take(self, handle: int) -> None:
        self._held = handle
        if fcntl is None:
            return
        for wait in (*_WAITS, None):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    return  # The file system has no locks.
                if wait is not None:
                    time.sleep(wait)
                    continue
                self.release()
                raise OutputError(
                    "another process is writing here",
                    where=str(self._folder),
                    expected="one run at a time",
                    fix="wait until it has ended, or choose another folder",
                ) from None
            return

    def release(self) -> None:
        """Give the lock up."""
        if self._held is not None:
            if fcntl is not None:
                with suppress(OSError):  # A forked process, such as one of a DataLoader, may have the file open, too.
                    fcntl.flock(self._held, fcntl.LOCK_UN)
            os.close(self._held)
            self._held = None
