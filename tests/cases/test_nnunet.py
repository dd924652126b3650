import json
import shutil

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

import segcal
from datasets import labels, logits, nnunet, plain, save_nifti, softmax
from segcal.cases import OutputFolder
from segcal.cases.nnunet import connected_to_border
from segcal.cases.written import write_scores
from segcal.errors import DataError, InputError


def test_prediction_folder_as_it_is(tmp_path):
    predictions, truth = nnunet(tmp_path)
    cases = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    case = cases[0].load()
    assert cases.class_names == ("background", "organ1", "organ2")
    assert case.shape == (1, 3, 6, 8, 10)
    assert case.spacing == (3.0, 2.0, 1.0)
    np.testing.assert_array_equal(case.labels[0], labels(0, 3, (6, 8, 10)))
    inner = (slice(None), slice(2, 4), slice(2, 6), slice(2, 8))
    assert torch.allclose(case.logits.softmax(1)[0][inner], torch.from_numpy(softmax(logits(0, 3, (6, 8, 10)))[inner]))


def test_padding_is_masked_and_nothing_else(tmp_path):
    predictions, truth = nnunet(tmp_path)
    case = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))[0]
    expected = np.zeros((6, 8, 10), bool)
    expected[2:4, 2:6, 2:8] = True
    np.testing.assert_array_equal(case.mask[0], expected)
    kept = segcal.open_cases(predictions, layout="nnunet", labels=str(truth), exterior="keep")[0]
    assert kept.mask is None


def test_only_background_connected_to_the_border_is_exterior():
    background = np.zeros((7, 7), bool)
    background[0] = background[3, 3] = True
    assert connected_to_border(background).sum() == 7
    assert connected_to_border(np.zeros((4, 4), bool)).sum() == 0
    assert connected_to_border(np.ones((1, 4, 4), bool)).all()
    lonely = np.zeros((1, 5, 5), bool)
    lonely[0, 2, 2] = True
    assert not connected_to_border(lonely).any()


def test_cross_validation_results(tmp_path):
    predictions, truth = nnunet(tmp_path, count=4)
    model = tmp_path / "model"
    for i in range(4):
        fold = model / f"fold_{i % 2}" / "validation"
        fold.mkdir(parents=True, exist_ok=True)
        for suffix in (".npz", ".nii.gz", ".pkl"):
            (predictions / f"scan_{i:03d}{suffix}").rename(fold / f"scan_{i:03d}{suffix}")
    (predictions / "dataset.json").rename(model / "dataset.json")
    cases = segcal.open_cases(model, layout="nnunet", labels=str(truth))
    assert len(cases) == 4
    assert [case.load().id for case in cases] == [f"scan_{i:03d}" for i in range(4)]
    one_fold = segcal.open_cases(model / "fold_0" / "validation", layout="nnunet", labels=str(truth))
    assert len(one_fold) == 2
    assert one_fold.class_names == cases.class_names != ("0", "1", "2")
    (model / "fold_1" / "validation" / "scan_000.npz").write_bytes(
        (model / "fold_0" / "validation" / "scan_000.npz").read_bytes()
    )
    with pytest.raises(DataError, match="two files for one case: in fold_0 and fold_1"):
        segcal.open_cases(model, layout="nnunet", labels=str(truth))


def test_several_models_are_an_ensemble(tmp_path):
    first, truth = nnunet(tmp_path / "1")
    second, _ = nnunet(tmp_path / "2")
    z = softmax(logits(50, 3, (6, 8, 10)))
    np.savez(second / "scan_000.npz", probabilities=z)
    root = tmp_path / "models"
    root.mkdir()
    first.rename(root / "2d")
    second.rename(root / "3d")
    case = segcal.open_cases(root, layout="nnunet", labels=str(truth))[0]
    other = np.load(root / "2d" / "scan_000.npz")["probabilities"]
    np.testing.assert_allclose(case.logits.softmax(1)[0], (z + other) / 2, atol=1e-6)
    assert case.mask.all()


def test_region_based_models_are_multilabel(tmp_path):
    regions = {"whole": [1, 2, 3], "core": [2, 3], "active": [3]}
    predictions, truth = nnunet(tmp_path, regions=regions)
    case = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))[0].load()
    y = labels(0, 4, (6, 8, 10))
    assert case.shape == (3, 2, 6, 8, 10)
    for channel, values in enumerate(regions.values()):
        np.testing.assert_array_equal(case.labels[channel], np.isin(y, values))
    assert case.mask.shape == (3, 6, 8, 10)
    assert case.mask[0].sum() == 2 * 4 * 6


def test_ignore_label_comes_from_dataset_json(tmp_path):
    predictions, truth = nnunet(tmp_path, names={"ignore": 3})
    assert segcal.open_cases(predictions, layout="nnunet", labels=str(truth)).ignore_index == 3


def test_two_dimensional_png_cases(tmp_path):
    predictions, truth = tmp_path / "p", tmp_path / "t"
    predictions.mkdir()
    truth.mkdir()
    p = softmax(logits(0, 3, (9, 7)))
    np.savez(predictions / "a.npz", probabilities=p[:, None])
    Image.fromarray(p.argmax(0).astype(np.uint8)).save(predictions / "a.png")
    Image.fromarray(labels(0, 3, (9, 7))).save(truth / "a.png")
    cases = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    with_labels = cases[0].load()
    without = segcal.open_cases(predictions, layout="nnunet", need_labels=False)[0]
    assert with_labels.shape == without.shape == (1, 3, 9, 7)
    output = OutputFolder(tmp_path / "out", cases, "scores", settings={})
    write_scores(output, with_labels, [(slice(0, 9), with_labels.logits.log_softmax(1))])
    np.testing.assert_allclose(np.load(tmp_path / "out" / "a.npz")["probabilities"], p[:, None], atol=1e-6)


def test_bad_folders(tmp_path):
    predictions, truth = nnunet(tmp_path)
    with pytest.raises(DataError, match="looks like an nnU-Net folder.*--layout nnunet"):
        segcal.open_cases(predictions)
    with pytest.raises(DataError, match="no label(.|\n)*--labels"):
        segcal.open_cases(predictions, layout="nnunet")
    (predictions / "dataset.json").write_text(json.dumps({"labels": [1, 2]}))
    with pytest.raises(DataError, match=r"dataset.json: cannot be read"):
        segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    with pytest.raises(DataError, match="--save_probabilities"):
        segcal.open_cases(truth, layout="nnunet")


def test_written_scores_keep_nnunets_layout_and_sidecars(tmp_path):
    predictions, truth = nnunet(tmp_path)
    out = tmp_path / "out"
    cases = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    output = OutputFolder(out, cases, "scores", settings={})
    for case in cases:
        write_scores(output, case, ((chunk.rows, chunk.logits.log_softmax(1)) for chunk in case.chunks(values=500)))
    for name in ("scan_000", "scan_001"):
        before = np.load(predictions / f"{name}.npz")["probabilities"]
        after = np.load(out / f"{name}.npz")["probabilities"]
        assert after.shape == before.shape
        np.testing.assert_allclose(after, before, atol=1e-6)
        assert (out / f"{name}.pkl").read_bytes() == b"never opened"
    assert (out / "dataset.json").read_text() == (predictions / "dataset.json").read_text()
    again = segcal.open_cases(out, layout="nnunet", labels=str(truth))
    assert torch.allclose(
        again[0].logits.softmax(1),
        segcal.open_cases(predictions, layout="nnunet", labels=str(truth))[0].logits.softmax(1),
        atol=1e-6,
    )


def trained(root, folds=(0, 1), name="nnUNetTrainer__nnUNetPlans__2d"):
    """The folder of a trained model with a case in each fold, and that of the labels."""
    predictions, truth = nnunet(root, count=len(folds))
    model = root / "Dataset004_Organ" / name
    for number, fold in enumerate(folds):
        validation = model / f"fold_{fold}" / "validation"
        validation.mkdir(parents=True)
        for path in predictions.glob(f"scan_{number:03d}.*"):
            path.rename(validation / path.name)
    for file in ("dataset.json", "plans.json"):
        (predictions / file).rename(model / file)
    return model, truth


def test_missing_probabilities_name_the_command(tmp_path):
    model, truth = trained(tmp_path)
    (model / "fold_1" / "validation" / "scan_001.npz").unlink()
    command = "nnUNetv2_train Dataset004_Organ 2d 1 -tr nnUNetTrainer -p nnUNetPlans --val --npz"
    with pytest.raises(DataError, match=f"fold_1/validation: .*without --npz. To fix: {command}"):
        segcal.open_cases(model, layout="nnunet", labels=str(truth))


def test_folds_that_are_not_validated_yet_are_noted(tmp_path):
    model, truth = trained(tmp_path)
    (model / "fold_2").mkdir()
    cases = segcal.open_cases(model, layout="nnunet", labels=str(truth))
    assert len(cases) == 2
    assert any("fold_2: not read, because it has not been validated; nnUNetv2_train" in note for note in cases.notes)
    empty = tmp_path / "Dataset005_New" / "nnUNetTrainer__nnUNetPlans__3d_fullres"
    (empty / "fold_0").mkdir(parents=True)
    with pytest.raises(DataError, match="no fold has been validated. .*nnUNetv2_train Dataset005_New 3d_fullres 0"):
        segcal.open_cases(empty, layout="nnunet", labels=str(truth))


def test_training_cases_of_fold_all_are_refused(tmp_path):
    model, truth = trained(tmp_path, folds=("all", 0))
    cases = segcal.open_cases(model, layout="nnunet", labels=str(truth))
    assert cases.ids == ("scan_001",)
    assert any("fold_all: not read" in note for note in cases.notes)
    for folder in (model, model / "fold_all" / "validation"):
        if folder == model:
            (model / "fold_0").rename(tmp_path / "elsewhere")
        with pytest.raises(DataError, match="trained on the cases that it was validated on"):
            segcal.open_cases(folder, layout="nnunet", labels=str(truth))


def test_models_are_named_not_guessed(tmp_path):
    model, truth = trained(tmp_path)
    with pytest.raises(DataError, match="holds the trained models nnUNetTrainer__nnUNetPlans__2d; .*segcal nnunet fit"):
        segcal.open_cases(model.parent, layout="nnunet", labels=str(truth))


def test_several_trained_models_are_an_ensemble(tmp_path):
    first, truth = trained(tmp_path / "1")
    second, _ = trained(tmp_path / "2", name="nnUNetTrainer__nnUNetPlans__3d_fullres")
    cases = segcal.open_cases([first, second], layout="nnunet", labels=str(truth))
    assert (len(cases), cases.num_members) == (2, 2)
    assert segcal.check(first, layout="nnunet", labels=str(truth)).members == ()
    (second / "fold_1" / "validation" / "scan_001.npz").rename(tmp_path / "scan_001.npz")
    (second / "fold_1" / "validation" / "scan_001.nii.gz").unlink()
    with pytest.raises(DataError, match="case 'scan_001': no scores from the ensemble members .*3d_fullres"):
        segcal.open_cases([first, second], layout="nnunet", labels=str(truth))
    with pytest.raises(DataError, match="several folders; expected one, unless layout = 'nnunet'"):
        segcal.open_cases([first, second])
    with pytest.raises(InputError, match="no folders"):
        segcal.open_cases([], layout="nnunet")
    with pytest.raises(DataError, match="nowhere: does not exist"):
        segcal.open_cases([first, tmp_path / "nowhere"], layout="nnunet")


def test_labels_are_found_by_nnunets_variables(tmp_path, monkeypatch):
    model, truth = trained(tmp_path)
    for variable, name in (("nnUNet_raw", "labelsTr"), ("nnUNet_preprocessed", "gt_segmentations")):
        home = tmp_path / variable
        (home / "Dataset004_Organ").mkdir(parents=True)
        shutil.copytree(truth, home / "Dataset004_Organ" / name)
        monkeypatch.setenv(variable, str(home))
        assert len(segcal.open_cases(model, layout="nnunet")) == 2
        assert len(segcal.open_cases(model / "fold_0" / "validation", layout="nnunet")) == 1
        monkeypatch.delenv(variable)


def test_folders_of_version_1_are_refused(tmp_path):
    model, truth = trained(tmp_path)
    (model / "fold_0" / "validation").rename(model / "fold_0" / "validation_raw")
    with pytest.raises(DataError, match="nnU-Net v1; expected nnU-Net v2. To fix: convert .*nnUNetv2_train --npz"):
        segcal.open_cases(model, layout="nnunet", labels=str(truth))
    predictions, truth = nnunet(tmp_path / "old")
    scores = np.load(predictions / "scan_000.npz")["probabilities"]
    np.savez(predictions / "scan_000.npz", softmax=scores)
    with pytest.raises(DataError, match="holds the arrays 'softmax'; expected one named 'probabilities'"):
        segcal.open_cases(predictions, layout="nnunet", labels=str(truth))


@pytest.mark.parametrize("order", [None, [1]])
def test_regions_need_their_order(tmp_path, order):
    predictions, truth = nnunet(tmp_path, regions={"whole": [1, 2, 3], "core": [2, 3], "active": [3]})
    about = json.loads((predictions / "dataset.json").read_text())
    (predictions / "dataset.json").write_text(json.dumps({**about, "regions_class_order": order}))
    with pytest.raises(DataError, match="regions_class_order.*a list of 3 labels, one for each region: whole, core"):
        segcal.open_cases(predictions, layout="nnunet", labels=str(truth))


def test_turned_images_are_refused_unless_nothing_was_turned(tmp_path):
    predictions, truth = nnunet(tmp_path)
    (predictions / "plans.json").write_text(json.dumps({"image_reader_writer": "NibabelIOWithReorient"}))
    assert len(segcal.open_cases(predictions, layout="nnunet", labels=str(truth))) == 2
    for folder in (predictions, truth):
        array = np.asarray(nibabel.load(folder / "scan_001.nii.gz").dataobj)
        save_nifti(folder / "scan_001.nii.gz", array, affine=np.diag([-1.0, 2.0, 3.0, 1.0]))
    with pytest.raises(DataError, match="case 'scan_001', .*: is LAS, but nnU-Net turned the image to RAS"):
        segcal.open_cases(predictions, layout="nnunet", labels=str(truth))


def test_nifti_needs_a_segmentation_with_geometry(tmp_path):
    predictions, truth = nnunet(tmp_path, count=1)
    cases = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    calibrator = segcal.calibrators.TemperatureScaling().fit(cases)
    (predictions / "scan_000.nii.gz").unlink()
    cases = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    with pytest.raises(DataError, match="case 'scan_000', .*: no NIfTI segmentation"):
        segcal.apply(calibrator, cases, tmp_path / "out", nifti=True)
    with pytest.raises(InputError, match="nifti = True; expected cases of an nnU-Net folder"):
        segcal.apply(
            calibrator, segcal.open_cases(plain(tmp_path / "plain", classes=3)), tmp_path / "other", nifti=True
        )


def test_resuming_adds_what_is_missing(tmp_path):
    predictions, truth = nnunet(tmp_path)
    cases = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    calibrator = segcal.calibrators.TemperatureScaling().fit(cases)
    assert segcal.apply(calibrator, cases, tmp_path / "out").written == 2
    assert segcal.apply(calibrator, cases, tmp_path / "out", nifti=True, resume=True).written == 2
    assert segcal.apply(calibrator, cases, tmp_path / "out", nifti=True, resume=True).skipped == 2
    assert len(list((tmp_path / "out" / "nifti").iterdir())) == 2
