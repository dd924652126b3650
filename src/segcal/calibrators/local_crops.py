"""The crops of cases that the network of local temperature scaling is trained on, on the device of the cases.

A case is divided into windows that do not overlap. A seeded sample of them, each with the halo that the network needs,
is drawn once and kept: it fits in memory whatever the number and size of the cases. Most windows of a scan show nothing
but easy background, so those are preferred in which much is left to learn, and each window drawn counts in inverse
proportion to its chance, which leaves the mean loss what it is. ``voxels="all"`` takes all windows
instead, and reads the cases again in every epoch, unless all crops fit in the memory of the GPU that they are on. If
there is only one case, a fifth of its images (of a single image, a fifth of its windows) is held out, and all its crops
are kept in memory.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.calibrators.local_network import TemperatureTree, Window, check_image, check_space
from segcal.cases import CaseSet
from segcal.cases.shares import added, in_shares
from segcal.errors import naming
from segcal.fitting.data import FitData, case_seed, check_voxels, valid_rows
from segcal.parallel.memory import give_back
from segcal.parallel.threads import torch_threads
from segcal.types import Case

# The sides of a crop, by the number of axes of the kernel.
_SIDES = {2: (64, 64), 3: (16, 32, 32)}
# At most this many voxels and scores (with halo) in all crops for training; a quarter of it for validation.
_VOXELS, _VALUES = 2**21, 2**26
# Bytes that a voxel's label takes in a crop, and the share of a GPU's free memory that all crops may take.
_LABEL_BYTES, _SHARE = 9, 0.25
# Crops per batch.
_BATCH = 8
# Crops that are cut before the memory of the rows around them is given back.
_CUT = 32
# Steps per epoch, at least: few crops are used several times.
_STEPS = 16
# Crops per image, at most, if an image has one temperature.
_PER_IMAGE = 32
# The part of the sample that is drawn whatever windows show, so that none counts for many.
_EVENLY = 0.5
#: The label that F.cross_entropy ignores.
IGNORED = -100


class Crops(NamedTuple):
    """Crops of one size, first axis n.

    ``scores`` are padded logits, ``image`` the padded image, ``labels`` those of the box itself (or ``IGNORED``),
    ``inside`` whether a voxel is in the image and in no earlier crop, ``owner`` the number of the image, ``weight`` how
    many windows the crop stands for.
    """

    scores: Tensor
    image: Tensor | None
    labels: Tensor
    inside: Tensor
    owner: Tensor
    weight: Tensor

    def weigh(self, values: Tensor) -> Tensor:
        """The sum of values ``(n, *sides)`` over all windows that the crops stand for, in float64."""
        return values.double().flatten(1).sum(1) @ self.weight

    def take(self, index: Tensor) -> Crops:
        """Some of them, by an index on their device."""
        return Crops._make(None if part is None else part[index] for part in self)

    @classmethod
    def join(cls, parts: list[Crops]) -> Crops:
        """All of them, one after the other."""
        return cls._make(None if own[0] is None else torch.cat(own) for own in zip(*parts, strict=True))


class Part(NamedTuple):
    """Crops that batches are made of, on their device; on the CPU the image, labelled voxels and weight of each."""

    crops: Crops
    owner: Tensor
    labelled: Tensor
    weight: Tensor

    @classmethod
    def of(cls, crops: Crops) -> Part:
        """Reads three numbers of every crop."""
        labelled = (crops.labels != IGNORED).flatten(1).sum(1)
        owner, labelled, weight = torch.stack((crops.owner, labelled, crops.weight)).cpu()
        return cls(crops, owner.long(), labelled.long(), weight)

    @property
    def device(self) -> torch.device:
        """Where the crops are."""
        return self.crops.labels.device

    def take(self, index: Tensor) -> Part:
        """Some of them, by an index on the CPU."""
        return Part(self.crops.take(index.to(self.device)), self.owner[index], self.labelled[index], self.weight[index])


class CropSource:
    """The crops of some cases: a sample of the windows, kept in memory, or all of them, read again every time.

    ``voxels`` is how many voxels are labelled, and ``total`` how many they stand for.
    """

    def __init__(
        self,
        data: FitData,
        beta: float,
        sides: tuple[int, ...],
        network: TemperatureTree,
        per_image: bool,
        share: float,
    ) -> None:
        self.cases, self.seed, self.sides, self.axes = data.cases, data.seed, sides, network.kernel_axes
        self.per_image, self.beta = per_image, beta
        self.image_channels = network.image_channels
        padded = math.prod(side + 8 for side in sides) * (data.cases.num_classes + network.image_channels)
        crops = share * min(_VOXELS / math.prod(sides), _VALUES / padded)
        stream = data.voxels == "all" and len(data.cases) > 1
        self.per_case = None if stream else max(1, int(crops / len(data.cases)))
        self._held: list[Part] | None = None
        if not stream:
            self._held = [Part.of(Crops.join(found)) for found in [self._gathered()] if found]
        elif self._fits(padded / math.prod(sides)):
            self._held = list(self.parts())
        self._count()

    def _fits(self, values: float) -> bool:
        """Whether the data are on a GPU with memory for all crops, of so many values to a voxel."""
        device = self.cases[0].tensor_device
        if device.type != "cuda":
            return False
        voxels = sum(math.prod(self.cases[index].shape) for index in range(len(self.cases))) / self.cases.num_classes
        return voxels * (4 * values + _LABEL_BYTES) < _SHARE * torch.cuda.mem_get_info(device)[0]

    def _count(self) -> None:
        self.voxels, self.total, self.device = 0, 0.0, torch.device("cpu")
        for part in self.parts():
            self.voxels, self.device = self.voxels + int(part.labelled.sum()), part.device
            self.total += float(part.labelled.double() @ part.weight)
        check_voxels(self.voxels)

    def parts(self) -> Iterator[Part]:
        """All crops: at once if they are a sample, else case by case."""
        yield from (Part.of(crops) for _, crops in self.draw(self.cases)) if self._held is None else self._held

    def divided(self) -> tuple[CropSource, CropSource, str]:
        """Four fifths and one fifth of the images, or of the crops of a single image, and a note for the user.

        If there is only one crop, or one image with a single temperature, both parts are the whole.
        """
        (whole,) = self.parts()
        units, name = torch.unique(whole.owner, return_inverse=True)[1], "images"
        if not self.per_image and int(units.max()) == 0:
            units, name = torch.arange(len(whole.owner)), "windows, beside those trained on,"
        counted = torch.unique(units[whole.labelled > 0])
        if len(counted) < 2:
            return self, self, "there is one case, too small to hold out a part: validated on its training voxels"
        generator = torch.Generator().manual_seed(self.seed)
        chosen = counted[torch.randperm(len(counted), generator=generator)[: -(-len(counted) // 5)]]
        later = torch.isin(units, chosen)
        train, held_out = copy.copy(self), copy.copy(self)
        for source, own in ((train, ~later), (held_out, later)):
            source._held = [whole.take(own.nonzero()[:, 0])]
            source._count()
        return train, held_out, f"there is one case: a fifth of its {name} were held out for validation"

    def batches(self, generator: torch.Generator | None = None) -> Iterator[Crops]:
        """All crops in batches; the crops of ``_groups`` stay together.

        With a generator they are for training: in random order, and without batches that have no labels.
        """
        for part in self.parts():
            groups, size = self._groups(part), _BATCH
            if generator is not None:
                groups = [groups[turn] for turn in torch.randperm(len(groups), generator=generator).tolist()]
                size = max(1, min(_BATCH, len(part.owner) // _STEPS))
            lengths = [0]
            for group in groups:
                lengths[-1] += len(group)
                if lengths[-1] >= size:
                    lengths.append(0)
            order = torch.cat(groups)
            both = (torch.split(own, lengths) for own in (order.to(part.device), part.labelled[order]))
            for index, found in zip(*both, strict=True):
                if len(index) and (generator is None or bool(found.any())):
                    yield part.crops.take(index)

    def epoch(self, generator: torch.Generator) -> Iterator[Crops]:
        """At least ``_STEPS`` batches for training."""
        steps = 0
        while steps < _STEPS:
            for crops in self.batches(generator):
                steps += 1
                yield crops

    def _groups(self, part: Part) -> list[Tensor]:
        """Groups of crops that must be in the same batch, as indices."""
        if not self.per_image:
            return list(torch.split(torch.arange(len(part.owner)), 1))
        return [(part.owner == image).nonzero()[:, 0] for image in torch.unique(part.owner)]

    def _gathered(self) -> list[Crops]:
        """The crops of all cases, each image with a number of its own."""
        drawn, found, images = in_shares(_drawn, self.cases, self, merge=added), [], 0
        for crops in (drawn[name] for name in self.cases.ids if name in drawn):
            found.append(crops._replace(owner=crops.owner + images))
            images += int(crops.owner.max()) + 1
        return found

    def draw(self, cases: CaseSet) -> Iterator[tuple[str, Crops]]:
        """The crops of each case that has any."""
        for case in cases:
            with naming(case=case.id):
                crops = self._of_case(case)
            if crops:
                yield case.id, Crops.join(crops)
            del case, crops

    def _of_case(self, case: Case) -> list[Crops]:
        if not case.source.sliceable:
            case.load()
        labelled = _window_sums(case, self.sides, valid_rows(case))
        # The mean over an image includes ignored voxels; otherwise windows without labels are useless.
        if self.per_image and bool(labelled.any()):
            labelled = labelled.clamp(min=1.0)
        count = math.inf if self.per_case is None else max(1, self.per_case // case.shape[0])
        count = min(count, _PER_IMAGE) if self.per_image else count
        if count < int((labelled > 0).sum()):
            doubtful = _window_sums(case, self.sides, _doubts(case, self.beta))
            chances = _chances(labelled.flatten(), doubtful.flatten(), int(count))
        else:
            chances = (labelled > 0).double().flatten()
        generator = torch.Generator().manual_seed(case_seed(self.seed, case.id))
        # Every whole number that the running sum passes: as many windows as asked for, spread over the case.
        passed = (chances.cumsum(0) + torch.rand(1, generator=generator, dtype=torch.float64)).floor()
        chosen = passed.diff(prepend=torch.zeros(1, dtype=torch.float64)).nonzero()[:, 0].tolist()
        boxes = _boxes(case.shape[2:], self.sides)
        found = []
        with torch_threads(1):
            for index in chosen:
                found.append(self._crop(case, boxes[index], 1 / float(chances[index])))
                if len(found) % _CUT == 0:
                    give_back()
        return found

    def _crop(self, case: Case, box: tuple[tuple[int, int], ...], weight: float) -> Crops:
        """One window of every item of a case; beyond the border the image is mirrored."""
        batch, _, *spatial = case.shape
        window = Window(box, tuple(spatial), self.axes)
        logits = case.rows("logits", window.source)
        image = None
        if self.image_channels:
            image = check_image(case.source.image(window.source), self.image_channels, tuple(logits.shape))
            image = window.padded(image.to(logits.device).expand(batch, *image.shape[1:]))
        rows, *columns = (slice(start, min(stop, size)) for (start, stop), size in zip(box, spatial, strict=True))
        here = (slice(None), slice(None), *columns)
        own, mask = case.rows("labels", rows)[here].long(), case.rows("mask", rows)
        valid = own != case.ignore_index
        own = torch.where(valid if mask is None else valid & mask[here], own, IGNORED)
        beyond = [end for (_, stop), size in zip(box, spatial, strict=True) for end in (max(0, stop - size), 0)][::-1]
        labels = F.pad(own, beyond, value=IGNORED)
        inside = F.pad(torch.ones_like(own, dtype=torch.bool), beyond)
        if len(box) > self.axes:  # a slice of a volume
            labels, inside = labels.flatten(0, 1), inside.flatten(0, 1)
        scores = window.padded(logits).float().contiguous()  # A view would keep whole rows in memory.
        weights = torch.full((batch,), weight, dtype=torch.float64, device=labels.device)
        return Crops(scores, image, labels, inside, torch.arange(batch, device=labels.device), weights)


def _drawn(cases: CaseSet, source: CropSource) -> dict[str, Crops]:
    return dict(source.draw(cases))


def crop_sides(cases: CaseSet, axes: int) -> tuple[int, ...]:
    """The sides of a crop, limited to the longest sides of the cases."""
    shapes = [cases[index].shape[2:] for index in range(len(cases))]
    for shape in shapes:
        check_space(shape, axes)
    longest = [max(lengths) for lengths in zip(*(shape[-axes:] for shape in shapes), strict=True)]
    return tuple(map(min, _SIDES[axes], longest))


def _doubts(case: Case, beta: float) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a case, and ``1 - p_y`` of the voxels that count, ``(N, rows, ...)``: how far a loss can still fall."""
    for chunk in case.chunks():
        index = torch.where(chunk.valid, chunk.labels.long(), 0).unsqueeze(1)
        gaps = chunk.logits.float() - chunk.logits.float().amax(1, keepdim=True)
        own = (gaps * beta).softmax(1).gather(1, index).squeeze(1)
        yield chunk.rows, torch.where(chunk.valid, 1 - own, 0.0)


def _chances(labelled: Tensor, doubts: Tensor, count: int) -> Tensor:
    """The chance of every window to be drawn: half of it by its voxels, half by its doubts. Their sum is the count."""
    shares = _EVENLY * labelled / labelled.sum() + (1 - _EVENLY) * doubts / doubts.sum().clamp(min=1e-300)
    certain = torch.zeros_like(shares, dtype=torch.bool)
    while True:  # what certain windows leave is shared by the others
        rest = torch.where(certain, 0.0, shares)
        chances = torch.where(certain, 1.0, (count - int(certain.sum())) * rest / rest.sum())
        if not bool((chances > 1).any()):
            return chances
        certain |= chances > 1


def _window_sums(case: Case, sides: tuple[int, ...], parts: Iterable[tuple[slice, Tensor]]) -> Tensor:
    """The sums over every window of ``_boxes`` of values that come by rows, ``(N, rows, ...)``."""
    spatial = case.shape[2:]
    first, *others = _lengths(spatial, sides)
    beyond = [end for size, side in zip(spatial[1:], others, strict=True) for end in (-size % side, 0)][::-1]
    sums = torch.zeros([-(-size // side) for size, side in zip(spatial, (first, *others), strict=True)]).double()
    for rows, values in parts:
        found = F.pad(values.double().sum(0), beyond)
        for axis, side in enumerate(others, 1):
            found = found.view(*found.shape[:axis], -1, side, *found.shape[axis + 1 :]).sum(axis + 1)
        sums.index_add_(0, torch.arange(rows.start, rows.stop) // first, found.cpu())
    return sums


def _lengths(spatial: Sequence[int], sides: tuple[int, ...]) -> tuple[int, ...]:
    """The sides of a window along all axes: single slices if there are fewer sides than axes."""
    return (1,) * (len(spatial) - len(sides)) + sides


def _boxes(spatial: tuple[int, ...], sides: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """Windows of the given sides that cover the space once."""
    lengths = _lengths(spatial, sides)
    starts = (range(0, size, length) for size, length in zip(spatial, lengths, strict=True))
    return [
        tuple((start, start + length) for start, length in zip(corner, lengths, strict=True))
        for corner in itertools.product(*starts)
    ]
