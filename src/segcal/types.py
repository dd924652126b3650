"""The objects that the parts of segcal exchange.

Shape conventions, written once: scores are ``(N, C, *spatial)``, labels and masks ``(N, *spatial)``, images
``(N, channels, *spatial)``. A case is a batch of one (N = 1), except in multi-label data, where each of the K
channels is a two-class problem of its own (N = K, C = 2). Volumes are ``(depth, height, width)`` = ``(z, y, x)``.
"Rows" are positions along the first spatial axis: the unit in which large cases are read piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.errors import InputError, check_name
from segcal.transfer import moved

FloatArray = NDArray[np.float64]
Kind = Literal["logits", "probs"]

# Scores read at once: 64 MB of float32, enough to make overheads small, little enough for any machine.
CHUNK_VALUES = 2**24

_Read = Literal["logits", "labels", "mask"]
_ROW_AXIS: dict[_Read, int] = {"logits": 2, "labels": 1, "mask": 1}


class CaseSource(Protocol):
    """Where a case comes from: files, memory, or a generator. All methods take a range of rows."""

    id: str
    batch: int
    num_classes: int
    spatial: tuple[int, ...]
    spacing: tuple[float, ...] | None
    ignore_index: int
    sliceable: bool  # False if reading some rows costs as much as reading all

    def logits(self, rows: slice) -> Tensor: ...  # noqa: D102
    def labels(self, rows: slice) -> Tensor: ...  # noqa: D102

    def mask(self, rows: slice) -> Tensor | None:
        """None by default: all voxels are valid."""
        return None

    def image(self, rows: slice) -> Tensor | None:
        """None by default: there is no image."""
        return None

    def posterior(self, rows: slice) -> Tensor | None:
        """None by default: the true posterior is not known."""
        return None


@runtime_checkable
class EnsembleSource(CaseSource, Protocol):
    """A source that can give the ensemble members from which its logits are pooled."""

    num_members: int | None  # None for a single model
    pooling: Kind  # the space in which ``logits`` are pooled

    def member(self, index: int, rows: slice) -> Tensor: ...  # noqa: D102
    def pooled(self, members: Sequence[int], space: Kind) -> CaseSource: ...  # noqa: D102


@runtime_checkable
class ChannelledSource(CaseSource, Protocol):
    """A multi-label source that can read one channel without the others."""

    def channel(self, index: int) -> CaseSource: ...  # noqa: D102


@runtime_checkable
class DeviceSource(CaseSource, Protocol):
    """A source whose scores can be moved as they are stored, and become logits on a GPU."""

    def logits_on(self, rows: slice, device: torch.device) -> Tensor: ...  # noqa: D102


@dataclass(frozen=True)
class Chunk:
    """Some rows of a case: ``logits (N, C, rows, ...)``, ``labels`` and ``mask (N, rows, ...)``.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> chunk = next(iter(scenes(1, size=(16, 20))[0].chunks()))
        >>> chunk.rows, chunk.logits.shape, chunk.valid.shape
        (slice(0, 16, None), torch.Size([1, 6, 16, 20]), torch.Size([1, 16, 20]))
    """

    rows: slice
    logits: Tensor
    labels: Tensor
    mask: Tensor | None
    ignore_index: int

    @property
    def valid(self) -> Tensor:
        """``(N, rows, ...)`` bool: neither ignored nor masked out."""
        valid = self.labels != self.ignore_index
        return valid if self.mask is None else valid & self.mask

    def part(self, rows: slice) -> Chunk:
        """Some of the rows, which are numbered as in the case."""
        own = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        mask = None if self.mask is None else self.mask[:, own]
        return Chunk(rows, self.logits[:, :, own], self.labels[:, own], mask, self.ignore_index)


@dataclass(frozen=True)
class FitReport:
    """How a fit went.

    Attributes:
        nll_before: Mean negative log-likelihood of the fit data before, in nats per voxel.
        nll_after: The same after the fit; never above ``nll_before``, except for ``ensemble``, which only pools.
        converged: Whether the optimum was reached.
        certificate: Norm of the (projected) gradient of the mean loss at the solution: 0 at an exact optimum.
        iterations: Steps of the solver.
        seconds: Wall-clock time.
        voxels_used: Voxels the solution rests on.
        notes: What the user should know: active bounds, fallbacks, classes with too few voxels.
        cases: Cases that were fitted to; None in files of earlier versions.
        fitted: When, in UTC, as ISO 8601 has it; None in files of earlier versions.

    Examples:
        >>> from segcal.calibrators import TemperatureScaling
        >>> from segcal.synthetic import Temperature, scenes
        >>> report = TemperatureScaling().fit(scenes(2, size=(16, 20), plant=[Temperature(2.0)])).fit_report
        >>> report.nll_after < report.nll_before, report.converged, report.voxels_used
        (True, True, 640)
    """

    nll_before: float
    nll_after: float
    converged: bool
    certificate: float
    iterations: int
    seconds: float
    voxels_used: int
    notes: tuple[str, ...] = ()
    cases: int | None = None
    fitted: str | None = None


class Case:
    """One image or volume with its scores, labels and other data, each read when first used.

    Attributes are ``logits (N, C, *spatial)`` float32, ``labels (N, *spatial)`` int64, ``image``, ``mask`` (True =
    valid) and ``posterior`` (scenes only), each ``None`` if there is none, and ``spacing`` per spatial axis.
    Once read, a tensor stays with the case; ``chunks`` reads without keeping. ``on`` gives them on another device.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> case = scenes(1, size=(32, 40))[0]
        >>> case.logits.shape, case.labels.shape
        (torch.Size([1, 6, 32, 40]), torch.Size([1, 32, 40]))
    """

    def __init__(self, source: CaseSource, device: torch.device | None = None) -> None:
        self.source, self.device = source, device
        self._read: dict[str, Tensor | None] = {}

    @property
    def id(self) -> str:
        """The name of the case, unique in its dataset."""
        return self.source.id

    @property
    def shape(self) -> tuple[int, ...]:
        """``(N, C, *spatial)``, without reading the scores."""
        return (self.source.batch, self.source.num_classes, *self.source.spatial)

    @property
    def tensor_device(self) -> torch.device:
        """The device that its tensors are on. A case that is a tensor is asked; before CUDA is used, none is there."""
        if self.device is None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found: torch.device = self.rows("logits", slice(0, 1)).device
            return found
        return self.device or torch.device("cpu")

    @property
    def spacing(self) -> tuple[float, ...] | None:
        """Voxel size along each spatial axis, or None if it is unknown."""
        return self.source.spacing

    @property
    def ignore_index(self) -> int:
        """The label of voxels that are ignored."""
        return self.source.ignore_index

    def _all(self, name: str) -> Tensor | None:
        if name not in self._read:
            self._read[name] = self._fetched(name, slice(0, self.source.spatial[0]))
        return self._read[name]

    def _fetched(self, name: str, rows: slice) -> Tensor | None:
        """Some rows from the source, on the device of the case."""
        on_gpu = self.device is not None and self.device.type == "cuda"
        if name == "logits" and on_gpu and isinstance(self.source, DeviceSource):
            assert self.device is not None
            return self.source.logits_on(rows, self.device)
        return moved(getattr(self.source, name)(rows), self.device)

    def on(self, device: torch.device) -> Case:
        """The same case, whose tensors are on this device."""
        return Case(self.source, device)

    @property
    def logits(self) -> Tensor:
        """Canonical logits ``(N, C, *spatial)``, float32: pooled over members, log of probabilities."""
        logits = self._all("logits")
        assert logits is not None
        return logits

    @property
    def labels(self) -> Tensor:
        """Labels ``(N, *spatial)``, int64."""
        labels = self._all("labels")
        assert labels is not None
        return labels

    @property
    def mask(self) -> Tensor | None:
        """``(N, *spatial)`` bool, True where the voxel counts; None if all do."""
        return self._all("mask")

    @property
    def image(self) -> Tensor | None:
        """``(1, channels, *spatial)`` float32, or None."""
        return self._all("image")

    @property
    def posterior(self) -> Tensor | None:
        """The true class probabilities ``(N, C, *spatial)`` of a synthetic scene, or None."""
        return self._all("posterior")

    @property
    def valid(self) -> Tensor:
        """``(N, *spatial)`` bool: neither ignored nor masked out."""
        valid = self.labels != self.ignore_index
        return valid if self.mask is None else valid & self.mask

    # -- ensembles -----------------------------------------------------------------------------------------------------

    @property
    def members(self) -> int | None:
        """How many ensemble members ``logits`` are pooled from; None for a single model."""
        return self.source.num_members if isinstance(self.source, EnsembleSource) else None

    @property
    def pooling(self) -> Kind | None:
        """The space in which the members are pooled; None for a single model."""
        return self.source.pooling if isinstance(self.source, EnsembleSource) and self.members else None

    def member_logits(self, index: int, rows: slice | None = None) -> Tensor:
        """Canonical logits ``(N, C, *spatial)`` of one member, of all rows or some; they are not kept."""
        source, (index,) = self._ensemble([index])
        return moved(source.member(index, rows or slice(0, self.source.spatial[0])), self.device)  # type: ignore[return-value]

    def pooled(self, space: Kind | None = None, members: Sequence[int] | None = None) -> Case:
        """The same case with its logits pooled in another space, or from some of the members.

        Examples:
            >>> from segcal.synthetic import scenes
            >>> case = scenes(1, size=(32, 40), members=3)[0]
            >>> case.pooling, case.pooled("probs").pooling, case.pooled(members=[0, 2]).members
            ('logits', 'probs', 2)
        """
        source, chosen = self._ensemble(members)
        return Case(source.pooled(chosen, check_pooling(space or source.pooling)), self.device)

    def _ensemble(self, members: Sequence[int] | None) -> tuple[EnsembleSource, tuple[int, ...]]:
        if not isinstance(self.source, EnsembleSource) or self.source.num_members is None:
            raise no_members().at(case=self.id)
        return self.source, check_members(members, self.source.num_members)

    # -- multi-label data ----------------------------------------------------------------------------------------------

    def channel(self, index: int) -> Case:
        """One channel of a multi-label case as a two-class case. What was read is not read again."""
        if not 0 <= index < self.source.batch:
            raise InputError(f"channel {index}", case=self.id, expected=f"0..{self.source.batch - 1}")
        return Case(_Channel(self, index), self.device)

    # -- reading -------------------------------------------------------------------------------------------------------

    def load(self) -> Case:
        """Read logits, labels and mask now. Returns the case."""
        _ = self.logits, self.labels, self.mask
        return self

    def chunks(self, values: int = CHUNK_VALUES) -> Iterator[Chunk]:
        """Pieces of about ``values`` scores (voxels times classes), at least one row each, in order.

        Only one is in memory at a time, unless the case was already read or its format cannot be read in parts.
        """
        if not self.source.sliceable:
            self.load()
        for rows in row_slices(self.shape, values):
            yield self.chunk(rows)

    def logit_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows and their logits ``(N, C, rows, ...)``, in the pieces of ``chunks``. Labels are not needed."""
        if not self.source.sliceable:
            _ = self.logits
        for rows in row_slices(self.shape):
            yield rows, self.rows("logits", rows)

    def chunk(self, rows: slice) -> Chunk:
        """Some rows, ``slice(start, stop)``."""
        parts = (self.rows("logits", rows), self.rows("labels", rows), self.rows("mask", rows))
        return Chunk(rows, *parts, self.ignore_index)

    def rows(self, name: _Read, rows: slice) -> Any:
        """Some rows of one tensor; the mask may be None."""
        if name not in self._read:
            return self._fetched(name, rows)
        whole = self._read[name]
        return None if whole is None else whole.narrow(_ROW_AXIS[name], rows.start, rows.stop - rows.start)

    def has_read(self, name: str) -> bool:
        """Whether a tensor was read and is kept."""
        return name in self._read

    def __repr__(self) -> str:
        return f"Case({self.id!r}, shape={self.shape})"


class _Channel:
    """One channel of a case as a ``CaseSource``, with the ensemble members that the case has."""

    def __init__(self, case: Case, index: int) -> None:
        source = case.source
        self._case, self._index = case, index
        self._apart = source.channel(index) if isinstance(source, ChannelledSource) else None
        self.id, self.batch, self.num_classes = source.id, 1, source.num_classes
        self.spatial, self.spacing, self.ignore_index = source.spatial, source.spacing, source.ignore_index
        self.sliceable, self.num_members, self.pooling = source.sliceable, case.members, case.pooling or "logits"
        self.logits, self.labels, self.mask = (partial(self._rows, name) for name in _ROW_AXIS)
        self.image = source.image

    def posterior(self, rows: slice) -> Tensor | None:
        return self._own(self._case.source.posterior(rows))  # type: ignore[no-any-return]

    def member(self, index: int, rows: slice) -> Tensor:
        return self._own(self._case.member_logits(index, rows))  # type: ignore[no-any-return]

    def pooled(self, members: Sequence[int], space: Kind) -> CaseSource:
        return _Channel(self._case.pooled(space, members), self._index)

    def _rows(self, name: _Read, rows: slice) -> Any:
        if self._apart is None or self._case.has_read(name):
            return self._own(self._case.rows(name, rows))
        return getattr(self._apart, name)(rows)

    def _own(self, whole: Any) -> Any:
        return None if whole is None else whole[self._index : self._index + 1]


def row_slices(shape: tuple[int, ...], values: int = CHUNK_VALUES) -> Iterator[slice]:
    """Split ``(N, C, *spatial)`` into ranges of rows with about ``values`` values each, at least one row."""
    batch, classes, rows, *rest = shape
    step = max(1, values // max(1, batch * classes * math.prod(rest)))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def check_pooling(space: Kind) -> Kind:
    """Raise unless this is a space to pool in. Returns it."""
    check_name("space", space, get_args(Kind))
    return space


def check_members(members: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Check indices of ensemble members, all different and below ``count``. None means all members.

    Examples:
        >>> check_members(None, 3), check_members([2, 0], 3)
        ((0, 1, 2), (2, 0))
    """
    chosen = tuple(range(count)) if members is None else tuple(members)
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= index < count for index in chosen):
        raise InputError(f"members {list(chosen)}", expected=f"at least one of 0..{count - 1}, each once")
    return chosen


def no_members() -> InputError:
    """The error of asking for ensemble members that do not exist."""
    return InputError(
        "there are no ensemble members",
        expected="scores of several models",
        fix="keep each model's scores in a folder of its own, logits/<member>/<case>.*",
    )
