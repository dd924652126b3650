"""Data to validate on where none were given: a fifth of the cases, or of the voxels of a single case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from segcal.cases import CaseSet, Split
from segcal.fitting.data import FitData
from segcal.fitting.first_pass import FirstPass
from segcal.fitting.sampling import VoxelSample

#: Of the cases, or of the voxels.
SHARE = 0.2


class HeldOut(NamedTuple):
    """Cases to train on and to validate on, None where there is but one case, and what to tell the user."""

    cases: CaseSet
    validation: CaseSet | None
    notes: list[str]


class Samples(NamedTuple):
    """A sample to train on, with what the first pass found, one to validate on, and what to tell the user.

    ``whole`` are those that stand for all that is fitted to, validation included where it was held out of that.
    """

    first: FirstPass
    held_out: VoxelSample
    whole: list[VoxelSample]
    notes: list[str]

    @property
    def voxels(self) -> int:
        """Voxels of both samples."""
        together = self.held_out is self.first.sample
        return len(self.first.sample) + (0 if together else len(self.held_out))


def hold_out(data: FitData) -> HeldOut:
    """The validation cases that were given, or a seeded fifth of the cases; both parts have voxels that count.

    Groups stay together, unless there is only one.
    """
    if data.validation is not None:
        return HeldOut(data.cases, data.validation, [])
    cases = data.cases
    if len(cases) > 1:
        split = _split(cases, data.seed)
        if not (_any_counts(split.calibration) and _any_counts(split.validation)):
            cases = cases.select(
                [name for index, name in enumerate(cases.ids) if _any_counts(cases[index : index + 1])]
            )
    if len(cases) < 2:
        return HeldOut(cases if len(cases) else data.cases, None, [])
    notes = []
    if len(set(cases.case_groups.values())) < 2:
        notes.append("all cases are of one group, so those held out for validation belong with those trained on")
    split = _split(cases, data.seed)
    return HeldOut(split.calibration, split.validation, notes)


def held_out_samples(data: FitData, voxels: int, see: Callable[[CaseSet], CaseSet] = lambda cases: cases) -> Samples:
    """Samples of up to so many voxels, of cases as ``see`` shows them."""
    parts = hold_out(data)
    first = FirstPass.over(see(parts.cases), voxels, data.seed)
    if parts.validation is not None:
        held_out = FirstPass.over(see(parts.validation), voxels, data.seed).sample
        whole = [first.sample] if data.validation is not None else [first.sample, held_out]
        return Samples(first, held_out, whole, parts.notes)
    sample = first.sample
    if len(sample) < 2:
        return Samples(first, sample, [sample], ["there is one case with one voxel: validated on what was trained on"])
    order = np.random.default_rng(data.seed).permutation(len(sample))
    count = max(1, round(SHARE * len(sample)))
    others, chosen = (sample.take(np.sort(part)) for part in (order[count:], order[:count]))
    note = "there is one case: a fifth of its voxels were held out for validation, among those trained on"
    return Samples(replace(first, sample=others), chosen, [sample], [note])


def _split(cases: CaseSet, seed: int) -> Split:
    count, groups = max(1, round(SHARE * len(cases))), cases.case_groups
    apart = None if len(set(groups.values())) > 1 else {name: name for name in groups}
    return cases.split(len(cases) - count, count, 0, seed=seed, groups=apart)


def _any_counts(cases: CaseSet) -> bool:
    """Whether a voxel of these cases is neither ignored nor masked; reads no scores."""
    return any(bool(cases[index].valid.any()) for index in range(len(cases)))
