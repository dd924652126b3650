"""NumPy files: npy is memory-mapped and read in parts; npz is nnU-Net's format, read as a whole."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import DTypeLike

from segcal.cases.formats.base import Array, ArrayFile, ArraySink, Index, WholeFile, WholeSink, pick_key


class NpyFile(ArrayFile):
    """A memory-mapped npy file."""

    sliceable = True

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        super().__init__(path, mapped.shape, mapped.dtype)

    def _read(self, index: Index) -> Array:
        # Mapped anew for each part: pages of a long-lived map would pile up in the process's resident memory. Mapped
        # copy-on-write, because torch warns of arrays that cannot be written.
        part: Array = np.load(self.path, mmap_mode="c", allow_pickle=False)[index]
        return part


class NpySink(ArraySink):
    """Writes an npy file in parts."""

    def __init__(self, path: Path, shape: Sequence[int], dtype: DTypeLike) -> None:
        super().__init__(path, shape, dtype)
        npy_format.open_memmap(path, mode="w+", dtype=self.dtype, shape=self.shape)

    def write(self, index: Index, block: Array) -> None:
        """Store a part; mapped anew each time for the reason given in ``NpyFile``."""
        npy_format.open_memmap(self.path, mode="r+")[index] = block


class NpzFile(WholeFile):
    """One array of an npz archive."""

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            self.key = pick_key(names, key, usual)
            with archive.open(self.key + ".npy") as member:
                version = npy_format.read_magic(member)
                read_header = (
                    npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
                )
                shape, _, dtype = read_header(member)
        super().__init__(path, shape, dtype)

    def _decode(self) -> Array:
        assert self.key is not None
        with np.load(self.path, allow_pickle=False) as archive:
            return np.asarray(archive[self.key])


class NpzSink(WholeSink):
    """Writes one array as a compressed npz archive, as nnU-Net does."""

    def __init__(self, path: Path, shape: Sequence[int], dtype: DTypeLike, key: str) -> None:
        super().__init__(path, shape, dtype)
        self.key = key

    def _encode(self) -> None:
        with self.path.open("wb") as file:
            np.savez_compressed(file, **{self.key: self.array})  # type: ignore[arg-type]
