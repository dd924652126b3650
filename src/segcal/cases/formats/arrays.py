"""NumPy files: npy is read in parts; npz, the format of nnU-Net, is read as a whole."""

from __future__ import annotations

import math
import pickle
import threading
import zipfile
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from segcal.cases.formats import base
from segcal.errors import DataError
from segcal.files.atomic import reserve

# Bytes from which on a run is read; many shorter ones would take longer than mapping the file.
_SHORT_RUN = 4096
# numpy parses headers as Python, which in two threads at once may raise a SystemError in Python 3.11.
_ONE_AT_A_TIME = threading.Lock()


def _read_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the first axis varies fastest, and type; leaves the file at the first value."""
    if file.peek(1)[:1] == pickle.PROTO:
        raise base.pickled()
    version = npy_format.read_magic(file)
    read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
    with _ONE_AT_A_TIME:
        shape, fortran, dtype = read(file)
    if any(size < 0 for size in shape):
        raise DataError(f"shape {shape}", expected="no negative size")
    return shape, fortran, dtype


class NpyFile(base.ArrayFile):
    """An npy file, read in parts."""

    sliceable = True

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        with path.open("rb") as file:
            shape, fortran, dtype = _read_header(file)
            self._offset = file.tell()
            self._fortran = fortran
        super().__init__(path, shape, dtype)
        base.require_length(self._offset + math.prod(shape) * dtype.itemsize, path.stat().st_size, exactly=True)

    def _read(self, index: base.Index) -> base.Array:
        if self._fortran:  # the same values as those of the transposed array in the usual order
            part: base.Array = self._read_rows(self.shape[::-1], index[::-1]).T
            return part
        return self._read_rows(self.shape, index)

    def _read_rows(self, shape: tuple[int, ...], index: base.Index) -> base.Array:
        """A part of an array of this shape, run by run: a run is what lies together in the file."""
        ranges = [range(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
        lengths = [len(each) for each in ranges]
        # Axes from ``last`` on are read whole, the one before it in part.
        last = len(shape)
        while last > 1 and lengths[last - 1] == shape[last - 1]:
            last -= 1
        steps = [math.prod(shape[axis + 1 :]) * self.dtype.itemsize for axis in range(len(shape))]
        run = lengths[last - 1] * steps[last - 1]
        if run < _SHORT_RUN or any(each.step != 1 for each in ranges):
            # Mapped again for each part: the pages of a long-lived map would add up in resident memory. Mapped
            # copy-on-write because torch warns about read-only arrays.
            mapped: base.Array = np.memmap(self.path, self.dtype, "c", self._offset, shape)
            return np.asarray(mapped)[index]
        # Not mapped: a read error or a file cut short would end the process instead of raising an error.
        part = np.empty(lengths, self.dtype)
        with self.path.open("rb", buffering=0) as file:
            for place, row in zip(
                np.ndindex(*lengths[: last - 1]), part.reshape(-1, run // self.dtype.itemsize), strict=True
            ):
                start = sum(each[k] * step for each, k, step in zip(ranges, place, steps, strict=False))
                file.seek(self._offset + start + ranges[last - 1].start * steps[last - 1])
                _read_exactly(file, row.data.cast("B"))
        return part


def _read_exactly(file: FileIO, into: memoryview) -> None:
    done = 0
    while done < len(into):
        read = file.readinto(into[done:])
        if not read:
            raise base.damaged(f"it ends {len(into) - done:,} bytes too early")
        done += read


class NpySink(base.ArraySink):
    """Writes an npy file in parts."""

    def _begin(self) -> None:
        header = {"descr": npy_format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": self.shape}
        with self.path.open("wb") as file:
            npy_format.write_array_header_1_0(file, header)
            self._offset = file.tell()
            reserve(file, math.prod(self.shape) * self.dtype.itemsize)

    def write(self, index: base.Index, block: base.Array) -> None:
        """Store a part; mapped again each time, as in ``NpyFile``."""
        np.memmap(self.path, self.dtype, "r+", self._offset, self.shape)[index] = block


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
