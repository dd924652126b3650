"""Zarr: version 3, sharded, is written; version 2 is read, too. Chunks are files, so some can be missing."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from segcal.cases.formats import base
from segcal.types import CHUNK_VALUES

# Values in one inner chunk: 1 MB of float32, small enough to read few rows, large enough to be fast.
INNER_VALUES = 2**18
# An attribute of the stores that segcal writes: every chunk was written, so a missing one was lost.
_COMPLETE = "segcal_every_chunk_stored"
# The offset that the zarr specification gives to a chunk that is not in its shard.
_ABSENT = 2**64 - 1


def _parts(sizes: Iterable[int], part: Sequence[int]) -> tuple[int, ...]:
    """How many parts each axis has."""
    return tuple(-(-size // each) for size, each in zip(sizes, part, strict=True))


class ZarrFile(base.ArrayFile):
    """A zarr array, or one array of a zarr group."""

    sliceable = True

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        node = ZARR.import_library().open(str(path), mode="r")
        if hasattr(node, "array_keys"):
            self.key = base.pick_key(sorted(node.array_keys()), key, usual)
            node = node[self.key]
        self._node, self.chunk = node, node.chunks
        # The shape that one file holds: that of a shard, or of a chunk if there are no shards.
        self._outer: tuple[int, ...] = node.shards or node.chunks
        super().__init__(path, node.shape, node.dtype)

    def stored(self) -> base.Stored:
        """Which chunks are on disk. They are found by listing files, so a wrong huge shape costs nothing."""
        inner, fill, complete = self._node.chunks, self._node.fill_value, bool(self._node.attrs.get(_COMPLETE))
        with base.reading(self.path):
            there = sum(1 if self._outer == inner else self._count_inner(*found) for found in self._chunk_files())
        chunks = math.prod(_parts(self.shape, inner))
        return base.Stored(chunks, there, 0 if fill is None else fill.item(), not complete)

    def holds_fill(self) -> bool:
        """Whether a stored chunk holds nothing but the fill value, bit for bit: 0.0 and -0.0 differ."""
        return any(
            block.tobytes() == np.full(block.shape, self._node.fill_value, block.dtype).tobytes()
            for block in (self.read(self._region(place)) for place, _ in self._chunk_files())
        )

    def _region(self, place: tuple[int, ...]) -> base.Index:
        """The part of the array that the file at this position in the grid holds."""
        return tuple(slice(k * n, (k + 1) * n) for k, n in zip(place, self._outer, strict=True))

    def _chunk_files(self) -> Iterator[tuple[tuple[int, ...], Path]]:
        """Position in the grid and path of every stored chunk or shard."""
        folder, grid = self.path / self._node.path, _parts(self.shape, self._outer)
        for parent, _, names in os.walk(folder):
            for name in names:
                path = Path(parent, name)
                # Names are c/0/1/2 or c.0.1.2 in version 3, 0.1.2 or 0/1/2 in version 2.
                words = path.relative_to(folder).as_posix().replace("/", ".").removeprefix("c.").split(".")
                if len(words) == len(grid) and all(word.isdecimal() for word in words):
                    place = tuple(map(int, words))
                    if all(k < count for k, count in zip(place, grid, strict=True)):
                        yield place, path

    def _count_inner(self, place: tuple[int, ...], path: Path) -> int:
        """How many chunks of a shard are stored, by its index: an (offset, length) pair for each chunk."""
        counts = _parts(self._outer, self._node.chunks)
        (sharding,) = (codec for codec in self._node.metadata.codecs if hasattr(codec, "index_codecs"))
        checksum = 4 if len(sharding.index_codecs) > 1 else 0
        size = 16 * math.prod(counts)
        with path.open("rb") as file:
            at_end = sharding.index_location.value == "end"
            base.require_length(size + checksum, path.stat().st_size)
            file.seek(-size - checksum if at_end else 0, os.SEEK_END if at_end else os.SEEK_SET)
            offsets = np.frombuffer(file.read(size), "<u8").reshape(*counts, 2)[..., 0]
        # The index of a shard at the edge also lists chunks beyond the array.
        shape = (len(range(*part.indices(size))) for part, size in zip(self._region(place), self.shape, strict=True))
        inside = tuple(slice(count) for count in _parts(shape, self._node.chunks))
        return int((offsets[inside] != _ABSENT).sum())

    def _read(self, index: base.Index) -> base.Array:
        return np.asarray(self._node[index])


class ZarrSink(base.ArraySink):
    """Writes a sharded zarr v3 array. A shard holds as many rows as ``Case.chunks`` reads at once."""

    def _begin(self) -> None:
        axis = self.row_axis
        before, rows, after = self.shape[:axis], self.shape[axis], self.shape[axis + 1 :]
        per_row = max(1, math.prod(after))
        shard_rows = min(rows, max(1, CHUNK_VALUES // (per_row * math.prod(before))))
        pieces = max(1, shard_rows * per_row // INNER_VALUES)
        inner_rows = next(shard_rows // p for p in range(pieces, 0, -1) if shard_rows % p == 0)
        self._node = ZARR.import_library().create_array(
            str(self.path),
            shape=self.shape,
            dtype=self.dtype,
            chunks=((1,) * axis + (inner_rows, *after)),
            shards=(*before, shard_rows, *after),
            zarr_format=3,
            config={"write_empty_chunks": True},
            attributes={_COMPLETE: True},
        )

    def write(self, index: base.Index, block: base.Array) -> None:
        """Store a part."""
        self._node[index] = block


ZARR = base.Format((".zarr",), ZarrFile, ZarrSink, folder=True, sparse=True, library="zarr", extra="zarr")
