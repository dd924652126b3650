import json
from datetime import datetime, timedelta, timezone
from importlib.util import find_spec

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import segcal
from segcal.synthetic import scenes


@pytest.fixture
def calibrator(tmp_path):
    cases = scenes(3, size=(16, 20))
    segcal.CALIBRATORS["ts"]().fit(cases).save(tmp_path / "cal.safetensors")
    return tmp_path / "cal.safetensors"


def test_show_says_what_is_in_a_calibrator(run, calibrator):
    code, text, _ = run("show", calibrator)
    own = segcal.load(calibrator)
    assert code == 0
    day = own.fit_report.fitted[:10]
    for word in ("ts: Temperature scaling", own.summary(), "every label", "converged", "3 cases, 960 voxels", day):
        assert word in text
    found = json.loads(run("show", calibrator, "--json")[1])
    assert found["fit"]["nll_after"] == own.fit_report.nll_after
    assert (found["method"], found["classes"], found["fit"]["cases"]) == ("ts", 6, 3)


def test_the_file_says_when_it_was_fitted_and_to_how_many_cases(calibrator):
    report = segcal.load(calibrator).fit_report
    assert report.cases == 3
    assert timedelta() <= datetime.now(timezone.utc) - datetime.fromisoformat(report.fitted) < timedelta(minutes=10)


def test_files_of_earlier_versions_say_less(run, calibrator):
    with safe_open(calibrator, framework="pt") as file:
        about, beta = json.loads(file.metadata()["segcal"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del about["fit_report"]["cases"], about["fit_report"]["fitted"], about["digest"]
    save_file(beta, calibrator, {"segcal": json.dumps(about)})
    report = segcal.load(calibrator).fit_report
    assert (report.cases, report.fitted) == (None, None)
    text = run("show", calibrator)[1]
    assert "the file is of" in text
    assert "960 voxels" in text


def test_show_says_what_a_calibrator_may_change(run, tmp_path):
    segcal.CALIBRATORS["vs"]().fit(scenes(2, size=(16, 20))).save(tmp_path / "vs.safetensors")
    text = run("show", tmp_path / "vs.safetensors")[1]
    assert "it may change labels" in text
    assert "adding a number to all logits changes the result" in text


def test_show_refuses_what_is_no_calibrator(run, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    code, _, error = run("show", tmp_path / "x.safetensors")
    assert code == 1
    assert "Calibrator.save" in error


def test_doctor_names_versions_and_what_is_missing(run, monkeypatch):
    code, text, _ = run("doctor")
    assert code == 0
    assert torch.__version__ in text
    assert segcal.__version__ in text
    monkeypatch.setattr("segcal.cli.info._there", lambda name: name != "h5py" and find_spec(name) is not None)
    found = json.loads(run("doctor", "--json")[1])
    assert "pip install 'segcal[h5]'" in found["not installed"]
    assert found["kernels, CPU"].endswith("; works")


def test_doctor_says_what_a_compiler_said(run, monkeypatch):
    def fail(self, *arguments, **options):
        raise RuntimeError("no such processor")

    monkeypatch.setattr("segcal.statistics.VoxelStatistics.update", fail)
    assert "fails: RuntimeError: no such processor" in run("doctor")[1]
