"""The numbers that the words of a study rest on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segcal.statistics import EVERYTHING
from segcal.study.advice.choice import NEGLIGIBLE
from segcal.study.settings import UNCALIBRATED

#: The method that all others are compared with on shifted cases: one parameter, and hard to beat there.
REFERENCE = "ts"
#: Rows by method and metric, of whole cases.
Rows = Mapping[tuple[str, str], Mapping[str, Any]]


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


@dataclass(frozen=True)
class Evidence:
    """What the words rest on.

    Attributes:
        methods: Rows of the methods, by key.
        summary: Means over the test cases.
        differences: The same minus uncalibrated.
        beside: The same minus the chosen method.
        flips: Changed labels, by key.
        diagnosis: Findings about the uncalibrated scores.
        cases: The number of cases in the smallest calibration part.
        voxels: Voxels of every class in that part.
        validation: The mean uncalibrated NLL of the validation cases, with its interval.
        groups: The number of groups of test cases; None if each case is its own.
        shift: Results on shifted cases, if there are any.
        robust_choice: What is recommended if it must not lose on shifted cases.
    """

    methods: Mapping[str, Mapping[str, Any]]
    summary: Rows
    differences: Rows
    beside: Rows
    flips: Mapping[str, Mapping[str, Any]]
    diagnosis: Mapping[str, Any]
    cases: int
    voxels: Mapping[str, int]
    validation: Mapping[str, Any]
    groups: int | None = None
    shift: Sequence[Shift] = ()
    robust_choice: str = ""
