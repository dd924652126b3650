"""The rows and columns of the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from segcal.metrics import Column

# Where a column of a table is found in results: metric and region.
Key = tuple[str, str]


@dataclass(frozen=True)
class Method:
    """A row: the network's logits, and the calibrator if any.

    ``source`` is a network, or the ensemble with its pooling: ``unet:z`` (mean of logits), ``unet:p`` (mean of
    probabilities), ``unet:0`` (the first member), ``unet:p3`` (mean of the probabilities of three).
    """

    source: str
    calibrator: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """Methods, what is measured of them, and on which datasets of logits.

    ``columns`` is all that is measured; ``images`` and ``pooled`` name what is kept of each image, and of all together.
    """

    methods: Mapping[str, Method]
    columns: tuple[Column, ...]
    images: Mapping[str, Key]
    pooled: Mapping[str, Column]
    parts: tuple[str, ...] = ("test",)


# The regions of Ding et al. as results name them. CamVid has no background, so All is every voxel with a label.
REGIONS = ("all", "boundary", "local-mean", "local-max")
# ACE is that of LTS's appendix F.6, classwise and of equal mass.
LTS_METRICS = {"ece": "ece", "mce": "mce", "sce": "sce", "ace": "ace-adaptive"}
# As in the paper, LTS and IBTS see the image; and the ODIR penalties are 0.01.
_IMAGE = {"image_channels": 3}
_ODIR = {"off_diagonal": 0.01, "bias_penalty": 0.01}
_MIOU = Column("miou", aggregation="pooled")


def _bins(metric: str, region: str, bins: int) -> Column:
    return Column(metric, region, "per-image", {"num_bins": bins})


def _lts(network: str) -> Table:
    """Table 3 of Ding et al. about networks of one kind, one for each of its three losses."""
    columns = [_bins(metric, region, 10) for metric in LTS_METRICS.values() for region in ("all", "boundary", "local")]
    images = {
        f"{name} {region}": (_bins(metric, region, 10).id, region)
        for region in REGIONS
        for name, metric in LTS_METRICS.items()
    }
    pooled = {"miou": _MIOU, "ece": Column("ece", options={"num_bins": 10}), "nll": Column("nll")}
    methods = {
        "UC": Method(f"{network}-ce"),
        "IsoReg": Method(f"{network}-ce", "isotonic"),
        "VS": Method(f"{network}-ce", "vs"),
        "ETS": Method(f"{network}-ce", "ets"),
        "DirODIR": Method(f"{network}-ce", "dc", _ODIR),
        "TS": Method(f"{network}-ce", "ts"),
        "IBTS": Method(f"{network}-ce", "ibts", _IMAGE),
        "LTS": Method(f"{network}-ce", "lts", _IMAGE),
        "MMCE": Method(f"{network}-mmce"),
        "MMCE+LTS": Method(f"{network}-mmce", "lts", _IMAGE),
        "FL": Method(f"{network}-focal"),
        "FL+LTS": Method(f"{network}-focal", "lts", _IMAGE),
        "trust": Method(f"{network}-ce", "trust"),
    }
    return Table(methods, (*columns, *pooled.values()), {"nll": ("nll", "everything"), **images}, pooled)


def _rethinking() -> Table:
    calibrators = {
        "MS": "ms", "MS_c": "ms-c", "DC": "dc", "LTS": "lts", "LTS-TI": "lts-ti", "CDC": "cdc", "CMS_ap": "cms-ap",
        "CMS_op": "cms-op", "TS": "ts", "ETS": "ets", "trust": "trust",
    }  # fmt: skip
    methods = {"p0": Method("unet:0"), "p-mean": Method("unet:p"), "z-mean": Method("unet:z")}
    methods |= {name: Method("unet:z", id) for name, id in calibrators.items()}
    columns = {
        "nll": Column("nll"), "dsc": Column("dsc"), "ece": Column("ece", options={"num_bins": 50}),
        "ba-ece": Column("ba-ece"), "flip": Column("flip"),
    }  # fmt: skip
    # ACE is pooled, because bins of a single image hold too few voxels.
    ace = Column("ace", aggregation="pooled", options={"num_bins": 15})
    pooled = {"miou": _MIOU, "ace": ace, "ece": columns["ece"], "nll": columns["nll"]}
    images = {name: column.key for name, column in columns.items()}
    return Table(methods, (*columns.values(), _MIOU, ace), images, pooled, ("test", "mild", "strong"))


def _selective() -> Table:
    # Logistic scaling is vector scaling in the paper. Its ensembles have three members.
    methods = {
        "Uncal": Method("unet:0"),
        "TS": Method("unet:0", "ts"),
        "LogS": Method("unet:0", "vs"),
        "DirS": Method("unet:0", "dc"),
        "Meta-Cal*": Method("unet:0", "meta-cal"),
        "LTS": Method("unet:0", "lts"),
        "Ensemble": Method("unet:p3"),
        "Selective": Method("unet:0", "selective", {"rule": "paper"}),
        "Selective, T1 by NLL": Method("unet:0", "selective"),
        "trust": Method("unet:0", "trust"),
    }
    columns = {"ece": Column("ece", options={"num_bins": 10}), "nll": Column("nll")}
    images = {name: column.key for name, column in columns.items()}
    return Table(methods, (*columns.values(), _MIOU), images, {"miou": _MIOU, **columns})


TABLES = {
    "lts": _lts("tiramisu"), "lts-unet": _lts("unet"), "rethinking": _rethinking(), "selective": _selective(),
}  # fmt: skip
