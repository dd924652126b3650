"""Which calibrator to deploy: the best one that meets the constraints, or a simpler one that is as good."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from segcal.inference import standard_error
from segcal.inference.arrays import FloatArray, difference, mean
from segcal.statistics import EVERYTHING
from segcal.study.settings import UNCALIBRATED, Preserve

RULE = (
    "Among the methods that meet the constraints, the best has the lowest NLL on the validation cases. "
    "Recommended is the method with the fewest parameters among those within one standard error of the best, "
    "or within 0.0001 nats. "
    "The standard error is that of the difference from the best, paired by case. "
    "With --robust, a method does not meet the constraints if it fails on shifted cases, or if its NLL there is more "
    "than 0.0001 nats higher than that of ts or of uncalibrated and the 95% interval of the paired difference "
    "lies above 0."
)
CHANNEL_RULE = " The NLL of a case is the mean over its channels."
#: A difference of NLL in nats that is too small to matter; methods that fall back to a simpler one differ by less.
NEGLIGIBLE = 1e-4
#: The method that all others are compared with on shifted cases: one parameter, and hard to beat there.
REFERENCE = "ts"
#: Rows by method and metric, of whole cases.
Rows = Mapping[tuple[str, str], Mapping[str, Any]]
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
        deployed: Whether these scores are the deployed ones; another pooling of an ensemble may change labels itself.
        translation_invariant: Whether it ignores offsets of the logits.
        parameters: The number of its parameters.
        nll: Validation NLL ``(cases,)``, means over the repeats; the same cases for all candidates.
        robust: Whether it works on all shifted cases and loses on none.
        same_as: The simpler method that is the same map on these cases, if there is one.
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
    """The chosen method, and what it was chosen from: keys, and validation NLL with the difference from the best.

    ``left_out`` are the methods that only their results on shifted cases exclude.
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

    ``groups`` are those of the validation cases; standard errors are over groups. A method that is the same map as a
    simpler candidate is not a candidate itself.

    Examples:
        >>> none = Candidate("uncalibrated", "order", True, True, 0, [1.0, 2.0, 3.0])
        >>> simple = Candidate("ts", "order", True, True, 1, [0.50, 1.51, 2.49])
        >>> rich = Candidate("cms-op", "order", True, True, 99, [0.49, 1.49, 2.51])
        >>> moving = Candidate("dc", None, True, True, 42, [0.1, 0.1, 0.1])
        >>> found = choose([none, simple, rich, moving], "order", False)
        >>> found.best, found.method, found.candidates
        ('cms-op', 'ts', ('uncalibrated', 'ts', 'cms-op'))
    """
    nll = {one.key: mean_and_error(one.nll, groups) for one in candidates}
    eligible = [
        one
        for one in candidates
        if one.preserves in _ALLOWED[preserve]
        and (one.deployed or preserve == "none")
        and (one.translation_invariant or not translation_invariant)
        and not np.isnan(nll[one.key]["mean"])
    ]
    allowed = [one for one in eligible if one.robust or not robust]
    left_out = tuple(one.key for one in eligible if one not in allowed)
    keys = {one.key for one in allowed}
    allowed = [one for one in allowed if one.same_as not in keys]
    if not allowed:  # no validation NLL at all
        allowed = [one for one in candidates if one.key == UNCALIBRATED]
    best = min(allowed, key=lambda one: (nll[one.key]["mean"], one.parameters))
    for one in candidates:
        # Paired by case: otherwise the difficulty of the cases would hide every difference between methods.
        minus = mean_and_error(difference(np.asarray(one.nll, float), np.asarray(best.nll, float)), groups)
        nll[one.key] |= {"minus_best": minus["mean"], "minus_best_standard_error": minus["standard_error"]}
    as_good = [one for one in allowed if one is best or _within_one_error(nll[one.key])]
    chosen = min(as_good, key=lambda one: (one.parameters, nll[one.key]["mean"]))
    return Choice(chosen.key, best.key, tuple(one.key for one in allowed), nll, left_out)


def by_method(rows: Iterable[Mapping[str, Any]]) -> Rows:
    """The rows of whole cases, by method and metric."""
    return {(row["method"], row["metric"]): row for row in rows if row["region"] == EVERYTHING}


@dataclass(frozen=True)
class Shift:
    """What one set of shifted cases shows.

    Attributes:
        name: Its name.
        summary: Means over its cases.
        differences: Every method minus uncalibrated, paired by case.
        against: Every method minus ``ts`` with the same pooling, if the study has it.
    """

    name: str
    summary: Rows
    differences: Rows
    against: Rows

    def loses_to(self, method: str) -> list[str]:
        """Which of ``ts`` and uncalibrated has a lower NLL here, beyond chance; see ``choice.RULE``."""
        found = (table.get((method, "nll")) for table in (self.against, self.differences))
        return [str(row["baseline"]) for row in found if row is not None and lost(row)]

    def knows(self, method: str) -> bool:
        """Whether the method worked here."""
        return (method, "nll") in self.summary


def lost(row: Mapping[str, Any]) -> bool:
    """Whether a difference of NLL is a loss that matters."""
    return bool(row["verdict"] == "worse" and row["mean"] > NEGLIGIBLE)


def is_robust(method: str, shifts: Sequence[Shift]) -> bool:
    """Whether a method works on all shifted sets and loses on none. Uncalibrated scores always are robust."""
    return method == UNCALIBRATED or all(one.knows(method) and not one.loses_to(method) for one in shifts)


def mean_and_error(values: Sequence[float] | FloatArray, groups: Sequence[str] | None = None) -> dict[str, float]:
    """Mean and standard error (over groups, if given) of the values that are not NaN.

    Examples:
        >>> mean_and_error([1.0, 2.0, 3.0, float("nan")])
        {'mean': 2.0, 'standard_error': 0.57735...}
    """
    array = np.asarray(values, float)
    return {"mean": float(mean(array, 0)[0]), "standard_error": standard_error(array.tolist(), groups=groups)}


def _within_one_error(nll: Mapping[str, float]) -> bool:
    # A single case (group) has no standard error: comparing with NaN is false.
    return nll["minus_best"] <= nll["minus_best_standard_error"] or nll["minus_best"] <= NEGLIGIBLE
