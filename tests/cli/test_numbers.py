"""Numbers that cannot be meant are refused before any work, in every command and in Python."""

import math
import re

import numpy as np
import pytest

import segcal.cli.commands
from datasets import plain
from segcal.errors import MAX_SEED, InputError
from segcal.evaluation.evaluate import evaluate
from segcal.inference import hierarchical_bootstrap
from segcal.study import compare
from segcal.study.tuning import tune
from segcal.synthetic import scenes
from segcal.training import convert
from segcal.training.config import parse_config

ARGUMENTS = {
    "evaluate": ("data",),
    "fit": ("data", "-o", "cal.safetensors"),
    "compare": ("data", "-o", "report"),
    "scenes": ("out",),
    "demo": ("-o", "demo"),
    "convert": ("packed.npz", "out"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain(tmp_path / "data", count=4)
    return tmp_path


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1, 10**30, "1.5", "x"])
def test_every_seed_of_every_command_is_checked(run, here, seed):
    commands = [one for one in segcal.cli.commands.app.registered_commands if "seed" in one.callback.__annotations__]
    assert {one.name for one in commands} == set(ARGUMENTS)
    for command in commands:
        code, text, error = run(command.name, *ARGUMENTS[command.name], "--seed", seed)
        assert (code, text) == (2, "")
        assert "--seed" in error
        assert "Traceback" not in error
    assert {path.name for path in here.iterdir()} == {"data"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("evaluate", "data", "--workers", "0"), "--workers"),
        (("compare", "data", "-o", "r", "--workers", "-2"), "--workers"),
        (("compare", "data", "-o", "r", "--repeats", "0"), "--repeats"),
        (("compare", "data", "-o", "r", "--fractions", "0.5,0.4,0.3"), "sum to at most 1"),
        (("compare", "data", "-o", "r", "--fractions", "0.5,-0.2,0.3"), "above 0"),
        (("compare", "data", "-o", "r", "--fractions", "nan,0.2,0.3"), "above 0"),
        (("compare", "data", "-o", "r", "--fractions", "a,b,c"), "three numbers"),
        (("fit", "data", "-o", "cal", "--test", "2"), "--test"),
        (("fit", "data", "-o", "cal", "--test", "nan"), r"--test|sizes \(nan"),
        (("fit", "data", "-o", "cal", "--test", "1"), "no cases to fit to"),
        (("convert", "packed.npz", "out", "--patients", "0"), "--patients"),
        (("convert", "packed.npz", "out", "--ignore-index", "9" * 30), "ignore_index"),
        (("compare", "data", "-o", "taken"), "is a file"),
        (("compare", "data", "-o", "."), "apart from the input"),
    ],
)
def test_other_numbers_and_places_too(run, here, arguments, says):
    (here / "taken").write_text("mine")
    code, text, error = run(*arguments)
    assert code in (1, 2)
    assert text == ""
    assert re.search(says, error)  # typer names the option from 0.29 on, segcal the sizes
    assert "Traceback" not in error
    assert {path.name for path in here.iterdir()} == {"data", "taken"}
    assert (here / "taken").read_text() == "mine"


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1, 0.5, True, None, math.nan])
def test_python_is_told_the_same(seed, tmp_path):
    cases = scenes(4, size=(16, 20))
    for call in (
        lambda: evaluate(cases, seed=seed),
        lambda: compare(cases, seed=seed),
        lambda: tune("ts", cases, seed=seed),
        lambda: segcal.calibrators.TemperatureScaling().fit(cases, seed=seed),
        lambda: cases.split(0.5, 0.2, 0.3, seed=seed),
        lambda: cases.folds(2, seed=seed),
        lambda: scenes(2, seed=seed),
        lambda: hierarchical_bootstrap(np.ones((1, 3)), seed=seed),
        lambda: convert(tmp_path / "x.npz", tmp_path / "out", seed=seed),
    ):
        with pytest.raises(InputError, match="seed is .*expected a whole number from 0 to 2147483647"):
            call()
    with pytest.raises(segcal.errors.ConfigError, match="seed = "):
        parse_config({"data": "a", "output": "b", "seed": seed})


def test_whole_numbers_of_numpy_are_numbers():
    cases = scenes(4, size=(16, 20))
    assert cases.split(0.5, 0.2, 0.3, seed=np.int64(3)).test.ids == cases.split(0.5, 0.2, 0.3, seed=3).test.ids
