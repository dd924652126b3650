"""A stratified random sample of voxels, drawn in one pass, in constant memory.

Most voxels of a segmentation are easy: the prediction is right and confident. A uniform sample would consist mostly of
them, and of the large classes. Here voxels are divided into strata by predicted class, correctness and confidence.
Classes share the sample equally, and the strata of a class in proportion to size times typical gradient (Neyman's
allocation): ``1 - confidence`` where the prediction is right, 1 where it is wrong. Each voxel drawn stands for
``size of stratum / number drawn`` voxels.

A voxel's random key is a hash of its case and its position there, and a stratum keeps the voxels with the lowest keys.
How many is known in the end only: where a stratum turns out to need voxels that were let go, the data are read again.
So the sample does not depend on how the data are cut into chunks or shared by processes, and a smaller sample is part
of the larger.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.fitting.data import case_seed, check_voxels
from segcal.kernels import Voxels
from segcal.kernels.dispatch import fast_rows
from segcal.kernels.fitting_passes import Survey, survey
from segcal.kernels.pieces_cpu import in_ranges, in_turn
from segcal.types import FloatArray

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]

#: Confidences that separate the strata.
CONFIDENCES = (0.6, 0.9, 0.99, 0.999)
# The typical gradient of wrong and of right voxels in each stratum.
_GRADIENTS = np.array([[1.0, 1.0, 1.0, 1.0, 1.0], [0.5, 0.25, 0.05, 0.005, 0.0005]])
# The part of a class's share that its strata divide equally, so that none goes unseen.
_EQUALLY = 0.2
# The sign bit of an int64, and the highest key.
_SIGN, _LAST = -(2**63), np.uint64(2**64 - 1)
# While data go by, up to _MOST sample sizes are held, then thinned to _SPARE: the shares of strata still change.
_SPARE, _MOST = 1.25, 2
# Standard deviations of the number of voxels with low keys, by which more are drawn when the data are read again.
_MARGIN = 10
# The parts of a sample that threads sort, and voxels that they move to their places at a time.
_SORTED, _MOVED = 32, 2**14


@dataclass(frozen=True)
class VoxelSample:
    """Voxels drawn: ``logits (n, C)``, ``labels (n,)`` int64, and how many each stands for, ``weights (n,)`` float64.

    ``strata`` are indices into ``sizes``, the number of voxels of every stratum in the data; ``keys`` are the random
    keys by which ``thin`` chooses.
    """

    logits: Tensor
    labels: Tensor
    strata: Ints
    keys: Keys
    sizes: Ints

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def total(self) -> int:
        """Voxels in the data."""
        return int(self.sizes.sum())

    @property
    def complete(self) -> bool:
        """Whether the sample has all voxels of the data."""
        return len(self) == self.total

    @property
    def weights(self) -> FloatArray:
        """How many voxels each of these stands for."""
        drawn = np.bincount(self.strata, minlength=len(self.sizes))
        return (self.sizes / np.maximum(drawn, 1))[self.strata]

    @property
    def wrong(self) -> Tensor:
        """Which predictions are wrong ``(n,)``."""
        return self.logits.argmax(1) != self.labels

    def thin(self, voxels: int) -> VoxelSample:
        """At most so many of these voxels: those with the lowest keys of every stratum."""
        return self if len(self) <= voxels else self.take(_lowest(self.strata, self.keys, self.sizes, voxels))

    def take(self, chosen: Ints) -> VoxelSample:
        """The voxels with these indices."""
        logits, labels = (_rows(own, chosen) for own in (self.logits, self.labels))
        return VoxelSample(logits, labels, self.strata[chosen], self.keys[chosen], self.sizes)

    def standard_error(self, values: FloatArray) -> float:
        """The standard error of the mean over the data, estimated from ``values (n,)`` of the sample."""
        strata = len(self.sizes)
        drawn = np.bincount(self.strata, minlength=strata)
        mean = np.bincount(self.strata, values, strata) / np.maximum(drawn, 1)
        squares = np.bincount(self.strata, (values - mean[self.strata]) ** 2, strata) / np.maximum(drawn - 1, 1)
        unseen = 1 - drawn / np.maximum(self.sizes, 1)
        variance = (self.sizes / self.total) ** 2 * squares / np.maximum(drawn, 1) * unseen
        return float(np.sqrt(variance.sum()))

    def note(self, values: FloatArray) -> str:
        """A note for the user on a mean NLL estimated from these ``values (n,)``."""
        error = self.standard_error(values)
        leaves = f", which leaves a standard error of {error:.1e} in the mean NLL" if error else ""
        return f"a stratified sample of {len(self):,} of {self.total:,} voxels{leaves}; voxels='all' is exact"


class VoxelSampler:
    """Draws a sample of at most ``voxels`` from chunks of data, one after the other.

    ``limits`` are those of an earlier sampler of the same data: keys above them are not kept, all others are.

    Examples:
        >>> sampler = VoxelSampler(num_classes=3, voxels=100)
        >>> z = torch.randn(1, 3, 50, 60, generator=torch.Generator().manual_seed(0))
        >>> _ = sampler.add(Voxels(z, z.argmax(1)))
        >>> sample = sampler.sample()
        >>> len(sample), sample.total, round(sample.weights.sum())
        (100, 3000, 3000)
    """

    def __init__(self, num_classes: int, voxels: int, seed: int = 0, limits: Keys | None = None) -> None:
        self.num_classes, self.voxels, self.seed = num_classes, voxels, seed
        strata = num_classes * 2 * (len(CONFIDENCES) + 1)
        self._sizes = np.zeros(strata, np.int64)
        # Keys above are not kept.
        self._highest = np.full(strata, _LAST) if limits is None else limits
        self._most = int(_MOST * voxels) if limits is None else sys.maxsize
        self._parts: list[VoxelSample] = []
        self._held, self.device = 0, torch.device("cpu")
        self._next: dict[str, int] = {}  # the number of the next voxel of every case

    def add(self, voxels: Voxels, case: str = "") -> Survey:
        """Draw from the next voxels of a case; raises where a valid one has invalid scores."""
        seen = survey(voxels, CONFIDENCES)
        self.device = voxels.logits.device
        logits, flat_labels, length = voxels.logits.detach(), voxels.labels.reshape(-1), len(seen.strata)
        sizes = self._sizes.copy()  # nothing changes before all is drawn: a GPU may lack memory for this chunk
        first = self._next.setdefault(case, case_seed(self.seed, case))
        if isinstance(seen.strata, Tensor):
            kept, strata, keys = _choose_on_device(seen.strata, first, self._highest, sizes, self._most)
        else:
            kept, keys = _choose(seen.strata, np.uint64(first), self._highest, sizes)
            strata = seen.strata[kept]
        item, place = np.divmod(kept, max(1, length // max(1, len(logits))))
        scores = logits.flatten(2) if logits.ndim > 2 else logits[:, :, None]
        drawn = _rows(flat_labels, kept).long()
        chosen = _rows(scores.movedim(1, -1), item, place)
        chosen = chosen if chosen.dtype == torch.float64 else chosen.float()
        self._next[case] = first + length
        self._sizes[:] = sizes  # in place: all parts have it
        self._parts.append(VoxelSample(chosen, drawn, strata, keys, self._sizes))
        self._held += len(kept)
        if self._held > self._most:
            self._thin(int(_SPARE * self.voxels))
        return seen

    def merge(self, other: VoxelSampler) -> VoxelSampler:
        """Add the voxels that ``other`` has drawn from other cases, and return self."""
        self._sizes += other._sizes
        self._highest = np.minimum(self._highest, other._highest)
        parts = (*self._parts, *other._parts)
        self._parts = [part.take(np.flatnonzero(part.keys <= self._highest[part.strata])) for part in parts]
        self._held = sum(map(len, self._parts))
        if self._held > self._most:
            self._thin(int(_SPARE * self.voxels))
        return self

    def limits(self) -> Keys | None:
        """The keys up to which the sample needs voxels, where some of them were let go; None if all are there."""
        if not self._sizes.any():
            return None
        quota = _quota(self._sizes, self._sizes, self.voxels)
        if (np.bincount(self._strata_and_keys()[0], minlength=len(quota)) >= quota).all():
            return None
        share = (quota + _MARGIN * (1 + np.sqrt(quota))) / np.maximum(self._sizes, 1)
        limits = np.full(len(share), _LAST)
        limits[share < 1] = (2.0**64 * share[share < 1]).astype(np.uint64)
        return limits

    def _thin(self, voxels: int) -> None:
        strata, keys = self._strata_and_keys()
        if len(strata) <= voxels:
            return
        chosen, first = _lowest(strata, keys, self._sizes, voxels), 0
        for n, part in enumerate(self._parts):  # one after the other, so that all logits are never held twice
            here = slice(*np.searchsorted(chosen, (first, first + len(part))))
            self._parts[n], first = part.take(chosen[here] - first), first + len(part)
        before, strata, keys = strata, strata[chosen], keys[chosen]
        cut = np.less(*(np.bincount(some, minlength=len(self._sizes)) for some in (strata, before)))
        highest = np.zeros_like(self._highest)
        np.maximum.at(highest, strata, keys)
        self._highest = np.where(cut, np.minimum(highest, self._highest), self._highest)
        self._held = len(strata)

    def _strata_and_keys(self) -> tuple[Ints, Keys]:
        """Those of all parts, one after the other."""
        strata, keys = zip(*((part.strata, part.keys) for part in self._parts), strict=True)
        return np.concatenate(strata), np.concatenate(keys)

    def sample(self) -> VoxelSample:
        """The sample of all data so far, in the order of the keys: whoever drew them, they come in the same order."""
        check_voxels(int(self._sizes.sum()))
        self._thin(self.voxels)
        strata, keys = self._strata_and_keys()
        order = _by_key(keys)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        dtype = max((part.logits.dtype for part in self._parts), key=lambda own: own.itemsize)
        logits = torch.empty(len(order), self.num_classes, dtype=dtype)
        labels = torch.empty(len(order), dtype=torch.int64)
        loops, pieces, first = fast_rows(logits), [], 0
        for part in self._parts:
            own = place[first : first + len(part)]
            pieces += [(part, own, slice(start, start + _MOVED)) for start in range(0, len(part), _MOVED)]
            first += len(part)

        def move(piece: tuple[VoxelSample, Ints, slice]) -> None:
            part, to, rows = piece
            labels.numpy()[to[rows]] = part.labels.numpy()[rows]
            if loops is None:
                logits.numpy()[to[rows]] = part.logits.numpy()[rows]
            else:
                loops.put(np.ascontiguousarray(part.logits.numpy()[rows]), to[rows], logits.numpy())

        in_turn(move, pieces)
        return VoxelSample(logits, labels, strata[order], keys[order], self._sizes.copy())


def _rows(values: Tensor, *places: Ints) -> Tensor:
    """The values at these places, on the CPU; not by torch if possible, as its threads may wait for one another."""
    if values.device.type != "cpu" or values.dtype == torch.bfloat16:
        return values[tuple(torch.from_numpy(own).to(values.device) for own in places)].cpu()
    if values.ndim == len(places) or (loops := fast_rows(values)) is None:
        return torch.from_numpy(values.numpy()[places])
    place = places[-1]
    given = (values if len(places) == 2 else values[None]).numpy(), places[0] if len(places) == 2 else 0 * place, place
    out = torch.empty(len(place), values.shape[-1], dtype=values.dtype)
    in_ranges(lambda start, stop: loops.take(*given, start, stop, out.numpy()), len(out))
    return out


def _choose(strata: Ints, first: np.uint64, highest: Keys, sizes: Ints) -> tuple[Ints, Keys]:
    """Indices and keys of the voxels with low enough keys; all voxels with a stratum are added to ``sizes``."""
    try:
        from segcal.kernels.fitting_loops import choose
    except ImportError:  # no numba
        keys = _hash(first + np.arange(len(strata), dtype=np.uint64))
        valid = strata >= 0
        sizes += np.bincount(strata[valid], minlength=len(sizes))
        kept = np.flatnonzero(valid & (keys <= highest[strata]))
        return kept, keys[kept]
    kept, keys = np.empty(len(strata) + 1, np.int64), np.empty(len(strata) + 1, np.uint64)
    count = choose(strata, first, highest, sizes, kept, keys)
    return kept[:count].copy(), keys[:count].copy()


def _choose_on_device(strata: Tensor, first: int, highest: Keys, sizes: Ints, most: int) -> tuple[Ints, Ints, Keys]:
    """As ``_choose``, with the strata of the chosen; if they are more than ``most``, each stratum's share of these."""
    device = strata.device
    sizes += torch.bincount(strata[strata >= 0], minlength=len(sizes)).cpu().numpy()
    keys = _hash_on_device(torch.arange(len(strata), device=device) + first)
    # Torch has no unsigned numbers to compare: with the sign bit flipped, signed numbers have their order.
    limit = torch.from_numpy(highest.view(np.int64)).to(device) ^ _SIGN
    kept = torch.nonzero((strata >= 0) & ((keys ^ _SIGN) <= limit[strata.clamp(min=0).long()])).squeeze(1)
    own = strata[kept].long()
    order = (keys[kept] ^ _SIGN).argsort()
    order = order[own[order].argsort(stable=True)]  # by stratum, then by key
    count = torch.bincount(own, minlength=len(sizes))
    rank = torch.arange(len(order), device=device) - (count.cumsum(0) - count)[own[order]]
    share = torch.from_numpy(np.ceil(most * _shares(sizes)).astype(np.int64) + 2).to(device)
    chosen = kept[order[rank < share[own[order]]]].sort().values if len(kept) > most else kept
    found = chosen, strata[chosen].long(), keys[chosen]
    places, strata_of, keys_of = (tensor.cpu().numpy() for tensor in found)
    keys_of = keys_of.view(np.uint64)
    if len(kept) > most:  # Of the next voxels, too, none is kept whose key is above those of voxels that were not.
        last = np.zeros_like(highest)
        np.maximum.at(last, strata_of, keys_of)
        cut = (count > share).cpu().numpy()
        highest[cut] = np.minimum(highest, last)[cut]
    return places, strata_of, keys_of


def _hash_on_device(x: Tensor) -> Tensor:
    """``_hash`` of int64 tensors, whose arithmetic is that of unsigned numbers but for the shifts."""
    for shift, factor in ((0, 0x9E3779B97F4A7C15), (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (_shifted(x, shift) if shift else x).mul(factor - 2**64)
    return _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """``x ^ (x >> bits)`` of unsigned numbers."""
    return x.bitwise_xor((x >> bits) & (2 ** (64 - bits) - 1))


def _hash(x: Keys) -> Keys:
    """The splitmix64 generator at these positions (Steele, Lea and Flood, OOPSLA 2014)."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def _lowest(strata: Ints, keys: Keys, sizes: Ints, voxels: int) -> Ints:
    """Indices of ``voxels`` voxels, those with the lowest keys of every stratum, in their order."""
    held = np.bincount(strata, minlength=len(sizes))
    quota = _quota(held, sizes, voxels)
    by_stratum = np.argsort(strata.astype(np.min_scalar_type(len(sizes))), kind="stable")  # fast for small types
    ends = np.cumsum(held)
    chosen = np.zeros(len(strata), np.bool_)

    def choose(stratum: int) -> None:
        own, wanted = by_stratum[ends[stratum] - held[stratum] : ends[stratum]], quota[stratum]
        chosen[own if wanted == len(own) else own[np.argpartition(keys[own], wanted)[:wanted]]] = True

    in_turn(choose, np.flatnonzero(quota).tolist())
    return np.flatnonzero(chosen)


def _quota(held: Ints, sizes: Ints, voxels: int) -> Ints:
    """How many of ``voxels`` voxels each stratum gives that holds so many."""
    # Two voxels of every stratum if possible: sums need one, their standard errors two.
    least = next(own for few in (2, 1, 0) if (own := np.minimum(held, few)).sum() <= voxels)
    return least + _fill(held - least, _shares(sizes), voxels - int(least.sum()))


def _by_key(keys: Keys) -> Ints:
    """The indices that sort the keys. Threads sort those between two edges each."""
    few = np.sort(keys[:: len(keys) // 2**10 + 1])
    edges = few[len(few) * np.arange(_SORTED) // _SORTED]
    edges[0] = 0

    def between(n: int) -> Ints:
        inside = keys >= edges[n]
        if n + 1 < _SORTED:
            inside &= keys < edges[n + 1]
        own = np.flatnonzero(inside)
        return own[np.argsort(keys[own])]

    return np.concatenate(in_turn(between, range(_SORTED)))


def _shares(sizes: Ints) -> FloatArray:
    """The share of the sample that each stratum gets; zero for a class that is never predicted."""
    by_class = sizes.reshape(-1, *_GRADIENTS.shape)
    wanted, present = by_class * _GRADIENTS, by_class > 0
    parts = (1 - _EQUALLY) * wanted / np.maximum(wanted.sum((1, 2), keepdims=True), 1e-300)
    parts += _EQUALLY * present / np.maximum(present.sum((1, 2), keepdims=True), 1)
    return np.asarray(parts.ravel() / parts.sum())


def _fill(held: Ints, shares: FloatArray, total: int) -> Ints:
    """How many voxels each stratum gives to reach ``total``: in these shares, and none more than it holds."""
    total = min(total, int(held.sum()))
    quota, open_ = np.zeros(len(held)), held > 0
    left = float(total)
    while open_.any():
        level = left * shares * open_ / (shares @ open_)
        full = open_ & (level >= held)
        if not full.any():
            quota[open_] = level[open_]
            break
        quota[full] = held[full]
        left -= held[full].sum()
        open_ &= ~full
    # Whole numbers: round down, and give the remainder to those that lost most.
    whole = np.floor(quota + 1e-9).astype(np.int64)
    missing = max(total - int(whole.sum()), 0)
    whole[np.argsort(whole - quota, kind="stable")[:missing]] += 1
    return np.minimum(whole, held)
