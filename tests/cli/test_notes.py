"""What is easily overlooked is said by every command, on standard error."""

import json
import os

import numpy as np
import pytest

import segcal
from datasets import logits, plain
from segcal.errors import SegcalError


def strict(text):
    """JSON without the NaN and Infinity that Python's parser lets pass."""

    def refuse(word):
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "DATA", "--metrics", "nll"),
        ("fit", "DATA", "-o", "OUT/cal.safetensors"),
        ("apply", "CAL", "DATA", "-o", "OUT"),
        ("pack", "DATA", "OUT"),
    ],
    ids=lambda command: command[0],
)
def test_every_command_names_files_that_belong_to_no_case(run, tmp_path, command):
    root = plain(tmp_path / "data", count=12)
    (root / "logits" / "case11.npy").unlink()
    (root / "masks").mkdir()
    np.save(root / "masks" / "case0.npy", np.ones((9, 7), bool))
    np.save(root / "masks" / "case1_mask.npy", np.ones((9, 7), bool))
    (tmp_path / "out").mkdir()
    segcal.calibrators.TemperatureScaling().fit(segcal.open_cases(root)).save(tmp_path / "cal.safetensors")
    places = {"DATA": root, "CAL": tmp_path / "cal.safetensors", "OUT": tmp_path / "out"}
    code, _, error = run(*(places.get(word, word.replace("OUT", str(places["OUT"]))) for word in command))
    assert code == 0
    assert error.count("labels: not read, because there are no scores of this name: case11.npy") == 1
    assert error.count("masks: not read, because there are no scores of this name: case1_mask.npy") == 1
    assert "no mask, so every voxel counts, for case1, case10, case2 and 7 more" in error


def test_a_study_names_them_too_for_shifted_data_as_well(run, tmp_path, monkeypatch):
    def stop(*arguments, **options):
        raise SegcalError("stop here")

    monkeypatch.setattr(segcal.cli.compare, "compare", stop)
    roots = [plain(tmp_path / name, count=3) for name in ("data", "shifted")]
    for number, root in enumerate(roots):
        (root / "logits" / f"case{number}.npy").unlink()
    code, _, error = run("compare", roots[0], "--shifted", roots[1], "-o", tmp_path / "out")
    assert (code, "stop here" in error) == (1, True)
    for number in range(2):
        assert error.count(f"labels: not read, because there are no scores of this name: case{number}.npy") == 1


def test_check_shows_the_notes_with_its_tables(run, tmp_path):
    root = plain(tmp_path, count=2)
    (root / "logits" / "case1.npy").unlink()
    code, text, error = run("check", root)
    assert (code, error) == (0, "")
    assert "there are no scores of this name: case1.npy" in text


def test_check_prints_strict_json(run, tmp_path):
    root = plain(tmp_path, count=1)
    z = logits(0)
    z[3] = -np.inf
    np.save(root / "logits" / "case0.npy", z)
    np.save(root / "labels" / "case0.npy", np.full((9, 7), 3, np.uint8))
    code, text, _ = run("check", root, "--json")
    assert (code, strict(text)["nll"]) == (0, "inf")
    np.save(root / "labels" / "case0.npy", np.full((9, 7), 255, np.uint8))
    assert strict(run("check", root, "--json")[1])["nll"] is None


def test_names_that_are_not_utf8_do_not_break_the_output(run, tmp_path):
    root = plain(tmp_path, count=2)
    (root / "labels" / "case1.npy").rename(os.fsdecode(os.fsencode(root / "labels") + b"/case\xe9.npy"))
    for arguments in (("check", root), ("check", root, "--json"), ("evaluate", root)):
        code, text, error = run(*arguments)
        assert code == 1
        assert "is not UTF-8" in text + error


@pytest.mark.parametrize("names", ["['a', 'b']", "['a', 'b', 'c', 'd', 'e']"])
def test_wrong_class_names_are_an_error_in_every_command(run, tmp_path, names):
    root = plain(tmp_path / "data")
    (root / "segcal.toml").write_text(f"class_names = {names}\n")
    for arguments in (
        ("check", root),
        ("evaluate", root),
        ("fit", root, "-o", tmp_path / "c"),
        ("pack", root, tmp_path),
    ):
        code, text, error = run(*arguments)
        assert code == 1
        assert "class_names" in text + error
