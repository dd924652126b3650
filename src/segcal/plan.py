"""What an evaluation was asked for: metrics in regions, spelled out as columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from segcal.errors import InputError
from segcal.metrics import METRICS, Column, MetricSpec
from segcal.metrics.calibration import BANDS
from segcal.regions import REGIONS
from segcal.statistics import EVERYTHING, VoxelStatistics
from segcal.types import Case

DEFAULT_BINS = 15
LOCAL = "local"


@dataclass(frozen=True)
class Plan:
    """What to compute, and what the statistics must hold for it."""

    columns: tuple[Column, ...]
    masks: Mapping[str, Callable[[Case], Tensor]]
    seed: int
    exact: bool = False

    @classmethod
    def make(
        cls,
        metrics: Sequence[str | Column],
        regions: Sequence[str],
        masks: Mapping[str, Callable[[Case], Tensor]],
        seed: int,
        exact: bool = False,
    ) -> Plan:
        """Check the request and spell it out as columns."""
        if taken := sorted(set(masks) & set(REGIONS)):
            raise InputError(f"masks are named {', '.join(taken)}", expected="names that are not regions of segcal")
        columns = [metric for metric in metrics if isinstance(metric, Column)]
        parsed = [parse_metric(metric) for metric in metrics if not isinstance(metric, Column)]
        for region in (*regions, *masks):
            columns += [Column(id, region, options=o) for id, o in parsed if "surfaces" not in metric_spec(id).needs]
        # Surfaces belong to a case as a whole.
        columns += [Column(id, options=o) for id, o in parsed if "surfaces" in metric_spec(id).needs]
        # The diagnosis needs these, whatever else was asked for.
        have = {(column.metric, column.region) for column in columns}
        columns += [Column(id) for id in ("confidence-balance", "free-energy-std") if (id, EVERYTHING) not in have]
        for column in columns:
            metric_spec(column.metric)
            if column.region not in REGIONS and column.region not in masks:
                raise InputError(f"region is {column.region!r}", expected=f"one of {', '.join((*REGIONS, *masks))}")
        return cls(tuple(columns), masks, seed, exact)

    @property
    def needs(self) -> set[str]:
        """What the metrics need beyond logits and labels."""
        return {need for column in self.columns for need in metric_spec(column.metric).needs}

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """The regions to collect: those asked for and, where distances are needed, the bands."""
        names = [column.region for column in self.columns if column.region not in (EVERYTHING, LOCAL)]
        return tuple(dict.fromkeys((*names, *(BANDS if "distance" in self.needs else ()))))

    def statistics(self, num_classes: int, threads: int | None = None) -> VoxelStatistics:
        """Empty statistics that hold all of it; classes included, for the reliability data."""
        bins = {int(column.options.get("num_bins", DEFAULT_BINS)) for column in self.columns}
        return VoxelStatistics(num_classes, sorted({DEFAULT_BINS, *bins}), regions=self.regions, threads=threads)


def parse_metric(text: str) -> tuple[str, dict[str, Any]]:
    """``"ece[num_bins=50]"`` to an id and options.

    Examples:
        >>> parse_metric("tace[num_bins=15,binning=width]")
        ('tace', {'num_bins': 15, 'binning': 'width'})
    """
    match = re.fullmatch(r"\s*([\w-]+)(?:\[([^\]]*)\])?\s*", text)
    if match is None:
        raise InputError(f"metric is {text!r}", expected="an id, or id[option=value,...]")
    pairs = (item.partition("=") for item in (match[2] or "").split(",") if item)
    return match[1], {name.strip(): _literal(value.strip()) for name, _, value in pairs}


def _literal(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def metric_spec(id: str) -> MetricSpec:
    """The metric of this id, or an error that lists them all."""
    if id not in METRICS:
        raise InputError(f"metric is {id!r}", expected=f"one of {', '.join(METRICS)}")
    return METRICS[id]
