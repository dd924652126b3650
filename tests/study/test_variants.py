"""Ensembles, shifted images, and how much the findings depend on bins, cases and members."""

from functools import partial

import pytest
import torch

from segcal.cases.caseset import Split
from segcal.errors import InputError
from segcal.study import compare
from segcal.study.settings import Settings
from segcal.study.splits import corrupted_sets, given_sets
from segcal.synthetic import Temperature, scenes

QUICK = {"tune": "none", "metrics": ("nll", "ece", "flip"), "regions": ("everything",), "repeats": 1}


def small(count=8, **options):
    return scenes(count, size=(32, 40), plant=[Temperature(3.0)], **options)


@pytest.fixture(scope="module")
def ensemble():
    cases = small(8, members=3, member_noise=2.0)
    options = {**QUICK, "pooling": ("single", "probs", "logits"), "sensitivity": ("members", "bins", "size")}
    return compare(cases, ("ts",), **options)


def test_every_pooling_is_compared_and_the_deployed_one_is_the_baseline(ensemble):
    keys = [row["key"] for row in ensemble.document["methods"]]
    spaces = ("single", "probs", "logits")
    assert keys == ["uncalibrated", *(f"{id}@{space}" for space in spaces for id in ("uncalibrated", "ts"))]
    nll = {row["method"]: row["mean"] for row in ensemble.summary("nll")}
    assert nll["uncalibrated"] == nll["uncalibrated@logits"] != nll["uncalibrated@probs"]
    assert nll["uncalibrated@single"] > nll["uncalibrated@probs"]


def test_another_pooling_moves_labels_and_is_recommended_only_if_that_is_allowed(ensemble):
    assert set(ensemble.recommendation["candidates"]) == {"uncalibrated", "ts@logits"}
    rows = {row["key"]: row["same_as"] for row in ensemble.document["methods"]}
    assert rows["uncalibrated@logits"] == "uncalibrated"  # as the data are pooled
    free = compare(small(8, members=2), ("ts",), **QUICK, pooling=("probs",), preserve="none")
    assert set(free.recommendation["candidates"]) == {"uncalibrated", "uncalibrated@probs", "ts@probs"}
    if free.recommendation["method"] == "ts@probs":
        assert any("mean of their probabilities" in text for text in free.recommendation["sentences"])


def test_more_members_and_more_cases_are_no_worse_and_bins_count_more(ensemble):
    curves = ensemble.document["sensitivity"]
    members = [row["nll"] for row in curves["members"] if row["method"] == "uncalibrated"]
    assert len(members) == 3
    assert members[0] > members[-1]
    last = next(row for row in curves["members"] if (row["method"], row["members"]) == ("ts", 3))
    assert last["nll"] == next(row["mean"] for row in ensemble.summary("nll") if row["method"] == "ts@logits")
    assert sorted({row["cases"] for row in curves["size"]}) == [1, 2, 4]
    whole = next(row for row in curves["size"] if (row["method"], row["cases"]) == ("ts@logits", 4))
    ece = next(row["mean"] for row in ensemble.summary("ece") if row["method"] == "ts@logits")
    assert whole["ece"] == pytest.approx(ece, rel=1e-14)  # added in another order
    bins = {row["bins"]: row["ece"] for row in curves["bins"] if row["method"] == "ts@probs"}
    assert sorted(bins) == [5, 10, 15, 20, 30, 50, 100]
    assert bins[5] <= bins[10] <= bins[20] <= bins[100]  # each refines the one before
    assert bins[15] == next(row["mean"] for row in ensemble.summary("ece") if row["method"] == "ts@probs")


def test_calibrators_are_tested_unchanged_on_a_second_dataset():
    same, moved = small(12), small(12, shift=1.0)
    study = compare(same, ("ts",), **QUICK, shifted={"same": same, "shifted": moved})
    first, second = study.document["shift"]
    assert [first["name"], second["name"]] == ["same", "shifted"]
    # The names are the dataset's: only those the repeat tests on are taken, so the first is the study itself.
    assert first["summary"] == study.document["summary"]
    nll = {row["method"]: row["mean"] for row in second["summary"] if row["metric"] == "nll"}
    assert nll["ts"] < nll["uncalibrated"]
    assert {row["region"] for row in second["reliability"]} == {"everything"}
    assert any("On shifted" in text for text in study.recommendation["sentences"])


def test_a_second_dataset_must_fit():
    with pytest.raises(InputError, match="has 3 classes"):
        compare(small(6), ("ts",), **QUICK, shifted={"other": small(6, num_classes=3)})
    cases = small(6)
    with pytest.raises(InputError, match="were fitted to or chosen on"):
        compare(cases, ("ts",), **QUICK, shifted={"seen": cases.split(0.5, 0.2, 0.3, seed=0).calibration})


def predict(image):
    """A network that knows the colours of nothing, but has an opinion that depends on the image."""
    shades = torch.linspace(0, 1, 6).view(1, 6, 1, 1)
    return -20 * (image.mean(1, keepdim=True) - shades).square()


def test_corrupted_images_are_predicted_anew(tmp_path):
    seen = []

    def model(image):
        seen.append(image.shape)
        return predict(image)

    study = compare(small(6), ("ts",), **QUICK, model=model, shift=True, output=tmp_path)
    assert [entry["name"] for entry in study.document["shift"]] == ["photometric mild", "photometric strong"]
    test = study.document["splits"][0]["test"]
    assert seen == [(1, 3, 32, 40)] * (2 * len(test))  # once for every corrupted test image, for all methods
    again = compare(small(6), ("ts",), **QUICK, model=model, shift=True, output=tmp_path, resume=True)
    assert again.document["shift"] == study.document["shift"]


def test_corrupted_images_are_those_of_the_test_part_alone():
    """Cases in no part may be the network's own training images."""
    cases = scenes(8, size=(32, 40))
    model = partial(torch.mean, dim=1, keepdim=True)
    split = Split(cases[:2], cases[2:4], cases[4:6])
    (mild, _) = corrupted_sets(cases, model, Settings(("ts",)))
    assert mild.left(split).ids == cases[4:6].ids
    (other,) = given_sets(cases, {"other": cases})
    assert other.left(split).ids == cases[4:].ids
