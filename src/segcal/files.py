"""Files that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from segcal.errors import OutputError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` that takes its place when the block succeeds and vanishes when it fails."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if path.is_dir() and temporary.exists():
            shutil.rmtree(path)
        temporary.replace(path)
    except OSError as error:
        raise OutputError(
            f"cannot be written ({error.strerror or error})",
            where=str(path),
            expected="a writable folder with enough space",
        ) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with suppress(OSError):
                temporary.unlink()
