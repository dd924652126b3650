"""Planted miscalibrations: each turns honest logits into those of a network with one known fault.

A plant maps logits ``z (C, *size)`` to faulty ones, in float64; plants compose in order, starting at ``z = log p``.
Each docstring names the calibrator (ids of METHODS.md) whose best fit undoes the fault exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from segcal.synthetic import checks
from segcal.synthetic.fields import Array, Grid

# Scales and temperatures below this would take float32 logits out of range.
SMALLEST = 1e-3


@runtime_checkable
class Plant(Protocol):
    """A miscalibration."""

    def check(self, num_classes: int) -> None:
        """Raise ``segcal.errors.InputError`` where the plant does not fit the number of classes."""

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> tuple[Array, Array | float | None]:
        """The faulty logits, and the temperature the logits were multiplied with (None for other faults).

        ``rng`` belongs to this plant and case alone.
        """


@dataclass(frozen=True)
class Temperature:
    """Global over- (T > 1) or underconfidence (T < 1): ``z' = T z``. ``ts`` recovers T.

    Examples:
        >>> import numpy as np
        >>> grid = Grid((8, 8), (1.0, 1.0))
        >>> Temperature(2.0).apply(np.ones((3, 8, 8)), grid, np.random.default_rng(0))[0].max()
        np.float64(2.0)
    """

    value: float = 2.0

    def check(self, num_classes: int) -> None:
        """The temperature is positive."""
        checks.positive("Temperature.value", self.value)

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> tuple[Array, Array | float | None]:
        """``T z``."""
        return self.value * logits, self.value


@dataclass(frozen=True)
class ImageTemperature:
    """One temperature per image, log-normal: ``z' = T_i z``, ``T_i = median * exp(spread * N(0, 1))``.

    ``ibts`` recovers the T_i: surprise saturates at the same depth in all scenes, so the depth of the logits tells T_i.
    """

    median: float = 1.5
    spread: float = 0.4

    def check(self, num_classes: int) -> None:
        """Median and spread are positive."""
        checks.positive("ImageTemperature.median", self.median)
        checks.positive("ImageTemperature.spread", self.spread)

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> tuple[Array, Array | float | None]:
        """``T_i z``."""
        temperature = self.median * math.exp(self.spread * rng.standard_normal())
        return temperature * logits, temperature


@dataclass(frozen=True)
class SpatialTemperature:
    """Overconfidence at boundaries: ``z' = T(v) z``, ``T(v) = far + (near - far) exp(-d(v) / reach)``.

    ``d`` is the distance to the boundaries of the argmax map (in the unit of the spacing), which the logits around a
    voxel show; ``lts-ti`` recovers T(v).
    """

    near: float = 3.0
    far: float = 1.2
    reach: float = 4.0

    def check(self, num_classes: int) -> None:
        """Temperatures and reach are positive."""
        for name in ("near", "far", "reach"):
            checks.positive(f"SpatialTemperature.{name}", getattr(self, name))

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> tuple[Array, Array | float | None]:
        """``T(v) z``."""
        distance = grid.boundary_distance(logits.argmax(0))
        temperature = self.far + (self.near - self.far) * np.exp(-distance / self.reach)
        return temperature * logits, temperature


@dataclass(frozen=True)
class ClassAffine:
    """A scale and a bias per class: ``z' = (z - b) / a``. ``vs`` recovers a and b; the argmax may change.

    The gauge of z enters the result, so it belongs before ``GaugeOffsets``.
    """

    scales: Sequence[float]
    biases: Sequence[float]

    def check(self, num_classes: int) -> None:
        """One positive scale and one bias for each class."""
        checks.per_class("ClassAffine.scales", self.scales, num_classes, least=SMALLEST)
        checks.per_class("ClassAffine.biases", self.biases, num_classes)

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> tuple[Array, Array | float | None]:
        """``(z - b) / a``."""
        scales, biases = (_column(values, logits) for values in (self.scales, self.biases))
        return (logits - biases) / scales, None


@dataclass(frozen=True)
class ClassConditional:
    """Confidence that depends on the winning class c: margins ``m_k = z_c - z_k`` become ``T_c m_k + o_c``, o_c >= 0.

    The argmax stays, so a calibrator routed by it sees the same experts: ``cdc`` recovers T and o. With all offsets 0
    ``cms-ap`` and ``cms-op`` do too; they cannot undo a positive offset, as theirs are non-negative.
    """

    temperatures: Sequence[float]
    offsets: Sequence[float] | None = None

    def check(self, num_classes: int) -> None:
        """One positive temperature and, if any, one non-negative offset for each class."""
        checks.per_class("ClassConditional.temperatures", self.temperatures, num_classes, least=SMALLEST)
        if self.offsets is not None:
            checks.per_class("ClassConditional.offsets", self.offsets, num_classes, least=0)

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> tuple[Array, Array | float | None]:
        """``z_c - (T_c (z_c - z_k) + o_c [k != c])``."""
        winner = logits.argmax(0)
        best = logits.max(0)
        faulty = best - np.asarray(self.temperatures)[winner] * (best - logits)
        if self.offsets is not None:
            faulty -= np.asarray(self.offsets)[winner]
            np.put_along_axis(faulty, winner[None], best[None], 0)
        return faulty, None


@dataclass(frozen=True)
class ConfidentlyWrong:
    """Patches (a ``share`` of the voxels) where winner k is taken for class k+1 (mod C): their logits are swapped.

    There the network has left what it knows, so all logits are shallower (times ``depth``), yet it is sure; the truth
    is among the losers, and the posterior is unchanged. No monotone map mends this; ``selective`` tells the patches by
    their shallow logits and flattens them.
    """

    share: float = 0.1
    depth: float = 0.5

    def check(self, num_classes: int) -> None:
        """The share is a share, the depth positive."""
        checks.interval("ConfidentlyWrong.share", self.share, 1, "a share of the voxels")
        checks.positive("ConfidentlyWrong.depth", self.depth)

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> tuple[Array, Array | float | None]:
        """``depth * z`` with ``z_k`` and ``z_{k+1}`` swapped inside the patches."""
        winner = logits.argmax(0)[None]
        wrong = (winner + 1) % len(logits)
        faulty = self.depth * logits
        ahead, behind = (np.take_along_axis(faulty, index, 0) for index in (winner, wrong))
        np.put_along_axis(faulty, wrong, ahead, 0)
        np.put_along_axis(faulty, winner, behind, 0)
        return np.where(grid.patches(rng, self.share, 0.05 * grid.scale), faulty, logits), None


@dataclass(frozen=True)
class GaugeOffsets:
    """A smooth random offset common to all classes: ``z' = z + amplitude * g(v)``, g of variance 1.

    The softmax is unchanged, so nothing needs undoing; calibrators of raw logits (``lts``, ``vs``, ``ms``) suffer.
    """

    amplitude: float = 5.0
    smoothness: float = 8.0

    def check(self, num_classes: int) -> None:
        """Amplitude and smoothness are positive."""
        checks.positive("GaugeOffsets.amplitude", self.amplitude)
        checks.positive("GaugeOffsets.smoothness", self.smoothness)

    def apply(self, logits: Array, grid: Grid, rng: np.random.Generator) -> tuple[Array, Array | float | None]:
        """``z + amplitude * g(v)``."""
        return logits + self.amplitude * grid.noise(rng, self.smoothness), None


def demo_plant(num_classes: int) -> tuple[Plant, ...]:
    """The fault of the demo's network: overconfident, more so at boundaries and for some classes, with mild gauge."""
    return (
        ClassConditional(tuple(1.0 + 0.6 * k / (num_classes - 1) for k in range(num_classes))),
        SpatialTemperature(near=2.4, far=1.2, reach=4.0),
        GaugeOffsets(amplitude=1.5),
    )


def _column(values: Sequence[float], logits: Array) -> Array:
    return np.asarray(values, float).reshape(-1, *[1] * (logits.ndim - 1))
