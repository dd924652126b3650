from __future__ import annotations

import nibabel
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import datasets
import segcal
from segcal.errors import InputError
from segcal.evaluation import maps as module
from segcal.evaluation.apply import write_maps
from segcal.evaluation.maps import voxel_maps
from segcal.regions import CaseRegions

NAMES = {"confidence", "prediction", "error", "confidence-balance", "band"}


@st.composite
def voxels(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (N, C, *spatial), labels with ignored voxels and a mask, of 0 to 3 spatial axes."""
    spatial = draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=4)) if draw(st.booleans()) else ()
    batch, classes = draw(st.integers(1, 2)), draw(st.integers(2, 4))
    finite = st.floats(-30, 30, width=32)
    logits = draw(hnp.arrays(np.float32, (batch, classes, *spatial), elements=finite))
    labels = draw(hnp.arrays(np.int64, (batch, *spatial), elements=st.sampled_from([*range(classes), 255])))
    mask = draw(hnp.arrays(np.bool_, (batch, *spatial), elements=st.sampled_from([True, True, False])))
    return torch.from_numpy(logits), torch.from_numpy(labels), torch.from_numpy(mask)


@settings(deadline=None, max_examples=60)
@given(voxels(), st.integers(1, 40))
def test_maps_are_their_formulas(given_voxels, piece: int) -> None:
    logits, labels, mask = given_voxels
    before, module._PIECE_VALUES = module._PIECE_VALUES, piece
    try:
        maps = voxel_maps(logits.double(), labels, mask=mask)
    finally:
        module._PIECE_VALUES = before
    assert set(maps) == NAMES
    assert torch.equal(maps["prediction"], logits.argmax(1))
    assert torch.equal(maps["band"], CaseRegions(labels, mask=mask).bands)
    for index in np.ndindex(*labels.shape):
        z = logits.numpy()[(index[0], slice(None), *index[1:])].astype(np.float64)
        p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        assert float(maps["confidence"][index]) == pytest.approx(p.max(), abs=1e-14)
        y = int(labels[index])
        error, balance = float(maps["error"][index]), float(maps["confidence-balance"][index])
        if y == 255 or not mask[index]:
            assert np.isnan(error)
            assert np.isnan(balance)
        else:
            nll, entropy = -np.log(p[y]), -sum(q * np.log(q) for q in p if q > 0)
            assert error == float(z.argmax() != y)
            assert balance == pytest.approx(nll - entropy, abs=1e-9)


def test_types_follow_the_logits() -> None:
    labels = torch.zeros(1, 2, 2, dtype=torch.uint8)
    for given_type, expected in ((torch.float16, torch.float32), (torch.float64, torch.float64)):
        maps = voxel_maps(torch.zeros(1, 3, 2, 2, dtype=given_type), labels)
        assert {maps[name].dtype for name in ("confidence", "error", "confidence-balance")} == {expected}
        assert (maps["prediction"].dtype, maps["band"].dtype) == (torch.int64, torch.int8)


def test_the_prediction_is_the_argmax_of_the_logits_however_close() -> None:
    # In float64, both minus their logsumexp are the same number.
    logits = torch.tensor([[1e-30, 2e-30]])
    assert voxel_maps(logits, torch.tensor([1]))["prediction"].tolist() == [1]


def test_mean_balance_is_nll_minus_entropy_of_the_statistics() -> None:
    case = segcal.synthetic.demo_scenes()[0][0]
    balance = voxel_maps(case.logits, case.labels)["confidence-balance"]
    statistics = segcal.VoxelStatistics(6).update(case.logits, case.labels)
    assert float(balance.nanmean()) == pytest.approx(segcal.metrics.confidence_balance(statistics), rel=1e-5)


def test_impossible_classes_give_no_nan() -> None:
    maps = voxel_maps(torch.tensor([[-torch.inf, 0.0], [0.0, -torch.inf]]), torch.tensor([0, 0]))
    assert maps["confidence-balance"].tolist() == [float("inf"), 0.0]


def test_without_valid_voxels_only_scores_are_known() -> None:
    maps = voxel_maps(torch.zeros(1, 2, 3, 3), torch.full((1, 3, 3), 255))
    assert bool(maps["error"].isnan().all() & maps["confidence-balance"].isnan().all())
    assert bool((maps["band"] == -1).all() & (maps["confidence"] == 0.5).all())


def test_padding_may_hold_anything() -> None:
    logits = torch.zeros(1, 2, 1, 2)
    logits[..., 1] = torch.nan
    assert voxel_maps(logits, torch.tensor([[[1, 255]]]))["error"][0, 0].isnan().tolist() == [False, True]


@pytest.mark.parametrize("piece", [1, 10**6])
@pytest.mark.parametrize("spatial", [(), (4, 3)])
def test_bad_voxels_are_named(monkeypatch, piece: int, spatial: tuple[int, ...]) -> None:
    monkeypatch.setattr(module, "_PIECE_VALUES", piece)
    shape = (2, *spatial)
    where = (1, *(2 for _ in spatial))
    name = "(1, 2, 2)" if spatial else "(1,)"
    labels = torch.zeros(shape, dtype=torch.int64)
    logits = torch.zeros((2, 3, *spatial))
    logits[(1, 0, *where[1:])] = torch.nan
    with pytest.raises(InputError, match=r"NaN logits at voxel") as error:
        voxel_maps(logits, labels)
    assert name in str(error.value)
    labels[where] = 7
    with pytest.raises(InputError, match="label 7 at voxel") as error:
        voxel_maps(torch.zeros((2, 3, *spatial)), labels)
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(1, 2, 3), torch.zeros(1, 4, dtype=torch.int64), "labels have shape"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64), "floating point"),
        (torch.zeros(1, 2, 3), torch.zeros(1, 3), "integers"),
    ],
)
def test_bad_arguments(logits, labels, message: str) -> None:
    with pytest.raises(InputError, match=message):
        voxel_maps(logits, labels)


def test_written_maps_are_the_maps(tmp_path) -> None:
    cases = segcal.synthetic.scenes(2, size=(16, 20), num_classes=3, ignored=0.1)
    seen: list[str] = []
    write_maps(cases, tmp_path, progress=seen.append)
    assert seen == list(cases.ids)
    for case in cases:
        expected = voxel_maps(case.logits, case.labels)
        for name in NAMES:
            np.testing.assert_array_equal(np.load(tmp_path / name / f"{case.id}.npy"), expected[name][0].numpy())
    assert np.load(tmp_path / "prediction" / f"{cases.ids[0]}.npy").dtype == np.uint8


def test_maps_of_calibrated_scores(tmp_path) -> None:
    cases = segcal.synthetic.scenes(1, size=(16, 20))
    write_maps(cases, tmp_path, calibrator=lambda logits: (logits / 2).log_softmax(1))
    expected = (cases[0].logits[0].double() / 2).softmax(0).amax(0)
    np.testing.assert_allclose(np.load(tmp_path / "confidence" / "image-000.npy"), expected.numpy(), rtol=1e-6)


def test_maps_of_nifti_cases_lie_where_the_labels_lie(tmp_path) -> None:
    predictions, truth = datasets.nnunet(tmp_path)
    cases = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    write_maps(cases, tmp_path / "maps")
    image = nibabel.load(tmp_path / "maps" / "error" / f"{cases.ids[0]}.nii.gz")
    label = nibabel.load(truth / f"{cases.ids[0]}.nii.gz")
    np.testing.assert_allclose(image.affine, label.affine)
    case = cases[0]
    expected = voxel_maps(case.logits, case.labels, mask=case.mask, spacing=case.spacing)
    np.testing.assert_array_equal(np.asarray(image.dataobj).T, expected["error"][0].numpy())
    band = nibabel.load(tmp_path / "maps" / "band" / f"{cases.ids[0]}.nii.gz")
    np.testing.assert_array_equal(np.asarray(band.dataobj).T, expected["band"][0].numpy())


def test_multilabel_maps_have_a_channel_axis(tmp_path) -> None:
    regions = {"whole": [1, 2], "core": [2]}
    predictions, truth = datasets.nnunet(tmp_path, classes=2, regions=regions)
    cases = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    write_maps(cases, tmp_path / "maps")
    assert np.load(tmp_path / "maps" / "confidence" / f"{cases.ids[0]}.npy").shape == (2, 6, 8, 10)


def test_errors_name_the_case(tmp_path) -> None:
    cases = segcal.synthetic.scenes(1, size=(16, 20))
    with pytest.raises(InputError, match="case 'image-000'.*NaN"):
        write_maps(cases, tmp_path, calibrator=lambda logits: logits * torch.nan)
    assert list(tmp_path.iterdir()) == []
