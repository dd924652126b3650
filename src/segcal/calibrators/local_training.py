"""Training the network of local temperature scaling, on crops that are drawn from the cases once and held.

A case is divided into windows that do not overlap, and a seeded share of them is taken, each with the halo that the
network needs: the crops of an epoch fit in memory whatever the number and size of the cases. ``everything`` takes all
windows instead and reads the cases again in every epoch. Where there is but one case, a fifth of its images (or, of
one image, of its windows) is held out, and its crops are held in memory either way.
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
    TemperatureTree,
    Window,
    check_image,
    check_space,
    network_inputs,
    temperature,
)
from segcal.cases import CaseSet
from segcal.errors import InputError, SegcalError
from segcal.fitting.measured import compared
from segcal.parallel.threads import torch_threads
from segcal.solvers import adam
from segcal.types import Case

# The sides of a crop, by the axes of the kernel.
_SIDES = {2: (64, 64), 3: (16, 32, 32)}
# Voxels and scores (halo included) of all crops together, for training; validation has a quarter.
_VOXELS, _VALUES = 2**21, 2**26
_BATCH = 8  # crops
# Steps an epoch has at least: few crops are gone through several times.
_STEPS = 16
_PATIENCE = 12
# Inputs of a kernel up to which the rate is as asked for.
_INPUTS = 100
_DEEPEST = -1e6
# Crops that stand for an image where it has one temperature.
_PER_IMAGE = 32
# What F.cross_entropy leaves out.
_NOT = -100


@dataclass(frozen=True)
class Recipe:
    """How to train: what the network sees, whether an image has one temperature, and the options of Adam."""

    inputs: Inputs
    per_image: bool
    epochs: int
    learning_rate: float
    weight_decay: float
    everything: bool
    seed: int


class Outcome(NamedTuple):
    """Whether the network beat a single temperature on the validation crops, and how the training went.

    ``gradient`` is the norm of that of the mean loss of all crops at the end, ``voxels`` those of all crops.
    """

    better: bool
    notes: list[str]
    converged: bool
    gradient: float
    iterations: int
    voxels: int


class Crops(NamedTuple):
    """Crops of one size, first axis n.

    ``scores`` are padded logits, ``image`` the padded image, ``labels`` those of the box itself, ``_NOT`` where they do
    not count, ``inside`` whether a voxel is in the image (and in no earlier crop), ``owner`` the image each is from.
    """

    scores: Tensor
    image: Tensor | None
    labels: Tensor
    inside: Tensor
    owner: Tensor

    def take(self, index: Tensor) -> Crops:
        """Some of them."""
        image = None if self.image is None else self.image[index]
        return Crops(self.scores[index], image, self.labels[index], self.inside[index], self.owner[index])

    @classmethod
    def join(cls, parts: list[Crops]) -> Crops:
        """All of them, one after the other."""
        images = [part.image for part in parts if part.image is not None]
        return cls(
            torch.cat([part.scores for part in parts]),
            torch.cat(images) if images else None,
            torch.cat([part.labels for part in parts]),
            torch.cat([part.inside for part in parts]),
            torch.cat([part.owner for part in parts]),
        )


def fit_network(
    network: TemperatureTree, beta: float, cases: CaseSet, validation: CaseSet | None, recipe: Recipe
) -> Outcome:
    """Train in place; the network is left at the state of the lowest validation NLL.

    Without validation cases there is one case, of which a part is held out.

    The loss is the mean NLL of ``S(beta z / factor)``, the factor being the network's output. Adam's first steps move
    every weight by the rate and, as neighbouring inputs are alike, these moves add up: so the rate falls with the
    number of inputs of a kernel, and an epoch at a tenth of it comes first.
    """
    sides = _crop_sides(cases, network.kernel_axes)
    train = CropSource(cases, sides, network, recipe, share=1.0)
    notes = []
    if validation is None:
        train, held_out, note = train.divided()
        notes.append(note)
    else:
        held_out = CropSource(validation, sides, network, recipe, share=0.25)
    network.standardise_by(*_moments(train, network, recipe))

    def losses(crops: Crops) -> Tensor:
        temperatures = temperature(network(network_inputs(crops.scores, recipe.inputs), crops.image), beta)
        if recipe.per_image:
            temperatures = _image_means(temperatures, crops)
        return _nll(crops, 1 / temperatures)

    def loss(crops: Crops) -> Tensor:
        return losses(crops) / (crops.labels != _NOT).sum()

    def objective() -> float:
        return sum(float(losses(crops)) for crops in held_out.batches()) / held_out.voxels

    single = sum(float(_nll(crops, torch.tensor(beta))) for crops in held_out.batches()) / held_out.voxels
    rate = recipe.learning_rate * min(1.0, _INPUTS / network.weight[0].numel())
    train_at = partial(
        adam,
        network,
        loss,
        train.epoch,
        objective,
        weight_decay=recipe.weight_decay,
        patience=_PATIENCE,
        seed=recipe.seed,
    )
    network.requires_grad_(True)
    train_at(learning_rate=rate / 10, max_epochs=1)
    training = train_at(learning_rate=rate, max_epochs=recipe.epochs)
    for crops in train.batches():
        (losses(crops) / train.voxels).backward()  # type: ignore[no-untyped-call]
    gradient = math.sqrt(sum(float(p.grad.square().sum()) for p in network.parameters() if p.grad is not None))
    network.zero_grad()
    network.requires_grad_(False)
    better = training.objective < single
    comparison = f"validation NLL {compared(training.objective, single)} that with one temperature"
    outcome = comparison if better else f"{comparison}: no better, so this is ts"
    return Outcome(
        better=better,
        notes=[*notes, f"{training.message}; {outcome}"],
        converged=training.converged,
        gradient=gradient,
        iterations=training.iterations,
        voxels=train.voxels + (0 if held_out is train else held_out.voxels),
    )


def _nll(crops: Crops, beta: Tensor) -> Tensor:
    """The sum over the voxels that count of the NLL of ``S(beta z)``, beta ``(n, *sides)`` or a scalar."""
    halo = [(whole - side) // 2 for whole, side in zip(crops.scores.shape[2:], crops.labels.shape[1:], strict=True)]
    box = tuple(slice(width, width + side) for width, side in zip(halo, crops.labels.shape[1:], strict=True))
    index = (slice(None), slice(None), *box)
    z = crops.scores[index].masked_fill((crops.labels == _NOT).unsqueeze(1), 0.0)  # which may be NaN there
    # Impossible classes are at a finite depth here: the gradient by beta would be 0 times infinity.
    gaps = (z - z.amax(1, keepdim=True)).clamp(min=_DEEPEST)
    scores = gaps * (beta.unsqueeze(1) if beta.ndim else beta)
    return F.cross_entropy(scores, crops.labels, ignore_index=_NOT, reduction="none").double().sum()


def _image_means(temperatures: Tensor, crops: Crops) -> Tensor:
    """Temperatures ``(n, *sides)``, each crop with the mean over the crops of its image."""
    _, owner = torch.unique(crops.owner, return_inverse=True)
    axes = tuple(range(1, temperatures.ndim))
    images = int(owner.max()) + 1
    total = torch.zeros(images).index_add(0, owner, torch.where(crops.inside, temperatures, 0.0).sum(axes))
    count = torch.zeros(images).index_add(0, owner, crops.inside.sum(axes).float())
    return (total / count)[owner].view(-1, *[1] * len(axes)).expand_as(temperatures)


class CropSource:
    """The crops of some cases: a share of the windows, held, or all of them, read again every time."""

    def __init__(
        self, cases: CaseSet, sides: tuple[int, ...], network: TemperatureTree, recipe: Recipe, share: float
    ) -> None:
        self.cases, self.sides, self.axes, self.recipe = cases, sides, network.kernel_axes, recipe
        self.image_channels = network.image_channels
        padded = math.prod(side + 8 for side in sides) * (cases.num_classes + network.image_channels)
        crops = share * min(_VOXELS / math.prod(sides), _VALUES / padded)
        stream = recipe.everything and len(cases) > 1
        self.per_case = None if stream else max(1, int(crops / len(cases)))
        self._hold(None if stream else list(self._draw()))

    def _hold(self, crops: list[Crops] | None) -> None:
        self._held = [Crops.join(crops)] if crops else crops
        self.voxels = sum(int((part.labels != _NOT).sum()) for part in self.parts())
        if not self.voxels:
            raise InputError("no valid voxel", expected="labels that are neither ignored nor masked")

    def parts(self) -> Iterator[Crops]:
        """All crops, as many at a time as are held."""
        yield from self._draw() if self._held is None else self._held

    def divided(self) -> tuple[CropSource, CropSource, str]:
        """Four fifths and a fifth of the images, or of the crops of a single image, and what to tell the user.

        Where there is one crop, or one image with a temperature of its own, both are the whole.
        """
        (whole,) = self.parts()
        units, name = torch.unique(whole.owner, return_inverse=True)[1], "images"
        if not self.recipe.per_image and int(units.max()) == 0:
            units, name = torch.arange(len(whole.owner)), "windows, beside those trained on,"
        counted = torch.unique(units[(whole.labels != _NOT).flatten(1).any(1)])
        if len(counted) < 2:
            return self, self, "there is one case, too small to hold a part out: validated on what was trained on"
        generator = torch.Generator().manual_seed(self.recipe.seed)
        chosen = counted[torch.randperm(len(counted), generator=generator)[: -(-len(counted) // 5)]]
        later = torch.isin(units, chosen)
        train, held_out = copy.copy(self), copy.copy(self)
        train._hold([whole.take((~later).nonzero()[:, 0])])
        held_out._hold([whole.take(later.nonzero()[:, 0])])
        return train, held_out, f"there is one case: a fifth of its {name} were held out for validation"

    def batches(self, generator: torch.Generator | None = None) -> Iterator[Crops]:
        """All crops, a few at a time; with a generator in random order. Crops that must be together are."""
        for part in self.parts():
            groups = self._groups(part)
            order = (
                range(len(groups)) if generator is None else torch.randperm(len(groups), generator=generator).tolist()
            )
            size = _BATCH if generator is None else max(1, min(_BATCH, len(part.owner) // _STEPS))
            batch: list[Tensor] = []
            for turn in order:
                batch.append(groups[turn])
                if sum(map(len, batch)) >= size:
                    yield part.take(torch.cat(batch))
                    batch = []
            if batch:
                yield part.take(torch.cat(batch))

    def epoch(self, generator: torch.Generator) -> Iterator[Crops]:
        """Batches for training, ``_STEPS`` of them at least; those without a label that counts are left out."""
        steps = 0
        while steps < _STEPS:
            for crops in self.batches(generator):
                if bool((crops.labels != _NOT).any()):
                    steps += 1
                    yield crops

    def _groups(self, crops: Crops) -> list[Tensor]:
        """Indices of the crops that must be in one batch."""
        if not self.recipe.per_image:
            return list(torch.split(torch.arange(len(crops.owner)), 1))
        return [(crops.owner == image).nonzero()[:, 0] for image in torch.unique(crops.owner)]

    def _draw(self) -> Iterator[Crops]:
        """The crops of each case."""
        generator = torch.Generator().manual_seed(self.recipe.seed)
        images = 0
        for case in self.cases:
            try:
                crops = self._of_case(case, images, generator)
            except SegcalError as error:
                raise error.at(case=case.id) from None
            images += case.shape[0]
            if crops:
                yield Crops.join(crops)
            del case, crops

    def _of_case(self, case: Case, images: int, generator: torch.Generator) -> list[Crops]:
        valid = case.valid.any(0)
        boxes = _boxes(case.shape[2:], self.sides)
        # The mean over an image takes in what is ignored there; else windows without a label are of no use.
        if not self.recipe.per_image or not bool(valid.any()):
            boxes = [box for box in boxes if bool(valid[tuple(slice(*ends) for ends in box)].any())]
        count = len(boxes) if self.per_case is None else min(len(boxes), max(1, self.per_case // case.shape[0]))
        count = min(count, _PER_IMAGE) if self.recipe.per_image else count
        chosen = torch.randperm(len(boxes), generator=generator)[:count].sort().values.tolist()
        if not case.source.sliceable:
            case.load()
        with torch_threads(1):
            return [self._crop(case, boxes[index], images) for index in chosen]

    def _crop(self, case: Case, box: tuple[tuple[int, int], ...], images: int) -> Crops:
        """One window of every item in the batch of a case; past the end of the image it is mirrored."""
        batch, _, *spatial = case.shape
        window = Window(box, tuple(spatial), self.axes)
        source = window.source
        logits = case.rows("logits", source)
        image = None
        if self.image_channels:
            image = check_image(case.source.image(source), self.image_channels, tuple(logits.shape))
            image = window.padded(image.expand(batch, *image.shape[1:])).cpu()
        labels = torch.full((batch, *(stop - start for start, stop in box)), _NOT)
        inside = torch.zeros(labels.shape, dtype=torch.bool)
        ends = [min(stop, size) for (_, stop), size in zip(box, spatial, strict=True)]
        rows = slice(box[0][0], ends[0])
        here = (
            slice(None),
            slice(None),
            *(slice(start, end) for (start, _), end in zip(box[1:], ends[1:], strict=True)),
        )
        there = (slice(None), *(slice(0, end - start) for (start, _), end in zip(box, ends, strict=True)))
        own, mask = case.rows("labels", rows)[here].cpu().long(), case.rows("mask", rows)
        valid = own != case.ignore_index
        labels[there] = torch.where(valid if mask is None else valid & mask[here].cpu(), own, _NOT)
        inside[there] = True
        slices = len(box) > self.axes
        return Crops(
            scores=window.padded(logits).float().cpu(),
            image=image,
            labels=labels.flatten(0, 1) if slices else labels,
            inside=inside.flatten(0, 1) if slices else inside,
            owner=images + torch.arange(batch),
        )


def _crop_sides(cases: CaseSet, axes: int) -> tuple[int, ...]:
    """The sides of a crop, no longer than the longest of the cases."""
    longest = [1] * axes
    for index in range(len(cases)):
        case = cases[index]
        check_space(case.shape[2:], axes)
        longest = [max(one, other) for one, other in zip(longest, case.shape[-axes:], strict=True)]
    return tuple(min(side, length) for side, length in zip(_SIDES[axes], longest, strict=True))


def _boxes(spatial: tuple[int, ...], sides: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """Windows of the given sides that cover the space once; slices one by one where there are fewer sides than axes."""
    lengths = (1,) * (len(spatial) - len(sides)) + sides
    starts = (range(0, size, length) for size, length in zip(spatial, lengths, strict=True))
    return [
        tuple((start, start + length) for start, length in zip(corner, lengths, strict=True))
        for corner in itertools.product(*starts)
    ]


def _moments(source: CropSource, network: TemperatureTree, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and standard deviation of each input channel, and of each channel of the image, over the crops."""
    scores, image = _Moments(), _Moments()
    for crops in source.batches():
        scores.add(network_inputs(crops.scores, recipe.inputs))
        if crops.image is not None:
            image.add(crops.image)
    return (*scores.result(), *image.result())


class _Moments:
    """Sums of each channel, in float64, around the first mean."""

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
        mean = self.sums / max(1, self.count)
        variance = (self.squares / max(1, self.count) - mean**2).clamp(min=0)
        return (self.shift.flatten() + mean).float(), variance.sqrt().float()
