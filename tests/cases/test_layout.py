"""Names: files that belong to no case, suffixes in upper case, names that cannot be printed or be told apart."""

import os
from pathlib import Path

import nibabel
import numpy as np
import pytest

import segcal
from datasets import labels, logits, nnunet, plain, save_nifti
from segcal.calibrators import TemperatureScaling
from segcal.cases.config import parse_config
from segcal.errors import ConfigError, DataError, SegcalError
from segcal.evaluation.apply import apply
from segcal.evaluation.check import check

# -- files that belong to no case -------------------------------------------------------------------------------------


def notes_of(root, **declared):
    """The notes on opening, which ``check`` gives, too."""
    notes = segcal.open_cases(root, **declared).notes
    assert set(notes) <= set(segcal.check(root, **declared).notes)
    return "\n".join(notes)


def test_a_complete_dataset_has_no_notes(tmp_path):
    root = plain(tmp_path)
    for folder in ("masks", "images"):
        (root / folder).mkdir()
        for i in range(3):
            np.save(root / folder / f"case{i}.npy", np.ones((9, 7), np.uint8))
    assert notes_of(root) == ""


def test_labels_without_scores_are_named(tmp_path):
    root = plain(tmp_path, count=6)
    for i in (1, 4):
        (root / "logits" / f"case{i}.npy").unlink()
    assert "labels: not read, because there are no scores of this name: case1.npy, case4.npy" in notes_of(root)
    assert len(segcal.open_cases(root)) == 4


def test_files_of_unknown_formats_are_named(tmp_path):
    root = plain(tmp_path)
    (root / "logits" / "case9.mha").write_bytes(b"")
    (root / "labels" / "more").mkdir()
    notes = notes_of(root)
    assert "logits: not read, because the format is not known: case9.mha" in notes
    assert "labels: not read, because the format is not known: more" in notes


def test_a_mask_folder_that_matches_nothing_is_an_error(tmp_path):
    root = plain(tmp_path, count=2)
    (root / "masks").mkdir()
    for i in range(2):
        np.save(root / "masks" / f"case{i}_mask.npy", np.ones((9, 7), bool))
    with pytest.raises(DataError, match=r"masks: none of its 2 files belongs to a case: case0_mask.npy.*case0\.\*"):
        segcal.open_cases(root)
    assert len(segcal.check(root).problems) == 1
    np.save(root / "masks" / "case0.npy", np.ones((9, 7), bool))
    notes = notes_of(root)
    assert "there are no scores of this name: case0_mask.npy, case1_mask.npy" in notes
    assert "no mask, so every voxel counts, for case1" in notes
    (root / "masks").rename(root / "brain")
    with pytest.raises(DataError, match="is not a folder"):
        segcal.open_cases(root, masks="masks")


def test_declared_images_that_match_nothing_are_an_error(tmp_path):
    root = plain(tmp_path, count=2)
    (root / "scans").mkdir()
    np.save(root / "scans" / "other_0000.npy", np.ones((9, 7)))
    with pytest.raises(DataError, match="none of its 1 files belongs to a case: other_0000.npy"):
        segcal.open_cases(root, images="scans")
    (root / "scans").rename(root / "images")
    assert "other_0000.npy" in notes_of(root)


def test_a_case_whose_name_looks_like_a_channel_keeps_its_image(tmp_path):
    root = plain(tmp_path, count=2)
    for folder in ("logits", "labels"):
        (root / folder / "case1.npy").rename(root / folder / "case0_0001.npy")
    (root / "images").mkdir()
    for value, name in enumerate(("case0_0000", "case0_0001")):
        np.save(root / "images" / f"{name}.npy", np.full((9, 7), value, np.float32))
    cases = segcal.open_cases(root)
    assert cases.ids == ("case0", "case0_0001")
    assert [case.image.unique().tolist() for case in cases] == [[0], [1]]


# -- suffixes in upper case -------------------------------------------------------------------------------------------


def upper(folder):
    for path in folder.iterdir():
        stem = path.name.split(".", 1)[0]
        path.rename(folder / (stem + path.name[len(stem) :].upper()))


def test_upper_case_nifti_keeps_spacing_and_affine_checks(tmp_path):
    shape = (4, 6, 8)
    for folder in ("logits", "labels"):
        (tmp_path / folder).mkdir()
    scores = np.moveaxis(logits(0, 3, shape), 0, -1).transpose(2, 1, 0, 3)
    save_nifti(tmp_path / "labels" / "a.nii.gz", labels(0, 3, shape).T, spacing=(1.0, 2.0, 3.0))
    save_nifti(tmp_path / "logits" / "a.nii.gz", scores, spacing=(1.0, 2.0, 3.0))
    before = segcal.open_cases(tmp_path, axes="xyz")[0].load()
    for folder in ("logits", "labels"):
        upper(tmp_path / folder)
    after = segcal.open_cases(tmp_path, axes="xyz")
    assert after[0].spacing == before.spacing == (3.0, 2.0, 1.0)
    np.testing.assert_array_equal(after[0].logits, before.logits)
    assert segcal.check(tmp_path).formats == {".nii.gz": 1}
    apply(TemperatureScaling().fit(after), after, tmp_path / "out")
    written = nibabel.load(tmp_path / "out" / "probs" / "a.NII.GZ")
    np.testing.assert_array_equal(written.affine, np.diag([1.0, 2.0, 3.0, 1.0]))
    assert (tmp_path / "out" / "probs" / "a.NII.GZ").read_bytes()[:2] == b"\x1f\x8b"
    assert not segcal.check(tmp_path / "out", labels=str(tmp_path / "labels")).problems
    moved = np.eye(4)
    moved[0, 3] = 2.5
    save_nifti(tmp_path / "labels" / "a.nii.gz", labels(0, 3, shape).T, affine=moved)
    (tmp_path / "labels" / "a.nii.gz").replace(tmp_path / "labels" / "a.NII.GZ")
    with pytest.raises(DataError, match="affine differs"):
        segcal.open_cases(tmp_path)


@pytest.mark.parametrize("format", ["npy", "npz", "nii", "tif", "zarr", "h5"])
def test_upper_case_round_trip_through_apply(tmp_path, format):
    cases = segcal.open_cases(plain(tmp_path / "plain", count=2))
    segcal.write_dataset(cases, tmp_path / "in", format=format)
    for folder in ("logits", "labels"):
        upper(tmp_path / "in" / folder)
    read = segcal.open_cases(tmp_path / "in")
    apply(TemperatureScaling().fit(read), read, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out" / "probs").iterdir()) == [
        f"case{i}.{format.upper()}" for i in range(2)
    ]
    out = segcal.open_cases(tmp_path / "out", labels=str(tmp_path / "in" / "labels"))
    np.testing.assert_array_equal(out[0].logits.argmax(1), cases[0].logits.argmax(1))


def test_upper_case_nnunet_folders(tmp_path):
    predictions, truth = nnunet(tmp_path)
    before = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    expected = before[0].logits
    for path in sorted(predictions.iterdir()):
        if path.suffix in (".npz", ".gz"):
            stem = path.name.split(".", 1)[0]
            path.rename(predictions / (stem + path.name[len(stem) :].upper()))
    after = segcal.open_cases(predictions, layout="nnunet", labels=str(truth))
    assert after.ids == before.ids
    assert after[0].source.files.prediction.name == "scan_000.NII.GZ"
    np.testing.assert_array_equal(after[0].logits, expected)


# -- names that cannot be printed, or be told apart -------------------------------------------------------------------


def surrogate(path: Path) -> Path:
    return Path(os.fsdecode(os.fsencode(path) + b"\xe9.npy"))


@pytest.mark.parametrize("folder", ["logits", "labels"])
def test_names_that_are_not_utf8_are_refused(tmp_path, folder):
    root = plain(tmp_path, count=2)
    (root / folder / "case1.npy").rename(surrogate(root / folder / "case"))
    (problem, *_) = segcal.check(root).problems
    assert "the name b'case\\xe9.npy' is not UTF-8" in str(problem)
    assert str(problem).encode()
    with pytest.raises(SegcalError, match="is not UTF-8"):
        segcal.open_cases(root)
    with pytest.raises(DataError, match="is not UTF-8"):
        segcal.open_cases(surrogate(tmp_path))
    with pytest.raises(DataError, match="is not UTF-8"):  # No dataset, but something with a name.
        segcal.open_cases(root / folder)


def test_two_spellings_of_one_name_are_an_error(tmp_path):
    root = plain(tmp_path, count=2)
    for folder in ("logits", "labels"):
        (root / folder / "case0.npy").rename(root / folder / "\u00e9.npy")
        (root / folder / "case1.npy").rename(root / folder / "e\u0301.npy")
    with pytest.raises(DataError, match=r"two cases look the same: 'e\\u0301' and '\\xe9'"):
        segcal.open_cases(root)


@pytest.mark.parametrize("key", ["scores", "labels", "images", "masks"])
def test_folder_names_that_no_system_has(tmp_path, key):
    """Found by fuzzing: the system's own error came through."""
    root = plain(tmp_path)
    (root / "segcal.toml").write_text(f'kind = "logits"\n{key} = "{"a" * 5000}"\n')
    with pytest.raises(DataError, match=r"aaa\.\.\.: cannot be read \(File name too long\)"):
        segcal.open_cases(root)


def test_nan_in_a_mask_is_neither_outside_nor_inside(tmp_path):
    root = plain(tmp_path, count=2)
    (root / "masks").mkdir()
    for i in range(2):
        mask = np.ones((9, 7), np.float32)
        mask[:4] = np.nan if i else 0
        np.save(root / "masks" / f"case{i}.npy", mask)
    cases = segcal.open_cases(root)
    assert int(cases[0].valid.sum()) <= 35
    with pytest.raises(DataError, match=r"case 'case1'.*case1.npy: NaN in the mask"):
        segcal.evaluate(cases)
    assert any("NaN in the mask" in str(problem) for problem in check(root).problems)


def test_an_empty_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="none empty"):
        parse_config({"class_names": ["", "b"]})
