import numpy as np
import pytest
import torch

import segcal
from datasets import logits, nnunet, plain
from segcal.apply import apply
from segcal.calibrators import TemperatureScaling
from segcal.errors import InputError
from segcal.synthetic import Temperature, scenes


@pytest.fixture
def calibrator():
    return TemperatureScaling().fit(scenes(2, size=(32, 40), num_classes=4, plant=[Temperature(2.0)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_written_probabilities_are_calibrated_and_keep_every_label(tmp_path, calibrator, dtype):
    root = plain(tmp_path / "in", shape=(90, 70))
    z = logits(0, shape=(90, 70))
    z[1] = np.where(np.arange(70) % 2, z.max(0), z[1])  # exact ties
    np.save(root / "logits" / "case0.npy", z)
    report = apply(
        calibrator, segcal.open_cases(root, need_labels=False), tmp_path / "out", dtype=dtype, confidence=True
    )
    assert (report.written, report.flips) == (3, 0)
    for case in segcal.open_cases(root):
        written = torch.from_numpy(np.load(tmp_path / "out" / "probs" / f"{case.id}.npy"))
        assert written.dtype == dtype
        assert torch.equal(written.argmax(0), case.logits[0].argmax(0))
        assert torch.allclose(written.float(), calibrator(case.logits)[0].exp(), atol=1e-3)
        confidence = np.load(tmp_path / "out" / "confidence" / f"{case.id}.npy")
        np.testing.assert_allclose(confidence, written.float().amax(0), atol=1e-3)


def test_resuming_and_changing_the_calibrator(tmp_path, calibrator):
    cases = segcal.open_cases(plain(tmp_path / "in"))
    apply(calibrator, cases, tmp_path / "out")
    assert apply(calibrator, cases, tmp_path / "out", resume=True).skipped == 3
    (tmp_path / "out" / "probs" / "case1.npy").write_bytes(b"cut")
    assert apply(calibrator, cases, tmp_path / "out", resume=True).written == 1
    calibrator.beta.mul_(2)
    assert apply(calibrator, cases, tmp_path / "out", resume=True).written == 3


def test_nnunet_folders_stay_nnunet_folders(tmp_path):
    predictions, truth = nnunet(tmp_path)
    cases = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    calibrator = TemperatureScaling().fit(cases)
    apply(calibrator, cases, tmp_path / "out")
    again = segcal.open_cases(tmp_path / "out", layout="nnunet", labels=str(truth))
    assert torch.equal(again[0].mask, cases[0].mask)
    nll = segcal.evaluate(again, metrics=("nll",)).value("nll")
    assert nll == pytest.approx(calibrator.fit_report.nll_after, abs=1e-4)


def test_sigmoid_outputs_keep_their_decision(tmp_path):
    root = plain(tmp_path / "in", count=1, classes=1)
    z = logits(0, 1)
    z[0, 0] = np.float32(1e-9)  # barely inside
    np.save(root / "logits" / "case0.npy", z)
    np.save(root / "labels" / "case0.npy", (z[0] > 1).astype(np.uint8))
    cases = segcal.open_cases(root, multilabel=True)
    apply(TemperatureScaling().fit(cases), cases, tmp_path / "out", dtype=torch.float16)
    assert np.array_equal(np.load(tmp_path / "out" / "probs" / "case0.npy") > 0.5, z > 0)


def test_other_class_counts_are_refused(tmp_path, calibrator):
    with pytest.raises(InputError, match="the cases have 3 classes; expected 4"):
        apply(calibrator, segcal.open_cases(plain(tmp_path / "in", classes=3)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
