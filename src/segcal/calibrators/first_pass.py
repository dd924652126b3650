"""What every exact fit begins with: one read of the data that checks them, measures the identity and draws a sample."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq

from segcal.calibrators.limits import HIGHEST, LOWEST
from segcal.cases import CaseSet
from segcal.errors import InputError, SegcalError
from segcal.sampling import VoxelSample, VoxelSampler
from segcal.scores import DEPTH, impossible_label, only_possible, some_impossible
from segcal.statistics import VoxelStatistics
from segcal.types import Chunk

# Voxels of the sample that the temperature is fitted to.
_TEMPERATURE_VOXELS = 50_000
# Scores in a sample, whatever is asked for: 128 MB of float32, which bind only where there are some hundred classes.
_SCORES = 2**25


@dataclass(frozen=True)
class FirstPass:
    """A sample, how many voxels have each true and each predicted class ``(C,)``, and the NLL of the identity."""

    sample: VoxelSample
    true: NDArray[np.int64]
    predicted: NDArray[np.int64]
    nll: float
    impossible: bool  # whether some class is, in some voxel

    @classmethod
    def over(cls, cases: CaseSet, voxels: int, seed: int) -> FirstPass:
        """Read all cases once; raises where scores or labels are unfit."""
        statistics = VoxelStatistics(cases.num_classes, (), classwise=False)
        sampler = VoxelSampler(cases.num_classes, min(voxels, most_voxels(cases.num_classes)), seed)
        impossible = False
        for case in cases:
            try:
                for chunk in case.chunks():
                    statistics.update(chunk.logits, chunk.labels, ignore_index=case.ignore_index, mask=chunk.mask)
                    impossible |= check_possible(chunk)
                    sampler.add(chunk.logits, chunk.labels, chunk.valid)
            except SegcalError as error:
                raise error.at(case=case.id) from None
            del case
        if not statistics.count():
            raise InputError("no valid voxel", expected="labels that are neither ignored nor masked")
        total = statistics.total()
        nll = float(total.losses.sum(0)[0]) / statistics.count()
        sample = sampler.sample()
        if impossible:
            sample = replace(sample, logits=only_possible(sample.logits))
        return cls(sample, total.confusion.sum(1), total.confusion.sum(0), nll, impossible)

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.true)

    @property
    def total(self) -> int:
        """Voxels in the data."""
        return self.sample.total

    def beta(self) -> float:
        """1 / temperature of the sample's least NLL, within bounds."""
        return TemperatureSlope(self.sample.thin(_TEMPERATURE_VOXELS)).root()


def most_voxels(num_classes: int) -> int:
    """Voxels of so many classes that a sample may have."""
    return max(1, _SCORES // num_classes)


def check_possible(chunk: Chunk) -> bool:
    """Whether a class is impossible in a voxel that counts; raises where that class is its label."""
    if not some_impossible(chunk.logits):
        return False
    logits = chunk.logits.movedim(1, -1)[chunk.valid].double()
    depth = logits.amax(1, keepdim=True) - logits
    if bool((depth.gather(1, chunk.labels[chunk.valid].long()[:, None]) > DEPTH).any()):
        raise impossible_label()
    return bool((depth > DEPTH).any())


class TemperatureSlope:
    """The derivative of a sample's mean NLL by beta = 1/T: the mean over voxels of ``E_p[z] - z_y``."""

    def __init__(self, sample: VoxelSample) -> None:
        z = sample.logits.double()
        self.gaps = z - z.amax(1, keepdim=True)
        self.label_gap = self.gaps.gather(1, sample.labels[:, None])[:, 0]
        self.weights = torch.from_numpy(sample.weights / sample.total)

    def __call__(self, beta: float) -> float:
        """At a beta."""
        p = (beta * self.gaps).softmax(1)
        expected = torch.where(p > 0, p * self.gaps, 0.0).sum(1)
        return float(self.weights @ (expected - self.label_gap))

    def root(self) -> float:
        """Where it is zero, or the bound that it points to."""
        if self(LOWEST) >= 0:
            return LOWEST
        if self(HIGHEST) <= 0:
            return HIGHEST
        return float(brentq(self, LOWEST, HIGHEST, xtol=1e-12, rtol=1e-10))

    def curvature(self, beta: float) -> float:
        """The second derivative by log beta, near the optimum: ``beta^2 Var_p[z]``."""
        p = (beta * self.gaps).softmax(1)
        z = torch.where(p > 0, self.gaps, 0.0)
        return beta**2 * float(self.weights @ ((p * z**2).sum(1) - (p * z).sum(1) ** 2))
