"""NIfTI volumes, through nibabel. Files hold ``(x, y, z[, C])``; on this side they are ``([C,] z, y, x)``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from segcal.cases.formats.base import Array, Geometry, Index, WholeFile, WholeSink
from segcal.errors import MissingExtraError


def _nibabel() -> Any:
    try:
        import nibabel
    except ImportError:
        raise MissingExtraError("nibabel", "nifti", "reading and writing NIfTI") from None
    return nibabel


class NiftiFile(WholeFile):
    """A NIfTI file; uncompressed ones are read in parts, compressed ones as a whole."""

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        nibabel = _nibabel()
        try:
            self._image = nibabel.load(path)
        except nibabel.filebasedimages.ImageFileError as error:
            raise ValueError(str(error)) from None
        super().__init__(path, self._image.shape[::-1], _stored_dtype(self._image))
        self.sliceable = path.suffix == ".nii"
        header = self._image.header
        self.geometry = Geometry(self._image.affine, tuple(float(zoom) for zoom in header.get_zooms()), header.copy())

    def _read(self, index: Index) -> Array:
        if self.sliceable:
            part: Array = np.asarray(self._image.dataobj[index[::-1]], dtype=self.dtype).T
            return part
        return super()._read(index)

    def _decode(self) -> Array:
        array: Array = np.asarray(self._image.dataobj, dtype=self.dtype).T
        return array


def _stored_dtype(image: Any) -> np.dtype[Any]:
    """The file's own type, or float64 where the header scales the values."""
    slope, intercept = image.dataobj.slope, image.dataobj.inter
    return np.dtype(image.get_data_dtype()) if (slope, intercept) == (1, 0) else np.dtype(np.float64)


class NiftiSink(WholeSink):
    """Writes a NIfTI file with the geometry of another one, or with unit spacing where there is none."""

    def __init__(self, path: Path, shape: Sequence[int], dtype: DTypeLike, geometry: Geometry | None) -> None:
        # NIfTI has no half precision and no booleans.
        dtype = {"float16": np.float32, "bool": np.uint8}.get(np.dtype(dtype).name, dtype)
        super().__init__(path, shape, dtype)
        self.geometry = geometry

    def _encode(self) -> None:
        affine, header = (self.geometry.affine, self.geometry.header) if self.geometry else (np.eye(4), None)
        image = _nibabel().Nifti1Image(self.array.T, affine, header, dtype=self.dtype)
        image.header.set_slope_inter(1, 0)
        image.to_filename(self.path)
