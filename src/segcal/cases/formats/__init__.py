"""File formats by extension. A new one takes a module like those here, and a line in ``FORMATS``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from segcal.cases.formats.arrays import NPY, NPZ
from segcal.cases.formats.base import Array as Array
from segcal.cases.formats.base import ArrayFile as ArrayFile
from segcal.cases.formats.base import ArraySink, Format, reading
from segcal.cases.formats.base import ArraySpec as ArraySpec
from segcal.cases.formats.base import Geometry as Geometry
from segcal.cases.formats.hdf5 import HDF5
from segcal.cases.formats.nifti import NIFTI, NIFTI_GZ
from segcal.cases.formats.png import PNG
from segcal.cases.formats.tiff import TIFF
from segcal.cases.formats.zarr_store import ZARR
from segcal.errors import DataError, OutputError, SegcalError
from segcal.files.atomic import atomic_path
from segcal.files.remote import RemotePath

#: All formats; the order is that of help texts and messages.
FORMATS: tuple[Format, ...] = (
    NPY,
    NPZ,
    NIFTI_GZ,
    NIFTI,
    PNG,
    TIFF,
    ZARR,
    HDF5,
)
#: What to do about other formats in object stores.
LOCAL_FIRST = "download it, or write it as zarr: segcal pack DATA s3://bucket/study --format zarr"
#: Those that hold scores, by name.
SCORE_FORMATS = {format.name: format for format in FORMATS if format.scores}
_BY_SUFFIX = {suffix: format for format in FORMATS for suffix in format.suffixes}


def split_suffix(name: str) -> tuple[str, str] | None:
    """``scan.01.nii.gz`` to ``("scan.01", ".nii.gz")``; None if the format is not known.

    Examples:
        >>> split_suffix("scan.01.nii.gz"), split_suffix("SCAN.NII.GZ"), split_suffix("notes.txt")
        (('scan.01', '.nii.gz'), ('SCAN', '.NII.GZ'), None)
    """
    for suffix in _BY_SUFFIX:
        if name.lower().endswith(suffix) and len(name) > len(suffix):
            return name[: -len(suffix)], name[-len(suffix) :]
    return None


def format_of(path: Path) -> Format | None:
    """The format of a file by its name; None if it is not known."""
    parts = split_suffix(path.name)
    return _BY_SUFFIX[parts[1].lower()] if parts else None


def open_array(path: Path, *, key: str | None = None, usual: Sequence[str] = ()) -> ArrayFile:
    """Open an array file by its extension. Reads only its shape and type."""
    format = _known(path, DataError)
    with reading(path):
        return format.reader(path, key, usual)


@contextmanager
def create_array(path: Path, spec: ArraySpec, *, replace: bool = False) -> Iterator[ArraySink]:
    """Write an array under a temporary name. The file appears under its own name once it is complete, or not at all.

    It is best written in parts of whole rows along ``spec.row_axis``. A zarr store is a folder; with ``replace`` it
    takes the place of an earlier one.
    """
    format = _known(path, OutputError)
    with atomic_path(path, folder=format.folder, replace=replace) as temporary:
        sink = format.writer(temporary, spec)
        yield sink
        sink.close()


def _known(path: Path, error: type[SegcalError]) -> Format:
    format = format_of(path)
    if format is None:
        raise error("unknown format", where=str(path), expected="one of " + ", ".join(_BY_SUFFIX))
    if isinstance(path, RemotePath) and not format.remote:
        raise error(f"{format.name} files cannot be used at a URL", where=str(path), expected="zarr", fix=LOCAL_FIRST)
    return format
