"""Shifted cases: a second dataset, or the same images corrupted and predicted again."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from segcal.cases import CaseSet
from segcal.cases.calibrated import check_classes
from segcal.cases.caseset import CaseRef, Split
from segcal.errors import InputError
from segcal.study.settings import Settings
from segcal.study.work.store import fingerprints
from segcal.training.shift import SEVERITIES, CorruptedCase, Severity
from segcal.types import Case

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ShiftedSet:
    """Cases to test the calibrators on; ``known`` are their fingerprints, ``modelled`` if a model predicts them."""

    name: str
    cases: CaseSet
    known: Mapping[str, str]
    modelled: bool = False

    def left(self, split: Split) -> CaseSet:
        """The cases that this repeat has not seen: a corrupted copy of a calibration image counts as seen."""
        seen = {*split.calibration.ids, *split.validation.ids}
        cases = self.cases.select([case for case in self.cases.ids if case not in seen])
        if not len(cases):
            raise InputError(
                f"all cases of '{self.name}' were fitted to or chosen on",
                where="shifted",
                expected="cases with new names, or with the names of test cases",
            )
        return cases

    def workers(self, workers: int) -> int:
        """One for a model: it uses all cores itself, and may not work in another process."""
        return 1 if self.modelled else workers


def given_sets(cases: CaseSet, shifted: Mapping[str, CaseSet]) -> list[ShiftedSet]:
    """Second datasets. They must have the classes of the first."""
    for name, other in shifted.items():
        check_classes(other, cases, have=f"'{name}' has", whose="the dataset")
    return [ShiftedSet(name, other, fingerprints(other)) for name, other in shifted.items()]


def corrupted_sets(cases: CaseSet, model: Model | None, settings: Settings) -> list[ShiftedSet]:
    """The model's predictions for mildly and strongly corrupted images of the cases."""
    if model is None:
        raise InputError("shift without a model", expected="model=, a function from images to logits")
    if cases[0].image is None:
        raise InputError("the cases have no images", where="shift", expected="a folder images/ in the dataset")
    if settings.pooling:
        raise InputError("shift with pooling", expected="one of them: a model gives one prediction, not an ensemble's")
    # A model has no fingerprint, so its predictions get a new one each time: nothing is reused from an earlier run.
    once, multilabel = uuid.uuid4().hex, cases.channel_names is not None
    found = []
    for severity in SEVERITIES:
        opens = {ref.id: partial(_open, ref, model, severity, settings.seed, multilabel) for ref in cases.refs}
        corrupted = replace(cases, refs=tuple(CaseRef(*item) for item in opens.items()), num_members=None)
        known = dict.fromkeys(cases.ids, f"{once} {severity}")
        found.append(ShiftedSet(f"photometric {severity}", corrupted, known, modelled=True))
    return found


def _open(ref: CaseRef, model: Model, severity: Severity, seed: int, multilabel: bool) -> Case:
    return Case(CorruptedCase(ref.open(), model, severity, seed, multilabel=multilabel))
