"""The real nnU-Net's folders: read, calibrated and read again by nnU-Net; calibration inside its prediction."""

import json
import multiprocessing
import pickle

import nibabel
import numpy as np
import pytest
import torch

import nnunet_study
import segcal
from segcal.errors import InputError
from segcal.integrations.nnunet import calibrate_predictor

pytest.importorskip("nnunetv2", reason="nnU-Net is not installed: pip install 'segcal[nnunet]'")

pytest_plugins = ["nnunet_fixtures"]
pytestmark = pytest.mark.filterwarnings("ignore")
MODEL = "results/Dataset001_Organs/nnUNetTrainer__nnUNetPlans__"
REGIONS = "results/Dataset002_Regions/nnUNetTrainer__nnUNetPlans__2d"
NEW = ("new_0", "new_1")


def probabilities(folder, case):
    return np.load(folder / f"{case}.npz")["probabilities"]


def segmentation(folder, case):
    return np.asarray(nibabel.load(folder / f"{case}.nii.gz").dataobj).T


def ensembled(folders, output, monkeypatch):
    """nnU-Net's own ensembling, in threads."""
    from nnunetv2.ensembling.ensemble import ensemble_folders

    monkeypatch.setattr(multiprocessing, "get_context", lambda *_: nnunet_study.THREADS)
    ensemble_folders(list(map(str, folders)), str(output), save_merged_probabilities=True, num_processes=1)
    return output


def label_manager(folder):
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    plans = PlansManager(str(folder / "plans.json"))
    return plans.get_label_manager(json.loads((folder / "dataset.json").read_text()))


def test_three_commands_to_calibrated_nifti_probabilities(study, run, tmp_path, monkeypatch):
    calibrator, out, predicted = tmp_path / "cal.safetensors", tmp_path / "out", study / "predicted-1-2d"
    code, text, error = run("nnunet", "fit", study / f"{MODEL}2d", "-o", calibrator)
    assert (code, error) == (0, "")
    assert "1 held-out cases" in text
    labels = study / "raw" / "Dataset001_Organs" / "labelsTs"
    code, text, _ = run("nnunet", "evaluate", predicted, "--labels", labels, "--calibrator", calibrator)
    assert code == 0
    code, text, _ = run("nnunet", "apply", calibrator, predicted, "-o", out, "--nifti")
    assert code == 0
    assert "2 cases written" in text
    for case in NEW:
        image = nibabel.load(out / "nifti" / f"{case}.nii.gz")
        own = np.asarray(image.dataobj)
        assert own.shape == (*nnunet_study.SHAPE, 3)
        assert own.dtype == np.float32
        np.testing.assert_allclose(image.affine, nnunet_study.AFFINE, atol=1e-5)
        np.testing.assert_allclose(own.sum(-1), 1, atol=1e-5)
        np.testing.assert_array_equal(own.T, probabilities(out, case))
        np.testing.assert_array_equal(own.argmax(-1).T, segmentation(predicted, case))
        before, after = probabilities(predicted, case), probabilities(out, case)
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        for suffix in (".pkl", ".nii.gz"):
            assert (out / f"{case}{suffix}").read_bytes() == (predicted / f"{case}{suffix}").read_bytes()
        temperature = segcal.load(calibrator).temperature
        inner = before[:, 5:10, 5:10, 5:10]
        expected = (torch.from_numpy(inner).log() / temperature).softmax(0)
        np.testing.assert_allclose(after[:, 5:10, 5:10, 5:10], expected, atol=1e-5)
    # What nnU-Net makes of these files: the same segmentation, in the same place, and the same probabilities.
    again = ensembled([out], tmp_path / "again", monkeypatch)
    for case in NEW:
        np.testing.assert_array_equal(segmentation(again, case), segmentation(predicted, case))
        np.testing.assert_array_equal(probabilities(again, case), probabilities(out, case))
        affines = (nibabel.load(folder / f"{case}.nii.gz").affine for folder in (again, predicted))
        np.testing.assert_allclose(*affines)


def test_cross_validation_has_every_training_case_and_its_label(study):
    cases = segcal.open_cases(study / f"{MODEL}2d", layout="nnunet")
    assert cases.ids == ("case_0", "case_1", "case_2", "case_3")
    assert cases.class_names == ("background", "organ", "lesion")
    for case in cases:
        truth = nibabel.load(study / "raw" / "Dataset001_Organs" / "labelsTr" / f"{case.id}.nii.gz")
        np.testing.assert_array_equal(case.labels[0], np.asarray(truth.dataobj).T)
        # Exactly what nnU-Net cropped away is left out.
        inside = np.zeros(nnunet_study.SHAPE, bool)
        inside[2:-2, 2:-3, 3:-2] = True
        np.testing.assert_array_equal(case.mask[0], inside.T)
        assert case.spacing == (1.5, 1.0, 1.0)


def test_preprocessed_labels_serve_where_the_raw_ones_are_gone(study, monkeypatch):
    raw = segcal.open_cases(study / f"{MODEL}2d", layout="nnunet")
    monkeypatch.delenv("nnUNet_raw")
    kept = segcal.open_cases(study / f"{MODEL}2d", layout="nnunet")
    assert torch.equal(kept[0].labels, raw[0].labels)
    monkeypatch.delenv("nnUNet_preprocessed")
    with pytest.raises(segcal.SegcalError, match="no label(.|\n)*--labels; those of training cases are found if"):
        segcal.open_cases(study / f"{MODEL}2d", layout="nnunet")


def test_several_configurations_are_averaged_as_nnunet_does(study, run, tmp_path, monkeypatch):
    models = [study / f"{MODEL}{name}" for name in ("2d", "3d_fullres")]
    cases = segcal.open_cases(models, layout="nnunet")
    assert cases.num_members == 2
    files = [model / "fold_1" / "validation" / "case_2.npz" for model in models]
    mean = sum(np.load(file)["probabilities"] for file in files) / 2
    np.testing.assert_allclose(cases[2].logits.softmax(1)[0], mean, atol=1e-6)

    calibrator, out = tmp_path / "cal.safetensors", tmp_path / "out"
    assert run("nnunet", "fit", *models, "-o", calibrator, "--test", "0")[0] == 0
    predicted = [study / f"predicted-1-{name}" for name in ("2d", "3d_fullres")]
    assert run("nnunet", "apply", calibrator, *predicted, "-o", out)[0] == 0
    own = ensembled(predicted, tmp_path / "own", monkeypatch)
    for case in NEW:
        # Temperature scaling keeps the labels of the ensemble, which are neither member's.
        np.testing.assert_array_equal(segmentation(out, case), segmentation(own, case))
        np.testing.assert_allclose(nibabel.load(out / f"{case}.nii.gz").affine, nnunet_study.AFFINE, atol=1e-5)
    assert any((segmentation(out, case) != segmentation(predicted[0], case)).any() for case in NEW)


def test_regions_and_the_ignore_label(study, run, tmp_path, monkeypatch):
    cases = segcal.open_cases(study / REGIONS, layout="nnunet")
    assert cases.channel_names == ("lesion", "whole")
    assert cases.ignore_index == 3
    truth = np.asarray(nibabel.load(study / "raw" / "Dataset002_Regions" / "labelsTr" / "case_0.nii.gz").dataobj).T
    for channel, values in zip(cases[0].labels.numpy(), ([2], [1, 2]), strict=True):
        np.testing.assert_array_equal(channel, np.where(truth == 3, 3, np.isin(truth, values)))

    calibrator, out, predicted = tmp_path / "cal.safetensors", tmp_path / "out", study / "predicted-2-2d"
    assert run("nnunet", "fit", study / REGIONS, "-o", calibrator, "--test", "0")[0] == 0
    assert run("nnunet", "apply", calibrator, predicted, "-o", out)[0] == 0
    again = ensembled([out], tmp_path / "again", monkeypatch)
    for case in NEW:
        np.testing.assert_array_equal(segmentation(out, case), segmentation(predicted, case))
        np.testing.assert_array_equal(segmentation(again, case), segmentation(predicted, case))
        assert (probabilities(out, case) != probabilities(predicted, case)).any()


@pytest.mark.parametrize(("model", "predicted"), [(f"{MODEL}2d", "predicted-1-2d"), (REGIONS, "predicted-2-2d")])
def test_moved_labels_are_written_as_nnunet_derives_them(study, tmp_path, model, predicted):
    cases = segcal.open_cases(study / model, layout="nnunet")
    calibrator = segcal.calibrators.VectorScaling().fit(cases)
    assert calibrator.preserves is None
    new = segcal.open_cases(study / predicted, layout="nnunet", need_labels=False)
    assert segcal.apply(calibrator, new, tmp_path / "out").flips > 0
    manager = label_manager(tmp_path / "out")
    for case in NEW:
        expected = manager.convert_probabilities_to_segmentation(probabilities(tmp_path / "out", case))
        np.testing.assert_array_equal(segmentation(tmp_path / "out", case), expected)
        assert nibabel.load(tmp_path / "out" / f"{case}.nii.gz").get_data_dtype() == np.uint8


def predictor_of(model):
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(device=torch.device("cpu"), use_mirroring=False, allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(model), (0, 1))
    return predictor


@pytest.mark.parametrize(
    ("model", "number", "method"), [(f"{MODEL}2d", 1, "ts"), (f"{MODEL}2d", 1, "vs"), (REGIONS, 2, "vs")]
)
def test_prediction_with_calibration_equals_calibration_after_prediction(study, tmp_path, model, number, method):
    calibrator = segcal.CALIBRATORS[method]().fit(segcal.open_cases(study / model, layout="nnunet"))
    calibrator.save(tmp_path / "cal.safetensors")
    predicted = study / f"predicted-{number}-2d"
    segcal.apply(calibrator, segcal.open_cases(predicted, layout="nnunet", need_labels=False), tmp_path / "after")
    predictor = calibrate_predictor(predictor_of(study / model), tmp_path / "cal.safetensors")
    # As nnU-Net sends it to its worker processes.
    predictor.plans_manager = pickle.loads(pickle.dumps(predictor.plans_manager))
    predictor.label_manager = pickle.loads(pickle.dumps(predictor.label_manager))
    images = next((study / "raw").glob(f"Dataset00{number}*")) / "imagesTs"
    for name, keep in (("inside", True), ("labels", False)):
        (tmp_path / name).mkdir()
        predictor.predict_from_files_sequential(str(images), str(tmp_path / name), save_probabilities=keep)
    for case in NEW:
        inside, after = (probabilities(tmp_path / name, case) for name in ("inside", "after"))
        np.testing.assert_allclose(inside, after, rtol=1e-6, atol=1e-7)  # Sigmoids of short rows differ by a bit.
        for name in ("inside", "labels"):
            np.testing.assert_array_equal(segmentation(tmp_path / name, case), segmentation(tmp_path / "after", case))


def test_calibrators_of_other_models_are_refused(study):
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    own = segcal.calibrators.TemperatureScaling().fit(segcal.open_cases(study / f"{MODEL}2d", layout="nnunet"))
    with pytest.raises(InputError, match="the predictor has no model; expected .*initialize_from_trained_model_folder"):
        calibrate_predictor(nnUNetPredictor(device=torch.device("cpu")), own)
    predictor = predictor_of(study / REGIONS)
    with pytest.raises(
        InputError, match="for the classes background, organ, lesion; expected the regions of the model"
    ):
        calibrate_predictor(predictor, own)
    own.class_names = ("background", "lesion", "organ")
    with pytest.raises(InputError, match="expected the classes of the model, background, organ, lesion"):
        calibrate_predictor(predictor_of(study / f"{MODEL}2d"), own)
