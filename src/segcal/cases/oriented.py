"""An array file with its axes in canonical order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from segcal.cases.formats import Array, ArrayFile, format_of, open_array

# The usual names of arrays in files that hold several.
SCORE_KEYS = ("probabilities", "logits", "probs", "softmax", "scores")
LABEL_KEYS = ("labels", "label", "segmentation", "seg", "mask")
MASK_KEYS = ("mask",)
IMAGE_KEYS = ("image",)


@dataclass(frozen=True)
class Oriented:
    """An array file as ``(channels..., *spatial)`` in canonical order, whatever the order in the file."""

    file: ArrayFile
    leading: int
    reverse: bool = False
    squeeze: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in canonical order."""
        lead, spatial = self.file.shape[: self.leading], self.file.shape[self.leading + self.squeeze :]
        return (*lead, *(spatial[::-1] if self.reverse else spatial))

    @property
    def row_axis(self) -> int:
        """The axis of the file along which the rows lie."""
        return len(self.file.shape) - 1 if self.reverse else self.leading + self.squeeze

    @property
    def rows_per_chunk(self) -> int:
        """How many rows are stored in one chunk; 1 if rows can be read one by one."""
        return self.file.chunk[self.row_axis] if self.file.chunk else 1

    def read(self, rows: slice, channels: slice = slice(None)) -> Array:
        """Some rows, of all channels or some."""
        index = [channels] * self.leading + [slice(None)] * (len(self.file.shape) - self.leading)
        index[self.row_axis] = rows
        array = self.file.read(tuple(index))
        return self._flip(array.squeeze(self.leading) if self.squeeze else array)

    def as_stored(self, array: Array) -> Array:
        """An array in canonical order, with its axes as they are in the file."""
        return np.expand_dims(self._flip(array), self.leading) if self.squeeze else self._flip(array)

    def _flip(self, array: Array) -> Array:
        """Reverse the order of the spatial axes if it differs between file and canonical order."""
        order = (*range(self.leading), *reversed(range(self.leading, array.ndim)))
        return array.transpose(order) if self.reverse else array


def orient(path: Path, leading: int, *, axes: str, usual: tuple[str, ...] = (), key: str | None = None) -> Oriented:
    """Open a file with ``leading`` channel axes; ``axes`` is the order of the others in array files."""
    file, format = open_array(path, key=key, usual=usual), format_of(path)
    return Oriented(file, leading, reverse=axes == "xyz" and format is not None and not format.own_axes)
