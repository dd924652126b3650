"""What goes into a fit, what comes out of it, and how every fit reads its cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

from segcal.cases import CaseSet
from segcal.cases.calibrated import AnyCalibrator, score_pieces
from segcal.errors import InputError, naming
from segcal.types import Case, Chunk

T = TypeVar("T")
VoxelBudget = Literal["auto", "all"]


class FitData(NamedTuple):
    """What a calibrator is fitted to: cases, validation cases, how many voxels to use, and a seed."""

    cases: CaseSet
    validation: CaseSet | None
    voxels: VoxelBudget
    seed: int


class Fitted(NamedTuple):
    """What a calibrator reports of its fit; the base class adds the time it took."""

    nll_before: float
    nll_after: float
    converged: bool
    certificate: float
    iterations: int
    voxels_used: int
    notes: Sequence[str] = ()


def over_chunks(
    cases: Iterable[Case], function: Callable[[Case, Chunk], T], calibrator: AnyCalibrator = None
) -> Iterator[T]:
    """``function(case, chunk)`` for the chunks of all cases, one in memory at a time; errors name the case.

    With a calibrator, the logits of the chunks are its log-probabilities.
    """
    for case in cases:
        with naming(case=case.id):
            for chunk in case.chunks() if calibrator is None else _calibrated(case, calibrator):
                yield function(case, chunk)
        del case


def _calibrated(case: Case, calibrator: AnyCalibrator) -> Iterator[Chunk]:
    for rows, scores in score_pieces(case, calibrator):
        yield Chunk(rows, scores, case.rows("labels", rows), case.rows("mask", rows), case.ignore_index)


def check_voxels(count: int) -> None:
    """Raise if no voxel is valid."""
    if not count:
        raise InputError("no valid voxel", expected="labels that are neither ignored nor masked")
