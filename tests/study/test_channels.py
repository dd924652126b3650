"""A study of multi-label data: every channel as if it were studied alone, methods chosen by the mean over channels."""

import csv
import math

import numpy as np
import pytest
import torch

from multilabel import channels, stacked
from segcal.calibrators import load
from segcal.cases import open_cases, write_dataset
from segcal.errors import SegcalError
from segcal.evaluation.apply import apply
from segcal.report import write_report
from segcal.study import compare
from segcal.synthetic import ClassAffine, scenes

OPTIONS = {
    "methods": ("ts", "vs"),
    "repeats": 2,
    "tune": "none",
    "metrics": ("nll", "ece", "ba-ece", "dsc", "flip"),
    "regions": ("everything", "boundary"),
}


@pytest.fixture(scope="module")
def parts():
    options = {"num_classes": 2, "size": (24, 28), "coherence": 0.0}
    biased = scenes(10, plant=[ClassAffine([1.0, 1.0], [0.0, 2.0])], seed=5, **options)
    return {**channels(10, {"liver": 1.0, "tumour": 4.0}, size=(24, 28)), "bi<b>ased": biased}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def study(parts, folder):
    return compare(stacked(**parts), output=folder, **OPTIONS)


def means(rows, key="mean"):
    return {(row["method"], row["region"], row["metric"]): row[key] for row in rows}


def test_every_channel_is_studied_as_if_it_were_alone(study, parts):
    assert [entry["name"] for entry in study.document["channels"]] == list(parts)
    entry, alone = study.document["channels"][1], compare(parts["tumour"], **OPTIONS).document
    for key in ("mean", "low", "high", "pooled", "pooled_low", "pooled_high"):
        assert means(entry["summary"], key) == means(alone["summary"], key)
    for method, found in alone["diagnosis"].items():
        assert study.document["diagnosis"][method]["channels"]["tumour"] == found
    bins = [row for row in study.document["reliability"] if row["channel"] == "tumour"]
    tops = [row for row in alone["reliability"] if row["class"] is None]
    assert [{**row, "channel": ""} for row in bins] == tops


def test_all_else_is_the_mean_over_channels(study):
    own = [means(entry["summary"]) for entry in study.document["channels"]]
    for key, value in means(study.document["summary"]).items():
        if key[2] != "flip":
            assert value == pytest.approx(np.mean([channel[key] for channel in own]))
    compared = {row["compared"] for row in study.document["flips"] if row["method"] != "uncalibrated"}
    assert compared == {3 * 2 * 3 * 24 * 28}  # channels, repeats, test cases
    assert all(math.isfinite(row["ece"]) for row in study.document["bands"])


def test_the_study_says_so(study, folder):
    document = study.document
    assert document["about"]["data"]["channel_names"] == ["liver", "tumour", "bi<b>ased"]
    assert document["diagnosis"]["uncalibrated"]["set"]["verdict"] == "mixed"
    assert "overconfident in tumour" in document["recommendation"]["headline"][0]["text"]
    assert "means over 3 channels" in document["recommendation"]["sentences"][0]
    assert document["recommendation"]["rule"].endswith("The NLL of a case is the mean over its channels.")
    rare = next(text for text in document["recommendation"]["caveats"] if "calibration voxels are labelled" in text)
    assert "'tumour'" in rare
    assert "outside" not in rare
    rows = list(csv.DictReader((folder / "tables.csv").read_text().splitlines()))
    assert [row["channel"] for row in rows][:: len(document["summary"])] == ["", "liver", "tumour", "bi<b>ased"]


def test_pictures_show_channels(study):
    entries = study.document["browser"]
    assert len(entries) == 12
    assert {entry["channel"] for entry in entries} == {"liver", "tumour", "bi<b>ased"}
    worst = entries[0]
    alone = next(one for one in study.document["channels"] if one["name"] == worst["channel"])
    assert worst["numbers"]["ece before"] >= means(alone["summary"])["uncalibrated", "everything", "ece"]


def test_the_deployed_file_has_a_map_for_each_channel(study, folder, parts, tmp_path):
    chosen = load(folder / study.recommendation["file"])
    assert chosen.channel_names == tuple(parts)
    cases = stacked(**parts)
    write_dataset(cases, tmp_path / "data")
    apply(chosen, open_cases(tmp_path / "data"), tmp_path / "out")
    for case in cases:
        stored = torch.from_numpy(np.load(tmp_path / "out" / "probs" / f"{case.id}.npy"))
        for k, own in enumerate(chosen.channels):
            expected = own(case.logits[k : k + 1].log_softmax(1)).exp()[0, 1]
            torch.testing.assert_close(stored[k], expected, atol=1e-5, rtol=0)


def test_a_refit_keeps_the_strength_of_every_channel(parts, tmp_path):
    study = compare(stacked(**parts), ("vs",), 1, output=tmp_path, preserve="none", metrics=("nll", "ece"))
    assert study.recommendation["method"] == "vs"
    chosen = load(tmp_path / study.recommendation["file"])
    tuning = study.document["fits"][0]["tuning"]
    assert {trial["channel"] for trial in tuning} == set(parts)
    for name, own in zip(chosen.channel_names, chosen.channels, strict=True):
        best = min((t for t in tuning if t["channel"] == name), key=lambda t: t["nll"])
        assert own.shrinkage == float(best["arguments"]["shrinkage"])


def test_a_model_of_channels_is_tested_on_corrupted_images(parts):
    cases = stacked(**{name: parts[name] for name in ("liver", "tumour")})

    def model(image):
        return torch.cat([image.mean(1, keepdim=True), -image.mean(1, keepdim=True)], 1)

    study = compare(cases, ("ts",), 1, tune="none", metrics=("nll", "ece"), shift=True, model=model)
    assert [entry["name"] for entry in study.document["shift"]] == ["photometric mild", "photometric strong"]
    with pytest.raises(SegcalError, match=r"the model gave \(1, 3, .*expected logits of shape \(1, 2, 24, 28\)"):
        compare(cases, ("ts",), 1, shift=True, model=lambda image: torch.zeros(1, 3, 24, 28))


def test_the_report_is_written(study, folder):
    page = write_report(folder).read_text()
    assert "bi<b>ased" not in page  # text only, never markup
    assert len(list(folder.rglob("reliability-everything-channel-*.png"))) == 3
