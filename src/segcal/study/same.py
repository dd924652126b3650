"""Methods that turned out to be the same map: fits that fell back to a simpler one, or to the identity.

Their values differ by rounding, and a rank test finds the slightest difference significant if it has the same sign in
every case. So they are told apart from methods that differ, shown as what they are, and not tested.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from segcal.evaluation.plan import parse_metric
from segcal.study.measuring import Evaluation

# To which the passes of calibrators and of metrics agree, whatever loops they take: what differs by less is rounding.
_RELATIVE = 1e-6
# Means over voxels. A voxel whose confidence is next to the edge of a bin may fall on either side of it by rounding,
# which moves some binned metrics by much; and differences of means cancel.
_SMOOTH = ("nll", "brier", "entropy", "accuracy", "flip")


def same_maps(repeats: Sequence[Mapping[str, Evaluation]], methods: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Method to the simplest one that has the same values in every case of every repeat; ``methods`` are their rows."""
    sizes = {row["key"]: row["parameters"] for row in methods}
    keys = sorted(repeats[0], key=lambda key: sizes[key])
    found: dict[str, str] = {}
    for place, key in enumerate(keys):
        simpler = (other for other in keys[:place] if other not in found)
        twin = next((other for other in simpler if all(_same(own[key], own[other]) for own in repeats)), None)
        if twin is not None:
            found[key] = twin
    return found


def _same(one: Evaluation, other: Evaluation) -> bool:
    """Alike in every channel, where there are some."""
    return all(_alike(*parts) for parts in zip(one.parts, other.parts, strict=True))


def _alike(one: Evaluation, other: Evaluation) -> bool:
    for metric, region in one.columns:
        id = parse_metric(metric)[0]
        if id in _SMOOTH:
            mine, theirs = one.values(metric, region), other.values(metric, region)
            if not all(_close(value, theirs[case], undefined=id == "flip") for case, value in mine.items()):
                return False
    return True


def _close(one: float, other: float, undefined: bool) -> bool:
    """Equal but for rounding; ``undefined`` says that NaN stands for 0, as the flips of uncalibrated scores do."""
    if undefined:
        one, other = (0.0 if math.isnan(value) else value for value in (one, other))
    return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=_RELATIVE)
