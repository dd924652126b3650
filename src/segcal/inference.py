"""Statistics of metrics over cases: arrays in, numbers out. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def bootstrap_interval(
    values: Sequence[float], *, replicates: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over cases; NaN for fewer than two.

    Examples:
        >>> low, high = bootstrap_interval([0.1, 0.2, 0.3, 0.4])
        >>> low < 0.25 < high
        True
    """
    array = np.asarray(values, np.float64)
    if len(array) < 2:
        return math.nan, math.nan
    # Resampling n of n cases is drawing their multiplicities: a (replicates, n) table instead of lists of indices.
    weights = np.random.default_rng(seed).multinomial(len(array), np.full(len(array), 1 / len(array)), replicates)
    low, high = np.quantile(weights @ array / len(array), ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)
