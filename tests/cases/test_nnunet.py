import json

import numpy as np
import pytest
import torch
from PIL import Image

import segcal
from datasets import labels, logits, nnunet, softmax
from segcal.cases import OutputFolder
from segcal.cases.nnunet import connected_to_border
from segcal.cases.written import write_scores
from segcal.errors import DataError


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
