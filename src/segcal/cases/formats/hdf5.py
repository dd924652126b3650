"""HDF5: datasets whose parts are read alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from segcal.cases.formats.base import Array, ArrayFile, ArraySink, Index, Stored, pick_key, require_length
from segcal.errors import MissingExtraError
from segcal.files.atomic import reserve


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise MissingExtraError("h5py", "h5", "reading and writing HDF5") from None
    return h5py


class H5File(ArrayFile):
    """A dataset of an HDF5 file, opened for each read so that no handle stays behind."""

    sliceable = True

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        with _h5py().File(path, "r") as file:
            names: list[str] = []
            file.visititems(lambda name, node: names.append(name) if hasattr(node, "dtype") else None)
            self.key = pick_key(names, key, usual)
            data = file[self.key]
            shape, dtype, self.chunk = data.shape, data.dtype, data.chunks
            contiguous_end = (data.id.get_offset() or 0) + (0 if data.chunks else data.id.get_storage_size())
        super().__init__(path, shape, dtype)
        require_length(contiguous_end, path.stat().st_size)

    def _stored(self) -> Stored:
        """The chunks on disk. HDF5 leaves out none that was written."""
        with _h5py().File(self.path, "r") as file:
            data = file[self.key]
            if data.is_virtual:  # Made of other files; those that are not there read as the fill value.
                sources = {source.file_name for source in data.virtual_sources()}
                there = [name for name in sources if name == "." or (self.path.parent / name).is_file()]
                return Stored(len(sources), len(there))
            if data.chunks is None:
                return Stored(1, int(data.id.get_storage_size() > 0))
            wanted = math.prod(-(-size // chunk) for size, chunk in zip(data.shape, data.chunks, strict=True))
            return Stored(wanted, data.id.get_num_chunks(), data.fillvalue.item())

    def _read(self, index: Index) -> Array:
        with _h5py().File(self.path, "r") as file:
            return np.asarray(file[self.key][index])


class H5Sink(ArraySink):
    """Writes one HDF5 dataset in parts."""

    def __init__(self, path: Path, shape: Sequence[int], dtype: DTypeLike, key: str) -> None:
        super().__init__(path, shape, dtype)
        h5py = _h5py()
        size = math.prod(self.shape) * self.dtype.itemsize
        # On a full disk HDF5 can neither write nor close a file: so it gets all space before it writes a value.
        with path.open("wb") as file:
            reserve(file, size)
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        with h5py.File(path, "w") as new:
            new.create_dataset(key, self.shape, self.dtype, dcpl=layout)
        with path.open("r+b") as file:
            reserve(file, path.stat().st_size)
        self._file = h5py.File(path, "r+")
        self._data = self._file[key]

    def write(self, index: Index, block: Array) -> None:
        """Store a part."""
        self._data[index] = block

    def close(self) -> None:
        """Close the file."""
        self._file.close()
