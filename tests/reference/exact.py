"""The softmax of one voxel and what follows from it, with 60 digits; and metrics by voxel, rounded once at the end."""

from __future__ import annotations

import math
from typing import NamedTuple

from mpmath import mp, mpf

DIGITS = 60


class Voxel(NamedTuple):
    """Probabilities, and losses for one label."""

    p: list[float]
    nll: float
    brier: float
    entropy: float
    energy: float


def voxel(z: list[float], y: int) -> Voxel:
    """Everything of logits ``z`` (-inf for impossible classes) and a label."""
    with mp.workdps(DIGITS):
        best = max(z)
        gaps = [None if math.isinf(value) else mpf(value) - mpf(best) for value in z]
        powers = [mpf(0) if gap is None else mp.exp(gap) for gap in gaps]
        total = mp.fsum(powers)
        log_total = mp.log(total)
        p = [power / total for power in powers]
        nll = mpf("inf") if gaps[y] is None else log_total - gaps[y]
        brier = mp.fsum((value - (k == y)) ** 2 for k, value in enumerate(p))
        entropy = mp.fsum(q * (log_total - gap) for q, gap in zip(p, gaps, strict=True) if gap is not None)
        return Voxel([float(q) for q in p], float(nll), float(brier), float(entropy), float(mpf(best) + log_total))


def mean(values: list[float]) -> float:
    """The mean, without overflow or rounding in between."""
    with mp.workdps(DIGITS):
        return float(mp.fsum(map(mpf, values)) / len(values)) if values else math.nan


def spread(values: list[float]) -> float:
    """The standard deviation of a population."""
    with mp.workdps(3 * DIGITS):
        exact = [mpf(value) for value in values]
        middle = mp.fsum(exact) / len(exact)
        return float(mp.sqrt(mp.fsum((value - middle) ** 2 for value in exact) / len(exact)))
