"""PNG, read and written with Pillow. Colour channels come first in arrays here: ``(channels, height, width)``."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from segcal.cases.formats import base
from segcal.errors import DataError, OutputError

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Pillow multiplies grey values of 2 and 4 bits by these factors, to fill the range 0..255.
_STRETCHED = {2: 85, 4: 17}
# Colour types (0 grey, 2 RGB, 3 palette, 4 grey with alpha, 6 RGB with alpha): channels, and possible bits of each.
_COLOURS = {0: (1, (1, 2, 4, 8, 16)), 2: (3, (8, 16)), 3: (1, (1, 2, 4, 8)), 4: (2, (8, 16)), 6: (4, (8, 16))}


class PngFile(base.WholeFile):
    """A PNG: a label map, a mask or an image, with the values as stored. Palette images give their indices."""

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        with path.open("rb") as file:
            start = file.read(26)
        if start[:8] != _PNG_SIGNATURE or start[12:16] != b"IHDR":
            raise DataError("is not a PNG", expected="a file as its name says")
        width, height, depth, colour = struct.unpack(">IIBB", start[16:26])
        bands, depths = _COLOURS.get(colour, (0, ()))
        if depth not in depths:
            raise DataError(f"colour type {colour} of {depth} bits", expected="one that PNG has")
        if depth == 16 and bands > 1:
            raise DataError(
                "16-bit colours", expected="8-bit colours, or 16-bit grey", fix="save a tif or npy, which keep them"
            )
        dtype = np.bool_ if (depth, colour) == (1, 0) else np.uint16 if depth == 16 else np.uint8
        self._factor = _STRETCHED.get(depth, 1) if colour == 0 else 1
        super().__init__(path, (bands, height, width) if bands > 1 else (height, width), dtype)
        base.require_length(height * (width * bands * depth // 8), base.DEFLATE_RATIO * path.stat().st_size)

    def _decode(self) -> base.Array:
        with PngImageFile(self.path) as image:
            image.verify()  # On reading, Pillow does not verify the checksums of the pixel data.
        # Not Image.open, which refuses large images as possible decompression bombs: the size was checked already.
        with PngImageFile(self.path) as image:
            array = np.asarray(image)
        if self._factor > 1:
            array = array // self._factor
        array = array.astype(self.dtype, copy=False)
        return np.moveaxis(array, -1, 0) if array.ndim == 3 else array


class PngSink(base.WholeSink):
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


PNG = base.Format((".png",), PngFile, PngSink, scores=False, own_axes=True)
