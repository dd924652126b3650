"""The calibrated scores of a case, computed in one place for evaluation, maps, pictures, fits and files.

A calibrator may use more of a case than the logits of a voxel: its image, its ensemble members, its neighbours. This
module alone decides what a calibrator gets to see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from segcal.cases.caseset import CaseSet, numbered_channels
from segcal.errors import InputError, SegcalError
from segcal.kernels import AffineMap
from segcal.types import Case


@runtime_checkable
class CaseCalibrator(Protocol):
    """A calibrator as evaluation sees it."""

    @property
    def spatial(self) -> bool:
        """Whether a voxel's result depends on more than its own logits: then only ``pieces`` is right."""

    @property
    def score_map(self) -> AffineMap | None:
        """The map, if it is affine, to be fused into the pass over the voxels."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Log-probabilities of any voxels ``(N, C, *spatial)``; of a whole case if ``spatial``."""

    def pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        """Rows of a case and their log-probabilities ``(N, C, rows, ...)``, in order."""


#: A calibrator, a function from the logits of a whole case to log-probabilities, or None for uncalibrated scores.
AnyCalibrator = CaseCalibrator | Callable[[Tensor], Tensor] | None


@runtime_checkable
class Classified(Protocol):
    """Anything with known classes: cases, and fitted calibrators (before the fit they have None)."""

    @property
    def num_classes(self) -> int | None:
        """The number of classes; two in each channel of multi-label data."""

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Their names, if they have any."""

    @property
    def channel_names(self) -> tuple[str, ...] | None:
        """The channels of multi-label data; None for ordinary data."""


@runtime_checkable
class PerChannel(Classified, Protocol):
    """A calibrator that has a map for each channel if it was fitted to multi-label data."""

    @property
    def per_channel(self) -> Sequence[CaseCalibrator]:
        """The calibrators, in the order of ``channel_names``; empty for ordinary data."""


class _Function:
    """A plain function as a calibrator. Nothing is known about it, so it gets whole cases."""

    spatial, score_map = True, None

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, logits: Tensor) -> Tensor:
        return self.function(logits)

    def pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, case.shape[2]), self.function(case.logits)


class _Uncalibrated:
    """The uncalibrated scores."""

    spatial, score_map = False, None

    def __call__(self, logits: Tensor) -> Tensor:
        return logits

    def pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        return case.logit_rows()


def as_calibrator(calibrator: AnyCalibrator) -> CaseCalibrator:
    """Wrap None or a plain function as a calibrator.

    Examples:
        >>> as_calibrator(lambda logits: logits / 2).spatial, as_calibrator(None).spatial
        (True, False)
    """
    if calibrator is None:
        return _Uncalibrated()
    return calibrator if isinstance(calibrator, CaseCalibrator) else _Function(calibrator)


def of_channel(calibrator: AnyCalibrator, index: int) -> AnyCalibrator:
    """The calibrator of one channel of multi-label data: its own map, or the function that all channels share."""
    if isinstance(calibrator, PerChannel) and calibrator.per_channel:
        return calibrator.per_channel[index]
    return calibrator


def check_classes(
    cases: CaseSet, like: AnyCalibrator | Classified, *, have: str = "the cases have", whose: str = "the calibrator"
) -> None:
    """Raise unless the cases have the classes and channels of a calibrator or of other cases, in the same order.

    Names are compared if both have them. A plain function accepts all cases.

    Args:
        cases: The cases to be calibrated.
        like: The calibrator or the cases that they must match.
        have: The beginning of the message, with its verb.
        whose: What expects these classes, for the message.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> cases, other = scenes(1, class_names="abcdef"), scenes(1, class_names="bacdef")
        >>> check_classes(cases, cases), check_classes(cases, lambda logits: logits)
        (None, None)
        >>> check_classes(cases, other)
        Traceback (most recent call last):
        segcal.errors.InputError: the cases have the classes a, b, c, d, e, f; expected b, a, c, d, e, f, as the ...
    """
    if isinstance(like, type) or not isinstance(like, Classified):
        if isinstance(like, type) or (like is not None and not callable(like)):
            raise InputError(
                f"the calibrator is {like!r}",
                expected="a calibrator, a function of logits, or None",
                fix=f"{like.__name__}().fit(...)" if isinstance(like, type) else "read it from its file by segcal.load",
            )
        return
    if like.num_classes is None:
        raise SegcalError("the calibrator has not been fitted", fix="call fit, or segcal.load a fitted one")
    ours, theirs = cases.channel_names, like.channel_names
    if (ours is None) != (theirs is None):
        raise InputError(f"{have} {_channels(ours)}", expected=f"{_channels(theirs)}, as {whose} has")
    if cases.num_classes != like.num_classes:
        raise InputError(f"{have} {cases.num_classes} classes", expected=f"{like.num_classes}, as {whose} has")
    if ours and theirs and len(ours) != len(theirs):
        raise InputError(f"{have} {len(ours)} channels", expected=f"{len(theirs)}, as {whose} has")
    named = {"channels": (_given(ours), _given(theirs)), "classes": (cases.class_names, like.class_names)}
    for what, (found, wanted) in named.items():
        if found and wanted and found != wanted:
            raise InputError(
                f"{have} the {what} {', '.join(found)}",
                expected=f"{', '.join(wanted)}, as {whose} has",
                fix="correct the names, or the order of the channels of the scores",
            )


def _channels(names: tuple[str, ...] | None) -> str:
    return "no channels (ordinary data)" if names is None else f"the channels {', '.join(names)}"


def _given(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The names, unless they are only the default numbers."""
    return None if names is None or names == numbered_channels(len(names)) else names


@torch.no_grad()
def score_pieces(case: Case, calibrator: AnyCalibrator) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a case and their calibrated log-probabilities ``(N, C, rows, ...)``, in order; logits if None.

    Only some rows are in memory at a time, if the calibrator and the file format allow it.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> [(rows.stop, part.shape) for rows, part in score_pieces(scenes(1, size=(32, 40))[0], lambda z: z / 2)]
        [(32, torch.Size([1, 6, 32, 40]))]
    """
    yield from as_calibrator(calibrator).pieces(case)


def case_scores(case: Case, calibrator: AnyCalibrator) -> Tensor:
    """The whole of ``score_pieces``, ``(N, C, *spatial)``."""
    return torch.cat([scores for _, scores in score_pieces(case, calibrator)], 2)


class RowStream:
    """The calibrated scores of a case, taken in order in ranges of rows of any length; only some are in memory."""

    def __init__(self, case: Case, calibrator: AnyCalibrator) -> None:
        self._pieces, self._held = score_pieces(case, calibrator), list[tuple[slice, Tensor]]()

    def take(self, rows: slice) -> Tensor:
        """The scores ``(N, C, rows, ...)`` of rows after those taken before.

        Examples:
            >>> from segcal.synthetic import scenes
            >>> stream = RowStream(scenes(1, size=(32, 40))[0], lambda logits: logits / 2)
            >>> stream.take(slice(0, 20)).shape, stream.take(slice(20, 32)).shape
            (torch.Size([1, 6, 20, 40]), torch.Size([1, 6, 12, 40]))
        """
        while not self._held or self._held[-1][0].stop < rows.stop:
            self._held.append(next(self._pieces))
        parts = []
        for own, scores in self._held:
            start, stop = max(own.start, rows.start), min(own.stop, rows.stop)
            parts.append(scores.narrow(2, start - own.start, max(0, stop - start)))
        self._held = [held for held in self._held if held[0].stop > rows.stop]
        return torch.cat(parts, 2) if len(parts) > 1 else parts[0]
