"""What a file format is: an array that can be read in parts, a sink that can be written in parts, and some facts.

Axes are canonical on this side: scores ``(C, *spatial)``, labels ``(*spatial)``, volumes ``(z, y, x)``.
Nothing is ever unpickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import GzipFile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from segcal.errors import DataError, SegcalError, import_extra

Array = NDArray[Any]
Index = tuple[slice, ...]

# The highest compression ratio of deflate (gzip, zip, png, tif). A header that claims more is wrong.
DEFLATE_RATIO = 1032
# Bytes decompressed at a time: memory grows with what the file holds, not with what its header claims.
_BLOCK = 2**20


@dataclass(frozen=True)
class Geometry:
    """Where a volume lies in space: affine, voxel size along the file's axes, and the header to write back."""

    affine: Array
    zooms: tuple[float, ...]
    header: Any


@dataclass(frozen=True)
class ArraySpec:
    """An array to be written part by part."""

    shape: Sequence[int]
    dtype: DTypeLike
    row_axis: int = 0  # the axis along which parts are written
    key: str = "array"  # its name, in formats that name arrays
    geometry: Geometry | None = None  # where it lies in space, in formats that say so


@dataclass(frozen=True)
class Stored:
    """How many chunks of an array are on disk, and what a chunk that is not there means."""

    chunks: int = 1
    there: int = 1
    fill: float = 0  # the value that missing chunks read as
    sparse: bool = False  # whether a chunk may be missing because it holds nothing but ``fill``

    @property
    def missing(self) -> int:
        """Chunks that are not on disk."""
        return self.chunks - self.there


class ArrayFile(ABC):
    """An array on disk. Opening reads only its shape; ``sliceable`` files read parts without reading the whole."""

    sliceable = False
    geometry: Geometry | None = None
    key: str | None = None
    chunk: tuple[int, ...] | None = None  # shape of the blocks that are stored and decoded as one
    _array: Array | None = None

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

    def stored(self) -> Stored:
        """Which chunks are on disk. A store that lost some can still be opened; other formats have one chunk."""
        return Stored()

    def holds_fill(self) -> bool:
        """Whether some stored chunk holds nothing but the fill value."""
        return False

    def forget(self) -> None:
        """Free what was decoded; only files that must be decoded as a whole keep anything."""
        self._array = None

    def read(self, index: Index | None = None) -> Array:
        """The part of the array at ``index`` (one slice per axis; all of it by default), in the machine's byte order.

        The result may be a view of a mapped file or of a kept array: copy it before you keep or change it.
        """
        with reading(self.path):
            part = self._read(index or (slice(None),) * len(self.shape))
            return part.astype(part.dtype.newbyteorder("="), copy=False)


class WholeFile(ArrayFile):
    """A file that must be decoded as a whole. It is decoded once and kept until ``forget``."""

    @abstractmethod
    def _decode(self) -> Array: ...

    def _read(self, index: Index) -> Array:
        if self._array is None:
            array = self._decode()
            if array.shape != self.shape:
                raise damaged(f"decoded, it has shape {array.shape}, and its header says {self.shape}")
            self._array = array
        return self._array[index]


class ArraySink(ABC):
    """An array that is written part by part. The caller renames the finished file into place.

    Args:
        path: The file to write.
        spec: The whole array.
    """

    def __init__(self, path: Path, spec: ArraySpec) -> None:
        self.path, self.shape, self.dtype = path, tuple(spec.shape), np.dtype(spec.dtype)
        self.row_axis, self.key, self.geometry = spec.row_axis, spec.key, spec.geometry
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Create the file, or whatever parts are stored in."""

    @abstractmethod
    def write(self, index: Index, block: Array) -> None:
        """Store a part."""

    def close(self) -> None:  # noqa: B027 - formats that write in place have nothing left to do
        """Finish the file."""


class WholeSink(ArraySink):
    """A sink for formats that are encoded as a whole: ``close`` writes the file."""

    def _begin(self) -> None:
        self.array = np.zeros(self.shape, self.dtype)

    def write(self, index: Index, block: Array) -> None:
        """Keep a part until the end."""
        self.array[index] = block


@dataclass(frozen=True)
class Format:
    """A file format. Adding one takes a module with such an object and a line in ``segcal.cases.formats``.

    Attributes:
        suffixes: How its files end, in lower case; new files get the first.
        reader: Opens a file, given its path, the declared name of the array, and the usual names.
        writer: Writes a file.
        scores: Whether it holds scores: floating-point arrays of any rank. Labels, masks and images every format holds.
        widest_label: The widest type of labels that other programs read.
        own_axes: Whether its files say which axis is which, so that ``axes`` of ``segcal.toml`` does not matter.
        geometry: Whether its files say where a volume lies in space.
        folder: Whether a file is really a folder.
        sparse: Whether chunks that hold nothing but the fill value may be left out.
        remote: Whether it can be read and written in object stores.
        library: The library that it needs beyond those of a plain installation.
        extra: The extra of segcal that installs this library.
    """

    suffixes: tuple[str, ...]
    reader: Callable[[Path, str | None, Sequence[str]], ArrayFile]
    writer: type[ArraySink]
    scores: bool = True
    widest_label: type[np.signedinteger[Any]] = np.int64
    own_axes: bool = False
    geometry: bool = False
    folder: bool = False
    sparse: bool = False
    remote: bool = False
    library: str = ""
    extra: str = ""

    @property
    def name(self) -> str:
        """What users call it: the suffix of new files, without its dot."""
        return self.suffixes[0][1:]

    def import_library(self) -> Any:
        """Import its library; the error names the extra that installs it."""
        return import_extra(self.library, self.extra, f"reading and writing {self.name} files")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a library raises on a bad file into one clear error that names the file.

    Libraries raise errors of every kind on damaged files, so all are caught, running out of memory included.
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
            expected="a complete file",
            fix="it may be truncated or of another format: write or copy it again",
        ) from error


def damaged(problem: str) -> DataError:
    """The error of a file that contradicts itself."""
    return DataError(
        f"is damaged: {problem}", expected="a complete file with matching checksums", fix="write or copy it again"
    )


def require_length(claimed: int, there: int, *, exactly: bool = False) -> None:
    """Raise if a header claims more bytes than its file can hold or, with ``exactly``, any other number than it has."""
    if claimed > there or (exactly and claimed != there):
        raise damaged(f"its header claims {claimed:,} bytes, the file has {there:,}")


def read_to_end(stream: IO[bytes] | GzipFile, size: int) -> Array:
    """Read ``size`` bytes of a compressed stream, then the rest of it: the checksum comes at the end."""
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
    """The error of pickles and object arrays."""
    return DataError(
        "holds Python objects (a pickle)",
        expected="a plain numeric array",
        fix="save a numeric array; segcal never unpickles, because loading a pickle runs code",
    )


def pick_key(keys: Sequence[str], wanted: str | None, usual: Sequence[str]) -> str:
    """Choose an array of a file that may hold several: the declared one, the only one, or the one with a usual name."""
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
