import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import segcal.cli.commands
from segcal.training import Trainer
from training.scans import small, write_scans, write_toml


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line as a user would; returns exit code, standard output, standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["segcal", *map(str, arguments)])
        monkeypatch.setattr(segcal.cli.console.out, "_width", 200)
        with pytest.raises(SystemExit) as stop:
            segcal.cli.main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


def test_train_resume_and_evaluate(run, tmp_path):
    write_scans(tmp_path / "d", 6)
    config = write_toml(tmp_path / "run.toml", data="d", output="out", loss="nacl", epochs=1)
    code, text, error = run("train", config)
    assert (code, error) == (0, "")
    for word in ("epochs", "2 train, 2 validation, 2 test", "Dice", "logits-test"):
        assert word in text
    code, _, error = run("train", config)
    assert code == 1
    assert "holds a run already" in error
    write_toml(tmp_path / "run.toml", data="d", output="out", loss="nacl", epochs=2)
    assert "best epoch" in run("train", config, "--resume")[1]
    for folder in ("logits-val", "logits-test"):
        assert "no problems" in run("check", tmp_path / "out" / folder)[1]
    assert run("evaluate", tmp_path / "out" / "logits-test", "--metrics", "nll,ece,dsc")[0] == 0


@pytest.mark.parametrize(
    ("differ", "options", "note"),
    [
        (True, {}, "give crop = [20, 28] or batch = 1"),
        (True, {"batch": 1}, ""),
        (True, {"crop": [20, 24]}, ""),
        (False, {"crop": [21, 24]}, "crop = [21, 24] is padded at its ends: give multiples of 2"),
    ],
)
def test_a_note_says_that_samples_are_padded(run, tmp_path, differ, options, note):
    first = write_scans(tmp_path / "d", 6)[0].id
    for folder in ("images", "labels") if differ else ():
        path = tmp_path / "d" / folder / f"{first}.npy"
        np.save(path, np.load(path)[..., :20, :])
    code, _, error = run("train", write_toml(tmp_path / "run.toml", data="d", output="out", epochs=1, **options))
    assert code == 0
    assert note in error
    assert bool(note) == bool(error)


def test_help_and_mistakes(run, tmp_path):
    for command in ("train", "convert"):
        assert "Example: segcal" in run(command, "--help")[1]
    config = write_toml(tmp_path / "run.toml", data="d", output="out", epoch=1)
    code, text, error = run("train", config)
    assert (code, text) == (1, "")
    assert "did you mean 'epochs'" in error
    assert "cannot be read" in run("convert", tmp_path / "none.npz", tmp_path / "out")[2]


def test_two_processes_make_the_step_of_one(tmp_path):
    """Every parameter after two epochs, and CRaC's multipliers, equal those of one process with the joined batch."""
    write_scans(tmp_path / "d", 8)
    options = {"norm": "none", "loss": "crac", "batch": 4, "epochs": 2, "augment": ["flip"]}
    config = write_toml(tmp_path / "run.toml", data="d", output="two", **options)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "segcal"]
    done = subprocess.run(
        [*launch, "train", config], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("best epoch") == 1
    one = Trainer(small(tmp_path / "d", "one", **options))
    one.fit()
    two = torch.load(tmp_path / "two" / "last.pt", weights_only=True)
    for name, value in one.network.state_dict().items():
        torch.testing.assert_close(two["network"][name], value, atol=1e-6, rtol=0)
    torch.testing.assert_close(two["loss"]["multipliers.values"], one.loss.multipliers.values, atol=1e-6, rtol=0)
    assert two["history"][-1]["val/nll"] == pytest.approx(one.history[-1]["val/nll"], abs=1e-6)
    assert two["history"][-1]["train/loss"] == pytest.approx(one.history[-1]["train/loss"], abs=1e-6)
    assert not segcal.check(tmp_path / "two" / "logits-test").problems
