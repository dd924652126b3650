"""A stratified random sample of voxels, drawn in one pass, in constant memory.

Most voxels of a segmentation are easy: right, and sure of it. A uniform sample spends itself on them, and on the large
classes. Here voxels are divided by predicted class, correctness and confidence. Classes share the sample equally, and
the strata of a class in proportion to size times typical gradient (Neyman's allocation): ``1 - confidence`` where the
prediction is right, 1 where it is wrong. Each voxel drawn stands for ``size of stratum / number drawn`` voxels.

A voxel's random number is a hash of its place in the data, and a stratum keeps the voxels with the lowest: chunks do
not matter, and a smaller sample is part of the larger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.errors import InputError
from segcal.kernels.survey import survey

#: Confidences that divide the strata,
CONFIDENCES = (0.6, 0.9, 0.99, 0.999)
#: the typical gradient of wrong and right voxels in each,
_GRADIENTS = np.array([[1.0, 1.0, 1.0, 1.0, 1.0], [0.5, 0.25, 0.05, 0.005, 0.0005]])
#: and the part of a class's share that all its strata divide equally, so that none goes unseen.
_EQUALLY = 0.2
# What is held while data go by, in sample sizes: the shares of strata change, so more than is wanted in the end.
_SPARE, _MOST = 1.25, 2


@dataclass(frozen=True)
class VoxelSample:
    """Voxels drawn: ``logits (n, C)``, ``labels (n,)`` int64, and how many each stands for, ``weights (n,)`` float64.

    ``strata`` are indices into ``sizes``, the number of voxels of every stratum in the data, and ``keys`` the random
    numbers by which ``thin`` chooses.
    """

    logits: Tensor
    labels: Tensor
    strata: NDArray[np.int64]
    keys: NDArray[np.uint64]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def total(self) -> int:
        """Voxels in the data."""
        return int(self.sizes.sum())

    @property
    def complete(self) -> bool:
        """Whether this is everything, not a part."""
        return len(self) == self.total

    @property
    def weights(self) -> NDArray[np.float64]:
        """How many voxels each of these stands for."""
        drawn = np.bincount(self.strata, minlength=len(self.sizes))
        return (self.sizes / np.maximum(drawn, 1))[self.strata]

    def thin(self, voxels: int) -> VoxelSample:
        """The part of at most so many voxels with the lowest keys, shared equally by the strata."""
        return self if len(self) <= voxels else self.take(_lowest(self.strata, self.keys, self.sizes, voxels))

    def take(self, chosen: NDArray[np.int64]) -> VoxelSample:
        """The voxels with these indices."""
        return replace(
            self,
            logits=_rows(self.logits, chosen),
            labels=_rows(self.labels, chosen),
            strata=self.strata[chosen],
            keys=self.keys[chosen],
        )

    def standard_error(self, values: NDArray[np.float64]) -> float:
        """That of the mean over the data of what has these ``values (n,)`` in the sample."""
        strata = len(self.sizes)
        drawn = np.bincount(self.strata, minlength=strata)
        mean = np.bincount(self.strata, values, strata) / np.maximum(drawn, 1)
        squares = np.bincount(self.strata, (values - mean[self.strata]) ** 2, strata) / np.maximum(drawn - 1, 1)
        unseen = 1 - drawn / np.maximum(self.sizes, 1)
        variance = (self.sizes / self.total) ** 2 * squares / np.maximum(drawn, 1) * unseen
        return float(np.sqrt(variance.sum()))

    def note(self, values: NDArray[np.float64]) -> str:
        """What to tell the user of a mean NLL with these ``values (n,)`` that rests on this part of the data."""
        error = self.standard_error(values)
        leaves = f", which leaves a standard error of {error:.1e} in the mean NLL" if error else ""
        return f"a stratified sample of {len(self):,} of {self.total:,} voxels{leaves}; voxels='all' is exact"


class VoxelSampler:
    """Draws a sample of at most ``voxels`` from the chunks that it is shown, all valid voxels of a class 0..C - 1.

    Examples:
        >>> sampler = VoxelSampler(num_classes=3, voxels=100)
        >>> z = torch.randn(1, 3, 50, 60, generator=torch.Generator().manual_seed(0))
        >>> sampler.add(z, z.argmax(1), torch.ones(1, 50, 60, dtype=torch.bool))
        >>> sample = sampler.sample()
        >>> len(sample), sample.total, round(sample.weights.sum())
        (100, 3000, 3000)
    """

    def __init__(self, num_classes: int, voxels: int, seed: int = 0) -> None:
        self.num_classes, self.voxels, self.seed = num_classes, voxels, seed
        strata = num_classes * 2 * (len(CONFIDENCES) + 1)
        self._sizes = np.zeros(strata, np.int64)
        self._highest = np.full(strata, np.iinfo(np.uint64).max, np.uint64)  # keys above are not kept
        self._parts: list[VoxelSample] = []
        self._held = self._seen = 0

    def add(self, logits: Tensor, labels: Tensor, valid: Tensor) -> None:
        """Show it ``logits (N, C, *spatial)``, ``labels`` and ``valid (N, *spatial)``; raises where one is unfit."""
        self.draw(logits, labels, survey(logits, labels, CONFIDENCES, mask=valid).strata)

    def draw(self, logits: Tensor, labels: Tensor, strata: NDArray[np.int64]) -> None:
        """Show it voxels whose strata are known; see ``segcal.kernels.survey``."""
        logits, flat_labels = logits.detach(), labels.reshape(-1)
        first = np.uint64(self._seen % 2**32) + np.uint64(self.seed % 2**32) * np.uint64(2**32)
        kept, keys = _choose(strata, first, self._highest, self._sizes)
        self._seen += len(strata)
        item, place = np.divmod(kept, max(1, len(strata) // max(1, len(logits))))
        scores = logits.flatten(2) if logits.ndim > 2 else logits[:, :, None]
        drawn = _rows(flat_labels, kept).long()
        chosen = _rows(scores.movedim(1, -1), item, place)
        chosen = chosen if chosen.dtype == torch.float64 else chosen.float()
        self._parts.append(VoxelSample(chosen, drawn, strata[kept], keys, self._sizes))
        self._held += len(kept)
        if self._held > _MOST * self.voxels:
            self._thin(int(_SPARE * self.voxels))

    def _thin(self, voxels: int) -> VoxelSample:
        strata, keys = (np.concatenate([getattr(part, name) for part in self._parts]) for name in ("strata", "keys"))
        if len(strata) > voxels:
            chosen, first = _lowest(strata, keys, self._sizes, voxels), 0
            for n, part in enumerate(self._parts):  # one after the other: everything is never held twice
                here = slice(*np.searchsorted(chosen, (first, first + len(part))))
                self._parts[n], first = part.take(chosen[here] - first), first + len(part)
        thinned = VoxelSample(
            torch.cat([part.logits for part in self._parts]),
            torch.cat([part.labels for part in self._parts]),
            np.concatenate([part.strata for part in self._parts]),
            np.concatenate([part.keys for part in self._parts]),
            self._sizes,
        )
        if len(thinned) < len(strata):
            counts = (np.bincount(some, minlength=len(self._sizes)) for some in (thinned.strata, strata))
            full = np.less(*counts)
            highest = np.zeros_like(self._highest)
            np.maximum.at(highest, thinned.strata, thinned.keys)
            self._highest = np.where(full, np.minimum(highest, self._highest), self._highest)
        self._parts, self._held = [thinned], len(thinned)
        return thinned

    def sample(self) -> VoxelSample:
        """What was drawn from all that was shown."""
        if not self._sizes.sum():
            raise InputError("no valid voxel", expected="labels that are neither ignored nor masked")
        return replace(self._thin(self.voxels), sizes=self._sizes.copy())


def _rows(values: Tensor, *places: NDArray[np.int64]) -> Tensor:
    """The values at these places, on the CPU; by numpy where it can, for torch's threads may wait for one another."""
    if values.device.type == "cpu" and values.dtype != torch.bfloat16:
        return torch.from_numpy(values.numpy()[places])
    return values[tuple(torch.from_numpy(own).to(values.device) for own in places)].cpu()


def _choose(
    strata: NDArray[np.int64],
    first: np.uint64,
    highest: NDArray[np.uint64],
    sizes: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Indices and keys of the voxels whose key is low enough; ``sizes`` grows by all that have a stratum."""
    try:
        from segcal.kernels.choose_loops import choose
    except ImportError:  # no numba
        keys = _hash(first + np.arange(len(strata), dtype=np.uint64))
        valid = strata >= 0
        sizes += np.bincount(strata[valid], minlength=len(sizes))
        kept = np.flatnonzero(valid & (keys <= highest[strata]))
        return kept, keys[kept]
    kept, keys = np.empty(len(strata) + 1, np.int64), np.empty(len(strata) + 1, np.uint64)
    count = choose(strata, first, highest, sizes, kept, keys)
    return kept[:count].copy(), keys[:count].copy()


def _hash(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 generator at these positions (Steele, Lea and Flood, OOPSLA 2014)."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def _lowest(
    strata: NDArray[np.int64], keys: NDArray[np.uint64], sizes: NDArray[np.int64], voxels: int
) -> NDArray[np.int64]:
    """Indices of ``voxels`` voxels, those with the lowest keys of every stratum, in their order."""
    held = np.bincount(strata, minlength=len(sizes))
    # A stratum without a voxel would be missing from all sums, and one with a single voxel from their standard errors.
    least = next(own for few in (2, 1, 0) if (own := np.minimum(held, few)).sum() <= voxels)
    quota = least + _fill(held - least, _shares(sizes), voxels - int(least.sum()))
    by_stratum = np.argsort(strata.astype(np.min_scalar_type(len(sizes))), kind="stable")  # fast for small types
    chosen = np.zeros(len(strata), np.bool_)
    for own, wanted in zip(np.split(by_stratum, np.cumsum(held)[:-1]), quota, strict=True):
        chosen[own if wanted == len(own) else own[np.argpartition(keys[own], wanted)[:wanted]]] = True
    return np.flatnonzero(chosen)


def _shares(sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """The part of the sample that each stratum is to have; those of a class that is never predicted are zero."""
    by_class = sizes.reshape(-1, *_GRADIENTS.shape)
    wanted, present = by_class * _GRADIENTS, by_class > 0
    axes = (1, 2)
    parts = (1 - _EQUALLY) * wanted / np.maximum(wanted.sum(axes, keepdims=True), 1e-300)
    parts += _EQUALLY * present / np.maximum(present.sum(axes, keepdims=True), 1)
    return np.asarray(parts.ravel() / parts.sum())


def _fill(held: NDArray[np.int64], shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """How many each stratum gives so that together they give ``total``: in these shares, none more than it holds."""
    quota, open_ = np.zeros(len(held)), held > 0
    left = min(total, int(held.sum())) * 1.0
    while open_.any():
        level = left * shares * open_ / (shares @ open_)
        full = open_ & (level >= held)
        if not full.any():
            quota[open_] = level[open_]
            break
        quota[full] = held[full]
        left -= held[full].sum()
        open_ &= ~full
    # Whole numbers: round down, and give what is left to those that lost most.
    whole = np.floor(quota + 1e-9).astype(np.int64)
    missing = min(total, int(held.sum())) - int(whole.sum())
    whole[np.argsort(whole - quota, kind="stable")[: max(missing, 0)]] += 1
    return np.minimum(whole, held)
