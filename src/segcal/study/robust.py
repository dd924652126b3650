"""How methods fare on shifted cases, against ``ts`` and against no calibration, and the words for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segcal.study.phrases import change, counted, joined
from segcal.study.recommend import NEGLIGIBLE
from segcal.study.settings import UNCALIBRATED

#: The method that every other one is held against: one number, hard to beat where data change.
REFERENCE = "ts"
Rows = Mapping[tuple[str, str], Mapping[str, Any]]


@dataclass(frozen=True)
class Shift:
    """What one shifted set says; rows by method and metric (NLL and ECE).

    Attributes:
        name: Of the set.
        summary: Means over its cases.
        differences: Every method minus uncalibrated, case by case.
        against: Every method minus ``ts`` with the same pooling, where that is in the study.
    """

    name: str
    summary: Rows
    differences: Rows
    against: Rows

    def loses_to(self, method: str) -> list[str]:
        """Which of ``ts`` and uncalibrated has a lower NLL here, beyond chance: the rule is in ``recommend.RULE``."""
        found = (table.get((method, "nll")) for table in (self.against, self.differences))
        return [str(row["baseline"]) for row in found if row is not None and _lost(row)]

    def knows(self, method: str) -> bool:
        """Whether the method could be tested here."""
        return (method, "nll") in self.summary


def is_robust(method: str, shifts: Sequence[Shift]) -> bool:
    """Whether a method works on all shifted sets and loses on none; leaving scores as they are always is."""
    return method == UNCALIBRATED or all(one.knows(method) and not one.loses_to(method) for one in shifts)


def shift_sentence(method: str, one: Shift) -> str:
    """How the recommended method does on one shifted set."""
    if not one.knows(method):
        return f"On {one.name}, {method} failed."
    against = one.against.get((method, "nll"))
    shown = {UNCALIBRATED: "as it is"}
    if against is not None:
        shown[str(against["baseline"])] = f"with {against['baseline']}"
    if method != UNCALIBRATED:
        shown[method] = f"with {method}"
    nll, ece = ([f"{one.summary[key, metric]['mean']:.4f}" for key in shown] for metric in ("nll", "ece"))
    values = joined([f"{value} {words}" for value, words in zip(nll, shown.values(), strict=True)])
    text = f"On {one.name} ({counted(one.summary[method, 'nll']['n'], 'case')}), NLL is {values}; ECE is {joined(ece)}."
    told = [_against(method, row) for row in (against, one.differences.get((method, "nll"))) if row is not None]
    return " ".join([text, *told])


def shift_caveats(method: str, shifts: Sequence[Shift], robust_choice: str) -> list[str]:
    """Where the recommended method loses, and what would be recommended if it must not."""
    found = []
    for one in shifts:
        for reference in one.loses_to(method):
            row = (one.differences if reference == UNCALIBRATED else one.against)[method, "nll"]
            found.append(f"{method} loses to {reference} on {one.name}: NLL {change(row)}.")
    if found and robust_choice != method:
        found[-1] += f" With --robust, {robust_choice} is recommended."
    return found


def _lost(row: Mapping[str, Any]) -> bool:
    return bool(row["verdict"] == "worse" and row["mean"] > NEGLIGIBLE)


def _against(method: str, row: Mapping[str, Any]) -> str:
    other = "no calibration" if row["baseline"] == UNCALIBRATED else row["baseline"]
    worse = f"{method} loses to {other} there" if _lost(row) else f"{method} is as good as {other} there"
    says = {"better": f"{method} is better than {other} there", "worse": worse}
    return f"{says.get(row['verdict'], f'{method} and {other} cannot be told apart there')} (NLL {change(row)})."
