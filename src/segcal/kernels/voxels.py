"""The voxels of one update, cut into pieces small enough to work on.

A piece is a matrix ``(C, v)`` of scores with its labels. Contiguous float32 logits are never copied; half precision,
channels-last or otherwise strided logits are converted piece by piece, so no more than a piece is ever in memory twice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from segcal.errors import InputError
from segcal.kernels.experts import ExpertMap
from segcal.kernels.grid import BinGrid
from segcal.scores import DEPTH, impossible_label, only_possible, some_impossible, without_softmax
from segcal.types import Chunk

PIECE_VOXELS = 2**15
ONE_BIN = BinGrid.from_edges(())
# exp(-100) is 0 in float32.
_NOTHING = 100.0


@dataclass(frozen=True)
class AffineMap:
    """A calibrator's map, applied inside the pass: ``z -> weight z + bias``, per voxel.

    ``weight`` is a scalar (1 / temperature), ``(C,)`` (vector scaling) or ``(C, C)`` (matrix scaling); ``bias`` is
    ``(C,)`` or None. A positive scalar without bias cannot change the argmax.

    Examples:
        >>> AffineMap.temperature(2.0)(torch.tensor([[4.0, 2.0]]))
        tensor([[2., 1.]])
    """

    weight: Tensor
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim > 2 or len(set(self.weight.shape)) > 1:
            raise InputError(f"weight has shape {tuple(self.weight.shape)}", expected="(), (C,) or (C, C)")
        for name, part in (("weight", self.weight), ("bias", self.bias)):
            if part is not None and not bool(torch.isfinite(part).all()):
                raise InputError(f"{name} is not finite", expected="finite numbers")
        if self.is_scale and float(self.weight) <= 0:
            raise InputError(f"scale is {float(self.weight):g}", expected="a positive 1 / temperature")

    @classmethod
    def temperature(cls, temperature: float) -> AffineMap:
        """Temperature scaling, ``z / temperature``."""
        return cls(torch.tensor(1 / temperature, dtype=torch.float64))

    @property
    def is_scale(self) -> bool:
        """Whether this is a bare temperature."""
        return self.weight.ndim == 0 and self.bias is None

    def suits(self, logits: Tensor) -> bool:
        """Whether impossible classes stay impossible in ``weight z + bias``: in a matrix they would meet the others."""
        deep = self.is_scale and float(self.weight) * DEPTH > _NOTHING
        return deep or not some_impossible(logits)

    def check_classes(self, num_classes: int) -> None:
        """Raise unless this map is for this number of classes."""
        for name, part in (("weight", self.weight), ("bias", self.bias)):
            if part is not None and part.ndim and set(part.shape) != {num_classes}:
                raise InputError(f"{name} has shape {tuple(part.shape)}", expected=f"{num_classes} classes")

    def __call__(self, logits: Tensor) -> Tensor:
        """The mapped logits ``(N, C, *spatial)``, up to a constant per voxel; impossible classes are at -inf."""
        classes = logits.shape[1]
        self.check_classes(classes)
        if self.is_scale:
            return only_possible(logits) * self.weight.to(logits)
        bias = self.weight.new_zeros(classes) if self.bias is None else self.bias
        if self.weight.ndim == 2:
            return ExpertMap("logits", self.weight[None], bias[None])(logits)
        return ExpertMap("own-logit", self.weight.expand(classes)[None, :, None], bias[None])(logits)


@dataclass(frozen=True)
class Piece:
    """Where some voxels lie: images, a window in the leading spatial axes, and columns of the flattened rest."""

    images: int | slice
    window: tuple[slice, ...]
    columns: slice
    offset: int  # flat index of the first voxel


@dataclass(frozen=True)
class Voxels:
    """One update, checked by the caller: all tensors ``(N, *spatial)`` but ``logits (N, C, *spatial)``.

    The grids are those of ``tally``. ``slots`` are indices 0..num_slots - 1 of the disjoint groups to tally,
    ``uncalibrated`` is the argmax before calibration, and ``score_map`` is applied to the logits first.
    """

    logits: Tensor
    labels: Tensor
    top_grid: BinGrid = ONE_BIN
    class_grid: BinGrid | None = None
    ignore_index: int | None = None
    mask: Tensor | None = None
    slots: Tensor | None = None
    num_slots: int = 1
    uncalibrated: Tensor | None = None
    score_map: AffineMap | None = None
    energy_shift: float = 0.0

    @classmethod
    def of(cls, chunk: Chunk) -> Voxels:
        """The voxels of some rows of a case."""
        return cls(chunk.logits, chunk.labels, ignore_index=chunk.ignore_index, mask=chunk.mask)

    @property
    def compares(self) -> bool:
        """Whether there is an uncalibrated prediction to compare with."""
        return self.uncalibrated is not None or self.score_map is not None

    def pieces(self, size: int = PIECE_VOXELS, joined: int = PIECE_VOXELS) -> Iterator[Piece]:
        """All voxels in order, about 2^15 at a time, or up to ``size`` of an image that is contiguous.

        Images of at most half of ``joined`` voxels are joined, up to so many, which copies them when they are read.
        Nothing is read or copied yet.
        """
        batch, _, *spatial = self.logits.shape
        per_image = math.prod(spatial)
        everything = slice(None)
        if per_image * batch == 0:
            return
        if per_image <= joined // 2:  # many small images, or (N, C): several to a piece
            for images in _steps(batch, joined // per_image):
                yield Piece(images, (), everything, images.start * per_image)
        elif self.logits.is_contiguous():
            for n in range(batch):
                for columns in _steps(per_image, size):
                    yield Piece(n, (), columns, n * per_image + columns.start)
        else:
            for n in range(batch):
                for window, start in _windows(spatial):
                    yield Piece(n, window, everything, n * per_image + start)

    def scores(self, piece: Piece) -> tuple[Tensor, slice]:
        """A matrix ``(C, V)`` and the piece's columns in it: a view where possible, else a copy of the piece alone."""
        logits = self.logits.detach()
        if isinstance(piece.images, slice):
            part = logits[piece.images].movedim(1, 0)
        else:
            index = (slice(None), *piece.window)
            part = logits[piece.images][index]
        matrix = part.reshape(logits.shape[1], -1)
        return matrix, slice(*piece.columns.indices(matrix.shape[1]))

    def flat(self, tensor: Tensor, piece: Piece) -> Tensor:
        """The piece's part of an ``(N, *spatial)`` tensor, ``(v,)``."""
        return tensor[piece.images][piece.window].reshape(-1)[piece.columns]

    def valid(self, piece: Piece) -> Tensor:
        """Which of the piece's voxels count, ``(v,)`` bool."""
        labels = self.flat(self.labels, piece)
        valid = torch.ones_like(labels, dtype=torch.bool) if self.ignore_index is None else labels != self.ignore_index
        return valid if self.mask is None else valid & self.flat(self.mask, piece)

    def first_valid(self) -> tuple[int | slice, ...] | None:
        """The index in ``logits`` of the first voxel that counts, all its classes; None if there is none."""
        if self.labels.numel() and self._counts(first := (0,) * self.labels.ndim):
            return self._of_logits(first)
        for piece in self.pieces():
            valid = self.valid(piece).nonzero()
            if len(valid):
                return self._of_logits(self._index(piece.offset + int(valid[0, 0])))
        return None

    def _counts(self, index: tuple[int, ...]) -> bool:
        counts = self.ignore_index is None or int(self.labels[index]) != self.ignore_index
        return counts and (self.mask is None or bool(self.mask[index]))

    def _index(self, flat: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(flat, tuple(self.labels.shape)))

    @staticmethod
    def _of_logits(index: tuple[int, ...]) -> tuple[int | slice, ...]:
        return (index[0], slice(None), *index[1:])

    def checked(self, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
        """Scores ``(C, n)`` in float64 and labels ``(n,)`` of the piece's valid voxels, and which these are ``(v,)``.

        Raises if a voxel is unfit. Impossible classes are at -inf, and no label is impossible.
        """
        (scores, columns), valid = self.scores(piece), self.valid(piece)
        z, y = scores[:, columns][:, valid].double(), self.flat(self.labels, piece)[valid].long()
        best = z.amax(0)
        bad = ~torch.isfinite(best) | (y < 0) | (y >= len(z))
        bad |= best - z.gather(0, y.clamp(0, len(z) - 1)[None])[0] > DEPTH
        if bool(bad.any()):
            raise self.bad_voxel(piece.offset + int(valid.nonzero()[bad.nonzero()[0, 0], 0]))
        return z.masked_fill(best - z > DEPTH, -torch.inf), y, valid

    def bad_voxel(self, flat: int) -> InputError:
        """The error for the voxel with this flat index: its label is impossible or its scores have no softmax."""
        index = self._index(flat)
        place = index[1:] if len(index) > 1 and index[0] == 0 and self.labels.shape[0] == 1 else index
        label = int(self.labels[index])
        classes = self.logits.shape[1]
        if not 0 <= label < classes:
            return InputError(
                f"label {label} at voxel {place}",
                expected=f"0..{classes - 1}" + ("" if self.ignore_index is None else f" or {self.ignore_index}"),
                fix="set ignore_index, or mask the voxel",
            )
        best = float(self.logits[self._of_logits(index)].double().amax())
        return impossible_label() if math.isfinite(best) else without_softmax(best, f"at voxel {place}")


def _steps(length: int, step: int) -> Iterator[slice]:
    step = max(1, step)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _windows(spatial: Sequence[int]) -> Iterator[tuple[tuple[slice, ...], int]]:
    """Windows of about 2^15 voxels that follow one another in flat order, and the flat index each begins at."""
    axis = next(a for a in range(len(spatial)) if math.prod(spatial[a + 1 :]) <= PIECE_VOXELS)
    inner = math.prod(spatial[axis + 1 :])
    start = 0
    for outer in itertools.product(*map(range, spatial[:axis])):
        for rows in _steps(spatial[axis], PIECE_VOXELS // inner):
            yield (*(slice(i, i + 1) for i in outer), rows), start
            start += (rows.stop - rows.start) * inner
