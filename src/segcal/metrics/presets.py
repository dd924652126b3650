"""The conventions of the papers, as tables of columns: which metric, bins, region and aggregation they report.

A case is an image, or a volume in 3D: the volumes of Murugesan et al. are evaluated whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from segcal.errors import check_name
from segcal.metrics.calibration import BANDS
from segcal.metrics.measure import Aggregation, Measure, MetricSpec, aggregate
from segcal.statistics import EVERYTHING, VoxelStatistics


@dataclass(frozen=True)
class Column:
    """One number of a table: a metric with its options, where, and how cases become one value.

    ``aggregation`` is what a paper reports: ``per-image`` values alone, or the ``pooled`` one alone; None gives both.
    """

    metric: str
    region: str = EVERYTHING
    aggregation: Aggregation | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The metric, and the region unless it is everything."""
        return self.metric if self.region == EVERYTHING else f"{self.metric}@{self.region}"

    @property
    def id(self) -> str:
        """The metric with its options, as users write it and rows say it.

        Examples:
            >>> Column("ece", options={"num_bins": 50}).id, Column("hd95", options={"absent": 30.0}).id
            ('ece[num_bins=50]', 'hd95[absent=30]')
        """
        options = ",".join(f"{name}={_spelled(value)}" for name, value in sorted(self.options.items()))
        return f"{self.metric}[{options}]" if options else self.metric


def _spelled(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


@dataclass(frozen=True)
class Preset:
    """What one paper reports.

    Examples:
        >>> PRESETS["rethinking"].bins, PRESETS["rethinking"].columns[2].options
        ((15, 50), {'num_bins': 50})
    """

    id: str
    paper: str
    columns: tuple[Column, ...]

    @property
    def bins(self) -> tuple[int, ...]:
        """The bin counts to collect statistics with."""
        return tuple(sorted({c.options["num_bins"] for c in self.columns if "num_bins" in c.options}))

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions to collect statistics for."""
        names = dict.fromkeys(c.region for c in self.columns if c.region != EVERYTHING)
        return (*names, *(BANDS if any(c.metric == "ba-ece" for c in self.columns) else ()))

    def compute(self, cases: Sequence[VoxelStatistics], metrics: Mapping[str, MetricSpec]) -> dict[str, Measure]:
        """All columns that are reductions of statistics, by ``Column.name``, from one statistics object a case.

        Examples:
            >>> import torch
            >>> from segcal.metrics import METRICS
            >>> cases = [VoxelStatistics(2, bins=(10,)).update(torch.eye(2), torch.tensor([0, 1]))]
            >>> sorted(PRESETS["selective"].compute(cases, METRICS))
            ['ece', 'miou']
        """
        values = {}
        for column in self.columns:
            spec = metrics.get(column.metric)
            if spec is None or "surfaces" in spec.needs or column.region == "local":
                continue
            options = {**column.options, "region": column.region}
            values[column.name] = aggregate(spec.function, cases, column.aggregation or "per-image", **options)
        return values


def _mean(metric: str, region: str = EVERYTHING, **options: Any) -> Column:
    """The mean over images."""
    return Column(metric, region, "per-image", options)


def _lts(region: str) -> tuple[Column, ...]:
    return tuple(_mean(metric, region, num_bins=10) for metric in ("ece", "mce", "sce", "ace-adaptive"))


_FOREGROUND_DICE = _mean("dsc", background=False, absent="one")

#: The papers' tables, by the names of METHODS.md.
PRESETS: dict[str, Preset] = {
    preset.id: preset
    for preset in (
        Preset(
            "lts",
            "Ding et al., Local Temperature Scaling, ICCV 2021, tables 1 and 2",
            # 10 bins throughout; SCE is not divided by the number of classes, as in the tables.
            (*_lts("all"), *_lts("boundary"), *_lts("local"), _mean("asd"), _mean("surface-dice"), _mean("hd95"),
             _mean("volume-dice")),
        ),
        Preset(
            "nacl",
            "Murugesan et al., Trust your neighbours, MICCAI 2023, table 1",
            # Calibration on foreground labels; CECE is the mean over classes, as in the released code and the tables.
            (_FOREGROUND_DICE, _mean("hd95"), _mean("ece", "foreground", num_bins=15),
             _mean("cece", "foreground", num_bins=15)),
        ),
        Preset(
            "selective",
            "Wang et al., On calibrating semantic segmentation models, CVPR 2023, tables 1 and 2",
            (Column("miou", aggregation="pooled"), _mean("ece", num_bins=10)),
        ),
        Preset(
            "rethinking",
            "Kirscher et al., translation invariance and decision preservation, table 4",
            # ACE is pooled, because bins of a single image hold too few voxels.
            (_mean("nll"), _mean("dsc"), _mean("ece", num_bins=50), _mean("ba-ece"),
             Column("ace", aggregation="pooled", options={"num_bins": 15}), _mean("flip")),
        ),
        Preset(
            "crac",
            "Murugesan et al., Class and region-adaptive constraints, MICCAI 2024, tables 1 and 2",
            # TACE as in the released code: equal-width bins above 1e-3, on foreground labels.
            (_FOREGROUND_DICE, _mean("hd95"), _mean("ece", "foreground", num_bins=15),
             _mean("tace", "foreground", num_bins=15, threshold=1e-3, binning="width")),
        ),
    )
}  # fmt: skip


def preset(id: str) -> Preset:
    """The preset of a paper.

    Examples:
        >>> preset("crac").regions
        ('foreground',)
    """
    check_name("preset", id, PRESETS)
    return PRESETS[id]
