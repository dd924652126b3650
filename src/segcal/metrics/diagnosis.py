"""A diagnosis in words: where a model is over- or underconfident, and whether logit offsets put calibrators at risk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from segcal.errors import listed
from segcal.metrics.calibration import class_balances, confidence_balance
from segcal.metrics.measure import Measure
from segcal.regions import BANDS
from segcal.statistics import VoxelStatistics

# NLL - entropy within this many nats per voxel is called balanced.
BALANCED = 0.01
# Mean free-energy spread per image, in nats. Kirscher et al. (Table 3) report 1.1 where enforcing invariance changed
# little, 2.5 and 8.8 where calibrators that see the offset lost clearly.
SOME_SPREAD, MUCH_SPREAD = 0.5, 2.0


def verdict(balance: float) -> str:
    """``overconfident``, ``underconfident``, ``balanced``, or ``undefined`` for NaN.

    Examples:
        >>> verdict(0.2), verdict(-0.2), verdict(0.001)
        ('overconfident', 'underconfident', 'balanced')
    """
    if math.isnan(balance):
        return "undefined"
    return "balanced" if abs(balance) < BALANCED else "overconfident" if balance > 0 else "underconfident"


def offset_risk(spread: float) -> str:
    """Whether calibrators that are not translation invariant are at risk: ``none``, ``some``, ``high``, ``undefined``.

    Examples:
        >>> offset_risk(0.0), offset_risk(1.1), offset_risk(8.8)
        ('none', 'some', 'high')
    """
    if math.isnan(spread):
        return "undefined"
    return "none" if spread < SOME_SPREAD else "some" if spread < MUCH_SPREAD else "high"


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
        class_names: Names of the *predicted* classes, in each of which a calibrated model is balanced.

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
        "gauge": {"free_energy_std": float(spread), "risk": offset_risk(spread)},
    }


def diagnose_channels(channels: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The findings of each channel of multi-label data, and their means over channels.

    Over- and underconfident channels are called ``mixed``, not balanced. An image counts once for each channel.

    Examples:
        >>> import torch
        >>> over = VoxelStatistics(2).update(torch.tensor([[9.0, 0.0]]), torch.tensor([1]))
        >>> under = VoxelStatistics(2).update(torch.tensor([[0.1, 0.0]]), torch.tensor([0]))
        >>> parts = {name: diagnose(s, balances=[], spreads=[]) for name, s in (("a", over), ("b", under))}
        >>> diagnose_channels(parts)["set"]["verdict"], channels_in_words(diagnose_channels(parts))
        ('mixed', 'overconfident in a, underconfident in b')
    """
    first = next(iter(channels.values()))
    return {
        "threshold": BALANCED,
        "set": _together([own["set"] for own in channels.values()]),
        "images": {word: sum(own["images"][word] for own in channels.values()) for word in first["images"]},
        "classes": {},
        "bands": {band: _together([own["bands"][band] for own in channels.values()]) for band in first["bands"]},
        # The two scores of a channel are 0 and its logit, or log-probabilities: they have no offset.
        "gauge": {"free_energy_std": 0.0, "risk": "none"},
        "channels": dict(channels),
    }


def in_words(diagnosis: Mapping[str, Any]) -> str:
    """The verdict of the set or, where channels of multi-label data differ, of each."""
    verdict: str = diagnosis["set"]["verdict"]
    return channels_in_words(diagnosis) if verdict == "mixed" else verdict


def channels_in_words(diagnosis: Mapping[str, Any]) -> str:
    """Which channels are over- and underconfident."""
    return verdicts_in_words({name: own["set"]["verdict"] for name, own in diagnosis["channels"].items()})


def verdicts_in_words(verdicts: Mapping[str, str]) -> str:
    """The names by verdict, in words.

    Examples:
        >>> verdicts_in_words({"a": "balanced", "b": "overconfident", "c": "balanced"})
        'balanced in a and c, overconfident in b'
    """
    words: dict[str, list[str]] = {}
    for name, word in verdicts.items():
        words.setdefault(word, []).append(name)
    return ", ".join(f"{word} in {listed(names, ' and ')}" for word, names in words.items())


def _together(findings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    balance = Measure.mean(own["balance"] for own in findings)
    words = {own["verdict"] for own in findings}
    return {
        "balance": float(balance),
        "voxels": sum(own["voxels"] for own in findings),
        "verdict": words.pop() if len(words) == 1 else "mixed",
    }


def _finding(balance: Measure) -> dict[str, Any]:
    return {"balance": float(balance), "voxels": balance.count, "verdict": verdict(balance)}
