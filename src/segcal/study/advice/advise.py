"""From the tables of a study to its advice: the choice, the words, and the calibrator file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from segcal.study.advice.choice import CHANNEL_RULE, RULE, Candidate, Choice, Shift, by_method, choose, is_robust
from segcal.study.advice.words import Evidence, caveats, headline, sentences
from segcal.study.settings import ECE, UNCALIBRATED
from segcal.study.summary.table import Table, differences, summary
from segcal.study.summary.voxels import part_voxels
from segcal.study.work.run import Repeats, Run

CALIBRATOR_FILE = "calibrator.safetensors"


def advise(
    run: Run,
    document: Mapping[str, Any],
    validated: tuple[Table, Repeats],
    tested: Table,
    counts: Mapping[str, Sequence[int]],
    shifts: Sequence[Shift],
) -> dict[str, Any]:
    """The recommendation, as its entry in the results.

    Args:
        run: The study, all of whose methods are fitted.
        document: The results so far. Its summary and differences have NLL and ECE of whole cases.
        validated: NLL on the validation cases, and the evaluations it comes from.
        tested: All columns on the test cases.
        counts: Voxels of every class in every case.
        shifts: Results on shifted cases.
    """
    table, settings = validated[0], run.settings
    methods = {row["key"]: row for row in document["methods"]}
    from_row = ("key", "preserves", "translation_invariant", "parameters", "same_as")
    candidates = [
        Candidate(
            **{name: methods[key][name] for name in from_row},
            deployed=methods[key]["pooling"] in (None, run.deployed),
            nll=table.values[:, m, 0].tolist(),
            robust=is_robust(key, shifts),
        )
        for m, key in enumerate(table.methods)
    ]
    free, robust = (
        choose(candidates, settings.preserve, settings.translation_invariant, must, table.groups)
        for must in (False, True)
    )
    choice = robust if settings.robust else free
    smallest = min((split.calibration for split in run.splits), key=len)
    evidence = Evidence(
        methods=methods,
        summary=by_method(document["summary"]),
        differences=by_method(document["differences"]),
        beside=by_method(differences(tested.part([ECE]), settings.seed, choice.method)),
        flips={row["method"]: row for row in document["flips"]},
        diagnosis=document["diagnosis"][UNCALIBRATED],
        cases=len(smallest),
        voxels=part_voxels(run.cases, smallest, counts),
        validation=summary(*validated, settings.seed)[0],
        groups=None if tested.groups is None else len(set(tested.groups)),
        shift=shifts,
        robust_choice=robust.method,
    )
    deployed = run.methods[choice.method].id != UNCALIBRATED
    failed: list[str] = []
    if deployed:
        calibrator, reason = run.refit(choice.method)
        calibrator.save(run.folder / CALIBRATOR_FILE)
        if reason:
            failed = [f"The last fit, to all but the test cases, failed, and the file is that of repeat 1: {reason}"]
    return {
        "method": choice.method,
        "best": choice.best,
        "shown": _shown(run, choice),
        "rule": RULE if run.cases.channel_names is None else RULE + CHANNEL_RULE,
        "headline": headline(choice, evidence),
        "sentences": sentences(choice, evidence),
        "caveats": [*caveats(choice, evidence), *failed],
        "candidates": list(choice.candidates),
        "left_out": list(choice.left_out),
        "validation_nll": choice.validation_nll,
        "file": CALIBRATOR_FILE if deployed else None,
    }


def _shown(run: Run, choice: Choice) -> str | None:
    """What a report calls "after": the recommended calibrator or, if none is, the best calibrator there is."""
    nll = choice.validation_nll
    fitted = [key for key in nll if run.methods[key].id != UNCALIBRATED and not math.isnan(nll[key]["mean"])]
    if choice.method in fitted:
        return choice.method
    return min(fitted, key=lambda key: (key not in choice.candidates, nll[key]["mean"]), default=None)
