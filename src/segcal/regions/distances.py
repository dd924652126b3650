"""Distances to the boundary of images that are too large for memory: exact, in a temporary file."""

from __future__ import annotations

import math
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.files.atomic import reserve, writing
from segcal.types import row_slices

# Voxels at once: three arrays of 16 MB.
_CHUNK = 2**21
# Voxels of a row that are read together, at least: 2 kB.
_COLUMNS = 256


class StreamedDistance:
    """The distances of ``distance_to``, from a boundary that is read by rows, in a few rows of memory.

    Squares of distances are separable: the nearest boundary voxel within each row first, then over all rows. The
    squares lie in a temporary file of 8 bytes a voxel.

    Args:
        boundary: From rows to the boundary voxels in them ``(N, rows, ...)``.
        shape: ``(N, *spatial)``.
        spacing: Voxel size per spatial axis.
        threads: That share the work; None means torch's number.

    Examples:
        >>> edge = torch.tensor([[[False, True, False, False]], [[False, False, False, True]]]).view(1, 2, 4)
        >>> StreamedDistance(lambda rows: edge[:, rows], (1, 2, 4), (1.0, 1.0)).rows(slice(0, 2))
        tensor([[[1.0000, 0.0000, 1.0000, 1.0000],
                 [1.4142, 1.0000, 1.0000, 0.0000]]])
    """

    def __init__(
        self,
        boundary: Callable[[slice], Tensor],
        shape: tuple[int, ...],
        spacing: Sequence[float],
        threads: int | None = None,
    ) -> None:
        from segcal.kernels import distance_cpu  # compiled when it is first needed

        self._shape, self._plane = shape, math.prod(shape[2:])
        with writing(Path(tempfile.gettempdir())):
            self._file = tempfile.TemporaryFile(prefix="segcal-", buffering=0)  # noqa: SIM115 (it lives as long as this)
            weakref.finalize(self, self._file.close)
            reserve(self._file, 8 * math.prod(shape))
        self.device = torch.device("cpu")
        for rows in row_slices((1, *shape), _CHUNK):
            own = boundary(rows)
            self.device = own.device
            squares = distance_cpu.squared_distances(own.cpu().numpy(), spacing[1:], threads)
            for image, part in enumerate(squares):
                self._write(image, rows.start, 0, part.reshape(len(part), -1))
        width = max(_COLUMNS, _CHUNK // shape[1])
        for image in range(shape[0]):
            for start in range(0, self._plane, width):
                block = self._read(image, slice(0, shape[1]), start, min(width, self._plane - start))
                distance_cpu.along(block, 0, spacing[0], threads)
                self._write(image, 0, start, block)

    def rows(self, rows: slice) -> Tensor:
        """The distances in some rows, ``(N, rows, ...)`` float32; inf where an image has no boundary."""
        squares = [self._read(image, rows, 0, self._plane) for image in range(self._shape[0])]
        # Computed in float64, then rounded, as distance_to does.
        distance = torch.from_numpy(np.sqrt(np.stack(squares)).astype(np.float32))
        return distance.view(-1, rows.stop - rows.start, *self._shape[2:]).to(self.device)

    def _read(self, image: int, rows: slice, start: int, width: int) -> NDArray[np.float64]:
        """A block ``(rows, width)`` of an image, whose planes are flat."""
        block = np.empty((rows.stop - rows.start, width))
        for part, offset in self._parts(block, image, rows.start, start):
            self._file.seek(offset)
            self._file.readinto(part)
        return block

    def _write(self, image: int, row: int, start: int, block: NDArray[np.float64]) -> None:
        for part, offset in self._parts(np.ascontiguousarray(block), image, row, start):
            self._file.seek(offset)
            self._file.write(part)

    def _parts(self, block: NDArray[np.float64], image: int, row: int, start: int) -> list[tuple[memoryview, int]]:
        """The pieces of a block that are contiguous in the file, and where."""
        first = 8 * ((image * self._shape[1] + row) * self._plane + start)
        lines = block.reshape(1, -1) if block.shape[1] == self._plane else block
        return [(line.data.cast("B"), first + 8 * self._plane * turn) for turn, line in enumerate(lines)]
