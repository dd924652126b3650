"""NumPy files: npy is memory-mapped and read in parts; npz, the format of nnU-Net, is read as a whole."""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy_format

from segcal.cases.formats import base
from segcal.errors import DataError
from segcal.files.atomic import reserve


def _read_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the first axis varies fastest, and type; leaves the file at the first value."""
    if file.peek(1)[:1] == pickle.PROTO:
        raise base.pickled()
    version = npy_format.read_magic(file)
    read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if any(size < 0 for size in shape):
        raise DataError(f"shape {shape}", expected="no negative size")
    return shape, fortran, dtype


class NpyFile(base.ArrayFile):
    """A memory-mapped npy file."""

    sliceable = True

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        with path.open("rb") as file:
            shape, fortran, dtype = _read_header(file)
            self._offset = file.tell()
            self._order: Literal["F", "C"] = "F" if fortran else "C"
        super().__init__(path, shape, dtype)
        base.require_length(self._offset + math.prod(shape) * dtype.itemsize, path.stat().st_size, exactly=True)

    def _read(self, index: base.Index) -> base.Array:
        # Mapped again for each part: the pages of a long-lived map would add up in resident memory. Mapped
        # copy-on-write because torch warns about read-only arrays.
        mapped: base.Array = np.memmap(self.path, self.dtype, "c", self._offset, self.shape, self._order)
        return np.asarray(mapped)[index]


class NpySink(base.ArraySink):
    """Writes an npy file in parts."""

    def _begin(self) -> None:
        header = {"descr": npy_format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": self.shape}
        with self.path.open("wb") as file:
            npy_format.write_array_header_1_0(file, header)
            reserve(file, math.prod(self.shape) * self.dtype.itemsize)

    def write(self, index: base.Index, block: base.Array) -> None:
        """Store a part; mapped again each time, as in ``NpyFile``."""
        npy_format.open_memmap(self.path, mode="r+")[index] = block


class NpzFile(base.WholeFile):
    """One array of an npz archive, with the checksum of zip verified."""

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            self.key = base.pick_key(names, key, usual)
            info = archive.getinfo(self.key + ".npy")
            with archive.open(info) as member:
                shape, _, dtype = _read_header(member)
                offset = member.tell()
        super().__init__(path, shape, dtype)
        base.require_length(offset + math.prod(shape) * self.dtype.itemsize, info.file_size, exactly=True)
        if info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            base.require_length(info.file_size, base.DEFLATE_RATIO * path.stat().st_size)

    def _decode(self) -> base.Array:
        assert self.key is not None
        with zipfile.ZipFile(self.path) as archive, archive.open(self.key + ".npy") as member:
            shape, fortran, dtype = _read_header(member)
            values = base.read_to_end(member, math.prod(shape) * dtype.itemsize).view(dtype)
        return values.reshape(shape, order="F" if fortran else "C")


class NpzSink(base.WholeSink):
    """Writes one array as a compressed npz archive, as nnU-Net does."""

    def close(self) -> None:
        """Write the file."""
        with self.path.open("wb") as file:
            np.savez_compressed(file, **{self.key: self.array})  # type: ignore[arg-type]


NPY = base.Format((".npy",), NpyFile, NpySink)
NPZ = base.Format((".npz",), NpzFile, NpzSink)
