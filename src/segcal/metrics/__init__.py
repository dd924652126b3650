"""Metrics: each is a small reduction of ``segcal.statistics.VoxelStatistics``. ``METRICS`` is their registry.

A new metric is a function in one of the modules here, which lists it in ``__all__``, and one line in ``METRICS``;
CONTRIBUTING.md shows one.

Examples:
    >>> import torch
    >>> from segcal.statistics import VoxelStatistics
    >>> stats = VoxelStatistics(2).update(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0]))
    >>> round(ece(stats), 4), METRICS["ece"].title
    (0.3808, 'ECE')
"""

from __future__ import annotations

from typing import Any

from segcal.metrics import calibration, decomposition, equal_mass, segmentation, surfaces
from segcal.metrics.calibration import *
from segcal.metrics.decomposition import *
from segcal.metrics.equal_mass import *
from segcal.metrics.measure import *
from segcal.metrics.measure import MetricSpec as MetricSpec
from segcal.metrics.options import *
from segcal.metrics.presets import *
from segcal.metrics.reliability import *
from segcal.metrics.segmentation import *
from segcal.metrics.surfaces import *

_CLASSWISE = ("classwise",)
_SURFACES: dict[str, Any] = {"needs": ("surfaces",), "quality": True, "foreground": True}

#: Metric id to what the rest of the library knows about it; METHODS.md, section 3, has the definitions.
METRICS: dict[str, MetricSpec] = {
    spec.id: spec
    for spec in (
        MetricSpec("nll", calibration.nll, "NLL"),
        MetricSpec("brier", calibration.brier, "Brier score"),
        MetricSpec("entropy", calibration.entropy, "Entropy", better="neither"),
        MetricSpec("ece", calibration.ece, "ECE"),
        MetricSpec("mce", calibration.mce, "MCE"),
        MetricSpec("ace", calibration.ace, "ACE"),
        MetricSpec(
            "ace-adaptive",
            equal_mass.ace_adaptive,
            "Adaptive calibration error",
            needs=_CLASSWISE,
            second_pass=equal_mass.SecondPass,
        ),
        MetricSpec("sce", calibration.sce, "Static calibration error", needs=_CLASSWISE),
        MetricSpec("cece", calibration.cece, "Classwise ECE", needs=_CLASSWISE),
        MetricSpec(
            "tace", equal_mass.tace, "Thresholded ACE", needs=_CLASSWISE, second_pass=equal_mass.tace_second_pass
        ),
        MetricSpec("ba-ece", calibration.ba_ece, "Boundary-aware ECE", needs=("distance",)),
        MetricSpec("ece-wrong", calibration.ece_wrong, "ECE, mispredicted"),
        MetricSpec("ece-right", calibration.ece_right, "ECE, correct"),
        MetricSpec("nll-calibration", decomposition.nll_calibration, "NLL, calibration part"),
        MetricSpec(
            "brier-calibration", decomposition.brier_calibration, "Brier score, calibration part", needs=_CLASSWISE
        ),
        MetricSpec("smece", calibration.smece, "Smooth ECE"),
        MetricSpec("dsc", segmentation.dsc, "Dice", better="higher", quality=True),
        MetricSpec("miou", segmentation.miou, "Mean IoU", better="higher", quality=True),
        MetricSpec("accuracy", segmentation.accuracy, "Accuracy", better="higher", quality=True),
        MetricSpec(
            "volume-dice", segmentation.volume_dice, "Volume Dice", better="higher", quality=True, foreground=True
        ),
        MetricSpec("hd95", surfaces.hd95, "Hausdorff 95", **_SURFACES),
        MetricSpec("asd", surfaces.asd, "Average surface distance", **_SURFACES),
        MetricSpec("surface-dice", surfaces.surface_dice, "Surface Dice", better="higher", **_SURFACES),
        MetricSpec("flip", segmentation.flip, "Flipped labels", needs=("uncalibrated",)),
        MetricSpec("free-energy-std", calibration.free_energy_std, "Free-energy spread", better="neither"),
        MetricSpec("confidence-balance", calibration.confidence_balance, "NLL - entropy", better="zero"),
    )
}
