"""``compare``: the whole study, from cases to a results document."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from torch import Tensor

from segcal.cases import CaseSet
from segcal.errors import InputError, check_whole
from segcal.evaluation.evaluate import DEFAULT_METRICS
from segcal.files.folders import OwnFolder
from segcal.files.plain import plain
from segcal.statistics import EVERYTHING
from segcal.study.cache import Store
from segcal.study.document import results_document
from segcal.study.facts import about_data
from segcal.study.progress import Step
from segcal.study.run import Run
from segcal.study.settings import Pooling, Preserve, Select, Sensitivity, Settings, Tune, resolve_methods
from segcal.study.shifted import corrupted_sets, given_sets
from segcal.study.splits import split_cases
from segcal.study.study import Study

STUDY_METRICS = (*DEFAULT_METRICS, "flip")


def compare(
    cases: CaseSet,
    methods: str | Sequence[str] = ("ts", "lts-ti", "cms-op"),
    repeats: int | None = None,
    *,
    output: str | Path | None = None,
    fractions: tuple[float, float, float] = (0.5, 0.2, 0.3),
    tune: Tune = "path",
    select: Select = "nll",
    metrics: Sequence[str] = STUDY_METRICS,
    regions: Sequence[str] = (EVERYTHING, "boundary"),
    preserve: Preserve = "order",
    translation_invariant: bool = False,
    robust: bool = False,
    pooling: Sequence[Pooling] | None = None,
    shifted: Mapping[str, CaseSet] | None = None,
    model: Callable[[Tensor], Tensor] | None = None,
    shift: bool = False,
    sensitivity: Sequence[Sensitivity] = (),
    workers: int = 1,
    seed: int = 0,
    resume: bool = False,
    name: str = "cases",
    command: str | None = None,
    progress: Callable[[Step], None] = lambda step: None,
) -> Study:
    """Fit every method on several splits, test them all on the same cases, and say which one to deploy.

    Each repeat splits the cases into a part to fit to, one to choose strengths and methods on, and one to test on;
    groups stay together. All methods of a repeat are tested from one read of its test cases. A method that fails is
    reported as failed, and the study goes on.

    Args:
        cases: The dataset.
        methods: Ids of ``segcal.CALIBRATORS``, ``"all"``, or ``"decision-preserving"`` for those that keep labels.
        repeats: How many splits, all different. By default 3 random ones or, where the dataset declares its splits, 1:
            these. Cases declared for testing are never fitted to or chosen on; with more repeats, the calibration and
            validation parts are drawn anew from the cases declared for them.
        output: Folder for ``results.json``, tables, pictures, the recommended calibrator, and what a killed study
            needs to go on; None keeps nothing.
        fractions: Shares of the cases for calibration, validation and test.
        tune: ``"path"`` chooses the shrinkage of exact maps on the validation part; ``"paper"`` trains by Adam with
            settings searched by Optuna, as published; ``"none"`` takes the defaults.
        select: The metric that tuning lowers.
        metrics: Ids of ``segcal.METRICS``, with options where wanted.
        regions: Ids of ``segcal.REGIONS``.
        preserve: What a recommended method must keep: the ``"order"`` of the classes, their ``"argmax"``, ``"none"``.
        translation_invariant: Recommend only methods that ignore offsets of the logits.
        robust: Recommend only methods that lose neither to ``ts`` nor to no calibration on the shifted cases.
        pooling: For ensembles: compare a ``"single"`` member, the mean of ``"probs"``, the mean of ``"logits"``.
        shifted: Other datasets to test on, by name. Cases that a repeat fitted to or chose on are left out.
        model: From an image ``(1, channels, *spatial)`` to logits ``(1, C, *spatial)``, for ``shift``; of
            multi-label data a sigmoid logit for each channel, ``(1, K, *spatial)``.
        shift: Also test on the photometric corruptions of the images (``segcal.training.shift``), mild and strong.
        sensitivity: Also vary the number of ``"bins"``, the calibration ``"size"``, the ensemble ``"members"``.
        workers: Processes: fits are shared by method, evaluations by case.
        seed: Of splits, fits and bootstrap.
        resume: Go on in a folder that is not empty; what is finished there and still fits is taken as it is.
        name: Of the dataset, for the report.
        command: That made this study, for the report.
        progress: Called with a ``Step`` before each piece of work.

    Examples:
        >>> import segcal
        >>> cases = segcal.synthetic.scenes(8, size=(32, 40), plant=[segcal.synthetic.Temperature(3.0)])
        >>> study = compare(cases, methods=("ts", "vs"), repeats=2, tune="none", metrics=("nll", "ece"))
        >>> study.recommendation["method"], len(study.summary("nll"))
        ('ts', 3)
    """
    settings = Settings(
        # With pooling spaces, the ensemble is there as uncalibrated in each of them.
        methods=resolve_methods(methods, members=cases.num_members is not None and not pooling),
        repeats=1 if repeats is None else repeats,
        fractions=fractions,
        tune=tune,
        select=select,
        metrics=tuple(dict.fromkeys(metrics)),
        regions=tuple(dict.fromkeys(regions)),
        preserve=preserve,
        translation_invariant=translation_invariant,
        robust=robust,
        pooling=tuple(dict.fromkeys(pooling or ())),
        sensitivity=tuple(dict.fromkeys(sensitivity)),
        seed=seed,
    )
    check_whole("workers", workers, 1)
    if robust and not shifted and not shift:
        raise InputError("robust without shifted cases", expected="shifted= (--shifted) or shift= (--shift), or both")
    settings.check_members(cases)
    splits, origin, warnings = split_cases(cases, repeats, fractions, seed)
    settings = replace(settings, repeats=len(splits))
    moved = given_sets(cases, shifted or {})
    if shift:
        moved += corrupted_sets(cases, model, settings)
    started = time.perf_counter()
    inputs = [folder for read in (cases, *(shifted or {}).values()) for folder in read.folders]
    with _folder(output, resume, inputs) as folder:
        run = Run(cases, settings, splits, moved, folder, Store(folder / "work"), workers, progress)
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


@contextmanager
def _folder(output: str | Path | None, resume: bool, inputs: Sequence[Path]) -> Iterator[Path]:
    if output is None:
        with tempfile.TemporaryDirectory(prefix="segcal-") as temporary:
            yield Path(temporary)
        return
    with OwnFolder(Path(output), "a study", inputs=inputs, resume=resume) as own:
        own.begin()
        yield own.folder
