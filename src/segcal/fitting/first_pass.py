"""What fits begin with: a pass that checks the data, measures the identity and draws a sample; and validation data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.cases import CaseSet, Split
from segcal.cases.calibrated import AnyCalibrator
from segcal.cases.shares import in_shares
from segcal.fitting.data import FitData, over_chunks, valid_rows
from segcal.fitting.limits import HIGHEST, LOWEST
from segcal.fitting.sampling import Keys, VoxelSample, VoxelSampler
from segcal.kernels import Voxels
from segcal.kernels.dispatch import fast_rows
from segcal.kernels.fitting_passes import slope_and_variance
from segcal.kernels.pieces_cpu import in_ranges
from segcal.scores import DEPTH, impossible_label, only_possible, some_impossible
from segcal.solvers import newton_1d
from segcal.types import Chunk

# Voxels of the sample that the temperature is fitted to.
_TEMPERATURE_VOXELS = 50_000
# Slope of their NLL by 1 / temperature at which that fit ends.
_TEMPERATURE_SLOPE = 1e-10
# Scores that a sample may hold, 128 MB of float32: a limit only for a hundred classes or more.
_SCORES = 2**25
# Share of the cases, or of the voxels of a single case, that is held out where no validation cases are given.
_HELD_OUT = 0.2


@dataclass(frozen=True)
class FirstPass:
    """A sample, how many voxels have each true and each predicted class ``(C,)``, and the NLL of the identity.

    ``impossible`` says whether some class is impossible in some voxel. ``device`` is where the data are; the sample is
    on the CPU.
    """

    sample: VoxelSample
    true: NDArray[np.int64]
    predicted: NDArray[np.int64]
    nll: float
    impossible: bool
    class_names: tuple[str, ...]
    device: torch.device

    @classmethod
    def over(cls, cases: CaseSet, voxels: int, seed: int, base: AnyCalibrator = None) -> FirstPass:
        """Read all cases, mapped by the base if there is one; raises where scores or labels are invalid."""
        sampler, true, nll, impossible = in_shares(_survey, cases, voxels, seed, base, None, merge=_merged)
        if (limits := sampler.limits()) is not None:  # rarely: of large easy cases and a few small hard ones
            sampler, *_ = in_shares(_survey, cases, voxels, seed, base, limits, merge=_merged)
        sample = sampler.sample()
        if impossible:
            sample = replace(sample, logits=only_possible(sample.logits))
        predicted = sample.sizes.reshape(cases.num_classes, -1).sum(1)
        names = cases.class_names or tuple(str(k) for k in range(cases.num_classes))
        return cls(sample, true, predicted, nll / sample.total, impossible, tuple(names), sampler.device)

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.true)

    @property
    def total(self) -> int:
        """Voxels in the data."""
        return self.sample.total

    @property
    def drawn(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How many voxels of the sample have each true and each predicted class ``(C,)``."""
        strata = len(self.sample.sizes) // self.num_classes
        found = self.sample.labels.numpy(), self.sample.strata // strata
        true, predicted = (np.bincount(own, minlength=self.num_classes) for own in found)
        return true, predicted

    def beta(self) -> float:
        """1 / temperature with the lowest NLL on the sample, within bounds."""
        device = self.device if self.device.type == "cuda" else None  # other accelerators may lack float64
        loss = SampleNLL.of(self.sample.thin(_TEMPERATURE_VOXELS), device)
        return newton_1d(loss, 1.0, (LOWEST, HIGHEST), tolerance=_TEMPERATURE_SLOPE).value


_Surveyed = tuple[VoxelSampler, NDArray[np.int64], float, bool]


def _survey(cases: CaseSet, voxels: int, seed: int, base: AnyCalibrator, limits: Keys | None) -> _Surveyed:
    sampler = VoxelSampler(cases.num_classes, min(voxels, most_voxels(cases.num_classes)), seed, limits)
    true, nll, impossible = np.zeros(cases.num_classes, np.int64), 0.0, False
    for seen in over_chunks(cases, lambda case, chunk: sampler.add(Voxels.of(chunk), case.id), base):
        true, nll, impossible = true + seen.true, nll + seen.nll, impossible or seen.impossible
    return sampler, true, nll, impossible


def _merged(mine: _Surveyed, other: _Surveyed) -> _Surveyed:
    return mine[0].merge(other[0]), mine[1] + other[1], mine[2] + other[2], mine[3] or other[3]


def most_voxels(num_classes: int) -> int:
    """The most voxels that a sample may have."""
    return max(1, _SCORES // num_classes)


def check_possible(chunk: Chunk) -> None:
    """Raise where the label of a valid voxel is an impossible class."""
    if some_impossible(chunk.logits):
        logits = chunk.logits.movedim(1, -1)[chunk.valid].double()
        own = logits.gather(1, chunk.labels[chunk.valid].long()[:, None])
        if bool((logits.amax(1, keepdim=True) - own > DEPTH).any()):
            raise impossible_label()


@dataclass(frozen=True)
class SampleNLL:
    """The NLL of some voxels, divided by all voxels of the data, as a convex function of 1 / T with two derivatives.

    ``gaps (n, C)`` and ``label_gap (n,)`` are scores relative to the best, in float64.
    """

    gaps: Tensor
    label_gap: Tensor
    weights: Tensor

    @classmethod
    def of(cls, sample: VoxelSample, device: torch.device | None = None) -> SampleNLL:
        """Of all voxels of a sample, on its device or another one."""
        z = sample.logits.to(device).double()
        gaps, labels = z - z.amax(1, keepdim=True), sample.labels.to(z.device)
        return cls(
            gaps, gaps.gather(1, labels[:, None])[:, 0], torch.from_numpy(sample.weights / sample.total).to(gaps)
        )

    def where(self, flagged: Tensor) -> SampleNLL:
        """Of those voxels that are ``flagged (n,)``."""
        return SampleNLL(self.gaps[flagged], self.label_gap[flagged], self.weights[flagged])

    def __call__(self, beta: float) -> tuple[float, float, float]:
        """Value, slope and curvature."""
        if (loops := fast_rows(self.gaps)) is not None:
            given = self.gaps.numpy(), self.label_gap.numpy(), self.weights.numpy(), beta
            parts = in_ranges(lambda start, stop: loops.add_temperature(*given, start, stop), len(self.gaps))
            value, first, second = np.sum(parts, 0).tolist()
            return value, first, second
        scaled = beta * self.gaps
        slope, variance = slope_and_variance(scaled.softmax(1), self.gaps, self.label_gap, 1)
        terms = scaled.logsumexp(1) - beta * self.label_gap, slope, variance
        value, first, second = torch.stack([self.weights @ term for term in terms]).tolist()
        return value, first, second


class Samples(NamedTuple):
    """A sample to train on, a sample to validate on, notes for the user, and the device that the data are on.

    ``whole`` are the samples that stand for all the fit data, with the validation sample if it was taken from them.
    """

    train: VoxelSample
    held_out: VoxelSample
    whole: list[VoxelSample]
    notes: list[str]
    device: torch.device

    @property
    def voxels(self) -> int:
        """Voxels of both samples."""
        return len(self.train) + (0 if self.held_out is self.train else len(self.held_out))


def hold_out(data: FitData) -> tuple[FitData, list[str]]:
    """The data with validation cases, the given ones or a seeded fifth of the cases, and notes for the user.

    Both parts have valid voxels; of a single case nothing is held out. Groups stay together, unless there is only one.
    """
    cases = data.cases
    if data.validation is not None or len(cases) < 2:
        return data, []
    split = _split(cases, data.seed)
    if not (_any_valid(split.calibration) and _any_valid(split.validation)):
        cases = cases.select([name for index, name in enumerate(cases.ids) if _any_valid(cases[index : index + 1])])
        if len(cases) < 2:
            return data._replace(cases=cases if len(cases) else data.cases), []
        split = _split(cases, data.seed)
    notes = []
    if len(set(cases.case_groups.values())) < 2:
        notes.append("all cases belong to one group, so the validation cases are of the same group as the others")
    return data._replace(cases=split.calibration, validation=split.validation), notes


def held_out_samples(data: FitData, voxels: int, base: AnyCalibrator = None) -> Samples:
    """Samples of at most ``voxels`` voxels each, mapped by the base if there is one."""
    parts, notes = hold_out(data)
    first = FirstPass.over(parts.cases, voxels, data.seed, base)
    sample, device = first.sample, first.device
    if parts.validation is not None:
        held_out = FirstPass.over(parts.validation, voxels, data.seed, base).sample
        whole = [sample] if data.validation is not None else [sample, held_out]
        return Samples(sample, held_out, whole, notes, device)
    if len(sample) < 2:
        note = "there is one case with one voxel: validated on the training data"
        return Samples(sample, sample, [sample], [note], device)
    order = np.random.default_rng(data.seed).permutation(len(sample))
    count = max(1, round(_HELD_OUT * len(sample)))
    others, chosen = (sample.take(np.sort(part)) for part in (order[count:], order[:count]))
    note = "there is one case: a fifth of its voxels were held out for validation, in between those trained on"
    return Samples(others, chosen, [sample], [note], device)


def _split(cases: CaseSet, seed: int) -> Split:
    count, groups = max(1, round(_HELD_OUT * len(cases))), cases.case_groups
    apart = None if len(set(groups.values())) > 1 else {name: name for name in groups}
    return cases.split(len(cases) - count, count, 0, seed=seed, groups=apart)


def _any_valid(cases: CaseSet) -> bool:
    """Whether a voxel of these cases is neither ignored nor masked; reads no scores."""
    return any(bool(valid.any()) for index in range(len(cases)) for _, valid in valid_rows(cases[index]))
