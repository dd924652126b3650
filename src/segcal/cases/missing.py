"""Chunks that a store does not hold: left out because all their values are the same, or lost?

Zarr by default does not write a chunk in which every value is the fill value (``write_empty_chunks=False``), so a
valid store may lack chunks, and one chunk alone cannot tell. What surrounds it can:

- HDF5 leaves out no chunk that was written, and segcal's own zarr stores say that they hold every chunk: what is
  missing there was lost or never written. An error.
- A zarr store with no chunk at all cannot be told from one that was created and never filled. An error.
- A zarr store that does hold a chunk of nothing but the fill value was written in full. An error.
- Probabilities sum to 1. With the missing chunks read as 0 they still do if these held zeros, and do not if mass was
  lost. Every voxel is checked, more strictly than those of complete files.
- Logits and sigmoid scores have no such sum. An error.
- Labels, masks and images are read with the fill value, and that is said: in ``check`` and on opening.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from torch import Tensor

from segcal.cases.formats import ArrayFile, Stored, format_of, open_array
from segcal.cases.layout import CaseFiles
from segcal.cases.oriented import IMAGE_KEYS, LABEL_KEYS, MASK_KEYS
from segcal.errors import DataError, SegcalError

# How far from 1 the probabilities of a voxel may sum where chunks are missing; float16 rounds more and may do so.
_SUM_TOLERANCE = 1e-5


def check_scores(file: ArrayFile, *, sums_to_one: bool) -> bool:
    """Raise if chunks of scores are lost; True if they are lost unless every voxel sums to 1 (``check_sums``)."""
    stored = file.stored()
    if stored is None or not stored.missing:
        return False
    if not (sums_to_one and stored.sparse and stored.there and stored.fill == 0):
        raise _lost(file, stored)
    return True


def check_sums(scores: Tensor, file: ArrayFile) -> None:
    """Raise where probabilities ``(1, C, *spatial)`` read from a store with missing chunks do not sum to 1."""
    tolerance = max(_SUM_TOLERANCE, float(np.finfo(file.dtype).eps))
    off = (scores.double().sum(1) - 1).abs().max()
    if not bool(off <= tolerance):
        stored = file.stored()
        assert stored is not None
        raise _lost(file, stored, f": without them the probabilities of a voxel sum to 1 only within {float(off):.2g}")


def check_values(file: ArrayFile) -> None:
    """Raise if chunks of labels, a mask or an image are lost and not just left out."""
    stored = file.stored()
    if stored is None or not stored.missing:
        return
    if not stored.sparse or not stored.there:
        raise _lost(file, stored)
    if file.holds_fill():
        raise _lost(file, stored, f", although others that hold nothing but {stored.fill} are stored")


def missing_notes(cases: Sequence[CaseFiles]) -> list[str]:
    """What is read as a fill value because zarr did not store it, in words."""
    notes = []
    for name, usual, paths in (
        ("labels", LABEL_KEYS, [case.label for case in cases]),
        ("masks", MASK_KEYS, [case.mask for case in cases]),
        ("images", IMAGE_KEYS, [path for case in cases for path in case.images]),
    ):
        found = [(path, stored) for path in paths if path is not None and (stored := _partial(path, usual))]
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
        with suppress(SegcalError):  # Whoever reads the file says what is wrong with it.
            stored = open_array(path, usual=usual).stored()
            return stored if stored and stored.missing else None
    return None


def _lost(file: ArrayFile, stored: Stored, why: str = "") -> DataError:
    return DataError(
        f"{stored.missing} of {stored.chunks} chunks are missing{why}",
        where=str(file.path),
        expected="a complete store",
        fix="write or copy it again; for zarr, if these chunks really hold nothing but the fill value, write them with "
        "config={'write_empty_chunks': True}",
    )
