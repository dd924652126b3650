"""File formats by extension."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from numpy.typing import DTypeLike

from segcal.cases.formats.arrays import NpyFile, NpySink, NpzFile, NpzSink
from segcal.cases.formats.base import (
    SUFFIXES,
    Array,
    ArrayFile,
    ArraySink,
    Geometry,
    Index,
    Stored,
    reading,
    split_suffix,
    suffix_of,
)
from segcal.cases.formats.hdf5 import H5File, H5Sink
from segcal.cases.formats.nifti import NiftiFile, NiftiSink
from segcal.cases.formats.png import PngFile, PngSink
from segcal.cases.formats.tiff import TiffFile, TiffSink
from segcal.cases.formats.zarr_store import ZarrFile, ZarrSink
from segcal.errors import DataError, OutputError
from segcal.files.atomic import atomic_path

__all__ = [
    "SUFFIXES",
    "Array",
    "ArrayFile",
    "ArraySink",
    "Geometry",
    "Index",
    "Stored",
    "create_array",
    "open_array",
    "split_suffix",
    "suffix_of",
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


def open_array(path: Path, *, key: str | None = None, usual: Sequence[str] = ()) -> ArrayFile:
    """Open an array file by its extension, reading its shape only."""
    suffix = suffix_of(path)
    if not suffix:
        raise DataError("unknown format", where=str(path), expected="one of " + ", ".join(SUFFIXES))
    with reading(path):
        return _READERS[suffix](path, key, usual)


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
    suffix = suffix_of(path)
    if not suffix:
        raise OutputError("unknown format", where=str(path), expected="one of " + ", ".join(SUFFIXES))
    with atomic_path(path, folder=suffix == ".zarr", replace=replace) as temporary:
        sink = _sink(suffix, temporary, shape, dtype, row_axis, key, geometry)
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
