"""``compare``: the whole study, from cases to the results document.

The document holds everything a report shows, in plain dictionaries, lists and numbers.
"""

from __future__ import annotations

import inspect
import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from segcal.cases import CaseSet, Source, cases_from
from segcal.cases.device import Device
from segcal.errors import InputError, check_whole
from segcal.evaluation.evaluate import versions
from segcal.evaluation.plan import DEFAULT_BINS, metric_spec, parse_metric
from segcal.files.folders import OwnFolder
from segcal.files.plain import plain
from segcal.files.versions import STUDY
from segcal.metrics import Column, options_of
from segcal.parallel.ranks import crew
from segcal.statistics import EVERYTHING
from segcal.study.advice.advise import advise
from segcal.study.advice.choice import REFERENCE, Shift, by_method, mean_and_error
from segcal.study.results.browser import Place, write_browser
from segcal.study.results.study import Study
from segcal.study.settings import BIN_COUNTS, ECE, NLL, SCORES, UNCALIBRATED, Settings, resolve_methods, variant_of
from segcal.study.splits import corrupted_sets, given_sets, split_cases
from segcal.study.summary import voxels
from segcal.study.summary.table import Columns, Table, differences, mean, rankings, same_maps, summary
from segcal.study.work.run import Repeats, Run, Step

Row = dict[str, Any]


def compare(
    cases: Source,
    methods: str | Sequence[str] = ("trust", "ts", "lts-ti", "cms-op"),
    repeats: int | None = None,
    *,
    output: str | Path | None = None,
    shifted: Mapping[str, Source] | None = None,
    model: Callable[[Tensor], Tensor] | None = None,
    shift: bool = False,
    workers: int = 1,
    device: Device | None = None,
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
        cases: The dataset, or anything else that ``segcal.cases_from`` takes, such as a DataLoader.
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
        workers: Number of processes: fits are shared by method, evaluations by case. In a torchrun job, its ranks
            share them instead; all machines must see the output folder.
        device: Where to compute: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``; None for where the cases are.
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
    cases, others = cases_from(cases), {name: cases_from(own) for name, own in (shifted or {}).items()}
    # With pooling spaces, the uncalibrated scores of each space take the place of the ensemble calibrator.
    ids = resolve_methods(methods, members=cases.num_members is not None and not settings.get("pooling"))
    asked = Settings(ids, repeats=1 if repeats is None else repeats, **settings)
    check_whole("workers", workers, 1)
    if asked.robust and not others and not shift:
        raise InputError("robust without shifted cases", expected="shifted= (--shifted) or shift= (--shift), or both")
    asked.check_members(cases)
    splits, origin, warnings = split_cases(cases, repeats, asked.fractions, asked.seed)
    asked = replace(asked, repeats=len(splits))
    cases = cases.on(device)
    moved = given_sets(cases, {name: own.on(device) for name, own in others.items()})
    if shift:
        moved += corrupted_sets(cases, model, asked)
    started = time.perf_counter()
    inputs = [folder for read in (cases, *others.values()) for folder in read.folders]
    with ExitStack() as stack:
        if output is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="segcal-")))
        else:
            own = stack.enter_context(OwnFolder(Path(output), "a study", inputs=inputs, resume=resume))
            own.begin()
            folder = own.folder
        run = Run(cases, asked, splits, moved, folder, crew(workers), progress)
        document = results_document(run, warnings, {**voxels.about_data(cases, name), "splits": origin}, command)
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


def results_document(run: Run, warnings: Sequence[str], data: Mapping[str, Any], command: str | None) -> Row:
    """Do all the work of a run and collect the results. All but the timings is the same every time."""
    settings, splits = run.settings, run.splits
    counts = voxels.label_counts(run.cases, run.known, run.store)
    run.fit_all()
    validation = run.evaluate_parts("validating", [split.validation for split in splits], [Column("nll")])
    test = run.evaluate_parts("testing", [split.test for split in splits], settings.measured)
    # A method that failed in a later repeat is removed from the earlier ones, too.
    validation, test = (run.in_order(part, run.failures) for part in (validation, test))
    methods = [one.row(run.parameters(key), run.failures.get(key)) for key, one in run.methods.items()]
    same = same_maps(test, {row["key"]: row["parameters"] for row in methods})
    shift, shift_facts, shift_warnings = _shift(run, same)
    columns = [column for column in test[0][UNCALIBRATED].columns if settings.shown(*column)]
    table = _table(run.cases, test, [*columns, NLL, ECE], same)
    document = {
        "format": STUDY[0],
        "version": STUDY[1],
        "about": {
            "title": f"Calibration of {data['name']}",
            "command": command,
            "seed": settings.seed,
            "versions": dict(versions()),
            "data": data,
            "settings": {name: value for name, value in asdict(settings).items() if name != "seed"},
        },
        "metrics": [describe_metric(metric) for metric in dict.fromkeys(metric for metric, _ in columns)],
        "methods": [{**row, "same_as": same.get(row["key"])} for row in methods],
        "splits": [{name: list(part.ids) for name, part in split._asdict().items()} for split in splits],
        "fits": _fit_rows(run, validation),
        **_value_rows(run, test, columns),
        "summary": summary(table, test, settings.seed),
        "differences": differences(table, settings.seed),
        **rankings(table.part(columns)),
        "scores": _scores(run, test),
        "flips": voxels.flips(test),
        "reliability": voxels.reliability(test, (EVERYTHING, *settings.regions)),
        "bands": voxels.bands(test, "voxel" if run.cases[0].spacing is None else "mm") if settings.bands else [],
        "classes": voxels.classes(test),
        "diagnosis": {key: evaluation.diagnosis for key, evaluation in test[0].items()},
        "channels": [
            {"name": name, "summary": summary(_table(run.cases, own, columns, same), own, settings.seed)}
            for name, own in voxels.by_channel(test).items()
        ],
        "shift": shift or None,
        "sensitivity": _sensitivity(run, test, same),
    }
    validated = _table(run.cases, validation, [NLL], same), validation
    advice = advise(run, document, validated, table, counts, shift_facts)
    failed = [f"{key} failed: {reason}" for key, reason in run.failures.items()]
    missed = voxels.missed_classes(test[0][UNCALIBRATED], columns)
    return {
        **document,
        "summary": _shown(run, document["summary"]),
        "differences": _shown(run, document["differences"]),
        "recommendation": advice,
        "browser": _browser(run, advice["shown"], test),
        "warnings": [*warnings, *voxels.absent_classes(run.cases, splits, counts), *missed, *failed, *shift_warnings],
    }


def _table(cases: CaseSet, repeats: Repeats, columns: Columns, same: Mapping[str, str]) -> Table:
    groups = cases.about_groups()
    return Table.of(repeats, list(dict.fromkeys(columns)), groups and groups["cases"], same)


def _shown(run: Run, rows: Sequence[Row]) -> list[Row]:
    """The rows of the columns that were asked for."""
    return [row for row in rows if run.settings.shown(row["metric"], row["region"])]


def _fit_rows(run: Run, validation: Repeats) -> list[Row]:
    rows = []
    groups = run.cases.case_groups if run.cases.groups else None
    for (key, repeat), task in run.tasks.items():
        if key not in run.failures:
            values = validation[repeat][key].values(*NLL)
            own = None if groups is None else [groups[case] for case in values]
            nll = {**mean_and_error(list(values.values()), own), "cases": len(values)}
            rows.append({"method": key, "repeat": repeat, **run.fits[task.key]["fit"], "validation_nll": nll})
    return rows


def _value_rows(run: Run, test: Repeats, columns: Columns) -> dict[str, list[Row]]:
    """The values of every test case, and the pooled ones."""
    cases, pooled = [], []
    for repeat, (split, found) in enumerate(zip(run.splits, test, strict=True)):
        for key, evaluation in found.items():
            for metric, region in columns:
                row = {"method": key, "repeat": repeat, "region": region, "metric": metric}
                values = evaluation.values(metric, region)
                cases.append({**row, "values": [values[case] for case in split.test.ids]})
                value, count = evaluation.pooled(metric, region)
                if count:
                    pooled.append({**row, "value": value, "count": count})
    return {"cases": cases, "pooled": pooled}


def _scores(run: Run, test: Repeats) -> list[Row]:
    """Pooled NLL and Brier score of every method: the calibration part, its interval, and the refinement."""
    table = _table(run.cases, test, SCORES, {})
    rows = {(row["method"], row["metric"]): row for row in summary(table, test, run.settings.seed)}
    return [
        {
            "method": method,
            "score": score,
            "pooled": rows[method, score]["pooled"],
            "calibration": part["pooled"],
            "low": part["pooled_low"],
            "high": part["pooled_high"],
            "refinement": rows[method, score]["pooled"] - part["pooled"],
        }
        for method in table.methods
        for score in ("nll", "brier")
        for part in (rows[method, f"{score}-calibration"],)
    ]


def _shift(run: Run, same: Mapping[str, str]) -> tuple[list[Row], list[Shift], list[str]]:
    """For every shifted set, its entry in the results and what the advice needs of it; and warnings of failures."""
    entries, facts, warnings = [], [], []
    for one in run.moved:
        repeats, failures = run.evaluate_shifted(one)
        columns = [column for column in repeats[0][UNCALIBRATED].columns if run.settings.shown(*column)]
        table = _table(one.cases, repeats, [*columns, NLL, ECE], same)
        means, changes = summary(table, repeats, run.settings.seed), differences(table, run.settings.seed)
        against = _against_reference(run, table)
        tables = {"summary": _shown(run, means), "differences": _shown(run, [*changes, *against])}
        bins = voxels.reliability(repeats, (EVERYTHING,), classes=False, bands=False)
        entries.append({"name": one.name, **tables, "flips": voxels.flips(repeats), "reliability": bins})
        facts.append(Shift(one.name, by_method(means), by_method(changes), by_method(against)))
        warnings += [f"{key} failed: {reason}" for key, reason in failures.items()]
    return entries, facts, warnings


def _against_reference(run: Run, table: Table) -> list[Row]:
    """Every method minus ``ts`` on the same cases, if the study has it; with pooling spaces, in the same one."""
    return [
        row
        for reference in table.methods
        if run.methods[reference].id == REFERENCE
        for row in differences(table, run.settings.seed, reference)
        if run.variant(row["method"]) == run.variant(reference)
    ]


def _sensitivity(run: Run, test: Repeats, same: Mapping[str, str]) -> dict[str, list[Row]]:
    """Mean ECE (and NLL) over the test cases by number of bins, of calibration cases and of ensemble members."""
    found: dict[str, list[Row]] = {}
    if "bins" in run.settings.sensitivity:
        table = _table(run.cases, test, [(f"ece[num_bins={count}]", EVERYTHING) for count in BIN_COUNTS], same)
        found["bins"] = [
            {"method": method, "bins": count, "ece": mean(table.values[:, m, k])}
            for k, count in enumerate(BIN_COUNTS)
            for m, method in enumerate(table.methods)
        ]
    for point, evaluations in run.evaluate_sensitivity():
        for key, own in evaluations.items():
            means = {metric: mean(own.values(metric).values()) for metric in ("nll", "ece")}
            found.setdefault(point.study, []).append({"method": key, point.unit: point.value, **means})
    return found


def _browser(run: Run, shown: str | None, test: Repeats) -> list[Row]:
    """Test cases of all repeats before and after a method, each with the values of the first repeat that tested it.

    For multi-label data, each channel of a case is treated as a case.
    """
    method = shown or UNCALIBRATED
    run.meter.next("drawing cases")
    # Later entries overwrite earlier ones, so the first repeat comes last.
    latest_first = list(enumerate(test))[::-1]
    repeat_of = {case: repeat for repeat, found in latest_first for case in found[UNCALIBRATED].values(*NLL)}
    before, after = (
        {
            metric: {
                Place(case, channel): value
                for _, found in latest_first
                for channel, part in enumerate(found[key].parts)
                for case, value in part.values(metric).items()
            }
            for metric in ("ece", "nll")
        }
        for key in (UNCALIBRATED, method)
    )
    tested = run.cases.select([case for case in run.cases.ids if case in repeat_of])
    pooled = variant_of(tested, run.variant(method))
    calibrator = cache(lambda repeat: run.calibrator(method, repeat))
    of_case = None if shown is None else lambda case: calibrator(repeat_of[case])
    return write_browser(pooled, of_case, method, before=before, after=after, folder=run.folder)


def describe_metric(metric: str) -> dict[str, Any]:
    """The entry of a metric in the results.

    Examples:
        >>> found = describe_metric("ece[num_bins=50]")
        >>> found["name"], found["better"], found["citation"], found["bins"]
        ('ECE (num_bins = 50)', 'lower', 'Naeini 2015, Guo 2017', 50)
        >>> describe_metric("ece")["definition"].endswith("Here with 15 bins.")
        True
    """
    id, options = parse_metric(metric)
    spec = metric_spec(id)
    bins = options.get("num_bins", DEFAULT_BINS) if "num_bins" in options_of(spec.function) else None
    extra = ", ".join(f"{name} = {value}" for name, value in sorted(options.items()))
    paragraphs = re.split(r"\n\s*\n", inspect.getdoc(spec.function) or "")
    definition = " ".join(paragraphs[0].split())
    cited = re.findall(r"\(([^()]*(?:\d{4}|et al)[^()]*)\)", " ".join(" ".join(paragraphs[:2]).split()))
    return {
        "id": metric,
        "name": f"{spec.title} ({extra})" if extra else spec.title,
        "better": spec.better,
        "quality": spec.quality,
        "definition": definition.replace("``", "") + (f" Here with {bins} bins." if bins else ""),
        "bins": bins,
        "citation": cited[0] if cited else "",
    }
