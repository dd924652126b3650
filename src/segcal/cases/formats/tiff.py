"""TIFF, read and written with tifffile. Colour channels come first in arrays here: ``(channels, height, width)``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from PIL import ImageSequence
from PIL.TiffImagePlugin import TiffImageFile

from segcal.cases.formats import base
from segcal.errors import DataError

# Codes of TIFF's compression tag.
_UNCOMPRESSED, _DEFLATE = (1,), (8, 32946)


class TiffFile(base.WholeFile):
    """A TIFF of any rank: multi-page files are stacks."""

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        with tifffile.TiffFile(path, _multifile=False) as tiff:
            _check_chain(tiff, path.stat().st_size)
            if any(size < 1 for size in tiff.pages.first.shape):  # tifffile would look for its series for ever
                raise base.damaged(f"its first page has shape {tiff.pages.first.shape}")
            series = tiff.series[0]
            self._stacked = tuple(series.shape)
            self._channels_last = series.axes.endswith("S") and series.ndim > 2
            shape = (series.shape[-1], *series.shape[:-1]) if self._channels_last else series.shape
            dtype, keyframe = np.dtype(series.dtype), series.keyframe
            # Pillow would invert images where white is zero, and stretch values of fewer than 8 bits.
            self._pillow_keeps = keyframe.photometric != 0 and keyframe.bitspersample in (8, 16, 32)
            if series.dataoffset is not None:
                base.require_length(series.dataoffset + math.prod(shape) * dtype.itemsize, path.stat().st_size)
            else:
                for page in series.pages:
                    _check_segments(page, path.stat().st_size)
        super().__init__(path, shape, dtype)

    def _decode(self) -> base.Array:
        try:
            with tifffile.TiffFile(self.path, _multifile=False) as tiff:
                array = np.asarray(tiff.series[0].asarray())
        except ValueError as error:
            if "imagecodecs" not in str(error) or not self._pillow_keeps:
                raise
            array = self._decode_pages()
        return np.moveaxis(array, -1, 0) if self._channels_last else array

    def _decode_pages(self) -> base.Array:
        """Decode page by page with Pillow: for LZW and JPEG, tifffile needs a large package of its own."""
        with TiffImageFile(self.path) as image:
            array = np.stack([np.asarray(page) for page in ImageSequence.Iterator(image)])
        if array.size != math.prod(self._stacked) or array.dtype != self.dtype:
            raise DataError(
                f"compressed pages of {array.dtype} {array.shape}",
                expected=f"{self.dtype} {self._stacked} as its header says",
                fix="write it again uncompressed or deflated",
            )
        return array.reshape(self._stacked)


def _check_chain(tiff: Any, length: int) -> None:
    """Raise if the list of pages has a loop or leads out of the file: tifffile follows loops and drops lost pages."""
    layout, handle = tiff.tiff, tiff.filehandle
    handle.seek(8 if layout.offsetsize == 8 else 4)
    seen: set[int] = set()
    while offset := _number(handle.read(layout.offsetsize), layout.byteorder, layout.offsetsize):
        if offset in seen or offset >= length:
            raise base.damaged("its pages run in a circle" if offset in seen else "a page lies beyond its end")
        seen.add(offset)
        handle.seek(offset)
        tags = _number(handle.read(layout.tagnosize), layout.byteorder, layout.tagnosize)
        handle.seek(offset + layout.tagnosize + tags * layout.tagsize)
    handle.seek(0)


def _number(data: bytes, order: str, size: int) -> int:
    base.require_length(size, len(data))
    return int.from_bytes(data, "big" if order == ">" else "little")


def _check_segments(page: Any, length: int) -> None:
    """Raise if strips or tiles of a page are missing from the file: tifffile would read them as zeros."""
    if page is None or not all(page.databytecounts) or not page.databytecounts:
        raise base.damaged("strips or tiles are missing")
    ends = (start + count for start, count in zip(page.dataoffsets, page.databytecounts, strict=True))
    base.require_length(max(ends), length)
    compression = page.keyframe.compression
    claimed = math.prod(page.shape) * np.dtype(page.dtype).itemsize
    if compression in _UNCOMPRESSED and page.keyframe.bitspersample >= 8:
        base.require_length(claimed, sum(page.databytecounts))
    elif compression in _DEFLATE:
        base.require_length(claimed, base.DEFLATE_RATIO * sum(page.databytecounts))


class TiffSink(base.WholeSink):
    """Writes an array of any rank as TIFF, deflated."""

    def close(self) -> None:
        """Write the file."""
        array = self.array.astype(np.uint8) if self.dtype == np.bool_ else self.array
        tifffile.imwrite(self.path, array, photometric="minisblack", compression="zlib")


TIFF = base.Format((".tif", ".tiff"), TiffFile, TiffSink, widest_label=np.int32)
