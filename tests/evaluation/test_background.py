"""Which class is the background is for the data to say, and every metric that leaves it out says so."""

import json

import numpy as np
import pytest
import torch

import segcal
from datasets import nnunet, plain
from segcal.cases import write_dataset
from segcal.errors import ConfigError, InputError
from segcal.evaluation.evaluate import evaluate
from segcal.metrics import METRICS, PRESETS, dsc, miou, volume_dice
from segcal.regions import CaseRegions
from segcal.statistics import VoxelStatistics
from segcal.training.config import TrainingConfig
from segcal.training.data import open_dataset
from segcal.training.prediction import Scores

# What leaves the background out.
METRICS_WITHOUT = ("hd95", "asd", "surface-dice", "volume-dice", "dsc[background=false]", "miou[background=false]")


def exchanged(root, target):
    """The dataset with classes 0 and 2 exchanged, in scores and labels."""
    plain(target)
    for path in (root / "logits").iterdir():
        np.save(target / "logits" / path.name, np.load(path)[[2, 1, 0, 3]])
        labels = np.load(root / "labels" / path.name)
        np.save(target / "labels" / path.name, np.array([2, 1, 0, 3], np.uint8)[labels])
    (target / "segcal.toml").write_text("background = 2\n")
    return target


def test_the_background_is_a_name_for_a_class(tmp_path):
    """Classes exchanged, and the background with them: every value stays."""
    first = plain(tmp_path / "first")
    second = exchanged(first, tmp_path / "second")
    wanted = {"metrics": [*METRICS, *METRICS_WITHOUT[4:]], "regions": ("everything", "foreground", "all")}
    one, other = (evaluate(segcal.open_cases(root), **wanted) for root in (first, second))
    assert (one.about["background"], other.about["background"]) == (0, 2)
    for left, right in zip(one.rows, other.rows, strict=True):
        assert left[:3] == right[:3]
        assert left.value == pytest.approx(right.value, rel=1e-9, abs=1e-12, nan_ok=True)
        assert left[4:] == right[4:]
    for preset in PRESETS.values():
        one, other = (evaluate(segcal.open_cases(root), metrics=preset.columns) for root in (first, second))
        assert [row.value for row in one.rows] == pytest.approx([row.value for row in other.rows], nan_ok=True)


def test_without_a_background_nothing_is_left_out(tmp_path):
    root = plain(tmp_path)
    with_one = evaluate(segcal.open_cases(root), metrics=METRICS_WITHOUT, regions=("everything", "foreground"))
    assert set(with_one.about["without_background"]) >= {"hd95", "volume-dice", "volume-dice in foreground"}
    without = evaluate(
        segcal.open_cases(root, background="none"), metrics=METRICS_WITHOUT, regions=("everything", "foreground")
    )
    assert without.about["background"] is None
    assert without.about["without_background"] == []
    dice = evaluate(segcal.open_cases(root), metrics=("dsc", "miou"))
    assert without.value("volume-dice") == without.value("dsc[background=false]") == dice.value("dsc")
    assert without.value("volume-dice", "foreground") == dice.value("dsc")
    assert without.value("miou[background=false]") == dice.value("miou")
    for metric in ("hd95", "asd", "surface-dice"):
        rows = [row for row in without.rows if row.metric == metric]
        assert {row.count for row in rows} == {4}
        assert [row.value for row in rows] != [row.value for row in with_one.rows if row.metric == metric]


def test_functions_know_the_background_of_their_input():
    labels = torch.tensor([[0, 1, 2, 2, 1]])
    for background, expected in ((0, labels != 0), (2, labels != 2), (None, labels >= 0)):
        assert torch.equal(CaseRegions(labels, background=background).mask("foreground"), expected)
    logits, truth = torch.eye(3)[[0, 1, 1, 2]], torch.tensor([0, 1, 2, 2])
    each = np.array([1, 2 / 3, 2 / 3])
    for background, kept in ((0, [1, 2]), (1, [0, 2]), (None, [0, 1, 2])):
        stats = VoxelStatistics(3, background=background).update(logits, truth)
        assert volume_dice(stats) == dsc(stats, background=False) == pytest.approx(each[kept].mean())
        assert miou(stats, background=False).count == len(kept)
        assert VoxelStatistics.from_dict(stats.to_dict()).background == background
    with pytest.raises(InputError, match="background is 3; expected a class, 0 to 2, or None"):
        VoxelStatistics(3, background=3)


@pytest.mark.parametrize("text", ["4", "-1", '"None"', "1.0", "true", "[]"])
def test_a_background_that_is_no_class_is_refused(tmp_path, run, text):
    root = plain(tmp_path)
    (root / "segcal.toml").write_text(f"background = {text}\n")
    with pytest.raises(ConfigError, match="background = "):
        segcal.open_cases(root)
    code, shown, error = run("check", root)
    assert code == 1
    assert "background = " in shown + error


def test_multilabel_data_have_no_background_class(tmp_path):
    predictions, truth = nnunet(tmp_path, regions={"whole": [1, 2], "core": [2], "rim": [1]})
    declared = {"layout": "nnunet", "labels": str(truth)}
    assert segcal.open_cases(predictions, **declared).background == 0
    with pytest.raises(ConfigError, match="multi-label"):
        segcal.open_cases(predictions, **declared, background=1)


@pytest.mark.parametrize("background", [0, 3, None])
def test_packed_data_keep_it(tmp_path, run, background):
    root = plain(tmp_path / "in")
    cases = segcal.open_cases(root, background="none" if background is None else background)
    assert cases[1:].background == cases.select(["case1"]).background == background
    write_dataset(cases, tmp_path / "out")
    assert segcal.open_cases(tmp_path / "out").background == background
    assert segcal.check(tmp_path / "out").to_dict()["background"] == background
    assert ("none" if background is None else f"class {background}") in run("check", tmp_path / "out")[1]


def test_the_command_says_what_was_left_out(run, tmp_path):
    root = plain(tmp_path)
    (root / "segcal.toml").write_text('background = 2\nclass_names = ["a", "b", "[sky]", "d"]\n')
    text = run("evaluate", root, "--preset", "crac")[1]
    assert "without the background, class 2 ([sky]): dsc[absent=one,background=false], hd95, ece" in text
    assert "without the background" not in run("evaluate", root, "--metrics", "nll,dsc")[1]
    document = json.loads(run("evaluate", root, "--preset", "nacl", "--json")[1])
    assert document["about"]["background"] == 2
    assert "hd95" in document["about"]["without_background"]


def test_the_validation_dice_of_training_leaves_the_background_out():
    scores = Scores((0.2, 0.4, 0.9), 1.0, 0.1)
    assert scores.mean_dice(0) == pytest.approx(0.65)
    assert scores.mean_dice(2) == pytest.approx(0.3)
    assert scores.mean_dice(None) == pytest.approx(0.5)


@pytest.mark.parametrize("text", ["", "background = 1\n", 'background = "none"\n'])
def test_training_data_say_which_class_is_the_background(tmp_path, text):
    root = plain(tmp_path, count=2)
    (root / "logits").rename(root / "images")
    (root / "segcal.toml").write_text("classes = 4\n" + text)
    dataset = open_dataset(TrainingConfig(data=(str(root),), output=str(tmp_path / "out")))
    assert dataset.background == {"": 0, "background = 1\n": 1}.get(text)
