"""What a calibrator makes of a case: the one way in which evaluation, maps, pictures, fits and files come by it.

Logits alone are not all that a calibrator may see of a case: there are its image, its ensemble members, and the
neighbours of a voxel. So nobody but this module decides what a calibrator is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from segcal.cases.caseset import CaseSet, numbered_channels
from segcal.errors import InputError, SegcalError
from segcal.kernels import AffineMap
from segcal.types import Case


@runtime_checkable
class CaseCalibrator(Protocol):
    """What is seen of a calibrator."""

    @property
    def spatial(self) -> bool:
        """Whether more of a case matters to a voxel than its own logits: then only ``pieces`` is right."""

    @property
    def score_map(self) -> AffineMap | None:
        """The map as an affine one, where it is, to be fused into the pass over the voxels."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Log-probabilities of any voxels ``(N, C, *spatial)``; of a whole case where ``spatial``."""

    def pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        """Rows of a case and their log-probabilities ``(N, C, rows, ...)``, in order."""


#: A calibrator, a plain function from the logits of a whole case to its log-probabilities, or the scores as they are.
AnyCalibrator = CaseCalibrator | Callable[[Tensor], Tensor] | None


@runtime_checkable
class Classified(Protocol):
    """What knows its classes: cases, and calibrators that were fitted to some (before, they have None)."""

    @property
    def num_classes(self) -> int | None:
        """How many; two in each channel of multi-label data."""

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Their names, where they have some."""

    @property
    def channel_names(self) -> tuple[str, ...] | None:
        """The channels of multi-label data; None for ordinary data."""


@runtime_checkable
class PerChannel(Classified, Protocol):
    """A calibrator that has a map for each channel, where it was fitted to multi-label data."""

    @property
    def channels(self) -> Any:
        """The calibrators, in the order of ``channel_names``; None for ordinary data."""


class _Function:
    """A plain function as a calibrator; nothing is known of it, so it sees whole cases."""

    spatial, score_map = True, None

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, logits: Tensor) -> Tensor:
        return self.function(logits)

    def pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, case.shape[2]), self.function(case.logits)


class _Uncalibrated:
    """The scores as they are."""

    spatial, score_map = False, None

    def __call__(self, logits: Tensor) -> Tensor:
        return logits

    def pieces(self, case: Case) -> Iterator[tuple[slice, Tensor]]:
        return case.logit_rows()


def as_calibrator(calibrator: AnyCalibrator) -> CaseCalibrator:
    """Whatever stands for a calibrator, as one.

    Examples:
        >>> as_calibrator(lambda logits: logits / 2).spatial, as_calibrator(None).spatial
        (True, False)
    """
    if calibrator is None:
        return _Uncalibrated()
    return calibrator if isinstance(calibrator, CaseCalibrator) else _Function(calibrator)


def of_channel(calibrator: AnyCalibrator, index: int) -> AnyCalibrator:
    """What calibrates one channel of multi-label data: its own map, or the function that all of them share."""
    if isinstance(calibrator, PerChannel) and calibrator.channel_names is not None:
        own: CaseCalibrator = calibrator.channels[index]
        return own
    return calibrator


def check_classes(
    cases: CaseSet, like: AnyCalibrator | Classified, *, have: str = "the cases have", whose: str = "the calibrator"
) -> None:
    """Raise unless the cases have the classes and channels of a calibrator or of other cases, in the same order.

    Names are compared where both have them; a plain function takes whatever comes.

    Args:
        cases: What is about to be calibrated.
        like: What it has to be like.
        have: The beginning of the message, with its verb.
        whose: Who expects it.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> cases, other = scenes(1, class_names="abcdef"), scenes(1, class_names="bacdef")
        >>> check_classes(cases, cases), check_classes(cases, lambda logits: logits)
        (None, None)
        >>> check_classes(cases, other)
        Traceback (most recent call last):
        segcal.errors.InputError: the cases have the classes a, b, c, d, e, f; expected b, a, c, d, e, f, as the ...
    """
    if not isinstance(like, Classified):
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
                fix="mend the names, or the order of the scores' channels",
            )


def _channels(names: tuple[str, ...] | None) -> str:
    return "no channels (ordinary data)" if names is None else f"the channels {', '.join(names)}"


def _given(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Names that somebody gave, not mere numbers."""
    return None if names is None or names == numbered_channels(len(names)) else names


@torch.no_grad()
def score_pieces(case: Case, calibrator: AnyCalibrator) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a case and their calibrated log-probabilities ``(N, C, rows, ...)``, in order; logits without one.

    Only some rows are in memory at a time, where the calibrator and the format of the case allow it.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> [(rows.stop, part.shape) for rows, part in score_pieces(scenes(1, size=(32, 40))[0], lambda z: z / 2)]
        [(32, torch.Size([1, 6, 32, 40]))]
    """
    yield from as_calibrator(calibrator).pieces(case)


def case_scores(case: Case, calibrator: AnyCalibrator) -> Tensor:
    """The whole of ``score_pieces``, ``(N, C, *spatial)``."""
    return torch.cat([scores for _, scores in score_pieces(case, calibrator)], 2)
