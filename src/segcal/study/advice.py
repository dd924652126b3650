"""From the evaluations of a study to its advice: the choice, what it rests on, the words, and the file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from segcal.statistics import EVERYTHING
from segcal.study import summarise
from segcal.study.evidence import Evidence, Rows
from segcal.study.facts import part_voxels
from segcal.study.headline import headline
from segcal.study.recommend import CHANNEL_RULE, RULE, Candidate, Choice, choose
from segcal.study.robust import REFERENCE, Shift, is_robust
from segcal.study.run import Run
from segcal.study.settings import UNCALIBRATED
from segcal.study.shifted import ShiftedSet
from segcal.study.summarise import Repeats
from segcal.study.words import caveats, sentences

CALIBRATOR_FILE = "calibrator.safetensors"
_NLL = ("nll", EVERYTHING)
_COLUMNS = [_NLL, ("ece", EVERYTHING)]


def advise(
    run: Run,
    document: Mapping[str, Any],
    validation: Repeats,
    test: Repeats,
    counts: Mapping[str, Sequence[int]],
    shifts: Sequence[Shift],
) -> dict[str, Any]:
    """What is recommended: its entry in the results; ``counts`` are the voxels of every class in every case."""
    validated = run.table(validation, [_NLL])
    candidates = _candidates(run, document["methods"], validated, shifts)
    limits = run.settings.preserve, run.settings.translation_invariant
    robust_choice = choose(candidates, *limits, robust=True, groups=validated.groups)
    choice = robust_choice if run.settings.robust else choose(candidates, *limits, groups=validated.groups)
    table, seed = run.table(test, _COLUMNS), run.settings.seed
    smallest = min((split.calibration for split in run.splits), key=len)
    evidence = Evidence(
        methods={row["key"]: row for row in document["methods"]},
        summary=_rows(summarise.summary(table, test, seed)),
        differences=_rows(summarise.differences(table, seed)),
        beside=_rows(summarise.differences(table, seed, choice.method)),
        flips={row["method"]: row for row in document["flips"]},
        diagnosis=document["diagnosis"][UNCALIBRATED],
        cases=len(smallest),
        voxels=part_voxels(run.cases, smallest, counts),
        validation=validated.values[:, 0, 0].tolist(),
        test=table.values[:, 0, 0].tolist(),
        groups=(validated.groups, table.groups),
        shift=shifts,
        robust_choice=robust_choice.method,
    )
    return {
        "method": choice.method,
        "best": choice.best,
        "shown": _shown(run, choice),
        "rule": RULE if run.cases.channel_names is None else RULE + CHANNEL_RULE,
        "headline": headline(choice, evidence),
        "sentences": sentences(choice, evidence),
        "caveats": caveats(choice, evidence, seed),
        "candidates": list(choice.candidates),
        "left_out": list(choice.left_out),
        "validation_nll": choice.validation_nll,
        "file": _deploy(run, choice.method),
    }


def shift_evidence(run: Run, one: ShiftedSet, repeats: Repeats) -> Shift:
    """What shifted cases say of NLL and ECE."""
    table, seed = run.table(repeats, _COLUMNS, one.cases), run.settings.seed
    return Shift(
        name=one.name,
        summary=_rows(summarise.summary(table, repeats, seed)),
        differences=_rows(summarise.differences(table, seed)),
        against=_rows(against_reference(run, table)),
    )


def against_reference(run: Run, table: summarise.Table) -> list[dict[str, Any]]:
    """Every method minus ``ts`` on the same cases, where the study has it; with pooling spaces, in the same one."""
    rows = []
    for reference in (run.method(key) for key in table.methods):
        if reference.id == REFERENCE:
            found = summarise.differences(table, run.settings.seed, reference.key)
            space = run.variant(reference)
            rows += [row for row in found if run.variant(run.method(row["method"])) == space]
    return rows


def _rows(rows: Sequence[Mapping[str, Any]]) -> Rows:
    return {(row["method"], row["metric"]): row for row in rows}


def _candidates(
    run: Run, methods: Sequence[Mapping[str, Any]], table: summarise.Table, shifts: Sequence[Shift]
) -> list[Candidate]:
    rows = {row["key"]: row for row in methods}
    return [
        Candidate(
            key,
            rows[key]["preserves"],
            rows[key]["pooling"] in (None, run.deployed),
            rows[key]["translation_invariant"],
            rows[key]["parameters"],
            table.values[:, m, 0].tolist(),
            is_robust(key, shifts),
            rows[key]["same_as"],
        )
        for m, key in enumerate(table.methods)
    ]


def _shown(run: Run, choice: Choice) -> str | None:
    """What a report calls "after": the recommended method or, where that is none, the best calibrator there is."""
    nll = choice.validation_nll
    fitted = [key for key in nll if run.method(key).id != UNCALIBRATED and not math.isnan(nll[key]["mean"])]
    if choice.method in fitted:
        return choice.method
    return min(fitted, key=lambda key: (key not in choice.candidates, nll[key]["mean"]), default=None)


def _deploy(run: Run, key: str) -> str | None:
    """The chosen calibrator as a file."""
    if run.method(key).id == UNCALIBRATED:
        return None
    run.refit(key).save(run.folder / CALIBRATOR_FILE)
    return CALIBRATOR_FILE
