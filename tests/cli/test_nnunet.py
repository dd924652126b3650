"""``segcal nnunet`` without nnU-Net; with it, see ``tests/integrations``."""

import sys

import numpy as np

import segcal.cli
from datasets import nnunet
from segcal.cli.nnunet import app


def test_help_teaches_every_command(run):
    assert "nnunet" in run("--help")[1]
    text = run("nnunet", "--help")[1]
    for command in app.registered_commands:
        assert command.name in text
        assert f"Example: segcal nnunet {command.name}" in run("nnunet", command.name, "--help")[1]
    for option in ("--method", "--tune", "--labels"):
        assert option in run("nnunet", "fit", "--help")[1]
    assert "--layout" not in run("nnunet", "fit", "--help")[1]


def test_fit_evaluate_and_apply_to_predictions(run, tmp_path):
    first, truth = nnunet(tmp_path / "1", count=3)
    second, _ = nnunet(tmp_path / "2", count=3)
    calibrator = tmp_path / "cal.safetensors"
    code, text, error = run("nnunet", "fit", first, "--labels", truth, "-o", calibrator)
    assert (code, error) == (0, "")
    assert "ts: converged" in text
    plain = run("fit", first, "--layout", "nnunet", "--labels", truth, "-o", tmp_path / "same.safetensors")
    assert plain[0] == 0
    same = segcal.load(tmp_path / "same.safetensors")
    assert same.temperature == segcal.load(calibrator).temperature
    assert run("nnunet", "evaluate", first, second, "--labels", truth, "--calibrator", calibrator)[0] == 0
    code, text, _ = run("nnunet", "apply", calibrator, first, "-o", tmp_path / "out", "--nifti")
    assert code == 0
    assert "3 cases written" in text
    assert len(list((tmp_path / "out" / "nifti").glob("*.nii.gz"))) == 3
    assert np.load(tmp_path / "out" / "scan_000.npz")["probabilities"].dtype == np.float32


def test_mistakes_are_named(run, tmp_path, monkeypatch):
    predictions, _ = nnunet(tmp_path)
    code, text, error = run("nnunet", "fit", predictions, "-o", tmp_path / "cal.safetensors")
    assert (code, text) == (1, "")
    assert "no label" in error
    assert "--labels" in error
    assert "does not exist" in run("nnunet", "fit", tmp_path / "nowhere", "-o", tmp_path / "cal.safetensors")[2]
    monkeypatch.setitem(sys.modules, "nnunetv2.paths", None)
    code, _, error = run("nnunet", "install-trainers")
    assert code == 1
    assert "pip install 'segcal[nnunet]'" in error
