"""PNG, read and written with Pillow. Colour channels come first in arrays here: ``(channels, height, width)``."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from segcal.cases.formats.base import DEFLATE_RATIO, Array, Format, WholeFile, WholeSink, damaged, require_length
from segcal.errors import DataError, OutputError

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Pillow multiplies grey values of 2 and 4 bits by these factors, to fill the range 0..255.
_STRETCHED = {2: 85, 4: 17}


class _PngHeader(NamedTuple):
    width: int
    height: int
    depth: int  # bits per sample
    colour: int  # 0 grey, 2 RGB, 3 palette, 4 grey with alpha, 6 RGB with alpha

    @property
    def stretched(self) -> int:
        """The factor by which Pillow multiplies the stored values."""
        return _STRETCHED.get(self.depth, 1) if self.colour == 0 else 1


class PngFile(WholeFile):
    """A PNG: a label map, a mask or an image, with the values as stored. Palette images give their indices."""

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        with path.open("rb") as file:
            self._header = _png_header(file.read(26))
        width, height, depth, colour = self._header
        bands = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
        if depth == 16 and bands > 1:
            raise DataError(
                "16-bit colours", expected="8-bit colours, or 16-bit grey", fix="save a tif or npy, which keep them"
            )
        dtype = np.bool_ if (depth, colour) == (1, 0) else np.uint16 if depth == 16 else np.uint8
        super().__init__(path, (bands, height, width) if bands > 1 else (height, width), dtype)
        require_length(height * (width * bands * depth // 8), DEFLATE_RATIO * path.stat().st_size)

    def _decode(self) -> Array:
        _check_png(self.path)
        # Not Image.open, which refuses large images as possible decompression bombs: the size was checked already.
        with PngImageFile(self.path) as image:
            array = np.asarray(image)
        if self._header.stretched > 1:
            array = array // self._header.stretched
        array = array.astype(self.dtype, copy=False)
        return np.moveaxis(array, -1, 0) if array.ndim == 3 else array


def _png_header(start: bytes) -> _PngHeader:
    if start[:8] != _PNG_SIGNATURE or start[12:16] != b"IHDR":
        raise DataError("is not a PNG", expected="a file as its name says")
    header = _PngHeader(*struct.unpack(">IIBB", start[16:26]))
    depths = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
    if header.depth not in depths.get(header.colour, ()):
        raise DataError(f"colour type {header.colour} of {header.depth} bits", expected="one that PNG has")
    return header


def _check_png(path: Path) -> None:
    """Verify the checksum of every chunk. Pillow does not check those of the pixel data."""
    data = memoryview(path.read_bytes())
    position, name = len(_PNG_SIGNATURE), b""
    while name != b"IEND":
        if position + 12 > len(data):
            raise damaged("it is truncated")
        (length,) = struct.unpack(">I", data[position : position + 4])
        checked = data[position + 4 : position + 8 + length]
        name = bytes(checked[:4])
        if data[position + 8 + length : position + 12 + length] != struct.pack(">I", zlib.crc32(checked)):
            raise damaged(f"the checksum of its {name.decode('latin-1')!r} chunk is wrong")
        position += 12 + length


class PngSink(WholeSink):
    """Writes a label map, a mask or an RGB image as PNG."""

    def _begin(self) -> None:
        super()._begin()
        if self.dtype not in (np.uint8, np.uint16, np.bool_) or len(self.shape) not in (2, 3):
            raise OutputError(
                f"a {self.dtype} array of shape {self.shape} does not fit a PNG",
                where=str(self.path),
                expected="a 2D label map or image of 8 or 16 bits",
                fix="choose a format that holds any array, such as npy",
            )

    def close(self) -> None:
        """Write the file."""
        array = np.moveaxis(self.array, 0, -1) if self.array.ndim == 3 else self.array
        Image.fromarray(array).save(self.path, "PNG")


PNG = Format((".png",), PngFile, PngSink, scores=False, own_axes=True)
