"""Training the network of local temperature scaling on crops of the cases.

A case is divided into windows that do not overlap. A seeded sample of them, each with the halo that the network needs,
is drawn once and kept: it fits in memory whatever the number and size of the cases. ``voxels="all"`` takes all windows
instead, and reads the cases again in every epoch. If there is only one case, a fifth of its images (of a single image,
a fifth of its windows) is held out, and all its crops are kept in memory.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.calibrators.local_network import (
    Inputs,
    Prefix,
    TemperatureTree,
    Window,
    check_image,
    check_space,
    network_inputs,
    temperature,
)
from segcal.cases import CaseSet
from segcal.cases.shares import added, in_shares
from segcal.errors import naming
from segcal.fitting.data import FitData, Fitted, case_seed, check_voxels
from segcal.fitting.measured import compared
from segcal.parallel.threads import torch_threads
from segcal.solvers import adam
from segcal.types import Case

# The sides of a crop, by the number of axes of the kernel.
_SIDES = {2: (64, 64), 3: (16, 32, 32)}
# At most this many voxels and scores (with halo) in all crops for training; a quarter of it for validation.
_VOXELS, _VALUES = 2**21, 2**26
# Crops per batch.
_BATCH = 8
# Steps per epoch, at least: few crops are used several times.
_STEPS = 16
# Epochs without improvement before training stops.
_PATIENCE = 12
# The learning rate is reduced for kernels with more inputs than this.
_INPUTS = 100
# Impossible classes get this logit, relative to the best: -inf would make the gradient by beta NaN.
_DEEPEST = -1e6
# Crops per image, at most, if an image has one temperature.
_PER_IMAGE = 32
# The label that F.cross_entropy ignores.
_IGNORED = -100


@dataclass(frozen=True)
class Recipe:
    """How to train: the network's inputs, whether an image has one temperature, and the options of Adam."""

    inputs: Inputs
    per_image: bool
    epochs: int
    learning_rate: float
    weight_decay: float


class Crops(NamedTuple):
    """Crops of one size, first axis n.

    ``scores`` are padded logits, ``image`` the padded image, ``labels`` those of the box itself (or ``_IGNORED``),
    ``inside`` whether a voxel is in the image and in no earlier crop, ``owner`` the number of the image.
    """

    scores: Tensor
    image: Tensor | None
    labels: Tensor
    inside: Tensor
    owner: Tensor

    def take(self, index: Tensor) -> Crops:
        """Some of them."""
        return Crops._make(None if part is None else part[index] for part in self)

    @classmethod
    def join(cls, parts: list[Crops]) -> Crops:
        """All of them, one after the other."""
        return cls._make(None if own[0] is None else torch.cat(own) for own in zip(*parts, strict=True))


def fit_network(network: TemperatureTree, beta: float, data: FitData, recipe: Recipe) -> Fitted:
    """Train the network in place; it ends in the state of the lowest validation NLL.

    The report holds the validation NLL, before with one temperature and after with the network. Its certificate is the
    norm of the gradient of the mean loss at the end.

    ``data.validation`` is None if there is only one case, of which a part is held out.

    The loss is the mean NLL of ``S(beta z / factor)``, where the factor is the network's output. Adam's first steps
    move every weight by the learning rate, and because neighbouring inputs are similar, these moves add up. So the rate
    falls with the number of inputs of a kernel, and training starts with an epoch at a tenth of it.
    """
    sides = _crop_sides(data.cases, network.kernel_axes)
    train = CropSource(data, sides, network, recipe, share=1.0)
    notes = []
    if data.validation is None:
        train, held_out, note = train.divided()
        notes.append(note)
    else:
        held_out = CropSource(data._replace(cases=data.validation), sides, network, recipe, share=0.25)
    moments: dict[Prefix, _Moments] = {"": _Moments(), "image_": _Moments()}
    for crops in train.batches():
        moments[""].add(network_inputs(crops.scores, recipe.inputs))
        if crops.image is not None:
            moments["image_"].add(crops.image)
    for prefix, own in moments.items():
        if own.count:
            network.standardise_by(*own.result(), prefix)

    def losses(crops: Crops) -> Tensor:
        temperatures = temperature(network(network_inputs(crops.scores, recipe.inputs), crops.image), beta)
        if recipe.per_image:
            temperatures = _image_means(temperatures, crops)
        return _nll(crops, 1 / temperatures)

    def loss(crops: Crops) -> Tensor:
        return losses(crops) / (crops.labels != _IGNORED).sum()

    def objective() -> float:
        return sum(float(losses(crops)) for crops in held_out.batches()) / held_out.voxels

    single = sum(float(_nll(crops, torch.tensor(beta))) for crops in held_out.batches()) / held_out.voxels
    rate = recipe.learning_rate * min(1.0, _INPUTS / network.weight[0].numel())
    decay, seed = recipe.weight_decay, data.seed
    train_at = partial(adam, network, loss, train.epoch, objective, weight_decay=decay, patience=_PATIENCE, seed=seed)
    network.requires_grad_(True)
    train_at(learning_rate=rate / 10, max_epochs=1)
    training = train_at(learning_rate=rate, max_epochs=recipe.epochs)
    for crops in train.batches():
        (losses(crops) / train.voxels).backward()  # type: ignore[no-untyped-call]
    gradient = math.sqrt(sum(float(p.grad.square().sum()) for p in network.parameters() if p.grad is not None))
    network.zero_grad()
    network.requires_grad_(False)
    after = training.objective
    outcome = "" if after < single else ": no better, so this is ts"
    notes.append(f"{training.message}; validation NLL {compared(after, single)} that with one temperature{outcome}")
    voxels = train.voxels + (0 if held_out is train else held_out.voxels)
    return Fitted(single, after, training.converged, gradient, training.iterations, voxels, notes)


def _nll(crops: Crops, beta: Tensor) -> Tensor:
    """The sum over labelled voxels of the NLL of ``S(beta z)``, where beta is ``(n, *sides)`` or a scalar."""
    z = crops.scores
    for axis, side in enumerate(crops.labels.shape[1:], start=2):
        z = z.narrow(axis, (z.shape[axis] - side) // 2, side)
    z = z.masked_fill((crops.labels == _IGNORED).unsqueeze(1), 0.0)  # ignored voxels may be NaN
    gaps = (z - z.amax(1, keepdim=True)).clamp(min=_DEEPEST)
    scores = gaps * (beta.unsqueeze(1) if beta.ndim else beta)
    return F.cross_entropy(scores, crops.labels, ignore_index=_IGNORED, reduction="none").double().sum()


def _image_means(temperatures: Tensor, crops: Crops) -> Tensor:
    """Temperatures ``(n, *sides)``, replaced by the mean over all crops of the same image."""
    _, owner = torch.unique(crops.owner, return_inverse=True)
    axes = tuple(range(1, temperatures.ndim))
    images = int(owner.max()) + 1
    total = torch.zeros(images).index_add(0, owner, torch.where(crops.inside, temperatures, 0.0).sum(axes))
    count = torch.zeros(images).index_add(0, owner, crops.inside.sum(axes).float())
    return (total / count)[owner].view(-1, *[1] * len(axes)).expand_as(temperatures)


class CropSource:
    """The crops of some cases: a sample of the windows, kept in memory, or all of them, read again every time."""

    def __init__(
        self, data: FitData, sides: tuple[int, ...], network: TemperatureTree, recipe: Recipe, share: float
    ) -> None:
        self.cases, self.seed, self.sides, self.axes = data.cases, data.seed, sides, network.kernel_axes
        self.per_image = recipe.per_image
        self.image_channels = network.image_channels
        padded = math.prod(side + 8 for side in sides) * (data.cases.num_classes + network.image_channels)
        crops = share * min(_VOXELS / math.prod(sides), _VALUES / padded)
        stream = data.voxels == "all" and len(data.cases) > 1
        self.per_case = None if stream else max(1, int(crops / len(data.cases)))
        self._hold(None if stream else self._gathered())

    def _hold(self, crops: list[Crops] | None) -> None:
        self._held = [Crops.join(crops)] if crops else crops
        self.voxels = sum(int((part.labels != _IGNORED).sum()) for part in self.parts())
        check_voxels(self.voxels)

    def parts(self) -> Iterator[Crops]:
        """All crops: at once if they are kept in memory, else case by case."""
        yield from (crops for _, crops in self.draw(self.cases)) if self._held is None else self._held

    def divided(self) -> tuple[CropSource, CropSource, str]:
        """Four fifths and one fifth of the images, or of the crops of a single image, and a note for the user.

        If there is only one crop, or one image with a single temperature, both parts are the whole.
        """
        (whole,) = self.parts()
        units, name = torch.unique(whole.owner, return_inverse=True)[1], "images"
        if not self.per_image and int(units.max()) == 0:
            units, name = torch.arange(len(whole.owner)), "windows, beside those trained on,"
        counted = torch.unique(units[(whole.labels != _IGNORED).flatten(1).any(1)])
        if len(counted) < 2:
            return self, self, "there is one case, too small to hold out a part: validated on its training voxels"
        generator = torch.Generator().manual_seed(self.seed)
        chosen = counted[torch.randperm(len(counted), generator=generator)[: -(-len(counted) // 5)]]
        later = torch.isin(units, chosen)
        train, held_out = copy.copy(self), copy.copy(self)
        train._hold([whole.take((~later).nonzero()[:, 0])])
        held_out._hold([whole.take(later.nonzero()[:, 0])])
        return train, held_out, f"there is one case: a fifth of its {name} were held out for validation"

    def batches(self, generator: torch.Generator | None = None) -> Iterator[Crops]:
        """All crops in batches, in random order if there is a generator; the crops of ``_groups`` stay together."""
        for part in self.parts():
            groups, size = self._groups(part), _BATCH
            if generator is not None:
                groups = [groups[turn] for turn in torch.randperm(len(groups), generator=generator).tolist()]
                size = max(1, min(_BATCH, len(part.owner) // _STEPS))
            batch: list[Tensor] = []
            for group in groups:
                batch.append(group)
                if sum(map(len, batch)) >= size or group is groups[-1]:
                    yield part.take(torch.cat(batch))
                    batch = []

    def epoch(self, generator: torch.Generator) -> Iterator[Crops]:
        """At least ``_STEPS`` batches for training; batches without labels are skipped."""
        steps = 0
        while steps < _STEPS:
            for crops in self.batches(generator):
                if bool((crops.labels != _IGNORED).any()):
                    steps += 1
                    yield crops

    def _groups(self, crops: Crops) -> list[Tensor]:
        """Groups of crops that must be in the same batch, as indices."""
        if not self.per_image:
            return list(torch.split(torch.arange(len(crops.owner)), 1))
        return [(crops.owner == image).nonzero()[:, 0] for image in torch.unique(crops.owner)]

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
        generator = torch.Generator().manual_seed(case_seed(self.seed, case.id))
        valid = case.valid.any(0)
        boxes = _boxes(case.shape[2:], self.sides)
        # The mean over an image includes ignored voxels; otherwise windows without labels are useless.
        if not self.per_image or not bool(valid.any()):
            boxes = [box for box in boxes if bool(valid[tuple(slice(*ends) for ends in box)].any())]
        count = len(boxes) if self.per_case is None else min(len(boxes), max(1, self.per_case // case.shape[0]))
        count = min(count, _PER_IMAGE) if self.per_image else count
        chosen = torch.randperm(len(boxes), generator=generator)[:count].sort().values.tolist()
        if not case.source.sliceable:
            case.load()
        with torch_threads(1):
            return [self._crop(case, boxes[index]) for index in chosen]

    def _crop(self, case: Case, box: tuple[tuple[int, int], ...]) -> Crops:
        """One window of every item of a case; beyond the border the image is mirrored."""
        batch, _, *spatial = case.shape
        window = Window(box, tuple(spatial), self.axes)
        logits = case.rows("logits", window.source)
        image = None
        if self.image_channels:
            image = check_image(case.source.image(window.source), self.image_channels, tuple(logits.shape))
            image = window.padded(image.expand(batch, *image.shape[1:])).cpu()
        rows, *columns = (slice(start, min(stop, size)) for (start, stop), size in zip(box, spatial, strict=True))
        here = (slice(None), slice(None), *columns)
        own, mask = case.rows("labels", rows)[here].cpu().long(), case.rows("mask", rows)
        valid = own != case.ignore_index
        own = torch.where(valid if mask is None else valid & mask[here].cpu(), own, _IGNORED)
        beyond = [end for (_, stop), size in zip(box, spatial, strict=True) for end in (max(0, stop - size), 0)][::-1]
        labels = F.pad(own, beyond, value=_IGNORED)
        inside = F.pad(torch.ones_like(own, dtype=torch.bool), beyond)
        if len(box) > self.axes:  # a slice of a volume
            labels, inside = labels.flatten(0, 1), inside.flatten(0, 1)
        return Crops(window.padded(logits).float().cpu(), image, labels, inside, torch.arange(batch))


def _drawn(cases: CaseSet, source: CropSource) -> dict[str, Crops]:
    return dict(source.draw(cases))


def _crop_sides(cases: CaseSet, axes: int) -> tuple[int, ...]:
    """The sides of a crop, limited to the longest sides of the cases."""
    shapes = [cases[index].shape[2:] for index in range(len(cases))]
    for shape in shapes:
        check_space(shape, axes)
    longest = [max(lengths) for lengths in zip(*(shape[-axes:] for shape in shapes), strict=True)]
    return tuple(map(min, _SIDES[axes], longest))


def _boxes(spatial: tuple[int, ...], sides: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """Windows of the given sides that cover the space once; single slices if there are fewer sides than axes."""
    lengths = (1,) * (len(spatial) - len(sides)) + sides
    starts = (range(0, size, length) for size, length in zip(spatial, lengths, strict=True))
    return [
        tuple((start, start + length) for start, length in zip(corner, lengths, strict=True))
        for corner in itertools.product(*starts)
    ]


class _Moments:
    """Running mean and variance of each channel, in float64, relative to the mean of the first batch."""

    def __init__(self) -> None:
        self.count, self.shift, self.sums, self.squares = 0, torch.zeros(1), torch.zeros(1), torch.zeros(1)

    def add(self, x: Tensor) -> None:
        flat = x.movedim(1, 0).flatten(1).double()
        flat = flat[:, torch.isfinite(flat).all(0)]
        if not self.count and flat.numel():
            self.shift = flat.mean(1, keepdim=True)
        flat = flat - self.shift
        self.count += flat.shape[1]
        self.sums, self.squares = self.sums + flat.sum(1), self.squares + flat.square().sum(1)

    def result(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel."""
        mean = self.sums / self.count
        variance = (self.squares / self.count - mean**2).clamp(min=0)
        return (self.shift.flatten() + mean).float(), variance.sqrt().float()
