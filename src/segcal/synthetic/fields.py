"""Gaussian random fields on a voxel grid, from which shapes, label noise, textures and offsets are made."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import fft, ndimage

from segcal.regions.boundary import label_boundary

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Grid:
    """A voxel grid and the size of its voxels. All lengths are in the unit of the spacing."""

    size: tuple[int, ...]
    spacing: tuple[float, ...]

    @property
    def extent(self) -> Array:
        """The position of the last voxel's centre."""
        return np.array([(n - 1) * step for n, step in zip(self.size, self.spacing, strict=True)])

    @property
    def scale(self) -> float:
        """The in-plane width (geometric mean of the last two sides). Shapes scale with it, so scenes look alike."""
        return float(np.sqrt(prod(self.size[-2:]) * prod(self.spacing[-2:])))

    def points(self) -> Array:
        """The positions ``(*size, dims)`` of the voxel centres."""
        steps = [np.arange(n) * step for n, step in zip(self.size, self.spacing, strict=True)]
        return np.stack(np.meshgrid(*steps, indexing="ij"), -1)

    def noise(self, rng: np.random.Generator, smoothness: float, count: int = 1) -> Array:
        """``count`` independent fields of smoothed white noise ``(count, *size)``, N(0, 1) at every voxel.

        The Gaussian filter (standard deviation ``smoothness``) wraps around, so the variance of the smoothed noise is
        the mean of the squared transfer function. Dividing by it makes the variance exactly 1, also near the borders.
        """
        white = rng.standard_normal((count, *self.size))
        if smoothness == 0:
            return white
        dims = tuple(range(1, white.ndim))
        spectrum = fft.rfftn(white, axes=dims)
        for axis, (n, step) in enumerate(zip(self.size, self.spacing, strict=True)):
            transfer = np.exp(-2 * (np.pi * smoothness / step * fft.fftfreq(n)) ** 2)
            transfer /= np.sqrt(np.mean(transfer**2))
            spectrum *= transfer[: spectrum.shape[axis + 1]].reshape([-1 if i == axis else 1 for i in range(len(dims))])
        field: Array = fft.irfftn(spectrum, s=self.size, axes=dims)
        return field

    def texture(self, rng: np.random.Generator, smoothness: float, count: int = 1) -> Array:
        """As ``noise``, but each field has mean 0 and variance 1 over the grid, for shapes that cover a known share."""
        field = self.noise(rng, smoothness, count)
        dims = tuple(range(1, field.ndim))
        field -= field.mean(dims, keepdims=True)
        field /= np.maximum(field.std(dims, keepdims=True), np.finfo(float).tiny)
        return field

    def patches(self, rng: np.random.Generator, share: float, smoothness: float) -> NDArray[np.bool_]:
        """A mask of smooth random regions that cover a ``share`` of the voxels, exact to one voxel."""
        field = self.noise(rng, smoothness)[0].ravel()
        chosen = np.zeros(field.size, bool)
        count = round(share * field.size)
        if count:
            chosen[np.argpartition(-field, count - 1)[:count]] = True
        return chosen.reshape(self.size)

    def boundary_distance(self, regions: NDArray[np.int64]) -> Array:
        """Distance of every voxel to the nearest one that touches another region; infinite if there is one region."""
        whole = torch.from_numpy(regions[None])
        boundary = label_boundary(whole, torch.ones_like(whole, dtype=torch.bool))[0].numpy()
        if not boundary.any():
            return np.full(self.size, np.inf)
        distance: Array = ndimage.distance_transform_edt(~boundary, sampling=self.spacing)
        return distance
