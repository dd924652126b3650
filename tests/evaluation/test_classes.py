"""The table of classes: against loops over voxels, and against the metrics that it takes apart."""

import json
import math
from dataclasses import replace

import pytest
import torch

import segcal
from datasets import plain
from multilabel import channels, stacked
from reference import metrics as reference
from segcal.evaluation.evaluate import evaluate
from segcal.evaluation.results import ClassRow, Results
from segcal.study import compare
from segcal.synthetic import Temperature, scenes

CASES = scenes(3, size=(20, 24), plant=[Temperature(3.0)], ignored=0.1)


@pytest.fixture(scope="module")
def results():
    return evaluate(CASES, metrics=("cece", "dsc", "confidence-balance", "accuracy"))


def test_every_number_is_that_of_a_loop_over_the_voxels(results):
    p, y = [], []
    for case in CASES:
        valid = case.labels != case.ignore_index
        p += case.logits.double().softmax(1).movedim(1, -1)[valid].tolist()
        y += case.labels[valid].tolist()
    winners = [reference.argmax(q) for q in p]
    for k, row in enumerate(results.classes):
        bins = reference.gaps([q[k] for q in p], [label == k for label in y], 15)
        assert row.ece == pytest.approx(sum(n * gap for n, gap in bins) / len(y), rel=1e-5)
        right = sum(label == winner == k for label, winner in zip(y, winners, strict=True))
        assert (row.voxels, row.predicted) == (y.count(k), winners.count(k))
        assert row.dice == pytest.approx(2 * right / (row.voxels + row.predicted))
        own = [(q, label) for q, label, winner in zip(p, y, winners, strict=True) if winner == k]
        assert row.balance == pytest.approx(reference.confidence_balance(*zip(*own, strict=True)), rel=1e-4)


def test_the_metrics_are_means_of_its_columns(results):
    rows = results.classes
    assert sum(row.ece for row in rows) / len(rows) == pytest.approx(results.value("cece"))
    assert sum(row.dice for row in rows) / len(rows) == pytest.approx(results.value("dsc"))
    voxels = sum(row.predicted for row in rows)
    assert voxels == sum(row.voxels for row in rows)
    balance = math.fsum(row.balance * row.predicted for row in rows) / voxels
    assert balance == pytest.approx(results.value("confidence-balance"))


def test_a_class_that_is_nowhere_is_undefined_but_counted():
    logits, labels = torch.tensor([[2.0, 0.0, -99.0]] * 4), torch.tensor([0, 0, 1, 0])
    row = evaluate((logits, labels), metrics=("nll",)).classes[2]
    assert (row.name, row.voxels, row.predicted, row.ece) == ("2", 0, 0, pytest.approx(0, abs=1e-12))
    assert math.isnan(row.dice)
    assert math.isnan(row.balance)


def test_channels_have_a_row_each_that_of_their_inside():
    parts = channels(2, {"liver": 1.0, "tumour": 4.0})
    whole = evaluate(stacked(**parts), metrics=("nll",))
    for row, (name, own) in zip(whole.classes, parts.items(), strict=True):
        assert row == evaluate(own, metrics=("nll",)).classes[1]._replace(name=name)
        assert whole.channel(name).classes == (row,)


def test_files_keep_it_and_older_files_have_none(results, tmp_path):
    odd = replace(results, classes=(*results.classes, ClassRow("odd", 0.1, math.nan, 0, 3, math.inf)))
    odd.to_json(tmp_path / "r.json")
    again = Results.from_json(tmp_path / "r.json")
    assert again.classes[:-1] == results.classes
    assert repr(again.classes[-1]) == repr(odd.classes[-1])
    content = json.loads((tmp_path / "r.json").read_text())
    content.pop("classes")
    assert Results.from_dict({**content, "version": 4}).classes == ()


def test_a_study_has_the_means_over_its_repeats():
    quick = {"tune": "none", "metrics": ("nll", "cece")}
    cases = scenes(8, size=(20, 24), plant=[Temperature(3.0)])
    document = compare(cases, ("ts",), 2, **quick).document
    rows = [row for row in document["classes"] if row["method"] == "uncalibrated"]
    assert len(document["classes"]) == 2 * len(rows) == 2 * cases.num_classes
    found = [evaluate(cases.select(split["test"]), metrics=("nll",)).classes for split in document["splits"]]
    for row, *parts in zip(rows, *found, strict=True):
        assert row["ece"] == pytest.approx(sum(own.ece for own in parts) / 2)
        assert row["voxels"] == round(sum(own.voxels for own in parts) / 2)


def test_the_command_shows_it_if_the_classes_are_few_or_if_it_is_asked_for(run, tmp_path):
    few = plain(tmp_path / "few", count=2)
    assert "where it is predicted" in run("evaluate", few, "--metrics", "nll")[1]
    assert "where it is predicted" not in run("evaluate", few, "--metrics", "nll", "--no-per-class")[1]
    torch.manual_seed(0)
    many = segcal.cases_from((torch.randn(1, 40, 8, 9), torch.randint(0, 40, (1, 8, 9))))
    segcal.write_dataset(many, tmp_path / "many")
    text = run("evaluate", tmp_path / "many", "--metrics", "nll")[1]
    assert "40 classes: --per-class shows each" in text
    assert "where it is predicted" not in text
    text = run("evaluate", tmp_path / "many", "--metrics", "nll", "--per-class")[1]
    assert [line.split()[0] for line in text.split("balance", 1)[1].splitlines()[1:41]] == [str(k) for k in range(40)]
