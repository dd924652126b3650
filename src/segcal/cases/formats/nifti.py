"""NIfTI volumes, read and written with nibabel. Files hold ``(x, y, z[, C])``, arrays here ``([C,] z, y, x)``."""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from segcal.cases.formats import base


class NiftiFile(base.WholeFile):
    """A NIfTI file. Uncompressed ones are read in parts, compressed ones as a whole, with their checksum verified."""

    def __init__(self, path: Path, key: str | None, usual: Sequence[str]) -> None:
        self._image = NIFTI.import_library().load(path)
        stored, length = self._image.dataobj, path.stat().st_size
        scaled = (stored.slope, stored.inter) != (1, 0)  # by the header, to float64
        super().__init__(path, self._image.shape[::-1], np.float64 if scaled else self._image.get_data_dtype())
        self.sliceable = path.suffix.lower() == ".nii"
        self._bytes = math.prod(self.shape) * np.dtype(stored.dtype).itemsize
        base.require_length(stored.offset + self._bytes, length if self.sliceable else base.DEFLATE_RATIO * length)
        header = self._image.header
        self.geometry = base.Geometry(self._image.affine, tuple(map(float, header.get_zooms())), header.copy())

    def _read(self, index: base.Index) -> base.Array:
        if self.sliceable:
            part: base.Array = np.asarray(self._image.dataobj[index[::-1]], dtype=self.dtype).T
            return part
        return super()._read(index)

    def _decode(self) -> base.Array:
        # nibabel stops reading at the last voxel, before the checksum.
        apply_scaling = NIFTI.import_library().volumeutils.apply_read_scaling
        stored = self._image.dataobj
        with gzip.open(self.path) as stream:
            stream.seek(stored.offset)
            values = base.read_to_end(stream, self._bytes).view(stored.dtype).reshape(stored.shape, order="F")
        scaled = apply_scaling(values, np.float64(stored.slope), np.float64(stored.inter))
        array: base.Array = scaled.astype(self.dtype, copy=False).T
        return array


class NiftiSink(base.WholeSink):
    """Writes a NIfTI file with the geometry of another one, or with unit spacing if there is none."""

    def _begin(self) -> None:
        # NIfTI has no half precision and no booleans.
        self.dtype = np.dtype({"float16": np.float32, "bool": np.uint8}.get(self.dtype.name, self.dtype))
        super()._begin()

    def close(self) -> None:
        """Write the file."""
        affine, header = (self.geometry.affine, self.geometry.header) if self.geometry else (np.eye(4), None)
        image = NIFTI.import_library().Nifti1Image(self.array.T, affine, header, dtype=self.dtype)
        image.header.set_slope_inter(1, 0)
        image.to_filename(self.path)


NIFTI_GZ = base.Format(
    (".nii.gz",),
    NiftiFile,
    NiftiSink,
    widest_label=np.int32,
    own_axes=True,
    geometry=True,
    library="nibabel",
    extra="nifti",
)
NIFTI = replace(NIFTI_GZ, suffixes=(".nii",))
