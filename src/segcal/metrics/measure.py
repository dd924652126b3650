"""What a metric returns, what the registry knows of it, and how values of several cases become one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from segcal.errors import InputError
from segcal.statistics import VoxelStatistics

Better = Literal["lower", "higher", "zero", "neither"]
Aggregation = Literal["per-image", "pooled"]


class Measure(float):
    """A number that knows how much it rests on.

    Attributes:
        count: How many voxels, bins, classes or cases were averaged; the metric says which. A value that is undefined
            is NaN, and its count says why: there was nothing to average.
        bound: The exact value is at most this far away; 0 but for equal-mass binnings in one pass.

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
        title: For tables.
        better: Which way is better; ``zero`` for signed metrics.
        counts: What ``Measure.count`` counts.
        needs: What the statistics must have been given beyond logits and labels: ``classwise``, ``distance``,
            ``uncalibrated``; or ``surfaces``.
    """

    id: str
    function: Callable[..., Any]
    title: str
    better: Better = "lower"
    counts: str = "voxels"
    needs: tuple[str, ...] = ()


def aggregate(
    metric: Callable[..., Measure], cases: Sequence[VoxelStatistics], how: Aggregation, **options: object
) -> Measure:
    """One value for many cases: the mean of the per-image values (``count``: defined cases), or of the pooled voxels.

    Examples:
        >>> import torch
        >>> from segcal.metrics import accuracy
        >>> right, wrong = torch.tensor([0, 0, 0]), torch.tensor([1])
        >>> cases = [VoxelStatistics(2).update(torch.tensor([[1.0, 0.0]] * len(y)), y) for y in (right, wrong)]
        >>> aggregate(accuracy, cases, "per-image"), aggregate(accuracy, cases, "pooled")
        (0.5, 0.75)
    """
    if how == "per-image":
        return Measure.mean(metric(stats, **options) for stats in cases)
    if how != "pooled":
        raise InputError(f"aggregation is {how!r}", expected="'per-image' or 'pooled'")
    if not cases:
        return Measure(math.nan, 0)
    pooled = cases[0].empty_like()
    for stats in cases:
        pooled.merge(stats)
    return metric(pooled, **options)
