"""Metrics: each is a small reduction of ``segcal.statistics.VoxelStatistics``. ``METRICS`` is their registry.

A new metric is a function in one of the modules here and one line in ``METRICS``; CONTRIBUTING.md shows one.
"""

from __future__ import annotations

from typing import Any

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
from segcal.metrics.equal_mass import SecondPass, ace_adaptive, tace, tace_second_pass
from segcal.metrics.measure import Aggregation, Measure, MetricSpec
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
    "smece",
    "surface_dice",
    "tace",
    "volume_dice",
]

_CLASSWISE = ("classwise",)
_SURFACES: dict[str, Any] = {"needs": ("surfaces",), "quality": True, "foreground": True}

#: Metric id to what the rest of the library knows about it; METHODS.md, section 3, has the definitions.
METRICS: dict[str, MetricSpec] = {
    spec.id: spec
    for spec in (
        MetricSpec("nll", nll, "NLL"),
        MetricSpec("brier", brier, "Brier score"),
        MetricSpec("entropy", entropy, "Entropy", better="neither"),
        MetricSpec("ece", ece, "ECE"),
        MetricSpec("mce", mce, "MCE"),
        MetricSpec("ace", ace, "ACE"),
        MetricSpec(
            "ace-adaptive", ace_adaptive, "Adaptive calibration error", needs=_CLASSWISE, second_pass=SecondPass
        ),
        MetricSpec("sce", sce, "Static calibration error", needs=_CLASSWISE),
        MetricSpec("cece", cece, "Classwise ECE", needs=_CLASSWISE),
        MetricSpec("tace", tace, "Thresholded ACE", needs=_CLASSWISE, second_pass=tace_second_pass),
        MetricSpec("ba-ece", ba_ece, "Boundary-aware ECE", needs=("distance",)),
        MetricSpec("ece-wrong", ece_wrong, "ECE, mispredicted"),
        MetricSpec("ece-right", ece_right, "ECE, correct"),
        MetricSpec("smece", smece, "Smooth ECE"),
        MetricSpec("dsc", dsc, "Dice", better="higher", quality=True),
        MetricSpec("miou", miou, "Mean IoU", better="higher", quality=True),
        MetricSpec("accuracy", accuracy, "Accuracy", better="higher", quality=True),
        MetricSpec("volume-dice", volume_dice, "Volume Dice", better="higher", quality=True, foreground=True),
        MetricSpec("hd95", hd95, "Hausdorff 95", **_SURFACES),
        MetricSpec("asd", asd, "Average surface distance", **_SURFACES),
        MetricSpec("surface-dice", surface_dice, "Surface Dice", better="higher", **_SURFACES),
        MetricSpec("flip", flip, "Flipped labels", needs=("uncalibrated",)),
        MetricSpec("free-energy-std", free_energy_std, "Free-energy spread", better="neither"),
        MetricSpec("confidence-balance", confidence_balance, "NLL - entropy", better="zero"),
    )
}
