"""What an evaluation computes: metrics in regions, as a list of columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from segcal.errors import InputError, check_name, check_seed
from segcal.metrics import METRICS, Aggregation, Column, MetricSpec, check_options, options_of
from segcal.regions import BANDS, REGIONS
from segcal.statistics import EVERYTHING, VoxelStatistics
from segcal.types import Case

DEFAULT_BINS = 15
#: The regions of every evaluation and study, in Python and on the command line, unless others are asked for.
DEFAULT_REGIONS = (EVERYTHING, "boundary")
LOCAL = "local"


@dataclass(frozen=True)
class Plan:
    """What to compute, and what the statistics need for it."""

    columns: tuple[Column, ...]
    masks: Mapping[str, Callable[[Case], Tensor]]
    seed: int
    exact: bool = False
    background: int | None = 0

    @classmethod
    def make(
        cls,
        metrics: Sequence[str | Column],
        regions: Sequence[str] = DEFAULT_REGIONS,
        masks: Mapping[str, Callable[[Case], Tensor]] | None = None,
        *,
        seed: int = 0,
        exact: bool = False,
        background: int | None = 0,
    ) -> Plan:
        """Check the arguments, which ``evaluate`` explains, and cross metrics with regions."""
        check_seed(seed)
        masks = masks or {}
        if taken := sorted(set(masks) & set(REGIONS)):
            raise InputError(f"masks are named {', '.join(taken)}", expected="names that are not regions of segcal")
        columns = [metric for metric in metrics if isinstance(metric, Column)]
        columns += columns_in([metric for metric in metrics if not isinstance(metric, Column)], (*regions, *masks))
        columns = [_checked(column, (*REGIONS, *masks)) for column in columns]
        if not columns:
            raise InputError("nothing was asked for", expected="at least one metric in at least one region")
        different = {(column.id, column.region, column.aggregation): column for column in columns}
        return cls(tuple(different.values()), masks, seed, exact, background)

    def columns_of(self, how: Aggregation) -> list[Column]:
        """The columns that are computed from the statistics of an image, or from pooled ones."""
        reduced = (column for column in self.columns if column.region != LOCAL and not _of_surfaces(column))
        return [column for column in reduced if column.aggregation in (None, how)]

    @property
    def without_background(self) -> tuple[str, ...]:
        """The columns that leave the background out: surfaces, some means over classes, and some regions."""
        return tuple(
            column.id if column.region == EVERYTHING else f"{column.id} in {column.region}"
            for column in self.columns
            if self.background is not None
            and (
                metric_spec(column.metric).foreground
                or column.options.get("background") is False
                or column.region in ("foreground", "all")
            )
        )

    @property
    def needs(self) -> set[str]:
        """What the metrics need beyond logits and labels."""
        return {need for column in self.columns for need in metric_spec(column.metric).needs}

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """The regions to collect: those of the columns and, if distances are needed, the bands."""
        names = [column.region for column in self.columns if column.region not in (EVERYTHING, LOCAL)]
        return tuple(dict.fromkeys((*names, *(BANDS if "distance" in self.needs else ()))))

    def statistics(self, num_classes: int, threads: int | None = None) -> VoxelStatistics:
        """Empty statistics that hold all that the columns need, and all classes for the reliability data."""
        bins = {column.options["num_bins"] for column in self.columns if "num_bins" in column.options}
        thresholds = {column.options["threshold"] for column in self.columns if "threshold" in column.options}
        return VoxelStatistics(
            num_classes,
            sorted({DEFAULT_BINS, *bins}),
            regions=self.regions,
            background=self.background,
            thresholds=sorted(thresholds),
            threads=threads,
        )


def columns_in(metrics: Sequence[str], regions: Sequence[str]) -> list[Column]:
    """Every metric in every region. Metrics of surfaces belong to a case as a whole and come last.

    Examples:
        >>> [(column.id, column.region) for column in columns_in(("hd95", "ece"), ("everything", "boundary"))]
        [('ece', 'everything'), ('ece', 'boundary'), ('hd95', 'everything')]
    """
    parsed = [Column(id, options=options) for id, options in map(parse_metric, metrics)]
    columns = [replace(one, region=region) for region in regions for one in parsed if not _of_surfaces(one)]
    return [*columns, *filter(_of_surfaces, parsed)]


def parse_metric(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``"ece[num_bins=50]"`` into an id and options, and check them.

    Examples:
        >>> parse_metric("tace[num_bins=15,binning=width]")
        ('tace', {'num_bins': 15, 'binning': 'width'})
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\[([^\[\]]*)\])?\s*", text)
    if match is None:
        raise InputError(f"metric is {text!r}", expected="an id, or id[option=value,...]")
    spec, options = metric_spec(match[1]), {}
    for item in [] if match[2] is None else match[2].split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value) or name in options:
            raise InputError(
                f"metric is {text.strip()!r}",
                expected=f"{spec.id}[option=value,...], each option once",
                fix=f"the options of {spec.id} are {', '.join(options_of(spec.function)) or 'none'}",
            )
        options[name] = value
    return spec.id, check_options(spec, options)


def _checked(column: Column, regions: Sequence[str]) -> Column:
    spec = metric_spec(column.metric)
    check_name("region", column.region, regions)
    whole = _of_surfaces(column)
    if whole and column.region != EVERYTHING:
        raise InputError(f"metric '{spec.id}' in region '{column.region}'", expected="surfaces of whole cases")
    if column.aggregation == "pooled" and (whole or column.region == LOCAL):
        raise InputError(f"metric '{spec.id}' in region '{column.region}', pooled", expected="a value for every image")
    return replace(column, options=check_options(spec, column.options))


def _of_surfaces(column: Column) -> bool:
    return "surfaces" in metric_spec(column.metric).needs


def metric_spec(id: str) -> MetricSpec:
    """The metric of this id, or an error that lists them all."""
    check_name("metric", id, METRICS)
    return METRICS[id]
