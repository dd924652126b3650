"""Reliability diagrams in the terminal say what the bins say."""

import numpy as np
import pytest

import segcal
import segcal.cli.console as console
from datasets import plain
from multilabel import channels, stacked
from segcal.errors import InputError
from segcal.evaluation.evaluate import evaluate
from segcal.evaluation.picture import NOT_SURE, PERFECT, RIGHT, TOO_SURE, reliability_picture
from segcal.synthetic import Temperature, scenes

BINS = 15
CENTRES = (np.arange(BINS) + 0.5) / BINS


def bins(accuracy, count=1000):
    count = np.broadcast_to(count, BINS)
    return {"count": count, "confidence": count * CENTRES, "correct": count * np.asarray(accuracy)}


def columns(picture, panel=0):
    """The marks of each bin, from the lowest row up; both characters of a bin are the same."""
    lines = picture.splitlines()
    top = next(number for number, line in enumerate(lines) if "1.0 ┤" in line)
    left = [index for index, letter in enumerate(lines[top]) if letter == "┤"][panel] + 1
    rows = [line.ljust(100)[left : left + 2 * BINS] for line in lines[top : top + BINS]][::-1]
    assert all(row[0::2] == row[1::2] for row in rows)
    return ["".join(row[2 * k] for row in rows) for k in range(BINS)]


def test_the_bars_are_as_high_as_the_accuracy():
    accuracy = np.random.default_rng(0).uniform(0, 1, BINS)
    for k, marks in enumerate(columns(reliability_picture({"a": bins(accuracy)}))):
        filled = sum(" ▁▂▃▄▅▆▇█".find(mark) / 8 for mark in marks if mark in "▁▂▃▄▅▆▇█")
        above = marks.count(NOT_SURE)
        if accuracy[k] < (k + 1) / BINS:  # up to the eighth of a row
            assert filled / BINS == pytest.approx(accuracy[k], abs=1 / 16 / BINS + 1e-9)
        else:  # up to half a row
            assert (filled + above) / BINS == pytest.approx(accuracy[k], abs=1 / 2 / BINS + 1e-9)


def test_gaps_reach_from_the_accuracy_to_the_confidence():
    for accuracy, mark, other in ((CENTRES / 2, TOO_SURE, NOT_SURE), ((CENTRES + 1) / 2, NOT_SURE, TOO_SURE)):
        picture = columns(reliability_picture({"a": bins(accuracy)}))
        assert other not in "".join(picture)
        for k, marks in enumerate(picture):
            assert marks.count(mark) / BINS == pytest.approx(abs(accuracy[k] - CENTRES[k]), abs=1.01 / BINS)
    perfect = "".join(columns(reliability_picture({"a": bins(CENTRES)})))
    assert TOO_SURE not in perfect
    assert NOT_SURE not in perfect


def test_empty_bins_show_the_diagonal_and_nothing_else():
    count = np.where(np.arange(BINS) < 5, 0, 1000)
    for k, marks in enumerate(columns(reliability_picture({"a": bins(CENTRES, count)}))):
        assert marks.replace(" ", "") == PERFECT if k < 5 else PERFECT not in marks
    nothing = reliability_picture({"a": bins(CENTRES, 0)})
    assert "ECE nan" in nothing
    assert RIGHT not in "".join(columns(nothing))


@pytest.fixture(scope="module")
def found():
    cases = scenes(3, size=(32, 40), plant=[Temperature(3.0)])
    ts = segcal.calibrators.TemperatureScaling().fit(cases)
    return [evaluate(cases, own, metrics=("ece", "accuracy")) for own in (None, ts)]


def test_two_results_stand_side_by_side_in_80_columns(found):
    before, after = found
    both = after.picture(before=before)
    assert max(map(len, both.splitlines())) <= 80
    assert columns(both, 0) == columns(before.picture())
    assert columns(both, 1) == columns(after.picture())
    for own in found:
        assert f"ECE {own.value('ece'):.4f}  right {own.value('accuracy'):.1%}" in both
    assert both.splitlines()[0].split() == ["before", "after", "ts"]
    with pytest.raises(InputError, match="one of everything, boundary"):
        after.picture("nowhere")


def test_channels_have_a_picture_each():
    parts = channels(2, {"liver": 1.0, "tumour": 4.0})
    text = evaluate(stacked(**parts), metrics=("ece",)).picture()
    for name, own in parts.items():
        assert f"{name}\n{evaluate(own, metrics=('ece',)).picture()}" in text


def test_the_command_draws_before_and_after(run, monkeypatch, tmp_path):
    data, cal = plain(tmp_path / "data", count=4, shape=(20, 24)), tmp_path / "cal.safetensors"
    run("fit", data, "-o", cal)
    options = ("--metrics", "ece", "--calibrator", cal, "-o", tmp_path / "r.json")
    text = run("evaluate", data, *options, "--picture")[1]
    cases = segcal.open_cases(data)
    before, after = (evaluate(cases, own, metrics=("ece",)) for own in (None, segcal.load(cal)))
    assert after.picture(before=before) in text
    assert segcal.Results.from_json(tmp_path / "r.json").rows == after.rows
    assert before.picture() in run("evaluate", data, "--metrics", "ece", "--picture")[1]
    assert run("evaluate", data, "--picture", "--json")[0] == 1
    monkeypatch.setattr(console.out, "_force_terminal", True)
    monkeypatch.setenv("NO_COLOR", "1")
    narrow = run("evaluate", data, *options, "--picture", width=60)[1]
    assert f"{before.picture()}\n\n{after.picture()}" in narrow
    monkeypatch.setattr(console.Console, "encoding", "ascii")
    run("evaluate", data, "--metrics", "ece", "--picture")[1].encode("ascii")
