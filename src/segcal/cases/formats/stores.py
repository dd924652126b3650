"""Zarr (v3, sharded when written by segcal) and HDF5: chunked stores whose parts are read alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from segcal.cases.formats.base import Array, ArrayFile, ArraySink, Index, pick_key
from segcal.errors import DataError, MissingExtraError
from segcal.types import CHUNK_VALUES

# Values in one inner chunk: about 1 MB of float32, small enough to read a few rows, large enough to be quick.
INNER_VALUES = 2**18


def _zarr() -> Any:
    try:
        import zarr
    except ImportError:
        raise MissingExtraError("zarr 3", "zarr", "reading and writing zarr") from None
    return zarr


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise MissingExtraError("h5py", "h5", "reading and writing HDF5") from None
    return h5py


class ZarrFile(ArrayFile):
    """A zarr array, or the one array of a zarr group that is meant."""

    sliceable = True

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        node = _zarr().open(str(path), mode="r")
        if hasattr(node, "array_keys"):
            self.key = pick_key(sorted(node.array_keys()), key, usual)
            node = node[self.key]
        self._node = node
        self.chunk = node.chunks
        super().__init__(path, node.shape, node.dtype)

    def require_complete(self) -> None:
        """Raise if chunks are missing: zarr would read them as the fill value without a word."""
        shards = self._node.shards or self._node.chunks
        wanted = math.prod(-(-size // shard) for size, shard in zip(self.shape, shards, strict=True))
        inner_per_shard = math.prod(s // c for s, c in zip(shards, self._node.chunks, strict=True))
        there = self._node.nchunks_initialized // inner_per_shard
        if there < wanted:
            raise DataError(
                f"{wanted - there} of {wanted} chunks are missing",
                where=str(self.path),
                expected="a complete store",
                fix="copy or write it again; zarr reads missing chunks as constant fill values",
            )

    def _read(self, index: Index) -> Array:
        return np.asarray(self._node[index])


class ZarrSink(ArraySink):
    """Writes a sharded zarr v3 array. A shard holds as many rows as ``Case.chunks`` reads at once."""

    def __init__(self, path: Path, shape: Sequence[int], dtype: DTypeLike, row_axis: int) -> None:
        super().__init__(path, shape, dtype)
        before, rows, after = self.shape[:row_axis], self.shape[row_axis], self.shape[row_axis + 1 :]
        per_row = max(1, math.prod(after))
        shard_rows = min(rows, max(1, CHUNK_VALUES // (per_row * math.prod(before))))
        pieces = max(1, shard_rows * per_row // INNER_VALUES)
        inner_rows = next(shard_rows // p for p in range(pieces, 0, -1) if shard_rows % p == 0)
        self._node = _zarr().create_array(
            str(path),
            shape=self.shape,
            dtype=self.dtype,
            chunks=((1,) * row_axis + (inner_rows, *after)),
            shards=(*before, shard_rows, *after),
            zarr_format=3,
            config={"write_empty_chunks": True},
        )

    def write(self, index: Index, block: Array) -> None:
        """Store a part."""
        self._node[index] = block


class H5File(ArrayFile):
    """A dataset of an HDF5 file, opened for each read so that no handle stays behind."""

    sliceable = True

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        with _h5py().File(path, "r") as file:
            names: list[str] = []
            file.visititems(lambda name, node: names.append(name) if hasattr(node, "dtype") else None)
            self.key = pick_key(names, key, usual)
            shape, dtype, self.chunk = file[self.key].shape, file[self.key].dtype, file[self.key].chunks
        super().__init__(path, shape, dtype)

    def _read(self, index: Index) -> Array:
        with _h5py().File(self.path, "r") as file:
            return np.asarray(file[self.key][index])


class H5Sink(ArraySink):
    """Writes one HDF5 dataset in parts."""

    def __init__(self, path: Path, shape: Sequence[int], dtype: DTypeLike, key: str) -> None:
        super().__init__(path, shape, dtype)
        self._file = _h5py().File(path, "w")
        self._data = self._file.create_dataset(key, self.shape, self.dtype)

    def write(self, index: Index, block: Array) -> None:
        """Store a part."""
        self._data[index] = block

    def close(self) -> None:
        """Close the file."""
        self._file.close()
