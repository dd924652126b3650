import numpy as np
import pytest
import torch

import segcal
from datasets import logits, nnunet, plain
from segcal.calibrators import TemperatureScaling
from segcal.errors import InputError
from segcal.evaluation.apply import apply
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


def test_resuming_with_other_constructor_arguments_makes_everything_again(tmp_path):
    root = tmp_path / "in"
    for member in range(2):
        plain(tmp_path / "one", count=2)
        (root / "logits").mkdir(parents=True, exist_ok=True)
        for i in range(2):
            np.save(tmp_path / "one" / "logits" / f"case{i}.npy", 3 * logits(10 * member + i))
        (tmp_path / "one" / "logits").rename(root / "logits" / f"member{member}")
        (tmp_path / "one" / "labels").rename(root / f"labels{member}")
    (root / "labels0").rename(root / "labels")
    cases = segcal.open_cases(root)
    one, other = (segcal.calibrators.Ensemble(space=space).fit(cases) for space in ("probs", "logits"))
    apply(one, cases, tmp_path / "out")
    resumed = apply(other, cases, tmp_path / "out", resume=True)
    apply(other, cases, tmp_path / "fresh")
    assert (resumed.written, resumed.skipped) == (2, 0)
    for i in range(2):
        again, fresh = (np.load(tmp_path / folder / "probs" / f"case{i}.npy") for folder in ("out", "fresh"))
        np.testing.assert_array_equal(again, fresh)
    other.class_names = ("a", "b", "c", "d")  # all that the file holds counts
    assert apply(other, cases, tmp_path / "out", resume=True).written == 2


def test_a_calibrator_from_its_file_goes_on_where_the_fitted_one_stopped(tmp_path, calibrator):
    cases = segcal.open_cases(plain(tmp_path / "in"))
    apply(calibrator, cases, tmp_path / "out")
    calibrator.save(tmp_path / "cal.safetensors")
    loaded = segcal.load(tmp_path / "cal.safetensors")
    assert loaded.to_bytes() == (tmp_path / "cal.safetensors").read_bytes()
    assert apply(loaded, cases, tmp_path / "out", resume=True).skipped == 3


def test_what_is_not_on_disk_is_made_again(tmp_path, calibrator):
    for seed in range(2):  # other values under the same names and shapes
        cases = scenes(2, size=(32, 40), num_classes=4, seed=seed)
        assert apply(calibrator, cases, tmp_path / "out", resume=True).written == 2
        expected = calibrator(cases[0].logits)[0].exp()
        assert torch.allclose(torch.from_numpy(np.load(tmp_path / "out" / "probs" / "image-000.npy")), expected)


def test_a_changed_chunk_of_a_zarr_store_is_seen(tmp_path, calibrator):
    import zarr

    root = plain(tmp_path / "in", count=1)
    (root / "logits" / "case0.npy").unlink()
    zarr.create_array(str(root / "logits" / "case0.zarr"), data=logits(0))
    cases = segcal.open_cases(root)
    apply(calibrator, cases, tmp_path / "out")
    assert apply(calibrator, cases, tmp_path / "out", resume=True).skipped == 1
    (chunk,) = (path for path in (root / "logits" / "case0.zarr" / "c").rglob("*") if path.is_file())
    zarr.create_array(str(tmp_path / "other.zarr"), data=logits(1))
    (other,) = (path for path in (tmp_path / "other.zarr" / "c").rglob("*") if path.is_file())
    chunk.write_bytes(other.read_bytes())  # in place: the folders above keep their times
    assert apply(calibrator, cases, tmp_path / "out", resume=True).written == 1
