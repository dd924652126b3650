"""Validation data where none were given: a fifth of the cases, or of the voxels of a single case."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from segcal.cases import CaseSet, Split
from segcal.cases.calibrated import AnyCalibrator
from segcal.fitting.data import FitData
from segcal.fitting.first_pass import FirstPass
from segcal.fitting.sampling import VoxelSample

#: Share of the cases, or of the voxels, that is held out.
SHARE = 0.2


class HeldOut(NamedTuple):
    """Cases to train on, cases to validate on (None where there is only one case), and notes for the user."""

    cases: CaseSet
    validation: CaseSet | None
    notes: list[str]


class Samples(NamedTuple):
    """A first pass with the sample to train on, a sample to validate on, and notes for the user.

    ``whole`` are the samples that stand for all the fit data, with the validation sample if it was taken from them.
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
    """The given validation cases, or a seeded fifth of the cases; both parts have valid voxels.

    Groups stay together, unless there is only one.
    """
    cases = data.cases
    if data.validation is not None or len(cases) < 2:
        return HeldOut(cases, data.validation, [])
    split = _split(cases, data.seed)
    if not (_any_valid(split.calibration) and _any_valid(split.validation)):
        cases = cases.select([name for index, name in enumerate(cases.ids) if _any_valid(cases[index : index + 1])])
        if len(cases) < 2:
            return HeldOut(cases if len(cases) else data.cases, None, [])
        split = _split(cases, data.seed)
    notes = []
    if len(set(cases.case_groups.values())) < 2:
        notes.append("all cases belong to one group, so the validation cases are of the same group as the others")
    return HeldOut(split.calibration, split.validation, notes)


def held_out_samples(data: FitData, voxels: int, base: AnyCalibrator = None) -> Samples:
    """Samples of at most ``voxels`` voxels each, mapped by the base if there is one."""
    parts = hold_out(data)
    first = FirstPass.over(parts.cases, voxels, data.seed, base)
    sample = first.sample
    if parts.validation is not None:
        held_out = FirstPass.over(parts.validation, voxels, data.seed, base).sample
        whole = [sample] if data.validation is not None else [sample, held_out]
        return Samples(first, held_out, whole, parts.notes)
    if len(sample) < 2:
        return Samples(first, sample, [sample], ["there is one case with one voxel: validated on the training data"])
    order = np.random.default_rng(data.seed).permutation(len(sample))
    count = max(1, round(SHARE * len(sample)))
    others, chosen = (sample.take(np.sort(part)) for part in (order[count:], order[:count]))
    note = "there is one case: a fifth of its voxels were held out for validation, in between those trained on"
    return Samples(replace(first, sample=others), chosen, [sample], [note])


def _split(cases: CaseSet, seed: int) -> Split:
    count, groups = max(1, round(SHARE * len(cases))), cases.case_groups
    apart = None if len(set(groups.values())) > 1 else {name: name for name in groups}
    return cases.split(len(cases) - count, count, 0, seed=seed, groups=apart)


def _any_valid(cases: CaseSet) -> bool:
    """Whether a voxel of these cases is neither ignored nor masked; reads no scores."""
    return any(bool(cases[index].valid.any()) for index in range(len(cases)))
