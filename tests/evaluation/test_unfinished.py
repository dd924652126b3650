"""An evaluation that was stopped goes on where it was, to the same bits."""

import pytest

from segcal.evaluation import evaluate as evaluation
from segcal.evaluation import unfinished
from segcal.evaluation.evaluate import evaluate
from segcal.evaluation.unfinished import Unfinished
from segcal.synthetic import Temperature, scenes

CASES = scenes(5, size=(24, 32), plant=[Temperature(2.0)])
WANTED = {"metrics": ("nll", "ece", "ace-adaptive", "hd95"), "regions": ("everything", "boundary")}


class StoppedError(Exception):
    pass


def stop_at(number):
    seen = []

    def progress(case):
        seen.append(case)
        if len(seen) > number:
            raise StoppedError

    return progress


def test_it_goes_on_with_the_cases_that_are_left_and_gives_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "EVERY", 0.0)
    monkeypatch.setattr(unfinished, "_RARELY", 0)
    whole = evaluate(CASES, **WANTED).to_json()
    kept = Unfinished(tmp_path / "kept", "key")
    for number in (2, 4):
        with pytest.raises(StoppedError):
            evaluate(CASES, **WANTED, unfinished=kept, progress=stop_at(number))
    measured = []
    measure = evaluation.measure_case
    monkeypatch.setattr(evaluation, "measure_case", lambda *some: measured.append(some[1].id) or measure(*some))
    assert evaluate(CASES, **WANTED, unfinished=Unfinished(tmp_path / "kept", "key")).to_json() == whole
    assert measured == ["image-004"]


def test_what_another_key_or_share_left_or_what_is_damaged_is_not_taken_up(tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "EVERY", 0.0)
    monkeypatch.setattr(unfinished, "_RARELY", 0)
    mine = Unfinished(tmp_path / "kept", "mine")
    mine.write(("a", "b"), 1, lambda: [1.5])
    assert mine.read(("a", "b")) == (1, [1.5])
    assert mine.read(("a",)) == Unfinished(tmp_path / "kept", "yours").read(("a", "b")) == (0, None)
    (file,) = (tmp_path / "kept").iterdir()
    file.write_text(file.read_text()[:-4])
    assert mine.read(("a", "b")) == (0, None)


def test_files_of_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "EVERY", 0.0)
    monkeypatch.setattr(unfinished, "_RARELY", 0)
    kept = Unfinished(tmp_path / "kept", "key")
    kept.write(("a",), 1, list)
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    kept.remove()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["notes.txt"]


def test_little_time_has_passed_so_nothing_is_written(tmp_path):
    Unfinished(tmp_path / "kept", "key").write(("a",), 1, list)
    assert not (tmp_path / "kept").exists()


def test_sums_that_take_long_to_write_are_written_more_rarely(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(unfinished.time, "time", lambda: clock[0])
    kept, writes = Unfinished(tmp_path / "kept", "key", 0.0), []

    def sums():
        writes.append(clock[0])
        clock[0] += 3.0  # takes so long
        return []

    while clock[0] < 200:
        clock[0] += 1
        kept.write(("a",), 1, sums)
    assert writes == [10.0, 73.0, 136.0, 199.0]
