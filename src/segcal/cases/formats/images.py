"""PNG through Pillow, TIFF through tifffile. Colour channels come first on this side: ``(channels, height, width)``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import DTypeLike
from PIL import Image

from segcal.cases.formats.base import Array, WholeFile, WholeSink
from segcal.errors import OutputError


class PngFile(WholeFile):
    """A PNG: a label map (palette images give their indices), a mask or an image."""

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        with Image.open(path) as image:
            bands, (width, height) = len(image.getbands()), image.size
            dtype = {"1": np.bool_, "I": np.int32, "I;16": np.uint16, "F": np.float32}.get(image.mode, np.uint8)
        super().__init__(path, (bands, height, width) if bands > 1 else (height, width), dtype)

    def _decode(self) -> Array:
        with Image.open(self.path) as image:
            array = np.asarray(image)
        return np.moveaxis(array, -1, 0) if array.ndim == 3 else array


class PngSink(WholeSink):
    """Writes a label map, a mask or an RGB image as PNG."""

    def __init__(self, path: Path, shape: Sequence[int], dtype: DTypeLike) -> None:
        super().__init__(path, shape, dtype)
        if self.dtype not in (np.uint8, np.uint16, np.bool_) or len(self.shape) not in (2, 3):
            raise OutputError(
                f"a {self.dtype} array of shape {self.shape} does not fit a PNG",
                where=str(path),
                expected="a 2D label map or image of 8 or 16 bits",
                fix="choose npy, npz, nii.gz, tif, zarr or h5",
            )

    def _encode(self) -> None:
        array = np.moveaxis(self.array, 0, -1) if self.array.ndim == 3 else self.array
        Image.fromarray(array).save(self.path)


class TiffFile(WholeFile):
    """A TIFF of any rank: multi-page files are stacks."""

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        with tifffile.TiffFile(path) as tiff:
            series = tiff.series[0]
            self._channels_last = series.axes.endswith("S") and series.ndim > 2
            shape = (series.shape[-1], *series.shape[:-1]) if self._channels_last else series.shape
        super().__init__(path, shape, series.dtype)

    def _decode(self) -> Array:
        try:
            array = np.asarray(tifffile.imread(self.path))
        except ValueError as error:
            if "imagecodecs" not in str(error):
                raise
            # tifffile leaves LZW and JPEG to a large package; Pillow, which is here anyway, decodes flat images.
            with Image.open(self.path) as image:
                array = np.asarray(image)
        return np.moveaxis(array, -1, 0) if self._channels_last else array


class TiffSink(WholeSink):
    """Writes an array of any rank as TIFF, deflated."""

    def _encode(self) -> None:
        array = self.array.astype(np.uint8) if self.dtype == np.bool_ else self.array
        tifffile.imwrite(self.path, array, photometric="minisblack", compression="zlib")
