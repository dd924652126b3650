"""One scene: a posterior, labels drawn from it, an image of it, and the faulty logits of a network."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import log_ndtr, log_softmax
from torch import Tensor

from segcal.errors import InputError, check_seed, check_whole
from segcal.scores import pool
from segcal.synthetic.plants import Plant, check_positive, check_range
from segcal.synthetic.shapes import Array, Grid, log_posterior

IGNORE_INDEX = 255
VOLUME_SPACING = (2.0, 1.0, 1.0)

# Each ingredient has its own random stream, so changing one (such as the plant) leaves the others unchanged.
_WORLD, _LABELS, _IMAGE, _PLANTS, _MEMBERS, _IGNORED, _SHIFT = range(1, 8)


@dataclass(frozen=True)
class Scene:
    """The tensors of one scene, without a batch axis.

    ``posterior (C, *S)`` is the distribution ``labels (*S)`` were drawn from; ``logits (C, *S)`` are the network's
    (pooled over ``members``, if any); ``temperature (*S)`` is the product of the planted temperatures, or None;
    ``image (channels, *S)`` is in [0, 1], three channels in 2D and one in 3D.
    """

    posterior: Tensor
    labels: Tensor
    image: Tensor
    logits: Tensor
    temperature: Tensor | None
    members: tuple[Tensor, ...]


@dataclass(frozen=True)
class SceneSpec:
    """The parameters of a family of scenes; ``segcal.synthetic.scenes`` explains them.

    Examples:
        >>> scene = SceneSpec(size=(32, 40)).generate(3)
        >>> scene.posterior.shape, scene.labels.shape, scene.image.shape
        (torch.Size([6, 32, 40]), torch.Size([32, 40]), torch.Size([3, 32, 40]))
    """

    size: tuple[int, ...] = (128, 160)
    num_classes: int = 6
    seed: int = 0
    plant: tuple[Plant, ...] = ()
    coherence: float = 2.0
    members: int | None = None
    member_noise: float = 1.0
    shift: float = 0.0
    ignored: float = 0.0

    def __post_init__(self) -> None:
        if len(self.size) not in (2, 3):
            raise InputError(f"size is {self.size}", expected="(height, width) or (depth, height, width)")
        for name, length in zip(("width", "height", "depth"), reversed(self.size), strict=False):
            check_whole(f"the {name} in size", length, 1 if name == "depth" else 8)
        check_whole("num_classes", self.num_classes, 2, IGNORE_INDEX)
        check_seed(self.seed)
        check_range("coherence", self.coherence, 1e6, "a length in voxels")
        if self.members is not None:
            check_whole("members", self.members, 1)
        check_positive("member_noise", self.member_noise)
        check_range("shift", self.shift, 1, "a strength")
        check_range("ignored", self.ignored, 1, "a share of the voxels")
        for plant in self.plant:
            if not isinstance(plant, Plant):
                raise InputError(f"plant holds {plant!r}", expected="plants such as Temperature(2.0)")
            plant.check(self.num_classes)

    @property
    def spacing(self) -> tuple[float, ...] | None:
        """The voxel size of volumes, which have thick slices; None for images."""
        return VOLUME_SPACING if len(self.size) == 3 else None

    @cached_property
    def grid(self) -> Grid:
        """The voxel grid."""
        return Grid(self.size, self.spacing or (1.0, 1.0))

    def generate(self, index: int) -> Scene:
        """The scene with this index. It depends on the parameters and the index only."""
        belief = log_posterior(self.grid, self.num_classes, self._rng(_WORLD, index))
        truth = self._shifted(belief)
        logits, temperature = self._planted(belief, index)
        members = self._members(logits, index)
        posterior = np.exp(truth)
        labels = draw_labels(posterior, self.coherence, self._rng(_LABELS, index), spacing=self.grid.spacing)
        labels[self.grid.patches(self._rng(_IGNORED, index), self.ignored, 0.05 * self.grid.scale)] = IGNORE_INDEX
        return Scene(
            posterior=_float(posterior),
            labels=torch.from_numpy(labels),
            image=_float(_image(self.grid, np.exp(belief), self.shift, self._rng(_IMAGE, index))),
            logits=pool([member[None] for member in members], "logits")[0] if members else _float(logits),
            temperature=None if temperature is None else _float(temperature),
            members=members,
        )

    def _rng(self, ingredient: int, *key: int) -> np.random.Generator:
        return np.random.default_rng([ingredient, self.seed, *key])

    def _shifted(self, belief: Array) -> Array:
        """The posterior after a covariate shift, ``S(log p / (1 + s) + s b)``: flatter, with another class prior."""
        if self.shift == 0:
            return belief
        prior = self._rng(_SHIFT).uniform(-1, 1, self.num_classes).reshape(-1, *[1] * len(self.size))
        truth: Array = log_softmax(belief / (1 + self.shift) + self.shift * prior, axis=0)
        return truth

    def _planted(self, logits: Array, index: int) -> tuple[Array, Array | None]:
        temperature: Array | None = None
        for position, plant in enumerate(self.plant):
            logits, factor = plant.apply(logits, self.grid, self._rng(_PLANTS, index, position))
            if factor is not None:
                temperature = factor * (np.ones(self.size) if temperature is None else temperature)
        return logits, temperature

    def _members(self, logits: Array, index: int) -> tuple[Tensor, ...]:
        rng = self._rng(_MEMBERS, index)
        return tuple(
            _float(logits + self.member_noise * self.grid.noise(rng, 0.02 * self.grid.scale, self.num_classes))
            for _ in range(self.members or 0)
        )


def draw_labels(
    posterior: Array, coherence: float, rng: np.random.Generator, *, spacing: tuple[float, ...] | None = None
) -> NDArray[np.int64]:
    """Labels ``(*S)`` with exactly the marginals ``posterior (C, *S)``, correlated over ``coherence`` voxels.

    Gumbel-max: ``argmax_k(log p_k + G_k)`` is k with probability p_k if the G_k of a voxel are independent standard
    Gumbel variables. Here ``G = -log(-log Phi(x))`` of a smooth field x that is N(0, 1) at every voxel, so labels
    change along organic lines, as an annotator's do. ``coherence=0`` draws every voxel independently.

    Examples:
        >>> draw_labels(np.full((2, 1, 4), [[[0.0] * 4], [[1.0] * 4]]), 2.0, np.random.default_rng(0))
        array([[1, 1, 1, 1]])
    """
    size = posterior.shape[1:]
    normal = Grid(size, spacing or (1.0,) * len(size)).noise(rng, coherence, len(posterior))
    with np.errstate(divide="ignore"):  # log 0 = -inf: an impossible class never wins.
        score = np.log(posterior) - np.log(-log_ndtr(normal))
    labels: NDArray[np.int64] = score.argmax(0)
    return labels


def _image(grid: Grid, posterior: Array, shift: float, rng: np.random.Generator) -> Array:
    """An image ``(channels, *S)``: each class has its own colour and grain, mixed by the posterior, with uneven light.

    A covariate shift lowers the contrast and adds noise.
    """
    volume = len(grid.size) == 3
    palette = _palette(len(posterior), volume) + 0.02 * rng.standard_normal((len(posterior), 1))
    grain = rng.uniform(0.015, 0.05, len(posterior))
    image = np.tensordot(palette.T, posterior, 1)
    image += grid.texture(rng, 0.9)[0] * np.tensordot(grain, posterior, 1)
    image *= 1 + 0.07 * grid.texture(rng, 0.2 * grid.scale)[0]
    image += (0.015 + 0.1 * shift) * rng.standard_normal(image.shape)
    return np.clip(0.5 + (1 - 0.5 * shift) * (image - 0.5), 0, 1)


def _palette(count: int, grey: bool) -> Array:
    """``(count, channels)`` distinct colours: hues (or greys) a golden angle apart, with alternating lightness."""
    turns = [0.382 * k % 1 for k in range(count)]
    if grey:
        return np.array([[0.15 + 0.7 * turn] for turn in turns])
    light = (0.3, 0.6, 0.48)
    return np.array([colorsys.hls_to_rgb((0.58 + turn) % 1, light[k % 3], 0.36) for k, turn in enumerate(turns)])


def _float(array: Array) -> Tensor:
    return torch.from_numpy(array.astype(np.float32))
