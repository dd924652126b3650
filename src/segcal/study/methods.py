"""The methods of a study: calibrators, each in every way of pooling an ensemble that is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from segcal.calibrators import CALIBRATORS
from segcal.cases import CaseSet
from segcal.study.fits import method_name
from segcal.study.settings import UNCALIBRATED, Settings


@dataclass(frozen=True)
class Method:
    """A row of the study. ``variant`` says which scores it is given: None for the cases as they are.

    Examples:
        >>> Method("ts", "probs").key, Method("ts").key
        ('ts@probs', 'ts')
    """

    id: str
    pooling: str | None = None

    @property
    def key(self) -> str:
        """Its name in the study."""
        return f"{self.id}@{self.pooling}" if self.pooling else self.id

    def row(self, parameters: int | None, reason: str | None) -> dict[str, Any]:
        """Its entry in the results."""
        calibrator = None if self.id == UNCALIBRATED else CALIBRATORS[self.id]()
        return {
            "key": self.key,
            "id": self.id,
            "pooling": self.pooling,
            "name": "Uncalibrated" if calibrator is None else method_name(self.id),
            "preserves": "order" if calibrator is None else calibrator.preserves,
            "translation_invariant": True if calibrator is None else calibrator.translation_invariant,
            "parameters": 0 if calibrator is None else parameters,
            "status": "ok" if reason is None else "failed",
            "reason": reason,
        }


def study_methods(settings: Settings) -> list[Method]:
    """Uncalibrated first, then every method; with pooling spaces, uncalibrated and every method in each of them."""
    if not settings.pooling:
        return [Method(UNCALIBRATED), *(Method(id) for id in settings.methods)]
    found = [Method(UNCALIBRATED)]
    for space in settings.pooling:
        found += [Method(id, space) for id in (UNCALIBRATED, *settings.methods)]
    return found


def variant_of(cases: CaseSet, variant: str | None) -> CaseSet:
    """The cases as a variant sees them: pooled in a space, the first member alone, or the first few."""
    if variant is None:
        return cases
    if variant == "single":
        return cases.members([0])
    if variant.startswith("members-"):
        return cases.members(range(int(variant.removeprefix("members-"))))
    return cases.pooled("probs" if variant == "probs" else "logits")
