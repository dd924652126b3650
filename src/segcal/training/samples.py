"""From scans to batches: slices, crops, augmentation. Randomness depends on seed, epoch and sample index only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils import data

from segcal.training.config import TrainingConfig
from segcal.training.data import HeldScan, Scan
from segcal.training.segmenter import pad_end

# Largest angle of the rotation augmentation.
MOST_DEGREES = 15.0
# Largest factor of the scale augmentation; the smallest is its inverse.
MOST_SCALE = 2.0
# Largest factor of the contrast augmentation (the smallest is its inverse), and shift, in standard deviations.
MOST_CONTRAST, MOST_SHIFT = 1.5, 0.5
# Steps whose random numbers are drawn ahead of time.
_AHEAD = 4


class Batch(NamedTuple):
    """``images (V B, channels, *S)``, all first views before all second ones, and labels ``(V B, *S)``."""

    images: Tensor
    labels: Tensor


class View(NamedTuple):
    """A change of contrast, brightness and noise, in units of the normalised image's standard deviation."""

    contrast: float
    brightness: float
    noise: NDArray[np.float32]


class Draw(NamedTuple):
    """All that is random about a sample: where the crop starts, its size, how it is moved and recoloured, and views."""

    start: tuple[int, ...] | None
    window: tuple[int, ...]
    flips: tuple[int, ...]
    degrees: float | None
    contrast: tuple[tuple[float, float], ...] | None  # of each channel: a factor and a shift
    views: tuple[View, ...]


@dataclass
class Samples(data.Dataset[Batch]):
    """The training samples of an epoch: images, slices of volumes (``dims`` 2), or volumes (``dims`` 3).

    ``samples[[3, 1]]`` is the batch of these two. Scans that are held on a device give batches there.

    Args:
        scans: The training scans.
        config: Its ``dims`` is the number of spatial axes of a sample, its ``seed`` that of augmentation and cropping.
            ``augment``: ``flip`` mirrors each in-plane axis with probability 1/2, ``mirror`` only the last one;
            ``rotate`` rotates half of the samples in the plane, by up to 15 degrees; ``scale`` enlarges by a factor
            from 1/2 to 2, all equally likely in the logarithm; ``contrast`` changes half of the samples: the contrast
            of each channel by a factor from 2/3 to 3/2, its brightness by up to half a standard deviation. ``crop`` is
            the size of a sample, cropped at random or padded with ignored voxels.
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

    def __getitem__(self, chosen: Sequence[int]) -> Batch:
        return self.assemble(chosen, [self.draw(index) for index in chosen])

    def batches(self, steps: Sequence[Sequence[int]], *, pin: bool) -> Iterator[Batch]:
        """The batch of every step of an epoch. Held scans need no loader, only random numbers ahead of time."""
        if not all(isinstance(scan, HeldScan) for scan in self.scans):
            yield from data.DataLoader(
                self,
                sampler=steps,  # type: ignore[arg-type, unused-ignore]
                batch_size=None,
                num_workers=self.config.workers,
                pin_memory=pin,
                generator=torch.Generator(),  # Otherwise every epoch would draw from the global generator.
            )
            return
        waiting: deque[tuple[Sequence[int], Future[list[Draw]]]] = deque()
        with ThreadPoolExecutor(1, "segcal-draws") as thread:
            for chosen in steps:
                waiting.append((chosen, thread.submit(lambda some: [self.draw(index) for index in some], chosen)))
                if len(waiting) > _AHEAD:
                    ready, draws = waiting.popleft()
                    yield self.assemble(ready, draws.result())
            for ready, draws in waiting:
                yield self.assemble(ready, draws.result())

    def draw(self, index: int) -> Draw:
        """The random numbers of a sample in this epoch."""
        scan, config = self.index[index][0], self.config
        rng = np.random.default_rng((config.seed, self.epoch, index))
        size, start = scan.spatial[-config.dims :], None
        window: tuple[int, ...] = size
        if config.crop is not None:
            factor = MOST_SCALE ** rng.uniform(-1, 1) if "scale" in config.augment else 1.0
            window = tuple(max(1, round(want / factor)) for want in config.crop)
            start = tuple(int(rng.integers(max(0, have - want) + 1)) for have, want in zip(size, window, strict=True))
            size = config.crop
        axes = (-1, -2) if "flip" in config.augment else (-1,) if "mirror" in config.augment else ()
        flips = tuple(axis for axis in axes if rng.random() < 0.5)
        turned = "rotate" in config.augment and rng.random() < 0.5
        degrees = rng.uniform(-MOST_DEGREES, MOST_DEGREES) if turned else None
        changes = None
        if "contrast" in config.augment and rng.random() < 0.5:
            pairs = rng.uniform(-1, 1, (scan.channels, 2)).tolist()
            changes = tuple((MOST_CONTRAST**gain, MOST_SHIFT * shift) for gain, shift in pairs)
        count = 0 if self.views == 1 else self.views
        views = tuple(
            View(rng.uniform(0.8, 1.2), rng.uniform(-0.2, 0.2), _noise(rng, (scan.channels, *size)))
            for _ in range(count)
        )
        return Draw(start, window, flips, degrees, changes, views)

    def assemble(self, chosen: Sequence[int], draws: Sequence[Draw]) -> Batch:
        """The batch of some samples with given random numbers; smaller samples are padded with ignored voxels."""
        samples = [self._cropped(*self._read(index), draw) for index, draw in zip(chosen, draws, strict=True)]
        by_size: dict[tuple[int, ...], list[int]] = {}
        for place, (_, labels) in enumerate(samples):
            by_size.setdefault(labels.shape, []).append(place)
        most = [max(sizes) for sizes in zip(*by_size, strict=True)]
        images: dict[int, Tensor] = {}
        maps: dict[int, Tensor] = {}
        for places in by_size.values():
            views, labels = augmented(
                torch.stack([samples[place][0] for place in places]),
                torch.stack([samples[place][1] for place in places]).long(),
                [draws[place] for place in places],
                self.ignore_index,
            )
            images |= zip(places, pad_end(views, most).unbind(1), strict=True)
            maps |= zip(places, pad_end(labels, most, value=self.ignore_index), strict=True)
        order = range(len(samples))
        return Batch(
            torch.stack([images[place] for place in order], 1).flatten(0, 1),
            torch.stack([maps[place] for place in order]).repeat(self.views, *(1,) * self.config.dims),
        )

    def _read(self, index: int) -> tuple[Tensor, Tensor]:
        """A normalised image ``(channels, *S)`` and its labels ``(*S)``."""
        scan, rows = self.index[index]
        image, labels = scan.normalised(rows), scan.labels(rows)
        return (image[:, 0], labels[0]) if len(scan.spatial) > self.config.dims else (image, labels)

    def _cropped(self, image: Tensor, labels: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        size = self.config.crop
        if draw.start is None or size is None:
            return image, labels
        part = tuple(slice(first, first + want) for first, want in zip(draw.start, draw.window, strict=True))
        channels_too = (slice(None), *part)
        image = pad_end(image[channels_too], draw.window)
        labels = pad_end(labels[part], draw.window, value=self.ignore_index)
        return (image, labels) if draw.window == size else resized(image, labels, size)


def borders_note(scans: Sequence[tuple[int, ...]], config: TrainingConfig, multiple: int) -> tuple[str, ...]:
    """A note if samples are padded at their ends: where a scan ends without padding, the network would fail.

    Args:
        scans: The sizes of the training scans.
        config: ``dims``, ``crop`` and ``batch`` count.
        multiple: The network pads what is no multiple of this.

    Examples:
        >>> config = TrainingConfig(data="a", output="b", batch=4)
        >>> borders_note([(50, 40), (44, 48)], config, 8)
        ('samples differ in size and are padded at their ends: give crop = [40, 40] or batch = 1',)
        >>> borders_note([(50, 40), (50, 40)], config, 8)
        ()
    """
    sizes = {size[-config.dims :] for size in scans}
    if config.crop is not None and any(size % multiple for size in config.crop):
        return (f"crop = {list(config.crop)} is padded at its ends: give multiples of {multiple}",)
    if config.crop is None and config.batch > 1 and len(sizes) > 1:
        fits = [max(1, min(axis) // multiple) * multiple for axis in zip(*sizes, strict=True)]
        return (f"samples differ in size and are padded at their ends: give crop = {fits} or batch = 1",)
    return ()


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


def augmented(images: Tensor, labels: Tensor, draws: Sequence[Draw], ignore_index: int) -> tuple[Tensor, Tensor]:
    """Views ``(V, B, channels, *S)`` of images ``(B, channels, *S)``, and the labels ``(B, *S)`` moved as they are.

    One code for all devices; on a GPU nothing here waits for it.
    """
    device, one_each = images.device, (-1, *(1,) * (labels.ndim - 1))
    for axis in (-1, -2):
        if any(axis in draw.flips for draw in draws):
            flip = _on([axis in draw.flips for draw in draws], device).view(one_each)
            images = torch.where(flip.unsqueeze(1), images.flip(axis), images)
            labels = torch.where(flip, labels.flip(axis), labels)
    if degrees := {place: draw.degrees for place, draw in enumerate(draws) if draw.degrees is not None}:
        turned = _on(list(degrees), device)
        parts = rotate(images[turned], labels[turned], list(degrees.values()), ignore_index)
        images, labels = (
            whole.index_copy(0, turned, part) for whole, part in zip((images, labels), parts, strict=True)
        )
    if any(draw.contrast for draw in draws):
        same = ((1.0, 0.0),) * images.shape[1]
        changes = _on([draw.contrast or same for draw in draws], device).view(*images.shape[:2], 2, *one_each[1:])
        images = images * changes[:, :, 0] + changes[:, :, 1]
    if not draws[0].views:
        return images[None], labels
    views = []
    for each in zip(*(draw.views for draw in draws), strict=True):
        contrast = _on([view.contrast for view in each], device).view(one_each).unsqueeze(1)
        brightness = _on([view.brightness for view in each], device).view(one_each).unsqueeze(1)
        views.append(images * contrast + brightness + _on(np.stack([view.noise for view in each]), device))
    return torch.stack(views), labels


def resized(image: Tensor, labels: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """An image ``(channels, *S)`` and its labels ``(*S)`` in another size: interpolated linearly, and the nearest.

    Examples:
        >>> resized(torch.tensor([[[0.0, 4.0]]]), torch.tensor([[0, 1]]), (1, 4))
        (tensor([[[0., 1., 3., 4.]]]), tensor([[0, 0, 1, 1]]))
    """
    mode = "bilinear" if labels.ndim == 2 else "trilinear"
    scaled = F.interpolate(image[None], tuple(size), mode=mode, align_corners=False)[0]
    moved = F.interpolate(labels[None, None].double(), tuple(size), mode="nearest-exact")[0, 0]  # any label is exact
    return scaled, moved.to(labels.dtype)


def rotate(images: Tensor, labels: Tensor, degrees: Sequence[float], ignore_index: int) -> tuple[Tensor, Tensor]:
    """Turn images ``(B, channels, *S)`` and their labels ``(B, *S)`` in the last two axes, about the centre.

    Images are interpolated linearly, labels by nearest neighbour. Voxels from outside the image are 0 and ignored.

    Examples:
        >>> image, labels = rotate(torch.arange(4.0).view(1, 1, 2, 2), torch.tensor([[[0, 1], [2, 3]]]), [90], 255)
        >>> image, labels
        (tensor([[[[1., 3.], [0., 2.]]]]), tensor([[[1, 3], [0, 2]]]))
    """
    count, height, width = len(labels), *labels.shape[-2:]
    angles = [(math.cos(math.radians(angle)), math.sin(math.radians(angle))) for angle in degrees]
    # Coordinates run from -1 to 1 along both axes, so the rotation needs the aspect ratio.
    turns = [[[c, -s * height / width, 0.0], [s * width / height, c, 0.0]] for c, s in angles]
    grid = F.affine_grid(_on(turns, images.device), [count, 1, height, width], align_corners=False)
    flat = images.reshape(count, -1, height, width)
    turned = F.grid_sample(flat, grid, mode="bilinear", align_corners=False).view(images.shape)
    # Rotation fills in zeros from outside the image, so meanwhile 0 is ignored and classes count from 1.
    counted = torch.where(labels == ignore_index, 0, labels + 1).float().reshape(count, -1, height, width)
    moved = F.grid_sample(counted, grid, mode="nearest", align_corners=False).long().view(labels.shape) - 1
    return turned, torch.where(moved < 0, ignore_index, moved)


def _noise(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    noise: NDArray[np.float32] = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
    return noise


def _on(values: Sequence[object] | NDArray[np.float32], device: torch.device) -> Tensor:
    """Values as a tensor on a device; a GPU fetches them from pinned memory in its own time."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
