"""Metrics: every one a small reduction of ``segcal.statistics.VoxelStatistics``, and their registry.

A new metric is a function in one of the modules here and one line in ``METRICS``.
"""

from __future__ import annotations

from segcal.metrics.calibration import (
    ace,
    ba_ece,
    brier,
    cece,
    confidence_balance,
    ece,
    ece_right,
    ece_wrong,
    entropy,
    free_energy_std,
    mce,
    nll,
    sce,
    smece,
)
from segcal.metrics.equal_mass import SecondPass, ace_adaptive, second_pass, tace
from segcal.metrics.measure import Aggregation, Measure, MetricSpec, aggregate
from segcal.metrics.options import check_options, options_of
from segcal.metrics.presets import PRESETS, Column, Preset, preset
from segcal.metrics.reliability import Reliability, predicted_reliability, reliability
from segcal.metrics.segmentation import accuracy, dice_per_class, dsc, flip, miou, volume_dice
from segcal.metrics.surfaces import asd, hd95, surface_dice

__all__ = [
    "METRICS",
    "PRESETS",
    "Aggregation",
    "Column",
    "Measure",
    "MetricSpec",
    "Preset",
    "Reliability",
    "SecondPass",
    "accuracy",
    "ace",
    "ace_adaptive",
    "aggregate",
    "asd",
    "ba_ece",
    "brier",
    "cece",
    "check_options",
    "confidence_balance",
    "dice_per_class",
    "dsc",
    "ece",
    "ece_right",
    "ece_wrong",
    "entropy",
    "flip",
    "free_energy_std",
    "hd95",
    "mce",
    "miou",
    "nll",
    "options_of",
    "predicted_reliability",
    "preset",
    "reliability",
    "sce",
    "second_pass",
    "smece",
    "surface_dice",
    "tace",
    "volume_dice",
]

_CLASSWISE = ("classwise",)
_SURFACES = ("surfaces",)

#: Metric id to what it is, as METHODS.md section 3 defines them.
METRICS: dict[str, MetricSpec] = {
    spec.id: spec
    for spec in (
        MetricSpec("nll", nll, "NLL"),
        MetricSpec("brier", brier, "Brier score"),
        MetricSpec("entropy", entropy, "Entropy", better="neither"),
        MetricSpec("ece", ece, "ECE"),
        MetricSpec("mce", mce, "MCE", counts="bins"),
        MetricSpec("ace", ace, "ACE", counts="bins"),
        MetricSpec("ace-adaptive", ace_adaptive, "Adaptive calibration error", counts="classes", needs=_CLASSWISE),
        MetricSpec("sce", sce, "Static calibration error", needs=_CLASSWISE),
        MetricSpec("cece", cece, "Classwise ECE", needs=_CLASSWISE),
        MetricSpec("tace", tace, "Thresholded ACE", counts="classes", needs=_CLASSWISE),
        MetricSpec("ba-ece", ba_ece, "Boundary-aware ECE", counts="bands", needs=("distance",)),
        MetricSpec("ece-wrong", ece_wrong, "ECE, mispredicted"),
        MetricSpec("ece-right", ece_right, "ECE, correct"),
        MetricSpec("smece", smece, "Smooth ECE"),
        MetricSpec("dsc", dsc, "Dice", better="higher", counts="classes"),
        MetricSpec("miou", miou, "Mean IoU", better="higher", counts="classes"),
        MetricSpec("accuracy", accuracy, "Accuracy", better="higher"),
        MetricSpec("volume-dice", volume_dice, "Volume Dice", better="higher", counts="classes"),
        MetricSpec("hd95", hd95, "Hausdorff 95", counts="classes", needs=_SURFACES),
        MetricSpec("asd", asd, "Average surface distance", counts="classes", needs=_SURFACES),
        MetricSpec("surface-dice", surface_dice, "Surface Dice", better="higher", counts="classes", needs=_SURFACES),
        MetricSpec("flip", flip, "Flipped labels", needs=("uncalibrated",)),
        MetricSpec("free-energy-std", free_energy_std, "Free-energy spread", better="neither"),
        MetricSpec("confidence-balance", confidence_balance, "NLL - entropy", better="zero"),
    )
}
