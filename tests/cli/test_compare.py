import json
import sys

import numpy as np
import pytest

import segcal.cli.commands
from datasets import plain
from segcal.cases import write_dataset
from segcal.synthetic import Temperature, scenes

QUICK = ("--repeats", "1", "--tune", "none", "--metrics", "nll,ece,ba-ece,flip", "--regions", "everything")


@pytest.fixture
def data(tmp_path):
    root = tmp_path / "study"
    write_dataset(scenes(8, size=(32, 40), plant=[Temperature(3.0)]), root)
    return root


def test_compare_writes_a_report_and_says_what_to_deploy(run, data, tmp_path):
    folder = tmp_path / "report"
    code, text, error = run("compare", data, "--methods", "ts,vs", "-o", folder, *QUICK)
    assert (code, error) == (0, "")
    for word in ("uncalibrated", "ts", "vs", "NLL", "Boundary-aware ECE", "labels moved", "MB", "Use ts", "index.html"):
        assert word in text
    assert "segcal apply" in text
    assert {path.name for path in folder.iterdir()} >= {
        "index.html", "results.json", "tables.csv", "tables.tex", "calibrator.safetensors", "browser", "work"
    }  # fmt: skip
    document = json.loads((folder / "results.json").read_text())
    assert document["about"]["data"]["name"] == "study"
    assert document["about"]["command"].startswith("segcal compare")
    assert run("apply", folder / "calibrator.safetensors", data, "-o", tmp_path / "applied")[0] == 0
    assert "is not empty" in run("compare", data, "--methods", "ts,vs", "-o", folder, *QUICK)[2]
    code, text, _ = run("compare", data, "--methods", "ts,vs", "-o", folder, *QUICK, "--resume", "--json")
    assert code == 0
    again = json.loads(text)
    for name in ("timings", "about"):
        first, second = document.pop(name), again.pop(name)
    assert (first["command"] + " --json") == second["command"]
    assert again == document


@pytest.mark.usefixtures("no_figures")
def test_a_study_of_which_nothing_worked_is_an_error(run, data, tmp_path, monkeypatch):
    def broken(*arguments, **options):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(segcal.calibrators.TemperatureScaling, "fit", broken)
    code, text, error = run("compare", data, "--methods", "ts", "-o", tmp_path / "report", *QUICK)
    assert code == 1
    assert "by zero" in text
    assert "every method failed" in error


@pytest.mark.usefixtures("no_figures")
def test_shifted_data_and_a_model_from_a_module(run, data, tmp_path, monkeypatch):
    other = tmp_path / "other"
    write_dataset(scenes(4, size=(32, 40), plant=[Temperature(4.0)], seed=7), other)
    for path in sorted(other.glob("*/image-*")):
        path.rename(path.with_name(path.name.replace("image", "new")))
    (tmp_path / "mynet_for_segcal.py").write_text(
        "def predict(image):\n    return image.mean(1, keepdim=True).repeat(1, 6, 1, 1)\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    options = ("--shifted", other, "--shift", "--model", "mynet_for_segcal:predict")
    code, text, error = run("compare", data, "--methods", "ts", "-o", tmp_path / "r", *QUICK, *options)
    assert (code, error) == (0, "")
    for words in ("Shifted: other", "Shifted: photometric mild", "NLL minus ts", "On other (4 cases), NLL is"):
        assert words in text
    names = [entry["name"] for entry in json.loads((tmp_path / "r" / "results.json").read_text())["shift"]]
    assert names == ["other", "photometric mild", "photometric strong"]
    for model, says in (
        ("mynet_for_segcal:nope", "module:function"),
        ("mynet_for_segcal", "module:function"),
        ("no_such_module:f", "module:function"),
        ("mynet_for_segcal:number", "is a int"),
    ):
        assert says in run("compare", data, "-o", tmp_path / "x", "--model", model)[2]
    lonely = run("compare", data, "-o", tmp_path / "x", "--model", "mynet_for_segcal:predict")[2]
    assert "came without --shift" in lonely
    assert not (tmp_path / "x").exists()


def test_mistakes_are_named_before_any_work(run, tmp_path):
    root = plain(tmp_path / "in", count=4)
    for options, says in (
        (("--methods", "nope"), "method is 'nope'"),
        (("--methods", ","), "nothing was asked for"),
        (("--fractions", "0.5,0.5"), "three numbers"),
        (("--pooling", "probs"), "no ensemble members"),
        (("--sensitivity", "luck"), "sensitivity is 'luck'"),
        (("--shift",), "shift without a model"),
        (("--robust",), "robust without shifted cases"),
        (("--metrics", "nope"), "metric is 'nope'"),
    ):
        code, text, error = run("compare", root, "-o", tmp_path / "r", *options)
        assert (code, text) == (1, "")
        assert says in error
    assert not (tmp_path / "r").exists()


def test_help_teaches(run):
    code, text, _ = run("compare", "--help")
    assert code == 0
    for word in ("decision-preserving", "--translation-inv", "--resume", "Example: segcal compare"):
        assert word in text


@pytest.mark.usefixtures("no_figures")
def test_names_with_markup_are_shown_as_they_are(run, tmp_path):
    root = plain(tmp_path / "in", count=6, shape=(20, 24))
    for folder in ("logits", "labels"):
        (root / folder / "case0.npy").rename(root / folder / "[red]<script>.npy")
    np.save(root / "labels" / "case1.npy", np.zeros((20, 24), np.uint8))
    code, text, _ = run("compare", root, "--methods", "ts", "-o", tmp_path / "r", *QUICK, "--json")
    assert code == 0
    named = [name for part in json.loads(text)["splits"][0].values() for name in part]
    assert "[red]<script>" in named
    assert "<script>.npy" not in (tmp_path / "r" / "index.html").read_text()
