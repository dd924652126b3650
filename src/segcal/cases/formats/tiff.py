"""TIFF through tifffile. Colour channels come first on this side: ``(channels, height, width)``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from PIL import ImageSequence
from PIL.TiffImagePlugin import TiffImageFile

from segcal.cases.formats.base import DEFLATE_RATIO, Array, WholeFile, WholeSink, damaged, require_length
from segcal.errors import DataError

_UNCOMPRESSED, _DEFLATE = (1,), (8, 32946)


class TiffFile(WholeFile):
    """A TIFF of any rank: multi-page files are stacks."""

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        with tifffile.TiffFile(path, _multifile=False) as tiff:
            _check_chain(tiff, path.stat().st_size)
            series = tiff.series[0]
            self._stacked = tuple(series.shape)
            self._channels_last = series.axes.endswith("S") and series.ndim > 2
            shape = (series.shape[-1], *series.shape[:-1]) if self._channels_last else series.shape
            dtype, keyframe = np.dtype(series.dtype), series.keyframe
            # Pillow would turn "white is zero" around and stretch what has fewer than 8 bits.
            self._pillow_keeps = keyframe.photometric != 0 and keyframe.bitspersample in (8, 16, 32)
            if series.dataoffset is not None:
                require_length(series.dataoffset + math.prod(shape) * dtype.itemsize, path.stat().st_size)
            else:
                for page in series.pages:
                    _check_segments(page, path.stat().st_size)
        super().__init__(path, shape, dtype)

    def _decode(self) -> Array:
        try:
            with tifffile.TiffFile(self.path, _multifile=False) as tiff:
                array = np.asarray(tiff.series[0].asarray())
        except ValueError as error:
            if "imagecodecs" not in str(error) or not self._pillow_keeps:
                raise
            array = self._decode_pages()
        return np.moveaxis(array, -1, 0) if self._channels_last else array

    def _decode_pages(self) -> Array:
        """tifffile leaves LZW and JPEG to a large package; Pillow, which is here anyway, decodes them page by page."""
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
    """Raise if the pages do not follow each other to an end: tifffile walks circles for hours and drops lost pages."""
    layout, handle = tiff.tiff, tiff.filehandle
    handle.seek(8 if layout.offsetsize == 8 else 4)
    seen: set[int] = set()
    while offset := _number(handle.read(layout.offsetsize), layout.byteorder, layout.offsetsize):
        if offset in seen or offset >= length:
            raise damaged("its pages run in a circle" if offset in seen else "a page lies beyond its end")
        seen.add(offset)
        handle.seek(offset)
        tags = _number(handle.read(layout.tagnosize), layout.byteorder, layout.tagnosize)
        handle.seek(offset + layout.tagnosize + tags * layout.tagsize)
    handle.seek(0)


def _number(data: bytes, order: str, size: int) -> int:
    require_length(size, len(data))
    return int.from_bytes(data, "big" if order == ">" else "little")


def _check_segments(page: Any, length: int) -> None:
    """Raise if strips or tiles of a page are not in the file: tifffile reads them as zeros."""
    if page is None or not all(page.databytecounts) or not page.databytecounts:
        raise damaged("strips or tiles are missing")
    ends = (start + count for start, count in zip(page.dataoffsets, page.databytecounts, strict=True))
    require_length(max(ends), length)
    compression = page.keyframe.compression
    claimed = math.prod(page.shape) * np.dtype(page.dtype).itemsize
    if compression in _UNCOMPRESSED and page.keyframe.bitspersample >= 8:
        require_length(claimed, sum(page.databytecounts))
    elif compression in _DEFLATE:
        require_length(claimed, DEFLATE_RATIO * sum(page.databytecounts))


class TiffSink(WholeSink):
    """Writes an array of any rank as TIFF, deflated."""

    def _encode(self) -> None:
        array = self.array.astype(np.uint8) if self.dtype == np.bool_ else self.array
        tifffile.imwrite(self.path, array, photometric="minisblack", compression="zlib")
