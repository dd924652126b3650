"""What every file format offers: an array whose parts can be read, and a sink whose parts can be written.

Axes are canonical on this side: scores ``(C, *spatial)``, labels ``(*spatial)``, volumes ``(z, y, x)``.
Nothing is ever unpickled.
"""

from __future__ import annotations

import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from segcal.errors import DataError, SegcalError

Array = NDArray[Any]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Geometry:
    """Where a NIfTI volume lies in space: affine, voxel size along the file's axes, and the header to write back."""

    affine: Array
    zooms: tuple[float, ...]
    header: Any


class ArrayFile(ABC):
    """An array on disk. Opening reads only its shape; ``sliceable`` files read parts without reading the whole."""

    sliceable = False
    geometry: Geometry | None = None
    key: str | None = None
    chunk: tuple[int, ...] | None = None  # what is stored, and decoded, together

    def __init__(self, path: Path, shape: Sequence[int], dtype: DTypeLike) -> None:
        self.path, self.shape, self.dtype = path, tuple(shape), np.dtype(dtype)
        if self.dtype.hasobject:
            raise pickled()

    @abstractmethod
    def _read(self, index: Index) -> Array: ...

    def require_complete(self) -> None:  # noqa: B027 - only chunked stores can lose a part and still open
        """Raise if parts of the array are missing on disk."""

    def forget(self) -> None:  # noqa: B027 - only files decoded as a whole keep anything
        """Drop what was decoded."""

    def read(self, index: Index | None = None) -> Array:
        """The part of the array at ``index`` (one slice per axis; all of it by default), in the machine's byte order.

        It may be a view of what is mapped or kept: copy it to keep or change it.
        """
        with reading(self.path):
            part = self._read(index or (slice(None),) * len(self.shape))
            return part.astype(part.dtype.newbyteorder("="), copy=False)


class WholeFile(ArrayFile):
    """A file that must be decoded as a whole; it is decoded once and kept as long as this object lives."""

    _array: Array | None = None

    @abstractmethod
    def _decode(self) -> Array: ...

    def _read(self, index: Index) -> Array:
        if self._array is None:
            self._array = self._decode()
        return self._array[index]

    def forget(self) -> None:
        """Drop what was decoded."""
        self._array = None


class ArraySink(ABC):
    """An array being written part by part. The caller renames the finished file into place."""

    def __init__(self, path: Path, shape: Sequence[int], dtype: DTypeLike) -> None:
        self.path, self.shape, self.dtype = path, tuple(shape), np.dtype(dtype)

    @abstractmethod
    def write(self, index: Index, block: Array) -> None:
        """Store a part."""

    def close(self) -> None:  # noqa: B027 - formats that write in place have nothing left to do
        """Finish the file."""


class WholeSink(ArraySink):
    """A sink for formats that are encoded as a whole, at the end."""

    def __init__(self, path: Path, shape: Sequence[int], dtype: DTypeLike) -> None:
        super().__init__(path, shape, dtype)
        self.array = np.zeros(self.shape, self.dtype)

    def write(self, index: Index, block: Array) -> None:
        """Keep a part until the end."""
        self.array[index] = block

    @abstractmethod
    def _encode(self) -> None: ...

    def close(self) -> None:
        """Encode the file."""
        self._encode()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a library says of a bad file into one clear error that names the file."""
    try:
        yield
    except SegcalError as error:
        raise error.at(where=str(path)) from None
    except (OSError, ValueError, EOFError, KeyError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        if "pickle" in str(error).lower() or "Python objects" in str(error):
            raise pickled().at(where=str(path)) from None
        raise DataError(
            f"cannot be read ({type(error).__name__}: {error})",
            where=str(path),
            expected=f"a complete {''.join(path.suffixes[-2:])} file",
            fix="it may be truncated or of another format: write or copy it again",
        ) from error


def pickled() -> DataError:
    """The refusal of pickles and object arrays."""
    return DataError(
        "holds Python objects (a pickle)",
        expected="a plain numeric array",
        fix="save a numeric array; segcal never unpickles, because loading a pickle runs code",
    )


def pick_key(keys: Sequence[str], wanted: str | None, usual: Sequence[str]) -> str:
    """Which array of a file with several: the declared one, the only one, or the one of a usual name."""
    if wanted is not None and wanted in keys:
        return wanted
    if wanted is None and len(keys) == 1:
        return keys[0]
    found = [key for key in usual if key in keys]
    if wanted is None and len(found) == 1:
        return found[0]
    raise DataError(
        f"holds the arrays {', '.join(map(repr, keys)) or '(none)'}",
        expected=f"one named {wanted!r}" if wanted else f"a single array, or exactly one named {' / '.join(usual)}",
        fix="name it with key = '...' in segcal.toml",
    )
