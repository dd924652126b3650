"""File formats by extension."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from numpy.typing import DTypeLike

from segcal.cases.formats.arrays import NpyFile, NpySink, NpzFile, NpzSink
from segcal.cases.formats.base import Array, ArrayFile, ArraySink, Geometry, Index, reading
from segcal.cases.formats.images import PngFile, PngSink, TiffFile, TiffSink
from segcal.cases.formats.nifti import NiftiFile, NiftiSink
from segcal.cases.formats.stores import H5File, H5Sink, ZarrFile, ZarrSink
from segcal.errors import DataError, OutputError
from segcal.files import atomic_path

__all__ = [
    "SUFFIXES",
    "Array",
    "ArrayFile",
    "ArraySink",
    "Geometry",
    "Index",
    "create_array",
    "open_array",
    "split_suffix",
]

_READERS: dict[str, Callable[[Path, str | None, Sequence[str]], ArrayFile]] = {
    ".npy": NpyFile,
    ".npz": NpzFile,
    ".nii.gz": NiftiFile,
    ".nii": NiftiFile,
    ".png": PngFile,
    ".tif": TiffFile,
    ".tiff": TiffFile,
    ".zarr": ZarrFile,
    ".h5": H5File,
    ".hdf5": H5File,
}
SUFFIXES = tuple(_READERS)


def split_suffix(name: str) -> tuple[str, str] | None:
    """``scan.01.nii.gz`` to ``("scan.01", ".nii.gz")``; None for names of no known format.

    Examples:
        >>> split_suffix("scan.01.nii.gz"), split_suffix("notes.txt")
        (('scan.01', '.nii.gz'), None)
    """
    for suffix in SUFFIXES:
        if name.lower().endswith(suffix) and len(name) > len(suffix):
            return name[: -len(suffix)], suffix
    return None


def open_array(path: Path, *, key: str | None = None, usual: Sequence[str] = ()) -> ArrayFile:
    """Open an array file by its extension, reading its shape only."""
    parts = split_suffix(path.name)
    if parts is None:
        raise DataError("unknown format", where=str(path), expected="one of " + ", ".join(SUFFIXES))
    with reading(path):
        return _READERS[parts[1]](path, key, usual)


@contextmanager
def create_array(
    path: Path,
    shape: Sequence[int],
    dtype: DTypeLike,
    *,
    row_axis: int,
    key: str = "array",
    geometry: Geometry | None = None,
    replace: bool = False,
) -> Iterator[ArraySink]:
    """Write an array under a temporary name; it appears under its own once complete, or not at all.

    Zarr shards along ``row_axis``; parts of whole rows are best. A zarr store is a folder, and another one that is
    there is replaced only with ``replace``.
    """
    parts = split_suffix(path.name)
    if parts is None:
        raise OutputError("unknown format", where=str(path), expected="one of " + ", ".join(SUFFIXES))
    with atomic_path(path, folder=parts[1] == ".zarr", replace=replace) as temporary:
        sink = _sink(parts[1], temporary, shape, dtype, row_axis, key, geometry)
        yield sink
        sink.close()


def _sink(
    suffix: str,
    path: Path,
    shape: Sequence[int],
    dtype: DTypeLike,
    row_axis: int,
    key: str,
    geometry: Geometry | None,
) -> ArraySink:
    if suffix == ".npy":
        return NpySink(path, shape, dtype)
    if suffix == ".npz":
        return NpzSink(path, shape, dtype, key)
    if suffix in (".nii", ".nii.gz"):
        return NiftiSink(path, shape, dtype, geometry)
    if suffix == ".png":
        return PngSink(path, shape, dtype)
    if suffix in (".tif", ".tiff"):
        return TiffSink(path, shape, dtype)
    if suffix == ".zarr":
        return ZarrSink(path, shape, dtype, row_axis)
    return H5Sink(path, shape, dtype, key)
