"""What is wrong, in words: over- or underconfident where, and whether the gauge puts some calibrators at risk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from segcal.metrics.calibration import BANDS, class_balances, confidence_balance
from segcal.metrics.measure import Measure
from segcal.statistics import VoxelStatistics

# NLL - entropy within this many nats per voxel is called balanced.
BALANCED = 0.01
# Mean free-energy spread per image, in nats. Kirscher et al. (Table 3) report 1.1 where enforcing invariance changed
# little, 2.5 and 8.8 where calibrators that see the offset lost clearly.
SOME_GAUGE, MUCH_GAUGE = 0.5, 2.0


def verdict(balance: float) -> str:
    """``overconfident``, ``underconfident``, ``balanced``, or ``undefined`` for NaN.

    Examples:
        >>> verdict(0.2), verdict(-0.2), verdict(0.001)
        ('overconfident', 'underconfident', 'balanced')
    """
    if math.isnan(balance):
        return "undefined"
    return "balanced" if abs(balance) < BALANCED else "overconfident" if balance > 0 else "underconfident"


def gauge_risk(spread: float) -> str:
    """Whether calibrators that are not translation invariant are at risk: ``none``, ``some``, ``high``, ``undefined``.

    Examples:
        >>> gauge_risk(0.0), gauge_risk(1.1), gauge_risk(8.8)
        ('none', 'some', 'high')
    """
    if math.isnan(spread):
        return "undefined"
    return "none" if spread < SOME_GAUGE else "some" if spread < MUCH_GAUGE else "high"


def diagnose(
    pooled: VoxelStatistics,
    *,
    balances: Sequence[float],
    spreads: Sequence[float],
    class_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Over- and underconfidence (NLL - entropy, Ding et al. 2021) of the set, images, classes and distance bands.

    Args:
        pooled: Statistics of all cases together.
        balances: NLL - entropy of every case.
        spreads: Standard deviation of the free energy of every case.
        class_names: For the classes; they are the *predicted* ones, so that a calibrated model is balanced in each.

    Examples:
        >>> import torch
        >>> stats = VoxelStatistics(2).update(torch.tensor([[9.0, 0.0]]), torch.tensor([1]))
        >>> found = diagnose(stats, balances=[9.0], spreads=[0.0])
        >>> found["set"]["verdict"], found["images"]["overconfident"], found["gauge"]["risk"]
        ('overconfident', 1, 'none')
    """
    images = [verdict(balance) for balance in balances]
    spread = Measure.mean(spreads)
    names = class_names or [str(index) for index in range(pooled.num_classes)]
    return {
        "threshold": BALANCED,
        "set": _finding(confidence_balance(pooled)),
        "images": {word: images.count(word) for word in ("overconfident", "underconfident", "balanced", "undefined")},
        "classes": {name: _finding(one) for name, one in zip(names, class_balances(pooled), strict=True)},
        "bands": {band: _finding(confidence_balance(pooled, region=band)) for band in BANDS if band in pooled.regions},
        "gauge": {"free_energy_std": float(spread), "risk": gauge_risk(spread)},
    }


def _finding(balance: Measure) -> dict[str, Any]:
    return {"balance": float(balance), "voxels": balance.count, "verdict": verdict(balance)}
