"""What every file format offers: an array whose parts can be read, and a sink whose parts can be written.

Axes are canonical on this side: scores ``(C, *spatial)``, labels ``(*spatial)``, volumes ``(z, y, x)``.
Nothing is ever unpickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import GzipFile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from segcal.errors import DataError, SegcalError

Array = NDArray[Any]
Index = tuple[slice, ...]

SUFFIXES = (".npy", ".npz", ".nii.gz", ".nii", ".png", ".tif", ".tiff", ".zarr", ".h5", ".hdf5")
# Deflate (gzip, zip, png, tif) cannot shrink anything more than this: whatever claims more than its file can hold lies.
DEFLATE_RATIO = 1032
# Bytes decompressed at a time: memory grows with what is really there, not with what a header claims.
_BLOCK = 2**20


def split_suffix(name: str) -> tuple[str, str] | None:
    """``scan.01.nii.gz`` to ``("scan.01", ".nii.gz")``; None for names of no known format.

    Examples:
        >>> split_suffix("scan.01.nii.gz"), split_suffix("SCAN.NII.GZ"), split_suffix("notes.txt")
        (('scan.01', '.nii.gz'), ('SCAN', '.NII.GZ'), None)
    """
    for suffix in SUFFIXES:
        if name.lower().endswith(suffix) and len(name) > len(suffix):
            return name[: -len(suffix)], name[-len(suffix) :]
    return None


def suffix_of(path: Path) -> str:
    """The format of a file by its name, in lower case; empty for names of no known format."""
    parts = split_suffix(path.name)
    return parts[1].lower() if parts else ""


@dataclass(frozen=True)
class Geometry:
    """Where a NIfTI volume lies in space: affine, voxel size along the file's axes, and the header to write back."""

    affine: Array
    zooms: tuple[float, ...]
    header: Any


@dataclass(frozen=True)
class Stored:
    """How many chunks of an array are on disk, and what a chunk that is not there means."""

    chunks: int
    there: int
    fill: float = 0
    """What the others read as."""
    sparse: bool = False
    """Whether the format leaves out chunks that hold nothing but ``fill``; otherwise missing ones were not written."""

    @property
    def missing(self) -> int:
        """Chunks that are not there."""
        return self.chunks - self.there


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
        if self.dtype.kind not in "biuf" or self.dtype.itemsize > 8:
            raise DataError(
                f"holds values of type {self.dtype}",
                expected="booleans, integers or floating-point numbers of at most 64 bits",
                fix="save one plain number per voxel: class indices, not colours or texts",
            )
        if not self.shape:
            raise DataError("holds a single number", expected="an array")

    @abstractmethod
    def _read(self, index: Index) -> Array: ...

    def stored(self) -> Stored | None:
        """What is on disk of a chunked store, which can lose a part and still open; None for other files."""
        with reading(self.path):
            return self._stored()

    def _stored(self) -> Stored | None:
        return None

    def holds_fill(self) -> bool:
        """Whether a chunk of nothing but the fill value is stored."""
        with reading(self.path):
            return self._holds_fill()

    def _holds_fill(self) -> bool:
        return False

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
    """Turn whatever a library says of a bad file into one clear error that names the file.

    The libraries raise errors of every kind on damaged files, so all are caught; running out of memory, too.
    """
    try:
        yield
    except SegcalError as error:
        raise error.at(where=str(path)) from None
    except Exception as error:
        if "pickle" in str(error).lower() or "Python objects" in str(error):
            raise pickled().at(where=str(path)) from None
        raise DataError(
            f"cannot be read ({type(error).__name__}: {error})",
            where=str(path),
            expected=f"a complete {suffix_of(path)} file",
            fix="it may be truncated or of another format: write or copy it again",
        ) from error


def damaged(problem: str) -> DataError:
    """What is said of a file that contradicts itself."""
    return DataError(
        f"is damaged: {problem}", expected="a complete file with matching checksums", fix="write or copy it again"
    )


def require_length(claimed: int, there: int, *, exactly: bool = False) -> None:
    """Raise if a header claims more bytes than its file can hold, or, with ``exactly``, fewer than it does."""
    if claimed > there or (exactly and claimed != there):
        raise damaged(f"its header claims {claimed:,} bytes, the file has {there:,}")


def read_to_end(stream: IO[bytes] | GzipFile, size: int) -> Array:
    """``size`` bytes of a compressed stream; the rest is read too, because the checksum stands at the end."""
    data = np.empty(size, np.uint8)
    done = 0
    while done < size and (part := stream.read(min(_BLOCK, size - done))):
        data[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done += len(part)
    if done < size:
        raise damaged(f"it ends after {done:,} of {size:,} bytes")
    while stream.read(_BLOCK):
        pass
    return data


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
