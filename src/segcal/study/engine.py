"""``compare``: the whole study, from cases to a results document."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import Tensor

from segcal.cases import CaseSet
from segcal.errors import InputError, check_whole
from segcal.files.folders import OwnFolder
from segcal.files.plain import plain
from segcal.study.results.document import results_document
from segcal.study.results.study import Study
from segcal.study.settings import Settings, resolve_methods
from segcal.study.splits import corrupted_sets, given_sets, split_cases
from segcal.study.summary.voxels import about_data
from segcal.study.work.run import Run, Step


def compare(
    cases: CaseSet,
    methods: str | Sequence[str] = ("ts", "lts-ti", "cms-op"),
    repeats: int | None = None,
    *,
    output: str | Path | None = None,
    shifted: Mapping[str, CaseSet] | None = None,
    model: Callable[[Tensor], Tensor] | None = None,
    shift: bool = False,
    workers: int = 1,
    resume: bool = False,
    name: str = "cases",
    command: str | None = None,
    progress: Callable[[Step], None] = lambda step: None,
    **settings: Any,
) -> Study:
    """Fit every method on several splits, test them all on the same cases, and recommend one to deploy.

    Each repeat splits the cases into a part to fit to, one to choose strengths and methods on, and one to test on;
    groups stay together. All methods of a repeat are tested from one read of its test cases. A method that fails is
    reported as failed, and the study goes on.

    Args:
        cases: The dataset.
        methods: Ids of ``segcal.CALIBRATORS``, ``"all"``, or ``"decision-preserving"`` for those that keep labels.
        repeats: The number of splits, all different. By default 3 random ones, or the one that the dataset declares.
            Cases declared for testing are never fitted to or chosen on; with more repeats, the calibration and
            validation parts are redrawn from the cases declared for them.
        output: Folder for ``results.json``, tables, pictures, the recommended calibrator, and what a stopped study
            needs to resume. None keeps nothing.
        shifted: Other datasets to test on, by name. Cases that a repeat fitted to or chose on are left out.
        model: For ``shift``: from an image ``(1, channels, *spatial)`` to logits ``(1, C, *spatial)``, or to sigmoid
            logits ``(1, K, *spatial)`` of the channels of multi-label data.
        shift: Also test on photometric corruptions of the images (``segcal.training.shift``), mild and strong.
        workers: Number of processes: fits are shared by method, evaluations by case.
        resume: Continue in a folder that is not empty; finished work that still applies is reused.
        name: The name of the dataset, for the report.
        command: The command that made this study, for the report.
        progress: Called with a ``Step`` before each piece of work.
        settings: Fields of ``segcal.study.Settings``, by name: ``fractions``, ``tune``, ``select``, ``metrics``,
            ``regions``, ``preserve``, ``translation_invariant``, ``robust``, ``pooling``, ``sensitivity``, ``seed``.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(8, size=(32, 40), plant=[segcal.synthetic.Temperature(3.0)])
        >>> study = compare(cases, methods=("ts", "vs"), repeats=2, tune="none", metrics=("nll", "ece"))
        >>> study.recommendation["method"], len(study.summary("nll"))
        ('ts', 3)
    """
    # With pooling spaces, the uncalibrated scores of each space take the place of the ensemble calibrator.
    ids = resolve_methods(methods, members=cases.num_members is not None and not settings.get("pooling"))
    asked = Settings(ids, repeats=1 if repeats is None else repeats, **settings)
    check_whole("workers", workers, 1)
    if asked.robust and not shifted and not shift:
        raise InputError("robust without shifted cases", expected="shifted= (--shifted) or shift= (--shift), or both")
    asked.check_members(cases)
    splits, origin, warnings = split_cases(cases, repeats, asked.fractions, asked.seed)
    asked = replace(asked, repeats=len(splits))
    moved = given_sets(cases, shifted or {})
    if shift:
        moved += corrupted_sets(cases, model, asked)
    started = time.perf_counter()
    inputs = [folder for read in (cases, *(shifted or {}).values()) for folder in read.folders]
    with ExitStack() as stack:
        if output is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="segcal-")))
        else:
            own = stack.enter_context(OwnFolder(Path(output), "a study", inputs=inputs, resume=resume))
            own.begin()
            folder = own.folder
        run = Run(cases, asked, splits, moved, folder, workers, progress)
        document = results_document(run, warnings, {**about_data(cases, name), "splits": origin}, command)
        document["timings"] = {
            "total_seconds": time.perf_counter() - started,
            "per_method": run.timings(),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        study = Study(json.loads(json.dumps(plain(document))))
        if output is not None:
            study.to_csv(folder / "tables.csv")
            study.to_latex(folder / "tables.tex")
            study.to_json(folder / "results.json")
    return study
