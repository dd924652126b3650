"""The study as a whole: stopped and resumed, with methods that fail, with data that do not fit."""

import json
import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from datasets import plain
from segcal.calibrators import CALIBRATORS, TemperatureScaling, load
from segcal.cases import open_cases, write_dataset
from segcal.cases.caseset import CaseRef, Split
from segcal.errors import InputError, OutputError, RankError, SegcalError, UnreachableError
from segcal.evaluation.evaluate import evaluate
from segcal.study import Study, compare
from segcal.study.splits import split_cases
from segcal.study.summary.voxels import absent_classes, label_counts
from segcal.study.work import tasks
from segcal.study.work.run import Run
from segcal.study.work.store import Store, fingerprints
from segcal.study.work.tasks import FitTask, run_fits
from segcal.synthetic import Temperature, demo_plant, scenes
from segcal.types import Case

QUICK = {"tune": "none", "metrics": ("nll", "ece", "dsc", "flip"), "regions": ("everything",)}


def small(count=8, **options):
    return scenes(count, size=(32, 40), plant=[Temperature(3.0)], **options)


def without_timings(text):
    document = json.loads(text)
    del document["timings"]
    return json.dumps(document)


class StopError(Exception):
    pass


def test_a_study_that_was_killed_anywhere_ends_as_if_it_had_not_been(tmp_path):
    cases, options = small(7), {**QUICK, "methods": ("ts", "vs"), "repeats": 2, "sensitivity": ("size",)}
    steps = []
    compare(cases, **options, output=tmp_path / "whole", progress=steps.append)
    whole = (tmp_path / "whole" / "results.json").read_text()
    for stop in np.linspace(0, len(steps) - 1, 5).astype(int):
        seen = []

        def stopping(step, stop=stop, seen=seen):
            seen.append(step)
            if len(seen) > stop:
                raise StopError

        folder = tmp_path / f"stopped-{stop}"
        with pytest.raises(StopError):
            compare(cases, **options, output=folder, progress=stopping)
        assert not (folder / "results.json").exists()
        compare(cases, **options, output=folder, resume=True)
        assert without_timings((folder / "results.json").read_text()) == without_timings(whole)
    assert steps[-1].done == steps[-1].total


def test_what_is_finished_is_not_done_again_unless_it_is_damaged_or_the_settings_differ(tmp_path, monkeypatch):
    cases, options = small(), {**QUICK, "methods": ("ts", "vs"), "repeats": 1, "output": tmp_path}
    compare(cases, **options)
    fitted = []
    fit = TemperatureScaling.fit
    monkeypatch.setattr(TemperatureScaling, "fit", lambda self, *a, **k: fitted.append(1) or fit(self, *a, **k))
    compare(cases, **options, resume=True)
    assert not fitted
    for path in (tmp_path / "work").glob("fit-*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    damaged = compare(cases, **options, resume=True)
    assert fitted
    fitted.clear()
    other = compare(cases, **{**options, "seed": 1}, resume=True)
    assert fitted
    assert other.document["splits"] != damaged.document["splits"]


def test_results_are_those_of_fitting_and_evaluating_by_hand():
    cases = small(9)
    study = compare(cases, ("ts",), 1, **QUICK)
    split = cases.split(0.5, 0.2, 0.3, seed=0)
    ts = TemperatureScaling().fit(split.calibration, seed=0)
    for key, calibrator in (("uncalibrated", None), ("ts", ts)):
        results = evaluate(split.test, calibrator, metrics=("nll", "ece"))
        row = next(row for row in study.summary("ece") if row["method"] == key)
        assert row["mean"] == pytest.approx(np.mean(list(results.values("ece").values())), rel=1e-12)
        assert row["pooled"] == pytest.approx(results.value("ece"), rel=1e-12)
        bins = next(
            r
            for r in study.document["reliability"]
            if (r["method"], r["region"], r["class"]) == (key, "everything", None)
        )
        assert bins["count"] == results.reliability["everything"]["top"]["count"]
    assert study.document["splits"][0]["test"] == list(split.test.ids)


def test_pooled_values_of_one_repeat_have_the_intervals_of_an_evaluation_and_scores_are_split():
    cases = small(12)
    settings = {"tune": "none", "metrics": ("nll", "ece"), "regions": ("everything", "boundary")}
    study = compare(cases, ("ts",), 1, fractions=(0.3, 0.2, 0.5), **settings)
    test = cases.select(study.document["splits"][0]["test"])
    parts = ("nll", "nll-calibration", "brier", "brier-calibration", "ece")
    results = evaluate(test, metrics=parts, regions=settings["regions"])
    for row in study.document["summary"]:
        if row["method"] == "uncalibrated":
            expected = results.pooled_intervals["", row["region"], row["metric"]]
            assert (row["pooled_low"], row["pooled_high"]) == pytest.approx(expected, rel=1e-12)
            assert row["pooled"] == pytest.approx(results.value(row["metric"], row["region"]), rel=1e-12)
    scores = {(row["method"], row["score"]): row for row in study.document["scores"]}
    assert len(scores) == 4
    for (method, score), row in scores.items():
        assert row["calibration"] + row["refinement"] == pytest.approx(row["pooled"], rel=1e-12)
        if method == "uncalibrated":
            assert row["pooled"] == pytest.approx(results.value(score), rel=1e-12)
            assert row["calibration"] == pytest.approx(results.value(f"{score}-calibration"), rel=1e-12)
            expected = results.pooled_intervals["", "everything", f"{score}-calibration"]
            assert (row["low"], row["high"]) == pytest.approx(expected, rel=1e-12)
    assert scores["ts", "nll"]["calibration"] < scores["uncalibrated", "nll"]["calibration"]


def test_the_recommended_calibrator_is_fitted_to_calibration_and_validation(tmp_path):
    cases = small()
    study = compare(cases, ("ts",), 1, **QUICK, output=tmp_path)
    assert study.recommendation["file"] == "calibrator.safetensors"
    split = cases.split(0.5, 0.2, 0.3, seed=0)
    seen = {*split.calibration.ids, *split.validation.ids}
    expected = TemperatureScaling().fit(cases.select([i for i in cases.ids if i in seen]))
    assert load(tmp_path / "calibrator.safetensors").temperature == pytest.approx(expected.temperature, rel=1e-6)
    written = Study.from_json(tmp_path / "results.json")
    assert written == study
    assert (
        (tmp_path / "tables.csv")
        .read_text()
        .startswith("method,region,metric,mean,low,high,n,pooled,pooled_low,pooled_high\n")
    )
    assert r"\toprule" in (tmp_path / "tables.tex").read_text()


class FailsToFit(TemperatureScaling):
    id = "fails-to-fit"

    def _fit(self, data):
        raise ZeroDivisionError("by zero")


class FailsToApply(TemperatureScaling):
    id = "fails-to-apply"

    @property
    def score_map(self):
        raise SegcalError("cannot do this case")


def test_a_method_that_fails_is_reported_and_the_study_goes_on(monkeypatch):
    for cls in (FailsToFit, FailsToApply):
        monkeypatch.setitem(CALIBRATORS, cls.id, cls)
    study = compare(small(), ("fails-to-fit", "ts", "fails-to-apply"), 2, **QUICK)
    rows = {row["key"]: row for row in study.document["methods"]}
    assert [rows[key]["status"] for key in rows] == ["ok", "failed", "ok", "failed"]
    assert "by zero" in rows["fails-to-fit"]["reason"]
    assert "cannot do this case" in rows["fails-to-apply"]["reason"]
    assert [row["method"] for row in study.summary("nll")] == ["uncalibrated", "ts"]
    assert any("2 methods failed" in caveat for caveat in study.recommendation["caveats"])
    assert sum("failed:" in warning for warning in study.document["warnings"]) == 2


class CountingSource:
    """A case that notes when its logits are read."""

    def __init__(self, case, reads):
        self._source, self._reads = case.source, reads
        for name in ("id", "batch", "num_classes", "spatial", "spacing", "ignore_index", "sliceable"):
            setattr(self, name, getattr(case.source, name))
        for name in ("labels", "mask", "image", "posterior"):
            setattr(self, name, getattr(case.source, name))

    def logits(self, rows):
        self._reads.append(self.id)
        return self._source.logits(rows)


def test_test_cases_are_read_once_for_all_methods():
    reads, stages = [], {}
    cases = small(6)
    refs = tuple(CaseRef(r.id, partial(lambda r: Case(CountingSource(r.open(), reads)), r)) for r in cases.refs)

    def note(step):
        stages.setdefault(step.name.split(":")[0], len(reads))

    study = compare(replace(cases, refs=refs), ("ts", "vs", "isotonic"), 1, **QUICK, progress=note)
    test = study.document["splits"][0]["test"]
    order = list(stages)
    begin, end = (stages[order[order.index("testing, repeat 1") + later]] for later in (0, 1))
    assert sorted(reads[begin:end]) == sorted(test)


def test_too_few_cases_and_groups_that_cannot_be_split():
    with pytest.raises(InputError, match="validation part empty"):
        compare(small(2), ("ts",), **QUICK)
    with pytest.raises(InputError, match="2 groups leave the validation part empty|part empty"):
        compare(replace(small(8), groups=lambda name: (name[-1] > "3" and "a") or "b"), ("ts",), **QUICK)


def test_groups_stay_together():
    cases = replace(small(12), groups=lambda name: str(int(name[-2:]) // 2))
    for split in compare(cases, ("ts",), 2, **QUICK).document["splits"]:
        parts = [{int(name[-2:]) // 2 for name in part} for part in split.values()]
        assert sum(map(len, parts)) == len(set().union(*parts)) == 6


def test_declared_test_cases_are_never_fitted_to_or_chosen_on():
    ids = small(9).ids
    named = {"calibration": ids[:4], "validation": ids[4:6], "test": ids[6:8]}
    cases = replace(small(9), splits=named)
    one = compare(cases, ("ts",), **QUICK)
    assert one.document["splits"] == [{part: list(names) for part, names in named.items()}]
    assert one.document["about"]["data"]["splits"] == "the splits that the dataset declares"
    assert sum("1 case is in no declared part" in warning for warning in one.document["warnings"]) == 1
    several = compare(cases, ("ts",), 3, **QUICK).document
    assert "declared test part, 3 random" in several["about"]["data"]["splits"]
    assert [(len(s["calibration"]), len(s["validation"])) for s in several["splits"]] == [(4, 2)] * 3
    assert len({tuple(split["calibration"]) for split in several["splits"]}) == 3
    for split in several["splits"]:
        assert split["test"] == list(ids[6:8])
        assert {*split["calibration"], *split["validation"]} == set(ids[:6])


def test_declared_splits_without_a_validation_part_hold_some_calibration_cases_out():
    ids = small(6).ids
    cases = replace(small(6), splits={"calibration": ids[:4], "test": ids[4:]})
    held = compare(cases, ("ts",), **QUICK).document
    assert any("No validation part is declared" in warning for warning in held["warnings"])
    assert [len(part) for part in held["splits"][0].values()] == [3, 1, 2]
    with pytest.raises(InputError, match="leave the test part empty"):
        compare(replace(small(6), splits={"calibration": ids}), ("ts",), **QUICK)


def test_no_two_repeats_are_the_same_split():
    three = replace(small(9), groups={name: "abbcccccc"[i] for i, name in enumerate(small(9).ids)})
    splits, origin, warnings = split_cases(three, 9, (0.5, 0.2, 0.3), seed=0)
    parts = [tuple(part.ids for part in split) for split in splits]
    assert 3 <= len(set(parts)) == len(parts) <= 6  # Three groups in three parts: there are no more.
    assert warnings == [f"{len(parts)} repeats instead of 9: these cases give no more different splits."]
    assert origin == f"{len(parts)} random splits"
    declared = {"calibration": three.ids[:1], "validation": three.ids[1:3], "test": three.ids[3:]}
    document = compare(replace(three, splits=declared), ("ts",), 4, **QUICK).document
    assert document["about"]["settings"]["repeats"] == len(document["splits"]) <= 2
    assert any("repeats instead of 4" in warning for warning in document["warnings"])


def test_a_class_that_calibration_never_sees_is_warned_of():
    with_class = scenes(9, size=(32, 40), num_classes=4)

    def lacking(ref):
        return CaseRef(ref.id.replace("image", "plain"), partial(_open_without_class_1, ref))

    cases = replace(with_class, refs=(*map(lacking, with_class.refs[:6]), *with_class.refs[6:]))
    names = {"calibration": cases.ids[:5], "validation": cases.ids[5:6], "test": cases.ids[6:]}
    study = compare(replace(cases, splits=names), ("ts",), 1, **QUICK)
    assert any("Class '1' does not occur in the calibration part" in text for text in study.document["warnings"])
    assert any("'1'" in text for text in study.recommendation["caveats"])


def test_many_classes_that_calibration_never_sees_are_one_warning():
    cases = scenes(4, size=(8, 8), num_classes=60)
    counts = {name: [int(case > 1)] * 60 for case, name in enumerate(cases.ids)}
    (warning,) = absent_classes(cases, [Split(cases[:2], cases[2:3], cases[3:])], counts)
    assert warning.startswith("Classes '")
    assert "and 40 more do not occur in the calibration part of repeat 1: nothing is learnt about them" in warning


def _open_without_class_1(ref):
    case = ref.open()
    source = CountingSource(case, [])
    source.id = source.id.replace("image", "plain")
    source.labels = lambda rows: case.source.labels(rows).masked_fill(case.source.labels(rows) == 1, 0)
    return Case(source)


def test_a_folder_with_something_in_it_is_refused_before_any_work(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    steps = []
    with pytest.raises(OutputError, match="is not empty"):
        compare(small(), ("ts",), **QUICK, output=tmp_path, progress=steps.append)
    assert not steps
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"methods": ("nope",)}, "method is 'nope'"),
        ({"repeats": 0}, "repeats is 0"),
        ({"fractions": (0.5, 0.5, 0.0)}, "fractions"),
        ({"tune": "hard"}, "tune is 'hard'"),
        ({"preserve": "all"}, "preserve is 'all'"),
        ({"regions": ("nope",)}, "region is 'nope'"),
        ({"metrics": ("nope",)}, "metric is 'nope'"),
        ({"metrics": ("ece[bins=3]",)}, "has no option 'bins'"),
        ({"pooling": ("probs",)}, "no ensemble members"),
        ({"sensitivity": ("members",)}, "no ensemble members"),
        ({"shift": True}, "shift without a model"),
        ({"workers": 0}, "workers is 0"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(wrong, says):
    steps = []
    with pytest.raises(InputError, match=says):
        compare(small(), **{"methods": ("ts",), **QUICK, **wrong}, progress=steps.append)
    assert not steps


def test_case_names_are_text_and_nothing_else(tmp_path):
    root = tmp_path / "data"
    write_dataset(small(6), root)
    for folder in ("logits", "labels", "images", "posteriors"):
        path = next((root / folder).glob("image-000.*"), None)
        if path is not None:
            path.rename(path.with_name("<script>alert(1)&_%" + path.suffix))
    study = compare(open_cases(root), ("ts",), 1, **QUICK, output=tmp_path / "out")
    named = [name for part in study.document["splits"][0].values() for name in part]
    assert "<script>alert(1)&_%" in named
    for entry in study.document["browser"]:
        for one in entry["slices"]:
            for panel in one["panels"]:
                assert set(panel["file"]) <= set("browser/0123456789-.png")
                assert (tmp_path / "out" / panel["file"]).is_file()


def test_only_voxels_that_count_are_counted_of_a_rare_class(tmp_path):
    root = plain(tmp_path / "data", count=8, classes=3, shape=(40, 50))
    (root / "masks").mkdir()
    for path in (root / "labels").iterdir():
        labels = np.load(path)
        # A class that is everywhere in the half that is masked out, and hardly elsewhere; ignored ones do not count.
        labels[:, 25:], labels[:, :25] = 2, np.where(labels[:, :25] == 2, 1, labels[:, :25])
        labels[:3, :25], labels[3, 0] = 255, 2
        np.save(path, labels)
        mask = np.zeros(labels.shape, np.uint8)
        mask[:, :25] = 1
        np.save(root / "masks" / path.name, mask)
    cases = open_cases(root)
    counts = label_counts(cases, fingerprints(cases), Store(tmp_path / "work"))
    for case in cases:
        expected = np.bincount(case.labels[case.valid].numpy(), minlength=3).tolist()
        assert counts[case.id] == expected
        assert expected[2] == 1
    study = compare(cases, ("ts",), 1, **QUICK)
    assert any("labelled '2'" in text for text in study.recommendation["caveats"])


def test_processes_fit_what_one_process_fits_and_survive_one_that_dies(tmp_path):
    cases = small(4)
    known = fingerprints(cases)
    fixed = {"calibration": cases, "validation": None, "tune": "none", "select": "nll", "seed": 0}
    tasks = [FitTask.make(known, None, method=method, **fixed) for method in ("ts",)]
    dying = replace(tasks[0], calibration=replace(cases, refs=(CaseRef("x", _die),)), key="dying")
    here = run_fits(tasks, Store(tmp_path / "one"), 1, lambda task: None)
    there = run_fits([dying, *tasks], Store(tmp_path / "two"), 2, lambda task: None)
    assert there["dying"]["status"] == "failed"
    for task in tasks:
        one, two = (found[task.key]["fit"] for found in (here, there))
        assert two["nll_after"] == pytest.approx(one["nll_after"], rel=1e-6)
        assert two["nll_after"] < two["nll_before"] == pytest.approx(one["nll_before"], rel=1e-6)


def _die():
    os._exit(9)


def test_a_study_of_the_demo_is_complete():
    study = compare(
        scenes(6, size=(32, 40), plant=demo_plant(6)), ("ts", "dc"), 2, tune="none", regions=("everything", "boundary")
    )
    document = study.document
    assert {row["band"] for row in document["bands"]} == {"band-0-3", "band-3-7", "band-7-15", "band-15-inf"}
    for row in document["bands"]:
        if row["count"]:
            assert row["ece"] <= 1
            assert abs(row["confidence"] - row["accuracy"]) <= row["ece"] + 1e-12
    assert {row["region"] for row in document["summary"]} == {"everything", "boundary"}
    flips = {row["method"]: row for row in document["flips"]}
    assert sum(flips["ts"][kind] for kind in ("harmful", "beneficial", "neutral")) == 0
    valid = sum(
        row["count"]
        for row in document["pooled"]
        if (row["method"], row["metric"], row["region"]) == ("dc", "nll", "everything")
    )
    assert flips["dc"]["compared"] == valid
    assert set(document["sum_rank"]) == {"uncalibrated", "ts", "dc"}


def test_a_server_that_is_away_ends_the_study_and_is_no_methods_fault(monkeypatch, tmp_path):
    cases = scenes(6, size=(16, 20), plant=[Temperature(2.0)])

    def away(self, data):
        raise UnreachableError("cannot be reached, after 5 tries", where="s3://bucket/logits/a.zarr")

    monkeypatch.setattr(CALIBRATORS["vs"], "_fit", away)
    with pytest.raises(UnreachableError, match="cannot be reached"):
        compare(cases, methods=("ts", "vs"), repeats=1, tune="none", output=tmp_path / "report")
    assert not (tmp_path / "report" / "results.json").exists()
    monkeypatch.undo()
    options = {"methods": ("ts", "vs"), "repeats": 1, "tune": "none", "output": tmp_path / "report", "resume": True}
    rows = compare(cases, **options).document["methods"]
    assert all(row["status"] == "ok" for row in rows)


def test_a_rank_that_is_lost_ends_the_study(monkeypatch, tmp_path):
    cases = scenes(6, size=(16, 20), plant=[Temperature(2.0)])
    options = {"repeats": 1, "tune": "none", "output": tmp_path / "report"}
    compare(cases, methods=("ts",), **options)

    def lost(*some, **more):
        raise RankError(0, 2, "connection closed by peer")

    monkeypatch.setattr(tasks, "evaluate_many", lost)
    with pytest.raises(RankError, match="lost another rank"):
        compare(cases, methods=("ts", "vs"), resume=True, **options)


def test_a_last_fit_that_fails_is_said(monkeypatch, tmp_path):
    cases = scenes(8, size=(16, 20), plant=[Temperature(2.0)])
    refit = Run.refit

    def failing(self, key):
        monkeypatch.setattr(CALIBRATORS["ts"], "_fit", lambda own, data: 1 / 0)
        return refit(self, key)

    monkeypatch.setattr(Run, "refit", failing)
    study = compare(cases, methods=("ts",), repeats=1, output=tmp_path / "report")
    assert any("The last fit" in own and "ZeroDivisionError" in own for own in study.recommendation["caveats"])
    assert load(tmp_path / "report" / "calibrator.safetensors").num_classes == cases.num_classes
