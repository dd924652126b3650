"""An array file of a case: its axes in canonical order, and what missing chunks of it mean.

By default zarr does not write chunks in which every value is the fill value (``write_empty_chunks=False``). So a valid
store may lack chunks, and a missing chunk alone does not tell. These rules decide:

- HDF5 stores every chunk that was written, and so do the zarr stores of segcal, which say so: a missing chunk was lost
  or never written. An error.
- A zarr store without any chunk looks like one that was created and never filled. An error.
- A zarr store that holds a chunk of nothing but the fill value was written in full. An error.
- Probabilities sum to 1. With missing chunks read as 0, they still do if these chunks held zeros, and do not if some
  were lost. Every voxel is checked, more strictly than in complete files.
- Logits and sigmoid scores have no such sum. An error.
- Labels, masks and images are read with the fill value, and a note says so, in ``check`` and on opening.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
from torch import Tensor

from segcal.cases.formats import Array, ArrayFile, format_of, open_array
from segcal.cases.formats.base import Stored
from segcal.cases.layout import CaseFiles
from segcal.errors import DataError, left_for_later

# The usual names of arrays in files that hold several.
SCORE_KEYS = ("probabilities", "logits", "probs", "softmax", "scores")
LABEL_KEYS = ("labels", "label", "segmentation", "seg", "mask")
MASK_KEYS = ("mask",)
IMAGE_KEYS = ("image",)
# Allowed difference from 1 of the sum over classes if chunks are missing; for float16 its rounding error.
_SUM_TOLERANCE = 1e-5
# Stores that are looked at together when a dataset is opened.
_TOGETHER = 16


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


def check_scores(file: ArrayFile, *, sums_to_one: bool) -> bool:
    """Raise if chunks of scores are lost. True if only the sums over classes can tell (``check_sums``)."""
    stored = file.stored()
    if not stored.missing:
        return False
    if not (sums_to_one and stored.sparse and stored.there and stored.fill == 0):
        raise _lost(file)
    return True


def check_sums(scores: Tensor, file: ArrayFile) -> None:
    """Raise where probabilities ``(1, C, *spatial)`` read from a store with missing chunks do not sum to 1."""
    tolerance = max(_SUM_TOLERANCE, float(np.finfo(file.dtype).eps))
    off = (scores.double().sum(1) - 1).abs().max()
    if not bool(off <= tolerance):
        raise _lost(file, f": without them the probabilities of a voxel sum to 1 only within {float(off):.2g}")


def check_values(file: ArrayFile) -> None:
    """Raise if chunks of labels, a mask or an image are lost, not just left out."""
    stored = file.stored()
    if not stored.missing:
        return
    if not stored.sparse or not stored.there:
        raise _lost(file)
    if file.holds_fill():
        raise _lost(file, f", although others that hold nothing but {stored.fill} are stored")


def missing_notes(cases: Sequence[CaseFiles]) -> list[str]:
    """Notes about labels, masks and images that are partly read as the fill value."""
    notes = []
    for name, usual, paths in (
        ("labels", LABEL_KEYS, [case.label for case in cases]),
        ("masks", MASK_KEYS, [case.mask for case in cases]),
        ("images", IMAGE_KEYS, [path for case in cases for path in case.images]),
    ):
        asked = [path for path in paths if path is not None]
        with ThreadPoolExecutor(_TOGETHER) as pool:  # Object stores take long to answer.
            looked = zip(asked, pool.map(_partial, asked, repeat(usual)), strict=True)
            found = [(path, stored) for path, stored in looked if stored]
        if found:
            missing, chunks = (sum(getattr(stored, part) for _, stored in found) for part in ("missing", "chunks"))
            values = ", ".join(f"{value:g}" for value in sorted({stored.fill for _, stored in found}))
            notes.append(
                f"{name}: {missing} of {chunks} chunks of {len(found)} zarr stores are not stored and read as {values} "
                f"(first {found[0][0]})"
            )
    return notes


def _partial(path: Path, usual: tuple[str, ...]) -> Stored | None:
    if (format := format_of(path)) and format.sparse:
        with left_for_later():  # It is raised again when the file is read.
            stored = open_array(path, usual=usual).stored()
            return stored if stored.missing else None
    return None


def _lost(file: ArrayFile, why: str = "") -> DataError:
    stored = file.stored()
    return DataError(
        f"{stored.missing} of {stored.chunks} chunks are missing{why}",
        where=str(file.path),
        expected="a complete store",
        fix="write or copy it again; for zarr, if these chunks really hold nothing but the fill value, write them with "
        "config={'write_empty_chunks': True}",
    )
