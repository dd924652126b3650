"""What a metric returns, and what the registry says about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["Aggregation", "Measure", "MetricSpec"]

Better = Literal["lower", "higher", "zero", "neither"]
Aggregation = Literal["per-image", "pooled"]
Absent = Literal["nan", "one"]  # the value of classes that occur neither in the labels nor in the prediction


def divided(part: NDArray[np.float64], whole: NDArray[Any]) -> NDArray[np.float64]:
    """``part / whole`` of arrays of one shape, NaN where the whole is not above 0."""
    result = np.full(np.shape(whole), np.nan)
    np.divide(part, whole, out=result, where=whole > 0)
    return result


class Measure(float):
    """A number that knows how many things it averages.

    Attributes:
        count: How many voxels, bins, classes or cases were averaged; the metric says which. An undefined value is NaN
            with a count of 0: there was nothing to average.
        bound: The exact value is at most this far away; 0 except for equal-mass bins from a single pass.

    Examples:
        >>> value = Measure(0.25, count=8)
        >>> value * 2, value.count
        (0.5, 8)
    """

    count: int
    bound: float

    def __new__(cls, value: float, count: int, bound: float = 0.0) -> Measure:  # noqa: D102
        measure = super().__new__(cls, value)
        measure.count, measure.bound = int(count), float(bound)
        return measure

    def __getnewargs__(self) -> tuple[float, int, float]:  # type: ignore[override]
        return float(self), self.count, self.bound

    @classmethod
    def ratio(cls, total: float, count: int) -> Measure:
        """``total / count``, NaN where there is nothing to average."""
        return cls(total / count if count else math.nan, count)

    @classmethod
    def mean(cls, values: Iterable[float]) -> Measure:
        """The mean of the values that are defined; ``count`` says how many those were.

        Examples:
            >>> Measure.mean([1.0, float("nan"), 2.0]), Measure.mean([1.0, float("nan"), 2.0]).count
            (1.5, 2)
        """
        defined = [float(value) for value in values if not math.isnan(value)]
        return cls.ratio(math.fsum(defined), len(defined))


@dataclass(frozen=True)
class MetricSpec:
    """An entry of ``segcal.METRICS``.

    Attributes:
        id: The id of METHODS.md, as commands and results spell it.
        function: ``function(stats, *, region="everything", **options) -> Measure``; metrics that need surfaces take
            what their module says instead.
        title: Its name in tables.
        better: Which direction is better; ``zero`` for signed metrics.
        needs: What the metric needs beyond logits and labels: ``classwise`` (per-class histograms), ``distance``,
            ``uncalibrated`` (predictions to compare with, so it has no value without a calibrator), or ``surfaces``.
        quality: Whether it measures the segmentation instead of its confidence.
        foreground: Whether it always leaves the background out.
        second_pass: Makes the second pass that gives the exact value, from the metric's own arguments; it returns None
            where the first pass is exact already. None where it always is.
    """

    id: str
    function: Callable[..., Any]
    title: str
    better: Better = "lower"
    needs: tuple[str, ...] = ()
    quality: bool = False
    foreground: bool = False
    second_pass: Callable[..., Any] | None = None
