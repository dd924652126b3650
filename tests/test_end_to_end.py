"""From files to calibrated files by the command line, measured against the known truth."""

import sys

import pytest

import segcal
import segcal.cli
from segcal.synthetic import ClassAffine, ClassConditional, Temperature, scenes, true_calibration_error

PLANTS = {
    "ts": Temperature(2.0),
    "vs": ClassAffine([0.6, 1.3, 0.9, 1.1], [0.5, -0.5, 0.0, 0.3]),
    "cms-ap": ClassConditional([1.2, 3.0, 2.0, 2.5]),
    "cms-op": ClassConditional([1.2, 3.0, 2.0, 2.5]),
    "cdc": ClassConditional([1.2, 3.0, 2.0, 2.5]),
}


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["segcal", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        segcal.cli.main()
    assert not stop.value.code


@pytest.mark.parametrize("method", PLANTS)
def test_true_calibration_error_falls_five_times(method, monkeypatch, tmp_path):
    made = scenes(6, size=(96, 128), num_classes=4, plant=[PLANTS[method]], coherence=0)
    segcal.write_dataset(made, tmp_path / "data", dtype="float32")
    command(monkeypatch, "fit", tmp_path / "data", "--method", method, "--voxels", "all", "--test", "0",
            "-o", tmp_path / "cal.safetensors")  # fmt: skip
    command(monkeypatch, "apply", tmp_path / "cal.safetensors", tmp_path / "data", "-o", tmp_path / "out")
    before = after = 0.0
    for case in made:
        calibrated = segcal.open_cases(tmp_path / "out", need_labels=False).select([case.id])[0]
        before += true_calibration_error(case.logits.log_softmax(1), case.posterior).kl
        after += true_calibration_error(calibrated.logits, case.posterior).kl
    assert after < before / 5
