"""An array file with its axes in canonical order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
    def rows_per_chunk(self) -> int:
        """How many rows are stored in one chunk; 1 if rows can be read one by one."""
        chunk = self.file.chunk
        return chunk[-1 if self.reverse else self.leading + self.squeeze] if chunk else 1

    def read(self, rows: slice, channels: slice = slice(None)) -> Array:
        """Some rows, of all channels or some."""
        spatial = [slice(None)] * (len(self.file.shape) - self.leading)
        spatial[-1 if self.reverse else int(self.squeeze)] = rows
        array = self.file.read((*(channels,) * self.leading, *spatial))
        if self.squeeze:
            array = array.squeeze(self.leading)
        return (
            array.transpose(*range(self.leading), *reversed(range(self.leading, array.ndim))) if self.reverse else array
        )


def orient(path: Path, leading: int, *, axes: str, usual: tuple[str, ...] = (), key: str | None = None) -> Oriented:
    """Open a file with ``leading`` channel axes; ``axes`` is the order of the others in array files."""
    file, format = open_array(path, key=key, usual=usual), format_of(path)
    return Oriented(file, leading, reverse=axes == "xyz" and format is not None and not format.own_axes)
