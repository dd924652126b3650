import json
from importlib.util import find_spec

import pytest
import torch

import segcal


@pytest.fixture
def calibrator(tmp_path):
    torch.manual_seed(0)
    logits = 3 * torch.randn(400, 3)
    labels = torch.distributions.Categorical(logits=logits / 2).sample()
    segcal.CALIBRATORS["ts"]().fit(logits, labels).save(tmp_path / "cal.safetensors")
    return tmp_path / "cal.safetensors"


def test_show_says_what_is_in_a_calibrator(run, calibrator):
    code, text, _ = run("show", calibrator)
    own = segcal.load(calibrator)
    assert code == 0
    for word in ("ts: Temperature scaling", own.summary(), "every label", "converged", "400 voxels"):
        assert word in text
    found = json.loads(run("show", calibrator, "--json")[1])
    assert found["fit"]["nll_after"] == own.fit_report.nll_after
    assert found["classes"] == 3


def test_show_refuses_what_is_no_calibrator(run, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    code, _, error = run("show", tmp_path / "x.safetensors")
    assert code == 1
    assert "Calibrator.save" in error


def test_doctor_names_versions_and_what_is_missing(run, monkeypatch):
    code, text, _ = run("doctor")
    assert code == 0
    assert torch.__version__ in text
    monkeypatch.setattr("segcal.cli.info._there", lambda name: name != "h5py" and find_spec(name) is not None)
    assert "pip install 'segcal[h5]'" in json.loads(run("doctor", "--json")[1])["not installed"]
