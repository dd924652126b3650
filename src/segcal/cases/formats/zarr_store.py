"""Zarr: version 3, sharded, is written; version 2 is read, too. Chunks are files, so some can be missing.

In an object store, a shard is fetched in parts, many at a time, and the metadata are written last: a store that is not
complete cannot be opened.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from segcal.cases.formats import base, zarr_remote
from segcal.files.remote import RemotePath, file_sizes, read_part, retried
from segcal.types import CHUNK_VALUES

# Values in one inner chunk: 1 MB of float32, small enough to read few rows, large enough to be fast.
INNER_VALUES = 2**18
# An attribute of the stores that segcal writes: every chunk was written, so a missing one was lost.
_COMPLETE = "segcal_every_chunk_stored"
# The offset that the zarr specification gives to a chunk that is not in its shard.
_ABSENT = 2**64 - 1
_EVERY_CHUNK = {"write_empty_chunks": True}


def _parts(sizes: Iterable[int], part: Sequence[int]) -> tuple[int, ...]:
    """How many parts each axis has."""
    return tuple(-(-size // each) for size, each in zip(sizes, part, strict=True))


class ZarrFile(base.ArrayFile):
    """A zarr array, or one array of a zarr group."""

    sliceable = True

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        zarr = ZARR.import_library()
        store = zarr_remote.store(path) if isinstance(path, RemotePath) else path
        node = retried(path, lambda: zarr.open(store, mode="r"))
        if hasattr(node, "array_keys"):
            self.key = base.pick_key(sorted(node.array_keys()), key, usual)
            node = node[self.key]
        if not isinstance(node.metadata.attributes, Mapping):
            raise base.damaged("the attributes in its description are no table")
        self._node, self.chunk = node, node.chunks
        # The shape that one file holds: that of a shard, or of a chunk if there are no shards.
        self._outer: tuple[int, ...] = node.shards or node.chunks
        super().__init__(path, node.shape, node.dtype)

    def stored(self) -> base.Stored:
        """Which chunks are on disk. They are found by listing files, so a wrong huge shape costs nothing."""
        inner, complete = self._node.chunks, bool(self._node.attrs.get(_COMPLETE))
        with base.reading(self.path):
            files = self._chunk_files()
            there = len(files) if self._outer == inner else self._count_inner(files)
        chunks = math.prod(_parts(self.shape, inner))
        return base.Stored(chunks, there, self._fill.item(), not complete)

    def holds_fill(self) -> bool:
        """Whether a stored chunk holds nothing but the fill value, bit for bit: 0.0 and -0.0 differ."""
        return any(
            block.tobytes() == np.full(block.shape, self._fill, block.dtype).tobytes()
            for block in (self.read(self._region(place)) for place in self._chunk_files())
        )

    @property
    def _fill(self) -> Any:
        """What missing chunks read as: 0 where version 2 of the format leaves it open."""
        fill = self._node.fill_value
        return np.zeros((), self.dtype)[()] if fill is None else fill

    def _region(self, place: tuple[int, ...]) -> base.Index:
        """The part of the array that the file at this position in the grid holds."""
        return tuple(slice(k * n, (k + 1) * n) for k, n in zip(place, self._outer, strict=True))

    @property
    def _folder(self) -> Path:
        """Where the files of the array are: the array may be one of a group."""
        return self.path / str(self._node.path)

    def _chunk_files(self) -> dict[tuple[int, ...], tuple[str, int | None]]:
        """Name and size of the file of every stored chunk or shard, by its position in the grid."""
        grid, found = _parts(self.shape, self._outer), {}
        for name, size in file_sizes(self._folder).items():
            # Names are c/0/1/2 or c.0.1.2 in version 3, 0.1.2 or 0/1/2 in version 2.
            words = name.replace("/", ".").removeprefix("c.").split(".")
            if len(words) == len(grid) and all(word.isdecimal() for word in words):
                place = tuple(map(int, words))
                if all(k < count for k, count in zip(place, grid, strict=True)):
                    found[place] = name, size
        return found

    def _count_inner(self, files: dict[tuple[int, ...], tuple[str, int | None]]) -> int:
        """How many chunks of some shards are stored, by their indexes: an (offset, length) pair for each chunk."""
        counts = _parts(self._outer, self._node.chunks)
        (sharding,) = (codec for codec in self._node.metadata.codecs if hasattr(codec, "index_codecs"))
        checksum = 4 if len(sharding.index_codecs) > 1 else 0
        size = 16 * math.prod(counts)
        for _, length in files.values():
            base.require_length(size + checksum, length if length is not None else size + checksum)
        location = sharding.index_location
        at_end = getattr(location, "value", location) == "end"  # an enumeration before zarr 3.4, a text since
        part = (-size - checksum, None) if at_end else (0, size + checksum)
        indexes = read_part(self._folder, [name for name, _ in files.values()], *part)
        there = 0
        for place, index in zip(files, indexes, strict=True):
            offsets = np.frombuffer(index[:size], "<u8").reshape(*counts, 2)[..., 0]
            # The index of a shard at the edge also lists chunks beyond the array.
            region = zip(self._region(place), self.shape, strict=True)
            shape = (len(range(*part.indices(length))) for part, length in region)
            inside = tuple(slice(count) for count in _parts(shape, self._node.chunks))
            there += int((offsets[inside] != _ABSENT).sum())
        return there

    def _read(self, index: base.Index) -> base.Array:
        return retried(self.path, lambda: np.asarray(self._node[index]))


class ZarrSink(base.ArraySink):
    """Writes a sharded zarr v3 array. A shard holds as many rows as ``Case.chunks`` reads at once."""

    def _begin(self) -> None:
        axis = self.row_axis
        before, rows, after = self.shape[:axis], self.shape[axis], self.shape[axis + 1 :]
        per_row = max(1, math.prod(after))
        shard_rows = min(rows, max(1, CHUNK_VALUES // (per_row * math.prod(before))))
        pieces = max(1, shard_rows * per_row // INNER_VALUES)
        inner_rows = next(shard_rows // p for p in range(pieces, 0, -1) if shard_rows % p == 0)
        zarr = ZARR.import_library()
        self._metadata: dict[str, Any] = {}
        self._node = zarr.create_array(
            zarr.storage.MemoryStore(self._metadata) if isinstance(self.path, RemotePath) else self.path,
            shape=self.shape,
            dtype=self.dtype,
            chunks=((1,) * axis + (inner_rows, *after)),
            shards=(*before, shard_rows, *after),
            zarr_format=3,
            config=_EVERY_CHUNK,
            attributes={_COMPLETE: True},
        )
        if isinstance(self.path, RemotePath):
            self._node = zarr_remote.moved(self._node, self.path, _EVERY_CHUNK)

    def write(self, index: base.Index, block: base.Array) -> None:
        """Store a part."""
        retried(self.path, lambda: self._node.__setitem__(index, block))

    def close(self) -> None:
        """In an object store, write the metadata, without which the store cannot be opened."""
        for name, content in self._metadata.items():
            (self.path / name).write_bytes(content.to_bytes())


ZARR = base.Format((".zarr",), ZarrFile, ZarrSink, folder=True, sparse=True, remote=True, library="zarr", extra="zarr")
