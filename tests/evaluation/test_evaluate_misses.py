"""What evaluations say of classes that a prediction misses, and of cases with names that look like something else."""

import json
import math

import numpy as np
import pytest

import segcal
from datasets import plain
from segcal.evaluation.evaluate import evaluate
from segcal.evaluation.results import POOLED, Results
from segcal.study.summary.voxels import missed_classes
from segcal.study.work.tasks import Evaluation

SIZE = 20


def dataset(root, predictions):
    """Cases by name, each a square of class 1 in the labels and what is given in the prediction; classes 0, 1, 2."""
    for folder in ("logits", "labels"):
        (root / folder).mkdir(parents=True)
    labels = np.zeros((SIZE, SIZE), np.uint8)
    labels[5:11, 5:11] = 1
    for name, prediction in predictions.items():
        np.save(root / "labels" / f"{name}.npy", labels)
        np.save(root / "logits" / f"{name}.npy", np.eye(3, dtype=np.float32)[prediction].transpose(2, 0, 1))
    return segcal.open_cases(root)


def square(rows):
    prediction = np.zeros((SIZE, SIZE), int)
    prediction[rows, 5:11] = 1
    return prediction


PREDICTIONS = {"shifted": square(slice(6, 12)), "missed": square(slice(0, 0))}


def test_a_missed_class_scores_worse_than_a_shifted_one_and_is_counted(tmp_path):
    cases = dataset(tmp_path, PREDICTIONS)
    results = evaluate(cases, metrics=("hd95", "asd", "surface-dice"))
    for metric in ("hd95", "asd"):
        values = results.values(metric)
        assert values["shifted"] == pytest.approx(1.0, abs=0.5)
        assert values["missed"] == pytest.approx(math.hypot(SIZE, SIZE))
    assert results.values("surface-dice") == {"shifted": 1.0, "missed": 0.0}
    for row in results.rows:
        if row.metric in ("hd95", "asd", "surface-dice"):
            # Class 2 is in neither segmentation: left out, and no miss.
            assert (row.count, row.missed) == (1, int(row.case == "missed"))
    assert {row.missed for row in results.summary() if row.metric == "hd95"} == {1}
    results.to_json(tmp_path / "r.json")
    assert Results.from_json(tmp_path / "r.json").rows == results.rows


def test_the_penalty_is_chosen_and_nothing_infinite_is_dropped(tmp_path):
    cases = dataset(tmp_path, PREDICTIONS)
    names = [f"hd95[absent={absent}]" for absent in ("infinite", "skip", "30", "2.5")]
    results = evaluate(cases, metrics=names)
    found = [results.values(name)["missed"] for name in names]
    assert found == [math.inf, pytest.approx(math.nan, nan_ok=True), 30.0, 2.5]
    means = [row.mean for row in results.summary() if row.metric in names]
    assert means[0] == math.inf
    assert means[1] == results.values(names[0])["shifted"]
    assert [row.missed for row in results.summary() if row.metric in names] == [1] * 4


def test_the_command_shows_misses(run, tmp_path):
    dataset(tmp_path, PREDICTIONS)
    code, text, _ = run("evaluate", tmp_path, "--metrics", "hd95,surface-dice,dsc")
    assert code == 0
    assert text.count("(1 classes missed)") == 2
    code, text, _ = run("evaluate", tmp_path, "--metrics", "hd95", "--json")
    document = json.loads(text)
    missed = document["columns"].index("missed")
    assert sum(row[missed] for row in document["rows"]) == 1


def test_no_case_name_is_taken_for_the_pooled_row(tmp_path):
    names = ("(pooled)", "None", "null", "a")
    cases = dataset(tmp_path, dict(zip(names, [*PREDICTIONS.values()] * 2, strict=True)))
    results = evaluate(cases, metrics=("nll", "accuracy"))
    values = results.values("accuracy")
    assert set(values) == set(names)
    assert results.value("accuracy", case="(pooled)") == values["(pooled)"] != values["None"]
    assert results.value("accuracy") == pytest.approx(np.mean([*values.values()]))
    results.to_json(tmp_path / "r.json")
    again = Results.from_json(tmp_path / "r.json")
    assert again.values("accuracy") == values
    assert again.value("accuracy", case=POOLED) == results.value("accuracy")
    assert again.summary() == results.summary()


def test_a_study_warns_of_misses(tmp_path):
    results = evaluate(dataset(tmp_path, PREDICTIONS), metrics=("hd95", "dsc"))
    warnings = missed_classes(Evaluation(results.rows), [("hd95", ""), ("dsc", "")])
    assert len(warnings) == 1
    assert warnings[0].startswith("hd95: 1 missed class ")


@pytest.mark.parametrize("ignored", [255, -1, 40000, -(2**40)])
def test_labels_of_any_size_give_the_same_values(tmp_path, ignored):
    """Labels are kept in two bytes where they fit; where they do not, nothing may wrap into a class."""
    values = []
    for name, index in (("usual", 255), ("other", ignored)):
        root = plain(tmp_path / name, count=2)
        for path in (root / "labels").iterdir():
            truth = np.load(path).astype(np.int64)
            truth[2] = index
            np.save(path, truth)
        cases = segcal.open_cases(root, ignore_index=index)
        values.append(evaluate(cases, metrics=("nll", "ba-ece", "hd95", "dsc"), regions=("everything", "boundary")))
    assert values[0].rows == values[1].rows


@pytest.mark.parametrize("wrong", [4, 32768, 65536, 2**40, -1, -32769])
def test_labels_that_are_no_classes_are_named_as_they_are(tmp_path, wrong):
    root = plain(tmp_path, count=1)
    truth = np.load(root / "labels" / "case0.npy").astype(np.int64)
    truth[3, 4] = wrong
    np.save(root / "labels" / "case0.npy", truth)
    with pytest.raises(segcal.SegcalError, match=rf"label {wrong}\b|{wrong}"):
        evaluate(segcal.open_cases(root))
