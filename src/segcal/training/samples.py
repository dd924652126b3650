"""From scans to batches: slices, crops, augmentation. Randomness depends on seed, epoch and sample index only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import data

from segcal.training.config import TrainingConfig
from segcal.training.data import Scan
from segcal.training.networks import pad_end

# Largest angle of the rotation augmentation.
MOST_DEGREES = 15.0


class Batch(NamedTuple):
    """``images (V B, channels, *S)``, all first views before all second ones, and labels ``(V B, *S)``.

    A single sample has its views ``(V, channels, *S)`` as images, and one map of labels ``(*S)``.
    """

    images: Tensor
    labels: Tensor


@dataclass
class Samples(data.Dataset[Batch]):
    """The training samples of an epoch: images, slices of volumes (``dims`` 2), or volumes (``dims`` 3).

    Args:
        scans: The training scans.
        config: Its ``dims`` is the number of spatial axes of a sample, its ``seed`` that of augmentation and cropping.
            ``augment``: ``flip`` mirrors each in-plane axis with probability 1/2; ``rotate`` rotates half of the
            samples in the plane, by up to 15 degrees. ``crop`` is the size of a sample, cropped at random or padded
            with ignored voxels.
        ignore_index: The label of ignored voxels.
        views: How many views with different contrast, brightness and noise; 1 leaves the values unchanged.
    """

    scans: Sequence[Scan]
    config: TrainingConfig
    ignore_index: int
    views: int = 1

    def __post_init__(self) -> None:
        self.epoch = 0
        self.index = [(scan, rows) for scan in self.scans for rows in self._rows(scan)]

    def _rows(self, scan: Scan) -> Iterator[slice]:
        """All rows at once, or one slice of a volume after the other."""
        step = scan.spatial[0] if len(scan.spatial) == self.config.dims else 1
        return (slice(row, row + step) for row in range(0, scan.spatial[0], step))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> Batch:
        (scan, rows), config = self.index[index], self.config
        image, labels = scan.normalised(rows), scan.labels(rows)
        if len(scan.spatial) > config.dims:
            image, labels = image[:, 0], labels[0]
        rng = np.random.default_rng((config.seed, self.epoch, index))
        if config.crop is not None:
            image, labels = _crop(image, labels, config.crop, self.ignore_index, rng)
        if "flip" in config.augment:
            axes = [axis for axis in (-1, -2) if rng.random() < 0.5]
            image, labels = image.flip(axes), labels.flip(axes)
        if "rotate" in config.augment and rng.random() < 0.5:
            image, labels = rotate(image, labels, rng.uniform(-MOST_DEGREES, MOST_DEGREES), self.ignore_index)
        views = [image] if self.views == 1 else [_view(image, rng) for _ in range(self.views)]
        return Batch(torch.stack(views), labels)

    def collate(self, samples: Sequence[Batch]) -> Batch:
        """Stack samples; smaller ones are padded with ignored voxels."""
        size = [max(sizes) for sizes in zip(*(sample.labels.shape for sample in samples), strict=True)]
        images = torch.stack([pad_end(sample.images, size) for sample in samples], 1).flatten(0, 1)
        labels = torch.stack([pad_end(sample.labels, size, value=self.ignore_index) for sample in samples])
        return Batch(images, labels.repeat(self.views, *(1,) * self.config.dims))


@dataclass(frozen=True)
class Schedule:
    """The samples of each step of an epoch, for one of ``world`` processes.

    The order depends on seed and epoch only. A process takes every ``world``-th sample of a step. If a step has fewer
    samples than processes, a process without one takes the first sample with weight 0.
    """

    samples: int
    batch: int
    seed: int
    rank: int = 0
    world: int = 1

    @property
    def steps(self) -> int:
        """The number of steps in an epoch."""
        return math.ceil(self.samples / self.batch)

    def of(self, epoch: int) -> Iterator[tuple[list[int], float]]:
        """The samples of every step, and the weight of this process's mean loss.

        Gradients are averaged over processes. Weighting each process by ``world`` times its share of the samples makes
        that the average over samples.

        Examples:
            >>> [len(step) for step, _ in Schedule(10, 4, seed=0).of(1)]
            [4, 4, 2]
            >>> list(Schedule(3, 3, seed=0, rank=1, world=2).of(1))
            [([0], 0.6666666666666666)]
        """
        order = np.random.default_rng((self.seed, epoch)).permutation(self.samples).tolist()
        for start in range(0, self.samples, self.batch):
            step = order[start : start + self.batch]
            mine = step[self.rank :: self.world]
            yield mine or step[:1], len(mine) * self.world / len(step)


def rotate(image: Tensor, labels: Tensor, degrees: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Turn an image ``(channels, *S)`` and its labels ``(*S)`` in the last two axes, about the centre.

    Images are interpolated linearly, labels by nearest neighbour. Voxels from outside the image are 0 and ignored.

    Examples:
        >>> image, labels = rotate(torch.arange(4.0).view(1, 2, 2), torch.tensor([[0, 1], [2, 3]]), 90, 255)
        >>> image, labels
        (tensor([[[1., 3.], [0., 2.]]]), tensor([[1, 3], [0, 2]]))
    """
    height, width = labels.shape[-2:]
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # Coordinates run from -1 to 1 along both axes, so the rotation needs the aspect ratio.
    turn = torch.tensor([[[cosine, -sine * height / width, 0.0], [sine * width / height, cosine, 0.0]]])
    grid = F.affine_grid(turn, [1, 1, height, width], align_corners=False)
    flat = image.reshape(1, -1, height, width)
    turned = F.grid_sample(flat, grid, mode="bilinear", align_corners=False).view(image.shape)
    # Rotation fills in zeros from outside the image, so the ignored label is shifted to 0 meanwhile.
    shifted = (labels - ignore_index).float().reshape(1, -1, height, width)
    moved = F.grid_sample(shifted, grid, mode="nearest", align_corners=False)
    return turned, moved.long().view(labels.shape) + ignore_index


def _crop(
    image: Tensor, labels: Tensor, size: Sequence[int], ignore_index: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    start = [int(rng.integers(max(0, have - want) + 1)) for have, want in zip(labels.shape, size, strict=True)]
    part = tuple(slice(first, first + want) for first, want in zip(start, size, strict=True))
    channels_too = (slice(None), *part)
    return pad_end(image[channels_too], size), pad_end(labels[part], size, value=ignore_index)


def _view(image: Tensor, rng: np.random.Generator) -> Tensor:
    """A random change of contrast, brightness and noise, in units of the normalised image's standard deviation."""
    contrast, brightness = rng.uniform(0.8, 1.2), rng.uniform(-0.2, 0.2)
    noise = torch.from_numpy(rng.normal(0, 0.1, image.shape).astype(np.float32))
    return image * contrast + brightness + noise
