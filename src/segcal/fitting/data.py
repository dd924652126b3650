"""What goes into a fit and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from segcal.cases import CaseSet

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
