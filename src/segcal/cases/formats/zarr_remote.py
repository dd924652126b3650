"""Zarr stores in object stores: whole shards are fetched in parts, several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import Any

from segcal.errors import import_extra
from segcal.files.remote import RemotePath

# Bytes of one request. A connection of an object store is slow, so a shard takes several at once.
PART = 4 * 2**20
# Metadata are small: they are fetched as they are.
_METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")


def store(path: RemotePath, *, read_only: bool = True) -> Any:
    """The store of zarr at this place."""
    path.file_system()  # Raises if the library of its scheme is missing.
    return _store_class().from_url(str(path), storage_options=path.options, read_only=read_only)


def moved(array: Any, path: RemotePath, config: Mapping[str, Any]) -> Any:
    """The array with its chunks at this place. The metadata stay where they are."""
    zarr = _zarr()
    place = zarr.storage.StorePath(store(path, read_only=False))
    return zarr.Array(zarr.AsyncArray(array.metadata, place, config=config))


def _zarr() -> Any:
    return import_extra("zarr", "zarr", "reading and writing zarr files")


@cache  # Made on first use: zarr is an extra.
def _store_class() -> Any:
    zarr, requests = _zarr(), import_extra("zarr.abc.store", "zarr", "reading zarr files")

    class ConcurrentStore(zarr.storage.FsspecStore):  # type: ignore[name-defined,misc]
        async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
            fetch = super().get
            if byte_range is not None or key.rpartition("/")[2] in _METADATA:
                # A range that is open at its end needs no request for the size.
                return await fetch(key, prototype, byte_range or requests.OffsetByteRequest(0))
            try:
                size = (await self.fs._info(f"{self.path}/{key}"))["size"]
            except FileNotFoundError:
                return None
            if size is None or size <= PART:
                return await fetch(key, prototype, requests.OffsetByteRequest(0))
            ranges = [requests.RangeByteRequest(at, min(at + PART, size)) for at in range(0, size, PART)]
            parts = await asyncio.gather(*(fetch(key, prototype, part) for part in ranges))
            if any(part is None for part in parts):
                return None
            return prototype.buffer.from_bytes(b"".join(part.to_bytes() for part in parts))

    return ConcurrentStore
