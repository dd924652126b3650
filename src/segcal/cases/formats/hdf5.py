"""HDF5: datasets are read and written in parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from segcal.cases.formats import base
from segcal.files.atomic import reserve


class H5File(base.ArrayFile):
    """A dataset of an HDF5 file, opened for each read so that no handle stays behind."""

    sliceable = True

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        with HDF5.import_library().File(path, "r") as file:
            names: list[str] = []
            file.visititems(lambda name, node: names.append(name) if hasattr(node, "dtype") else None)
            self.key = base.pick_key(names, key, usual)
            data = file[self.key]
            _check_sources(data, path, ())
            _check_index(data)
            shape, dtype, self.chunk = data.shape, data.dtype, data.chunks
            contiguous_end = (data.id.get_offset() or 0) + (0 if data.chunks else data.id.get_storage_size())
        super().__init__(path, shape, dtype)
        base.require_length(contiguous_end, path.stat().st_size)

    def stored(self) -> base.Stored:
        """Which chunks are on disk. HDF5 stores every chunk that was written."""
        with base.reading(self.path), HDF5.import_library().File(self.path, "r") as file:
            data = file[self.key]
            if data.is_virtual:  # It refers to other files, and a missing one reads as the fill value.
                sources = {source.file_name for source in data.virtual_sources()}
                there = [name for name in sources if name == "." or (self.path.parent / name).is_file()]
                return base.Stored(len(sources), len(there))
            if data.chunks is None:
                return base.Stored(1, int(data.id.get_storage_size() > 0))
            wanted = math.prod(-(-size // chunk) for size, chunk in zip(data.shape, data.chunks, strict=True))
            return base.Stored(wanted, data.id.get_num_chunks(), data.fillvalue.item())

    def _read(self, index: base.Index) -> base.Array:
        with HDF5.import_library().File(self.path, "r") as file:
            data = file[self.key]
            part = np.asarray(data[index])
            if data.chunks is not None:
                _check_found(data, index, part)
            return part


def _check_index(data: Any) -> None:
    """Raise if two chunks are at one place, or one is where none can be: no checksum covers the index of chunks."""
    if data.chunks is None or not hasattr(data.id, "chunk_iter"):  # HDF5 before 1.10.10
        return
    starts: list[tuple[int, ...]] = []
    data.id.chunk_iter(lambda chunk: starts.append(chunk.chunk_offset))
    grid = list(zip(data.shape, data.chunks, strict=True))
    if len(set(starts)) < len(starts):
        raise base.damaged("two chunks are at the same place")
    for start in starts:
        if any(k % n or not 0 <= k < size for k, (size, n) in zip(start, grid, strict=True)):
            raise base.damaged(f"a chunk is at {start}, where none can be")


def _check_found(data: Any, index: base.Index, part: base.Array) -> None:
    """Raise if a chunk reads as the fill value because its entry in the index, which no checksum covers, is damaged."""
    windows = [range(*own.indices(size)) for own, size in zip(index, data.shape, strict=True)]
    firsts = [range(own.start // n * n, own.stop, n) for own, n in zip(windows, data.chunks, strict=True)]
    fill = data.fillvalue
    for start in itertools.product(*firsts):
        corners = zip(start, data.chunks, windows, strict=True)
        block = part[tuple(slice(max(0, k - own.start), k + n - own.start) for k, n, own in corners)]
        if block.size and block.flat[0] == fill and (block == fill).all():
            try:
                if data.id.get_chunk_info_by_coord(start).byte_offset is not None:
                    data.id.read_direct_chunk(start)
            except RuntimeError:
                raise base.damaged(f"the chunk at {start} is stored, but cannot be found") from None


def _check_sources(data: Any, path: Path, above: tuple[tuple[Path, str], ...]) -> None:
    """Raise if a virtual dataset leads back to itself, at any distance: reading it would end the process."""
    if not data.is_virtual:
        return
    above = (*above, (path.resolve(), data.name))
    for source in data.virtual_sources():
        there = path if source.file_name == "." else path.parent / source.file_name
        if not there.is_file():
            continue
        with HDF5.import_library().File(there, "r") as file:
            found = file.get(source.dset_name)
            if found is None:
                continue
            if (there.resolve(), found.name) in above:
                raise base.damaged("a virtual dataset refers to itself")
            _check_sources(found, there, above)


class H5Sink(base.ArraySink):
    """Writes one HDF5 dataset in parts."""

    def _begin(self) -> None:
        h5py = HDF5.import_library()
        # On a full disk HDF5 can neither write nor close a file, so all space is reserved before the first write.
        with self.path.open("wb") as file:
            reserve(file, math.prod(self.shape) * self.dtype.itemsize)
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        with h5py.File(self.path, "w") as new:
            new.create_dataset(self.key, self.shape, self.dtype, dcpl=layout)
        with self.path.open("r+b") as file:
            reserve(file, self.path.stat().st_size)
        self._file = h5py.File(self.path, "r+")
        self._data = self._file[self.key]

    def write(self, index: base.Index, block: base.Array) -> None:
        """Store a part."""
        self._data[index] = block

    def close(self) -> None:
        """Close the file."""
        self._file.close()


HDF5 = base.Format((".h5", ".hdf5"), H5File, H5Sink, library="h5py", extra="h5")
