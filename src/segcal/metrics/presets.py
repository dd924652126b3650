"""What the papers report, as tables of columns: metric, number of bins, region and aggregation.

A case is an image, or a whole volume in 3D, also where a paper (Murugesan et al.) trains on its slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from segcal.errors import check_name
from segcal.metrics.measure import Aggregation
from segcal.statistics import EVERYTHING

__all__ = ["PRESETS", "Column", "Preset", "preset"]


@dataclass(frozen=True)
class Column:
    """One column of a table: a metric with its options, a region, and how the values of cases become one.

    ``aggregation`` is ``per-image`` (the mean over cases), ``pooled`` (one value for the voxels of all cases), or None
    for both.
    """

    metric: str
    region: str = EVERYTHING
    aggregation: Aggregation | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The metric with its options, as users write it and as rows of results name it.

        Examples:
            >>> Column("ece", options={"num_bins": 50}).id, Column("hd95", options={"absent": 30.0}).id
            ('ece[num_bins=50]', 'hd95[absent=30]')
        """
        options = ",".join(f"{name}={_spelled(value)}" for name, value in sorted(self.options.items()))
        return f"{self.metric}[{options}]" if options else self.metric

    @property
    def key(self) -> tuple[str, str]:
        """Metric with options, and region: what identifies a column in results.

        Examples:
            >>> Column("ece", "boundary", options={"num_bins": 50}).key
            ('ece[num_bins=50]', 'boundary')
        """
        return self.id, self.region


def _spelled(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


@dataclass(frozen=True)
class Preset:
    """The columns that one paper reports.

    Examples:
        >>> PRESETS["rethinking"].columns[2].id
        'ece[num_bins=50]'
    """

    id: str
    paper: str
    columns: tuple[Column, ...]


def _mean(metric: str, region: str = EVERYTHING, **options: Any) -> Column:
    """The column of a metric's mean over images."""
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
        >>> preset("crac").columns[-1].region
        'foreground'
    """
    check_name("preset", id, PRESETS)
    return PRESETS[id]
