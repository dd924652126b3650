"""Which calibrator to deploy: the best one that meets the constraints, or a simpler one that is as good."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from segcal.inference import standard_error
from segcal.inference.arrays import difference
from segcal.study.settings import UNCALIBRATED, Preserve

RULE = (
    "Of the methods that meet the constraints, the one with the lowest NLL on validation cases is the best; "
    "recommended is the one with the fewest parameters among those that lie within one standard error of it, "
    "or within 0.0001 nats. "
    "The standard error is that of the difference to the best, case by case. "
    "Where it must be robust, a method does not meet the constraints if it fails on shifted cases, or if its NLL there "
    "is higher than that of ts or of no calibration by more than 0.0001 nats and the 95% interval of the difference, "
    "case by case, lies above 0."
)
CHANNEL_RULE = " The NLL of a case is the mean over its channels."
#: Nats that nobody can see; methods that fall back to a simpler one differ by less.
NEGLIGIBLE = 1e-4
_ALLOWED: dict[Preserve, tuple[str | None, ...]] = {
    "order": ("order",),
    "argmax": ("order", "argmax"),
    "none": ("order", "argmax", None),
}


@dataclass(frozen=True)
class Candidate:
    """A method that might be recommended.

    Attributes:
        key: Its name in the study.
        preserves: What it keeps of the scores it is given: ``order``, ``argmax`` or None.
        deployed: Whether these scores are the ones deployed; another pooling of an ensemble moves labels by itself.
        translation_invariant: Whether it ignores offsets of the logits.
        parameters: How many numbers it has.
        nll: Validation NLL ``(cases,)``, means over the repeats; the same cases for all candidates.
        robust: Whether it works on all shifted cases there are and loses on none.
        same_as: The simpler method that is the same map on these cases, if one is.
    """

    key: str
    preserves: str | None
    deployed: bool
    translation_invariant: bool
    parameters: int
    nll: Sequence[float]
    robust: bool = True
    same_as: str | None = None


@dataclass(frozen=True)
class Choice:
    """What was chosen and from what: keys, and validation NLL with the difference to the best.

    ``left_out`` are those that only their results on shifted cases excluded.
    """

    method: str
    best: str
    candidates: tuple[str, ...]
    validation_nll: Mapping[str, Mapping[str, float]]
    left_out: tuple[str, ...] = ()


def choose(
    candidates: Sequence[Candidate],
    preserve: Preserve,
    translation_invariant: bool,
    robust: bool = False,
    groups: Sequence[str] | None = None,
) -> Choice:
    """Apply the rule. ``uncalibrated`` must be among the candidates: it meets all constraints.

    ``groups`` are those of the validation cases: standard errors are over groups. A method that is the same map as a
    simpler one is no candidate beside it.

    Examples:
        >>> none = Candidate("uncalibrated", "order", True, True, 0, [1.0, 2.0, 3.0])
        >>> simple = Candidate("ts", "order", True, True, 1, [0.50, 1.51, 2.49])
        >>> rich = Candidate("cms-op", "order", True, True, 99, [0.49, 1.49, 2.51])
        >>> moving = Candidate("dc", None, True, True, 42, [0.1, 0.1, 0.1])
        >>> found = choose([none, simple, rich, moving], "order", False)
        >>> found.best, found.method, found.candidates
        ('cms-op', 'ts', ('uncalibrated', 'ts', 'cms-op'))
    """
    eligible = [
        one
        for one in candidates
        if one.preserves in _ALLOWED[preserve]
        and (one.deployed or preserve == "none")
        and (one.translation_invariant or not translation_invariant)
        and not math.isnan(_mean(one.nll))
    ]
    allowed = [one for one in eligible if one.robust or not robust]
    left_out = tuple(one.key for one in eligible if one not in allowed)
    keys = {one.key for one in allowed}
    allowed = [one for one in allowed if one.same_as not in keys]
    if not allowed:  # no validation NLL at all
        allowed = [one for one in candidates if one.key == UNCALIBRATED]
    best = min(allowed, key=lambda one: (_mean(one.nll), one.parameters))
    as_good = [one for one in allowed if one is best or _within_one_error(one.nll, best.nll, groups)]
    chosen = min(as_good, key=lambda one: (one.parameters, _mean(one.nll)))
    return Choice(
        method=chosen.key,
        best=best.key,
        candidates=tuple(one.key for one in allowed),
        validation_nll={
            one.key: {
                **mean_and_error(one.nll, groups),
                "minus_best": _mean(_minus(one.nll, best.nll)),
                "minus_best_standard_error": standard_error(_minus(one.nll, best.nll), groups=groups),
            }
            for one in candidates
        },
        left_out=left_out,
    )


def mean_and_error(values: Sequence[float], groups: Sequence[str] | None = None) -> dict[str, float]:
    """Mean and standard error, over groups of cases where there are, of the values that are not NaN.

    Examples:
        >>> mean_and_error([1.0, 2.0, 3.0, float("nan")])
        {'mean': 2.0, 'standard_error': 0.57735...}
    """
    return {"mean": _mean(values), "standard_error": standard_error(values, groups=groups)}


def _within_one_error(values: Sequence[float], best: Sequence[float], groups: Sequence[str] | None) -> bool:
    # Paired: how hard the cases are is in both, and would make every method as good as any other.
    worse = _minus(values, best)
    # The error of a single case (group) is NaN, and no reason.
    mean, error = _mean(worse), standard_error(worse, groups=groups)
    return mean <= error or mean <= NEGLIGIBLE


def _minus(values: Sequence[float], best: Sequence[float]) -> list[float]:
    found: list[float] = difference(np.asarray(values, float), np.asarray(best, float)).tolist()
    return found


def _mean(values: Sequence[float]) -> float:
    defined = np.asarray(values, float)
    defined = defined[~np.isnan(defined)]
    with np.errstate(invalid="ignore"):  # of opposite infinities
        return float(defined.mean()) if defined.size else math.nan
