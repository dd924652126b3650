"""Methods that turned out to be the same map: fits that fell back to a simpler one, or to the identity.

Their values differ by rounding only. A rank test would find even that significant if it has the same sign in every
case. So these methods are found here, shown as what they are, and not tested.
"""

from __future__ import annotations

import numpy as np

from segcal.evaluation.plan import parse_metric
from segcal.study.work.evaluations import Evaluation
from segcal.study.work.run import Repeats

# The relative rounding error of calibrators and metrics, whichever loops compute them.
_RELATIVE = 1e-6
# Means over voxels. Binned metrics are not compared: rounding may move a voxel from one bin into the next.
_SMOOTH = ("nll", "brier", "entropy", "accuracy", "flip")


def same_maps(repeats: Repeats, sizes: dict[str, int]) -> dict[str, str]:
    """Method to the simplest one with the same values in every case of every repeat; ``sizes`` are parameters."""
    keys = sorted(repeats[0], key=lambda key: sizes[key])
    found: dict[str, str] = {}
    for place, key in enumerate(keys):
        simpler = (other for other in keys[:place] if other not in found)
        twin = next((other for other in simpler if all(_same(own[key], own[other]) for own in repeats)), None)
        if twin is not None:
            found[key] = twin
    return found


def _same(one: Evaluation, other: Evaluation) -> bool:
    """Whether the values are equal up to rounding, in every channel if there are several."""
    for mine, theirs in zip(one.parts, other.parts, strict=True):
        for metric, region in mine.columns:
            id = parse_metric(metric)[0]
            if id in _SMOOTH:
                first, second = (np.array(list(part.values(metric, region).values())) for part in (mine, theirs))
                if id == "flip":  # Uncalibrated scores have NaN, which stands for 0.
                    first, second = np.nan_to_num(first), np.nan_to_num(second)
                if not np.isclose(first, second, rtol=_RELATIVE, atol=0, equal_nan=True).all():
                    return False
    return True
