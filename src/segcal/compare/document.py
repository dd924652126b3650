"""The results document of a study: everything a report shows, in plain dictionaries, lists and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from segcal.compare import summarise
from segcal.compare.browser import write_browser
from segcal.compare.describe import describe_metric
from segcal.compare.facts import absent_classes, distance_unit, label_counts, missed_classes, part_voxels
from segcal.compare.measuring import Evaluation
from segcal.compare.methods import variant_of
from segcal.compare.recommend import RULE, Candidate, Choice, choose, mean_and_error
from segcal.compare.run import Run
from segcal.compare.settings import BIN_COUNTS, UNCALIBRATED
from segcal.compare.shifted import ShiftedSet
from segcal.compare.study import FORMAT, VERSION
from segcal.compare.words import Evidence, caveats, sentences
from segcal.evaluate import versions
from segcal.metrics import Column
from segcal.statistics import EVERYTHING

CALIBRATOR_FILE = "calibrator.safetensors"
_NLL = ("nll", EVERYTHING)
_HEADLINE = [_NLL, ("ece", EVERYTHING)]
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
    shift, shift_warnings = _shift(run)
    columns = [column for column in test[0][UNCALIBRATED].columns if settings.shown(*column)]
    warnings += missed_classes(test[0][UNCALIBRATED], columns)
    table = summarise.Table.of(test, columns)
    methods = [method.row(_parameters(run, method.key), run.failures.get(method.key)) for method in run.methods]
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
        "shift": shift or None,
        "sensitivity": _sensitivity(run, test),
    }
    choice = _choose(run, methods, validation)
    document["recommendation"] = _recommendation(run, choice, document, validation, test, counts)
    document["browser"] = _browser(run, choice, test[0])
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
    for (key, repeat), task in run.tasks.items():
        if key not in run.failures:
            values = list(validation[repeat][key].values(*_NLL).values())
            nll = {**mean_and_error(values), "cases": len(values)}
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


def _choose(run: Run, methods: Sequence[Mapping[str, Any]], validation: Repeats) -> Choice:
    table = summarise.Table.of(validation, [_NLL])
    rows = {row["key"]: row for row in methods}
    candidates = [
        Candidate(
            key,
            rows[key]["preserves"],
            rows[key]["pooling"] in (None, run.deployed),
            rows[key]["translation_invariant"],
            rows[key]["parameters"],
            table.values[:, m, 0].tolist(),
        )
        for m, key in enumerate(table.methods)
    ]
    return choose(candidates, run.settings.preserve, run.settings.translation_invariant)


def _recommendation(
    run: Run,
    choice: Choice,
    document: Mapping[str, Any],
    validation: Repeats,
    test: Repeats,
    counts: Mapping[str, Sequence[int]],
) -> dict[str, Any]:
    headline, seed = summarise.Table.of(test, _HEADLINE), run.settings.seed
    smallest = min((split.calibration for split in run.splits), key=len)
    evidence = Evidence(
        methods={row["key"]: row for row in document["methods"]},
        summary={(row["method"], row["metric"]): row for row in summarise.summary(headline, test, seed)},
        differences={(row["method"], row["metric"]): row for row in summarise.differences(headline, seed)},
        flips={row["method"]: row for row in document["flips"]},
        diagnosis=document["diagnosis"][UNCALIBRATED],
        cases=len(smallest),
        voxels=part_voxels(run.cases, smallest, counts),
        validation=summarise.Table.of(validation, [_NLL]).values[:, 0, 0].tolist(),
        test=headline.values[:, 0, 0].tolist(),
        shift=document["shift"] or (),
    )
    return {
        "method": choice.method,
        "best": choice.best,
        "rule": RULE,
        "sentences": sentences(choice, evidence),
        "caveats": caveats(choice, evidence, seed),
        "candidates": list(choice.candidates),
        "validation_nll": choice.validation_nll,
        "file": _deploy(run, choice.method),
    }


def _deploy(run: Run, key: str) -> str | None:
    """The chosen calibrator as a file."""
    if run.method(key).id == UNCALIBRATED:
        return None
    run.refit(key).save(run.folder / CALIBRATOR_FILE)
    return CALIBRATOR_FILE


def _shift(run: Run) -> tuple[list[dict[str, Any]], list[str]]:
    found, warnings = [], []
    for one in run.moved:
        entry, failures = _shifted(run, one)
        found.append(entry)
        warnings += [f"{key} failed: {reason}" for key, reason in failures.items()]
    return found, warnings


def _shifted(run: Run, one: ShiftedSet) -> tuple[dict[str, Any], Mapping[str, str]]:
    repeats, failures = run.evaluate_shifted(one)
    columns = [column for column in repeats[0][UNCALIBRATED].columns if run.settings.shown(*column)]
    table = summarise.Table.of(repeats, columns)
    entry = {
        "name": one.name,
        "summary": summarise.summary(table, repeats, run.settings.seed),
        "flips": summarise.flips(repeats),
        "reliability": summarise.reliability(repeats, (EVERYTHING,), classes=False, bands=False),
    }
    return entry, failures


def _sensitivity(run: Run, test: Repeats) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "bins" in run.settings.sensitivity:
        columns = [(f"ece[num_bins={count}]", EVERYTHING) for count in BIN_COUNTS]
        found["bins"] = summarise.bin_sensitivity(summarise.Table.of(test, columns), BIN_COUNTS)
    return {**found, **run.evaluate_sensitivity()}


def _browser(run: Run, choice: Choice, test: Mapping[str, Evaluation]) -> list[dict[str, Any]]:
    """Test cases of the first repeat before and after the chosen method; where none was, the best, or any."""
    shown = next((key for key in (choice.method, choice.best, *test) if run.method(key).id != UNCALIBRATED), None)
    method = run.method(shown or UNCALIBRATED)
    run.meter.next("drawing cases")
    before, after = (
        {metric: test[key].values(metric) for metric in ("ece", "nll")} for key in (UNCALIBRATED, method.key)
    )
    return write_browser(
        variant_of(run.splits[0].test, run.variant(method)),
        None if shown is None else run.calibrator(shown),
        method.key,
        before=before,
        after=after,
        folder=run.folder,
    )
