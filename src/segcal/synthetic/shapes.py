"""The shapes of a scene: territories, nested blobs, thin branches and a rare speck, as a posterior over classes.

Shapes, label noise, textures and offsets are made from Gaussian random fields on a voxel ``Grid``.

Every shape has a signed distance ``s`` to its edge, positive inside, and an edge width ``w`` that varies over the
scene. It covers a voxel with probability ``sigmoid(s / w)``, and shapes are laid over each other in turn. So some edges
are sharp, others are wide and uncertain, and every voxel has a distribution over classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import fft, ndimage
from scipy.special import log_softmax

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


# Bound of -log p in nats: it saturates far inside a region, as the logits of trained networks do.
DEEPEST_SURPRISE = 12.0
# Share of the scenes that hold the rare class.
RARE_SCENES = 1 / 3


def log_posterior(grid: Grid, num_classes: int, rng: np.random.Generator) -> Array:
    """Log-probabilities ``(C, *size)`` of one random scene, float64.

    Class 0 is the surroundings. From three classes on there is a class of thin branches and from four on, as the last
    class, a rare speck that exists in a third of the scenes; the other classes are territories and (nested) blobs.
    """
    thin = num_classes - 2 if num_classes > 3 else (2 if num_classes == 3 else None)
    rare = num_classes - 1 if num_classes > 3 else None
    broad = num_classes - (thin is not None) - (rare is not None)
    territories = 1 + (broad - 1) // 2
    # The median edge is half a voxel wide in the demo; a sixth of the edges is more than twice as wide.
    width = 0.1 * np.sqrt(grid.scale / num_classes) * np.exp(0.75 * grid.texture(rng, 0.1 * grid.scale)[0])

    log_p = np.full((num_classes, *grid.size), -np.inf)
    log_p[:territories] = _territories(grid, territories, rng) / width
    log_p[:territories] = log_softmax(log_p[:territories], axis=0)
    inside: Array | None = None
    for blob in range(territories, broad):
        # Every second blob class lies inside the one before, like a core in a shell.
        nested = inside if (blob - territories) % 2 else None
        inside = _blobs(grid, nested, rng)
        _cover(log_p, blob, inside / width)
    if thin is not None:
        _cover(log_p, thin, _branches(grid, rng) / np.clip(0.3 * width, 0.25, 0.6))
    if rare is not None and rng.random() < RARE_SCENES:
        _cover(log_p, rare, _speck(grid, rng) / np.clip(0.4 * width, 0.3, 1.0))

    surprise = DEEPEST_SURPRISE * np.expm1(log_p / DEEPEST_SURPRISE)
    surprise += 0.2 * grid.noise(rng, 0.04 * grid.scale, num_classes)
    result: Array = log_softmax(surprise, axis=0)
    return result


def _cover(log_p: Array, layer: int, log_odds: Array) -> None:
    """Lay a class over the others, in place: p <- (1 - a) p + a e_layer with a = sigmoid(log_odds)."""
    log_p -= np.logaddexp(0, log_odds)
    log_p[layer] = np.logaddexp(log_p[layer], -np.logaddexp(0, -log_odds))


def _territories(grid: Grid, count: int, rng: np.random.Generator) -> Array:
    """``count`` fields, the largest of which wins a voxel; their differences approximate distances to the edge."""
    coarse = 0.16 * grid.scale
    field = grid.texture(rng, coarse, count) + 0.12 * grid.texture(rng, 0.25 * coarse, count)
    field[0] += 0.4
    return 0.9 * coarse * field


def _blobs(grid: Grid, within: Array | None, rng: np.random.Generator) -> Array:
    """Signed distance to the union of one to three deformed ellipsoids, or to the cores of the blobs ``within``."""
    wobble = 0.03 * grid.scale * grid.texture(rng, 0.05 * grid.scale)[0]
    if within is not None:
        depth = max(float(within.max()), 1.0)
        core: Array = within - rng.uniform(0.35, 0.55) * depth + 0.6 * wobble
        return core
    union = np.full(grid.size, -np.inf)
    for _ in range(_crowd(grid) * int(rng.integers(1, 4))):
        centre = rng.uniform(0.15, 0.85, len(grid.size)) * grid.extent
        radii = _roundness(grid) * rng.uniform(0.1, 0.22, len(grid.size))
        turn = np.linalg.qr(rng.standard_normal((len(radii), len(radii))))[0]
        reach = np.linalg.norm((grid.points() - centre) @ turn / radii, axis=-1)
        union = np.maximum(union, (1 - reach) * radii.min())
    union += wobble
    return union


def _crowd(grid: Grid) -> int:
    """The factor by which a volume has more shapes than an image, as a slice cuts only some of them."""
    return 3 if len(grid.size) == 3 else 1


def _roundness(grid: Grid) -> float:
    """The unit of radii, larger in volumes, as a ball covers a smaller share of a volume than a disc of a plane."""
    return grid.scale * (1.25 if len(grid.size) == 3 else 1.0)


def _speck(grid: Grid, rng: np.random.Generator) -> Array:
    """Signed distance to one small round shape."""
    centre = rng.uniform(0.1, 0.9, len(grid.size)) * grid.extent
    radius = max(_roundness(grid) * rng.uniform(0.025, 0.055), 1.0)
    wobble = 0.3 * radius * grid.texture(rng, 0.03 * grid.scale)[0]
    distance: Array = radius + wobble - np.linalg.norm(grid.points() - centre, axis=-1)
    return distance


def _branches(grid: Grid, rng: np.random.Generator) -> Array:
    """Signed distance to one or two tapering curves across the scene, each with side branches; 1 to 4 voxels wide."""
    curves = []
    for _ in range(_crowd(grid) * int(rng.integers(1, 3))):
        start, end = rng.uniform(0.05, 0.95, (2, len(grid.size))) * grid.extent
        side = len(grid.size) - 1 - rng.integers(2)
        start[side], end[side] = 0.0, grid.extent[side]
        radius = rng.uniform(1.1, 2.0)
        trunk = _curve(grid, start, end, radius, 0.75 * radius, rng)
        curves.append(trunk)
        for _ in range(rng.integers(1, 4)):
            root = trunk[rng.integers(len(trunk) // 8, 7 * len(trunk) // 8)]
            tip = root[:-1] + 0.35 * grid.scale * rng.standard_normal(len(grid.size))
            curves.append(_curve(grid, root[:-1], tip, 0.75 * root[-1], 0.5, rng))
    points = np.concatenate(curves)
    tangents = np.concatenate([np.gradient(curve[:, :-1], axis=0) for curve in curves])
    tangents /= np.maximum(np.linalg.norm(tangents, axis=1, keepdims=True), 1e-12)

    # The nearest curve point is found on the voxel grid; the distance to its tangent is then exact within voxels.
    spacing = np.array(grid.spacing)
    cells = np.rint(points[:, :-1] / spacing).astype(int)
    visible = ((cells >= 0) & (cells < grid.size)).all(1)
    points, tangents, cells = points[visible], tangents[visible], cells[visible]
    owner = np.full(grid.size, -1)
    owner[tuple(cells.T)] = np.arange(len(points))
    nearest = ndimage.distance_transform_edt(owner < 0, grid.spacing, return_distances=False, return_indices=True)
    owner = owner[tuple(nearest)]
    offset = grid.points() - points[owner, :-1]
    along = np.clip((offset * tangents[owner]).sum(-1, keepdims=True), -1, 1)
    distance: Array = points[owner, -1] - np.linalg.norm(offset - along * tangents[owner], axis=-1)
    return distance


def _curve(grid: Grid, start: Array, end: Array, thick: float, thin: float, rng: np.random.Generator) -> Array:
    """Points ``(n, dims + 1)`` of a winding curve, half a unit apart or less; the last column is the radius."""
    length = float(np.linalg.norm(end - start))
    t = np.linspace(0, 1, int(4 * length) + 8)[:, None]
    # Sines are 0 at both ends, so branches start on their trunk.
    waves = np.sin(np.pi * t * np.arange(1, 6))
    bends = rng.standard_normal((5, len(start))) * (0.1 * length / np.arange(1, 6))[:, None]
    return np.hstack([start + (end - start) * t + waves @ bends, thick + (thin - thick) * t])
