"""The results document of a study: everything a report shows, in plain dictionaries, lists and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from segcal.evaluation.evaluate import versions
from segcal.metrics import Column
from segcal.statistics import EVERYTHING
from segcal.study import summarise
from segcal.study.advice import advise, against_reference, shift_evidence
from segcal.study.browser import Place, write_browser
from segcal.study.describe import describe_metric
from segcal.study.facts import absent_classes, distance_unit, label_counts, missed_classes
from segcal.study.measuring import Evaluation
from segcal.study.methods import variant_of
from segcal.study.recommend import mean_and_error
from segcal.study.robust import Shift
from segcal.study.run import Run
from segcal.study.same import same_maps
from segcal.study.settings import BIN_COUNTS, UNCALIBRATED
from segcal.study.shifted import ShiftedSet
from segcal.study.study import FORMAT, VERSION

_NLL = ("nll", EVERYTHING)
Repeats = Sequence[Mapping[str, Evaluation]]


def results_document(run: Run, warnings: Sequence[str], data: Mapping[str, Any], command: str | None) -> dict[str, Any]:
    """Do all the work of a run and say what came of it; all but the timings is the same every time."""
    settings, splits = run.settings, run.splits
    counts = label_counts(run.cases, run.known, run.store)
    warnings = [*warnings, *absent_classes(run.cases, splits, counts)]
    run.fit_all()
    validation: Repeats = run.evaluate_parts("validating", [s.validation for s in splits], [Column("nll")])
    test: Repeats = run.evaluate_parts("testing", [s.test for s in splits], settings.measured)
    # A method that failed in the last repeat is left out of the first one, too.
    validation, test = ([run.in_order(found) for found in part] for part in (validation, test))
    methods = [method.row(_parameters(run, method.key), run.failures.get(method.key)) for method in run.methods]
    run.same = same_maps(test, methods)
    methods = [{**row, "same_as": run.same.get(row["key"])} for row in methods]
    shift, shift_facts, shift_warnings = _shift(run)
    columns = [column for column in test[0][UNCALIBRATED].columns if settings.shown(*column)]
    warnings += missed_classes(test[0][UNCALIBRATED], columns)
    table = run.table(test, columns)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "about": {
            "title": f"Calibration of {data['name']}",
            "command": command,
            "seed": settings.seed,
            "versions": dict(versions()),
            "data": data,
            "settings": {name: value for name, value in asdict(settings).items() if name != "seed"},
        },
        "metrics": [describe_metric(metric) for metric in dict.fromkeys(metric for metric, _ in columns)],
        "methods": methods,
        "splits": [{name: list(part.ids) for name, part in split._asdict().items()} for split in splits],
        "fits": _fit_rows(run, validation),
        "cases": _case_rows(run, test, columns),
        "pooled": _pooled_rows(test, columns),
        "summary": summarise.summary(table, test, settings.seed),
        "differences": summarise.differences(table, settings.seed),
        "ranks": summarise.ranks(table),
        "sum_rank": summarise.sum_rank(table),
        "mean_case_rank": summarise.mean_case_rank(table),
        "flips": summarise.flips(test),
        "reliability": summarise.reliability(test, (EVERYTHING, *settings.regions)),
        "bands": summarise.bands(test, distance_unit(run.cases)) if settings.bands else [],
        "diagnosis": {key: evaluation.diagnosis for key, evaluation in test[0].items()},
        "channels": _channels(run, test, columns),
        "shift": shift or None,
        "sensitivity": _sensitivity(run, test),
    }
    advice = advise(run, document, validation, test, counts, shift_facts)
    document["recommendation"] = advice
    document["browser"] = _browser(run, advice["shown"], test)
    failed = [f"{key} failed: {reason}" for key, reason in run.failures.items()]
    document["warnings"] = [*warnings, *failed, *shift_warnings]
    return document


def _parameters(run: Run, key: str) -> int | None:
    if run.method(key).id == UNCALIBRATED or key in run.failures:
        return None
    count: int = run.fits[run.tasks[key, 0].key]["parameters"]
    return count


def _fit_rows(run: Run, validation: Repeats) -> list[dict[str, Any]]:
    rows = []
    groups = run.cases.case_groups if run.cases.groups else None
    for (key, repeat), task in run.tasks.items():
        if key not in run.failures:
            values = validation[repeat][key].values(*_NLL)
            own = None if groups is None else [groups[case] for case in values]
            nll = {**mean_and_error(list(values.values()), own), "cases": len(values)}
            rows.append({"method": key, "repeat": repeat, **run.fits[task.key]["fit"], "validation_nll": nll})
    return rows


def _case_rows(run: Run, test: Repeats, columns: summarise.Columns) -> list[dict[str, Any]]:
    rows = []
    for repeat, (split, found) in enumerate(zip(run.splits, test, strict=True)):
        for key, evaluation in found.items():
            for metric, region in columns:
                values = evaluation.values(metric, region)
                of_cases = [values[case] for case in split.test.ids]
                rows.append({"method": key, "repeat": repeat, "region": region, "metric": metric, "values": of_cases})
    return rows


def _pooled_rows(test: Repeats, columns: summarise.Columns) -> list[dict[str, Any]]:
    rows = []
    for repeat, found in enumerate(test):
        for key, evaluation in found.items():
            for metric, region in columns:
                value, count = evaluation.pooled(metric, region)
                if count:
                    row = {"method": key, "repeat": repeat, "region": region, "metric": metric}
                    rows.append({**row, "value": value, "count": count})
    return rows


def _channels(run: Run, test: Repeats, columns: summarise.Columns) -> list[dict[str, Any]]:
    """The summary of every channel of multi-label data; all else is of the means over channels."""
    found = []
    for name in summarise.channel_names(test):
        own = summarise.of_channel(test, name)
        found.append({"name": name, "summary": summarise.summary(run.table(own, columns), own, run.settings.seed)})
    return found


def _shift(run: Run) -> tuple[list[dict[str, Any]], list[Shift], list[str]]:
    entries, evidence, warnings = [], [], []
    for one in run.moved:
        repeats, failures = run.evaluate_shifted(one)
        entries.append(_shift_entry(run, one, repeats))
        evidence.append(shift_evidence(run, one, repeats))
        warnings += [f"{key} failed: {reason}" for key, reason in failures.items()]
    return entries, evidence, warnings


def _shift_entry(run: Run, one: ShiftedSet, repeats: Repeats) -> dict[str, Any]:
    seed = run.settings.seed
    columns = [column for column in repeats[0][UNCALIBRATED].columns if run.settings.shown(*column)]
    table = run.table(repeats, columns, one.cases)
    return {
        "name": one.name,
        "summary": summarise.summary(table, repeats, seed),
        "differences": [*summarise.differences(table, seed), *against_reference(run, table)],
        "flips": summarise.flips(repeats),
        "reliability": summarise.reliability(repeats, (EVERYTHING,), classes=False, bands=False),
    }


def _sensitivity(run: Run, test: Repeats) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "bins" in run.settings.sensitivity:
        columns = [(f"ece[num_bins={count}]", EVERYTHING) for count in BIN_COUNTS]
        found["bins"] = summarise.bin_sensitivity(run.table(test, columns), BIN_COUNTS)
    return {**found, **run.evaluate_sensitivity()}


def _browser(run: Run, shown: str | None, test: Repeats) -> list[dict[str, Any]]:
    """Test cases of all repeats before and after a method, each as the first repeat that tested it has it.

    Of multi-label data, a channel of a case is drawn as a case is.
    """
    method = run.method(shown or UNCALIBRATED)
    run.meter.next("drawing cases")
    # The first repeat comes last and has the last word.
    latest_first = list(enumerate(test))[::-1]
    repeat_of = {case: repeat for repeat, found in latest_first for case in found[UNCALIBRATED].values(*_NLL)}
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
        for key in (UNCALIBRATED, method.key)
    )
    tested = run.cases.select([case for case in run.cases.ids if case in repeat_of])
    calibrator = cache(lambda repeat: run.calibrator(method.key, repeat))
    return write_browser(
        variant_of(tested, run.variant(method)),
        None if shown is None else lambda case: calibrator(repeat_of[case]),
        method.key,
        before=before,
        after=after,
        folder=run.folder,
    )
