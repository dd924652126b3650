import numpy as np
import pytest
import torch
from PIL import Image

from segcal.calibrators import TemperatureScaling, VectorScaling
from segcal.study import compare
from segcal.study.results.browser import CASES, PIXELS, SLICES, Place, chosen_cases, write_browser
from segcal.synthetic import Temperature, scenes


def drawn(cases, calibrator, folder):
    values = {metric: {Place(name): 0.1 * place for place, name in enumerate(cases.ids)} for metric in ("ece", "nll")}
    own = None if calibrator is None else lambda name: calibrator
    return write_browser(cases, own, "m", before=values, after=values, folder=folder)


def panel(entry, name, folder, place=0):
    file = next(one["file"] for one in entry["slices"][place]["panels"] if one["name"] == name)
    return np.asarray(Image.open(folder / file)).astype(int)


def test_images_have_every_panel_and_a_temperature_that_is_one_colour(tmp_path):
    cases = scenes(3, size=(40, 48), plant=[Temperature(2.0)], ignored=0.1)
    entries = drawn(cases, TemperatureScaling().fit(cases), tmp_path)
    assert [entry["case"] for entry in entries] == list(cases.ids[::-1])
    names = [one["name"] for one in entries[0]["slices"][0]["panels"]]
    assert names == [
        "image", "label", "prediction", "confidence before", "confidence after", "temperature", "error", "flips"
    ]  # fmt: skip
    assert panel(entries[0], "image", tmp_path).shape == (40, 48, 3)
    temperature = panel(entries[0], "temperature", tmp_path).reshape(-1, 3)
    assert np.abs(temperature - np.median(temperature, 0)).max() <= 2
    assert np.median(temperature[:, 0]) > np.median(temperature[:, 2])  # above 1 is red
    brighter = (
        panel(entries[0], "confidence before", tmp_path).sum() - panel(entries[0], "confidence after", tmp_path).sum()
    )
    assert brighter > 0


def test_errors_flips_and_ignored_voxels_are_where_they_are(tmp_path):
    cases = scenes(1, size=(40, 48), ignored=0.2)
    case = cases[0]
    calibrator = VectorScaling().fit(cases)
    calibrator.bias[0, 0] += 2.0
    (entry,) = drawn(cases, calibrator, tmp_path)
    moved = (calibrator(case.logits).argmax(1) != case.logits.argmax(1))[0] & case.valid[0]
    assert bool(moved.any())
    kept, ignored = np.array((226, 232, 236)), np.array((128, 128, 128))
    flips, error = panel(entry, "flips", tmp_path), panel(entry, "error", tmp_path)
    np.testing.assert_array_equal((flips != kept).any(-1) & (flips != ignored).any(-1), moved.numpy())
    np.testing.assert_array_equal((flips == ignored).all(-1), ~case.valid[0].numpy())
    wrong = (case.logits.argmax(1) != case.labels)[0] & case.valid[0]
    np.testing.assert_array_equal((error == (200, 50, 40)).all(-1), wrong.numpy())


def test_volumes_are_shown_in_slices_and_large_images_thinned(tmp_path):
    volumes = scenes(1, size=(20, 24, 32), num_classes=4)
    (entry,) = drawn(volumes, None, tmp_path)
    places = [one["index"] for one in entry["slices"]]
    assert len(places) == SLICES
    assert places[0] == 0
    assert places[-1] == 19
    assert [one["name"] for one in entry["slices"][0]["panels"]] == [
        "image", "label", "prediction", "confidence before", "error"
    ]  # fmt: skip
    expected = volumes[0].labels[0, 19]
    shown = panel(entry, "label", tmp_path, place=7)
    assert len(np.unique(shown.reshape(-1, 3), axis=0)) == len(torch.unique(expected))
    (large,) = drawn(scenes(1, size=(16, 700)), None, tmp_path / "large")
    assert max(panel(large, "label", tmp_path / "large").shape) <= PIXELS
    assert large["shape"] == [16, 700]


@pytest.mark.parametrize("count", [1, 12, 13, 500])
def test_worst_middle_and_best_are_chosen_once_each(count):
    ece = {f"case{i}": i / count for i in range(count)}
    chosen = [name for name, _ in chosen_cases(ece)]
    assert len(chosen) == len(set(chosen)) == min(count, CASES)
    assert chosen[0] == f"case{count - 1}"
    assert chosen[-1] == "case0"


def test_undefined_values_do_not_come_first():
    assert chosen_cases({"a": float("nan"), "b": 0.1})[0][0] == "b"


@pytest.mark.parametrize("count", [13, 40])
def test_the_cases_that_calibration_helped_least_are_among_them(count):
    ece = {f"case{i}": i / count for i in range(count)}
    change = {name: (7 * i) % count - 50.0 for i, name in enumerate(ece)}
    chosen = chosen_cases(ece, change)
    assert len({name for name, _ in chosen}) == len(chosen) == CASES
    least = sorted(change, key=change.get, reverse=True)[: CASES // 3]
    assert set(least) <= {name for name, _ in chosen}
    assert [name for name, title in chosen if title == "worst ECE"] == [f"case{count - 1 - i}" for i in range(4)]


def test_the_worst_cases_of_all_repeats_are_drawn_each_with_a_calibrator_that_has_not_seen_it():
    cases = scenes(10, size=(24, 32), plant=[Temperature(3.0)])
    study = compare(cases, ("ts",), 3, tune="none", metrics=("nll", "ece"), regions=("everything",))
    document = study.document
    tested = [split["test"] for split in document["splits"]]
    assert len({case for part in tested for case in part}) > len(tested[0])
    rows = {
        (row["method"], row["repeat"]): dict(zip(tested[row["repeat"]], row["values"], strict=True))
        for row in document["cases"]
        if row["metric"] == "ece"
    }
    ece = {case: value for repeat in range(3) for case, value in rows["uncalibrated", repeat].items()}
    drawn_cases = [entry["case"] for entry in document["browser"]]
    assert drawn_cases == sorted(ece, key=ece.get, reverse=True)
    for entry in document["browser"]:
        own = [rows["ts", repeat].get(entry["case"]) for repeat in range(3)]
        assert entry["numbers"]["ece before"] == ece[entry["case"]]
        assert entry["numbers"]["ece after"] == next(value for value in own if value is not None)
        assert entry["slices"]
