"""What goes into a fit, what comes out of it, and how every fit reads its cases.

Passes over all cases go through ``segcal.cases.shares.in_shares``: a function of some cases, and how answers add up.
What is drawn at random is drawn case by case, with ``case_seed``, so that no result depends on who reads which case.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from segcal.cases import CaseSet
from segcal.cases.calibrated import AnyCalibrator, score_pieces
from segcal.cases.device import fewer_rows
from segcal.errors import InputError, naming
from segcal.kernels import Voxels
from segcal.types import Case, Chunk, row_slices

T = TypeVar("T")
VoxelBudget = Literal["auto", "all"]

# Scores of the chunks that a function gets at once.
_TOGETHER = 2**26


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

    Chunks for which a GPU has too little memory are halved, so the function must change nothing if it raises. With a
    calibrator, the logits of the chunks are its log-probabilities.
    """
    for case in cases:
        with naming(case=case.id):
            for chunk in case.chunks() if calibrator is None else _calibrated(case, calibrator):
                yield from _within_memory(function, case, chunk)
        del case


def in_groups(cases: CaseSet, function: Callable[[Sequence[Voxels]], T]) -> Iterator[T]:
    """``function(voxels)`` for the chunks of all cases: of one or, where they lie in the CPU's memory already, of many.

    Threads share many at once with less waiting for each other. As in ``over_chunks``, errors name the case.
    """
    alone = over_chunks(cases, lambda _, chunk: function([Voxels.of(chunk)]))
    if not all(ref.memory == "cpu" for ref in cases.refs):
        yield from alone
        return
    for group in _groups(over_chunks(cases, lambda _, chunk: Voxels.of(chunk))):
        try:
            found = function(group)
        except InputError:
            for _ in alone:
                pass  # raises, and names the case
            raise
        yield found


def _groups(parts: Iterable[Voxels]) -> Iterator[list[Voxels]]:
    """Voxels one after the other, up to a limit together: what is read may be a copy."""
    group: list[Voxels] = []
    for voxels in parts:
        if sum(own.logits.numel() for own in (*group, voxels)) > _TOGETHER and group:
            yield group
            group = []
        group.append(voxels)
    if group:
        yield group


def _within_memory(function: Callable[[Case, Chunk], T], case: Case, chunk: Chunk) -> Iterator[T]:
    """The result for a chunk or, where a GPU has too little memory for that, those for its halves."""
    try:
        found = function(case, chunk)
    except torch.OutOfMemoryError:
        halves = fewer_rows(chunk.rows)
    else:
        yield found
        return
    for rows in halves:
        yield from _within_memory(function, case, chunk.part(rows))


def _calibrated(case: Case, calibrator: AnyCalibrator) -> Iterator[Chunk]:
    for rows, scores in score_pieces(case, calibrator):
        yield Chunk(rows, scores, case.rows("labels", rows), case.rows("mask", rows), case.ignore_index)


def valid_rows(case: Case) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a case, and which of their voxels count ``(N, rows, ...)``. Scores are not read."""
    for rows in row_slices(case.shape):
        labels, mask = case.rows("labels", rows), case.rows("mask", rows)
        valid = labels != case.ignore_index
        yield rows, valid if mask is None else valid & mask


def case_seed(seed: int, case: str) -> int:
    """A seed for one case, below 2^63.

    Examples:
        >>> case_seed(0, "a") == case_seed(0, "a") != case_seed(1, "a") != case_seed(1, "b")
        True
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {case}".encode(), digest_size=8).digest(), "big") >> 1


def check_voxels(count: int) -> None:
    """Raise if no voxel is valid."""
    if not count:
        raise InputError("no valid voxel", expected="labels that are neither ignored nor masked")
