"""Planted miscalibrations: each turns calibrated logits into those of a network with one known fault.

A plant maps logits ``z (C, *size)`` to faulty ones, in float64. Plants are applied in order, starting at ``z = log p``.
Each docstring names the calibrator (ids of METHODS.md) whose best fit undoes the fault exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from segcal.errors import InputError
from segcal.synthetic.shapes import Array, Grid

# Smallest scale or temperature; below it, float32 logits would overflow.
SMALLEST = 1e-3

# Faulty logits, and the temperature that the logits were multiplied with, or None for other faults.
Planted = tuple[Array, Array | float | None]


@runtime_checkable
class Plant(Protocol):
    """A miscalibration."""

    def check(self, num_classes: int) -> None:
        """Raise ``segcal.errors.InputError`` unless the parameters are valid; by default, all must be positive."""
        for name, value in asdict(self).items():  # type: ignore[call-overload]
            check_positive(f"{type(self).__name__}.{name}", value)

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> Planted:
        """The faulty logits and the temperature, if any. ``rng`` is used by this plant and case only."""


@dataclass(frozen=True)
class Temperature(Plant):
    """Global over- (T > 1) or underconfidence (T < 1): ``z' = T z``. ``ts`` recovers T.

    Examples:
        >>> import numpy as np
        >>> grid = Grid((8, 8), (1.0, 1.0))
        >>> float(Temperature(2.0).apply(np.ones((3, 8, 8)), grid, np.random.default_rng(0))[0].max())
        2.0
    """

    value: float = 2.0

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> Planted:
        """``T z``."""
        return self.value * logits, self.value


@dataclass(frozen=True)
class ImageTemperature(Plant):
    """One temperature per image, log-normal: ``z' = T_i z``, ``T_i = median * exp(spread * N(0, 1))``.

    ``ibts`` recovers the T_i: log-probabilities have the same lower bound in all scenes, so the range of the logits
    reveals T_i.
    """

    median: float = 1.5
    spread: float = 0.4

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> Planted:
        """``T_i z``."""
        temperature = self.median * math.exp(self.spread * rng.standard_normal())
        return temperature * logits, temperature


@dataclass(frozen=True)
class SpatialTemperature(Plant):
    """Overconfidence at boundaries: ``z' = T(v) z``, ``T(v) = far + (near - far) exp(-d(v) / reach)``.

    ``d`` is the distance to the boundaries of the argmax map (in the unit of the spacing), which can be seen in the
    logits around a voxel. ``lts-ti`` recovers T(v).
    """

    near: float = 3.0
    far: float = 1.2
    reach: float = 4.0

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> Planted:
        """``T(v) z``."""
        distance = grid.boundary_distance(logits.argmax(0))
        temperature = self.far + (self.near - self.far) * np.exp(-distance / self.reach)
        return temperature * logits, temperature


@dataclass(frozen=True)
class ClassAffine(Plant):
    """A scale and a bias per class: ``z' = (z - b) / a``. ``vs`` recovers a and b; the argmax may change.

    An offset common to all classes changes the result, so put this plant before ``GaugeOffsets``.
    """

    scales: Sequence[float]
    biases: Sequence[float]

    def check(self, num_classes: int) -> None:
        """One positive scale and one bias for each class."""
        check_per_class("ClassAffine.scales", self.scales, num_classes, least=SMALLEST)
        check_per_class("ClassAffine.biases", self.biases, num_classes)

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> Planted:
        """``(z - b) / a``."""
        column = (-1, *[1] * len(grid.size))
        scales, biases = (np.reshape(values, column) for values in (self.scales, self.biases))
        return (logits - biases) / scales, None


@dataclass(frozen=True)
class ClassConditional(Plant):
    """Confidence that depends on the winning class c: margins ``m_k = z_c - z_k`` become ``T_c m_k + o_c``, o_c >= 0.

    The argmax stays, so a calibrator with one expert per predicted class uses the right experts: ``cdc`` recovers T and
    o. With all offsets 0, ``cms-ap`` and ``cms-op`` do too; their offsets are non-negative, so they cannot undo a
    positive one.
    """

    temperatures: Sequence[float]
    offsets: Sequence[float] | None = None

    def check(self, num_classes: int) -> None:
        """One positive temperature and, if given, one non-negative offset for each class."""
        check_per_class("ClassConditional.temperatures", self.temperatures, num_classes, least=SMALLEST)
        if self.offsets is not None:
            check_per_class("ClassConditional.offsets", self.offsets, num_classes, least=0)

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> Planted:
        """``z_c - (T_c (z_c - z_k) + o_c [k != c])``."""
        winner, best = logits.argmax(0), logits.max(0)
        faulty = best - np.asarray(self.temperatures)[winner] * (best - logits)
        if self.offsets is not None:
            faulty -= np.asarray(self.offsets)[winner]
            np.put_along_axis(faulty, winner[None], best[None], 0)
        return faulty, None


@dataclass(frozen=True)
class ConfidentlyWrong(Plant):
    """Patches (a ``share`` of the voxels) where winner k is taken for class k+1 (mod C): their logits are swapped.

    All logits there are multiplied by ``depth``, as a network's are outside of its training distribution, but it is
    still sure of the wrong class. The posterior is unchanged. No monotone map can undo this; ``selective`` recognises
    the patches by their smaller logits and flattens the probabilities there.
    """

    share: float = 0.1
    depth: float = 0.5

    def check(self, num_classes: int) -> None:
        """The share is from 0 to 1, the depth positive."""
        check_range("ConfidentlyWrong.share", self.share, 1, "a share of the voxels")
        check_positive("ConfidentlyWrong.depth", self.depth)

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> Planted:
        """``depth * z`` with ``z_k`` and ``z_{k+1}`` swapped inside the patches."""
        winner = logits.argmax(0)[None]
        wrong = (winner + 1) % len(logits)
        faulty = self.depth * logits
        ahead, behind = (np.take_along_axis(faulty, index, 0) for index in (winner, wrong))
        np.put_along_axis(faulty, wrong, ahead, 0)
        np.put_along_axis(faulty, winner, behind, 0)
        return np.where(grid.patches(rng, self.share, 0.05 * grid.scale), faulty, logits), None


@dataclass(frozen=True)
class GaugeOffsets(Plant):
    """A smooth random offset common to all classes: ``z' = z + amplitude * g(v)``, g of variance 1.

    The softmax is unchanged, so there is nothing to undo. Calibrators of raw logits (``lts``, ``vs``, ``ms``) suffer.
    """

    amplitude: float = 5.0
    smoothness: float = 8.0

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> Planted:
        """``z + amplitude * g(v)``."""
        return logits + self.amplitude * grid.noise(rng, self.smoothness), None


def demo_plant(num_classes: int) -> tuple[Plant, ...]:
    """The fault of the demo's network: overconfident, more at boundaries and for some classes, with common offsets."""
    return (
        ClassConditional(tuple(1.0 + 0.6 * k / (num_classes - 1) for k in range(num_classes))),
        SpatialTemperature(near=2.4, far=1.2, reach=4.0),
        GaugeOffsets(amplitude=1.5),
    )


def check_positive(name: str, value: float) -> None:
    """Raise unless a value is positive and finite."""
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{name} is {value!r}", expected="a positive number")


def check_range(name: str, value: float, most: float, meaning: str) -> None:
    """Raise unless a value is from 0 to ``most``."""
    if not 0 <= value <= most:
        raise InputError(f"{name} is {value!r}", expected=f"{meaning}, from 0 to {most:g}")


def check_per_class(name: str, values: Sequence[float], num_classes: int, least: float = -math.inf) -> None:
    """Raise unless there is one finite number of at least ``least`` for each class."""
    if len(values) != num_classes:
        raise InputError(f"{name} has {len(values)} values", expected=f"{num_classes}, one for each class")
    if not all(math.isfinite(value) and value >= least for value in values):
        floor = "" if least == -math.inf else f" of at least {least:.3g}"
        raise InputError(f"{name} are {tuple(values)}", expected=f"finite numbers{floor}")
