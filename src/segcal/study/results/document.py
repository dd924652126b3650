"""The results document of a study: everything a report shows, in plain dictionaries, lists and numbers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from segcal.cases import CaseSet
from segcal.evaluation.evaluate import versions
from segcal.evaluation.plan import DEFAULT_BINS, metric_spec, parse_metric
from segcal.files.versions import STUDY
from segcal.metrics import Column, options_of
from segcal.statistics import EVERYTHING
from segcal.study.advice.advise import advise
from segcal.study.advice.choice import REFERENCE, Shift, by_method, mean_and_error
from segcal.study.results.browser import Place, write_browser
from segcal.study.settings import BIN_COUNTS, ECE, NLL, UNCALIBRATED, variant_of
from segcal.study.summary import voxels
from segcal.study.summary.table import Columns, Table, differences, mean, rankings, same_maps, summary
from segcal.study.work.run import Repeats, Run

Row = dict[str, Any]


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
        "flips": voxels.flips(test),
        "reliability": voxels.reliability(test, (EVERYTHING, *settings.regions)),
        "bands": voxels.bands(test, "voxel" if run.cases[0].spacing is None else "mm") if settings.bands else [],
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


def _shift(run: Run, same: Mapping[str, str]) -> tuple[list[Row], list[Shift], list[str]]:
    """For every shifted set, its entry in the results and what the advice needs of it; and warnings of failures."""
    entries, facts, warnings = [], [], []
    for one in run.moved:
        repeats, failures = run.evaluate_shifted(one)
        columns = [column for column in repeats[0][UNCALIBRATED].columns if run.settings.shown(*column)]
        table = _table(one.cases, repeats, [*columns, NLL, ECE], same)
        means, changes = summary(table, repeats, run.settings.seed), differences(table, run.settings.seed)
        against = _against_reference(run, table)
        entries.append(
            {
                "name": one.name,
                "summary": _shown(run, means),
                "differences": _shown(run, [*changes, *against]),
                "flips": voxels.flips(repeats),
                "reliability": voxels.reliability(repeats, (EVERYTHING,), classes=False, bands=False),
            }
        )
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
    calibrator = cache(lambda repeat: run.calibrator(method, repeat))
    return write_browser(
        variant_of(tested, run.variant(method)),
        None if shown is None else lambda case: calibrator(repeat_of[case]),
        method,
        before=before,
        after=after,
        folder=run.folder,
    )


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
