"""Zarr (v3, sharded when written by segcal; v2 is read too): chunks are files, which can be left out or get lost."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from segcal.cases.formats.base import Array, ArrayFile, ArraySink, Index, Stored, pick_key, require_length
from segcal.errors import MissingExtraError
from segcal.types import CHUNK_VALUES

# Values in one inner chunk: about 1 MB of float32, small enough to read a few rows, large enough to be quick.
INNER_VALUES = 2**18
# The attribute by which segcal's own stores say that every chunk was written, so that a missing one is a lost one.
_COMPLETE = "segcal_every_chunk_stored"
# The offset of a chunk that a shard does not hold, by zarr's specification.
_ABSENT = 2**64 - 1


def _zarr() -> Any:
    try:
        import zarr
    except ImportError:
        raise MissingExtraError("zarr 3", "zarr", "reading and writing zarr") from None
    return zarr


def _parts(sizes: Iterable[int], part: Sequence[int]) -> tuple[int, ...]:
    """How many parts each axis has."""
    return tuple(-(-size // each) for size, each in zip(sizes, part, strict=True))


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

    def _stored(self) -> Stored:
        """The chunks on disk, found by their names, so that a shape that is a lie costs nothing."""
        outer, inner = self._outer, self._node.chunks
        there = 0
        for place, path in self._chunk_files():
            there += 1 if outer == inner else self._count_inner(place, path)
        fill, complete = self._node.fill_value, bool(self._node.attrs.get(_COMPLETE))
        return Stored(math.prod(_parts(self.shape, inner)), there, 0 if fill is None else fill.item(), not complete)

    def _holds_fill(self) -> bool:
        """Whether a stored chunk holds nothing but the fill value; bits are compared, as 0.0 and -0.0 differ."""
        for place, _ in self._chunk_files():
            region = tuple(slice(k * n, (k + 1) * n) for k, n in zip(place, self._outer, strict=True))
            block = np.asarray(self._node[region])
            if block.tobytes() == np.full(block.shape, self._node.fill_value, block.dtype).tobytes():
                return True
        return False

    @property
    def _outer(self) -> tuple[int, ...]:
        """The shape of what is one file: a shard, or a chunk where there are no shards."""
        outer: tuple[int, ...] = self._node.shards or self._node.chunks
        return outer

    def _chunk_files(self) -> Iterator[tuple[tuple[int, ...], Path]]:
        """Position in the grid and path of every stored chunk or shard."""
        folder, grid = self.path / self._node.path, _parts(self.shape, self._outer)
        for parent, _, names in os.walk(folder):
            for name in names:
                path = Path(parent, name)
                # c/0/1/2 and c.0.1.2 in version 3, 0.1.2 and 0/1/2 in version 2.
                words = path.relative_to(folder).as_posix().replace("/", ".").removeprefix("c.").split(".")
                if len(words) == len(grid) and all(word.isdecimal() for word in words):
                    place = tuple(map(int, words))
                    if all(k < count for k, count in zip(place, grid, strict=True)):
                        yield place, path

    def _count_inner(self, place: tuple[int, ...], path: Path) -> int:
        """How many chunks of a shard are stored, by the shard's own list: (offset, length) each, all ones if absent."""
        counts = _parts(self._outer, self._node.chunks)
        (sharding,) = (codec for codec in self._node.metadata.codecs if hasattr(codec, "index_codecs"))
        checksum = 4 if len(sharding.index_codecs) > 1 else 0
        size = 16 * math.prod(counts)
        with path.open("rb") as file:
            at_end = sharding.index_location.value == "end"
            require_length(size + checksum, path.stat().st_size)
            file.seek(-size - checksum if at_end else 0, os.SEEK_END if at_end else os.SEEK_SET)
            offsets = np.frombuffer(file.read(size), "<u8").reshape(*counts, 2)[..., 0]
        # A shard at the edge has room for chunks beyond the array.
        corner = tuple(k * n for k, n in zip(place, self._outer, strict=True))
        rest = (min(n, whole - k) for n, whole, k in zip(self._outer, self.shape, corner, strict=True))
        inside = tuple(slice(count) for count in _parts(rest, self._node.chunks))
        return int((offsets[inside] != _ABSENT).sum())

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
            attributes={_COMPLETE: True},
        )

    def write(self, index: Index, block: Array) -> None:
        """Store a part."""
        self._node[index] = block
