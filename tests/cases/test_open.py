import numpy as np
import pytest
import torch
from PIL import Image

import segcal
from datasets import labels, logits, plain, save_nifti, softmax
from segcal.errors import ConfigError, DataError, InputError, SegcalError


def expect_error(root, match, error=SegcalError, **declared):
    """Opening the dataset or reading its first case raises a message that matches."""
    with pytest.raises(error, match=match):
        segcal.open_cases(root, **declared)[0].load()


def test_plain_convention(tmp_path):
    cases = segcal.open_cases(plain(tmp_path))
    case = cases[1]
    assert (cases.ids, cases.num_classes) == (("case0", "case1", "case2"), 4)
    assert case.shape == (1, 4, 9, 7)
    assert (case.mask, case.image, case.spacing, case.posterior) == (None, None, None, None)
    np.testing.assert_array_equal(case.logits[0], logits(1))
    np.testing.assert_array_equal(case.labels[0], labels(1))
    assert case.labels.dtype == torch.int64


def test_probabilities_become_logits(tmp_path):
    case = segcal.open_cases(plain(tmp_path, kind="probs"))[0]
    assert torch.allclose(case.logits.softmax(1)[0], torch.from_numpy(softmax(logits(0))), atol=1e-6)


def test_images_masks_and_ignored_voxels(tmp_path):
    root = plain(tmp_path, count=1)
    for folder in ("images", "masks"):
        (root / folder).mkdir()
    colours = np.random.default_rng(0).integers(0, 256, (9, 7, 3)).astype(np.uint8)
    Image.fromarray(colours).save(root / "images" / "case0.png")
    mask = np.random.default_rng(1).random((9, 7)) < 0.7
    Image.fromarray(mask.astype(np.uint8) * 255).save(root / "masks" / "case0.png")
    truth = labels(0)
    truth[0] = 255
    np.save(root / "labels" / "case0.npy", truth)
    case = segcal.open_cases(root)[0]
    np.testing.assert_array_equal(case.image[0], np.moveaxis(colours, -1, 0))
    np.testing.assert_array_equal(case.mask[0], mask)
    np.testing.assert_array_equal(case.valid[0], mask & (truth != 255))


def test_image_channels_in_separate_files_are_stacked(tmp_path):
    root = plain(tmp_path, count=1)
    (root / "images").mkdir()
    for channel in range(2):
        np.save(root / "images" / f"case0_{channel:04d}.npy", np.full((9, 7), channel, np.float32))
    assert segcal.open_cases(root)[0].image[0, :, 0, 0].tolist() == [0, 1]


def test_configuration_file_and_keywords(tmp_path):
    root = plain(tmp_path, count=2)
    (root / "logits").rename(root / "network")
    (root / "labels").rename(root / "truth")
    (root / "segcal.toml").write_text(
        "kind = 'logits'\nscores = 'network'\nlabels = 'truth'\nclass_names = ['a', 'b', 'c', 'd']\n"
        "ignore_index = 0\nspacing = [2, 0.5]\ngroups = '^case'\n[splits]\ntest = ['case1']\n"
    )
    cases = segcal.open_cases(root)
    assert (cases.class_names, cases.ignore_index, cases[0].spacing) == (("a", "b", "c", "d"), 0, (2.0, 0.5))
    assert cases.split().test.ids == ("case1",)
    assert segcal.open_cases(root / "segcal.toml").ids == cases.ids
    assert segcal.open_cases(root, ignore_index=3).ignore_index == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kinds = 'probs'", r"unknown key 'kinds'; expected one of layout, kind, .*did you mean 'kind'"),
        ("zzz = 1", "unknown key 'zzz'; expected one of layout"),
        ("kind = 'softmax'", "kind = 'softmax'; expected 'logits' or 'probs'"),
        ("classes = true", "expected a whole number"),
        ("classes = 0", "a whole number above 0"),
        ("ignore_index = 9223372036854775808", "fits 64 bits"),
        ("ignore_index = -9223372036854775809", "fits 64 bits"),
        ("groups = '('", r"groups = '\('.*expected a regular expression"),
        ("[groups]\ncase0 = 1", r"groups = .*expected a regular expression, or a table with the group of every case"),
        ("[regions]", "a list of labels for every channel"),
        ("[regions]\na = []", "a list of labels"),
        ("[regions]\na = [true]", "a list of labels"),
        ("[regions]\na = [-1]", "a list of labels"),
        ("[regions]\na = [1]\nb = [2]", r"2 \[regions\]; expected 4, one per channel"),
        ("class_names = ['a', 'b', 'b', 'd']", "different names"),
        ("multilabel = 1", "expected true or false"),
        ("spacing = [1, -1]", "positive numbers"),
        ("spacing = [1, nan]", "positive numbers"),
        ("spacing = [1, inf]", "positive numbers"),
        ("spacing = [1, 1e300]", "positive numbers"),
        ("[spacing]\ncase0 = [0, 1]", "positive numbers"),
        ("class_names = 'a'", "a list of texts"),
        ("labels = 3", "a text"),
        ("splits = 3", "a table"),
        ("[splits]\ntrain = ['a']", "calibration, validation, test"),
        ("[regions]\na = 'x'", "a list of labels"),
        ("class_names = ['a']", "1 class_names; expected 4"),
        ("class_names = ['a', 'b', 'c', 'd', 'e']", "5 class_names; expected 4"),
        ("kind = ", "cannot be read"),
        ("kind = 'logits'\nexterior = 'mask'", "exterior = 'mask' with logits"),
    ],
)
def test_wrong_configuration_says_what_is_right(tmp_path, text, says):
    root = plain(tmp_path)
    (root / "segcal.toml").write_text(text)
    expect_error(root, says, ConfigError)


@pytest.mark.parametrize("content", ["class_names = ['\xe9']".encode("latin-1"), b"a = " + b"[" * 5000])
def test_a_configuration_that_cannot_be_decoded(tmp_path, content):
    root = plain(tmp_path)
    (root / "segcal.toml").write_bytes(content)
    expect_error(root, "segcal.toml: cannot be read.*expected a TOML file in UTF-8", ConfigError)


@pytest.mark.parametrize("pattern", ["patient", "(x)?case"])
def test_groups_without_a_match(tmp_path, pattern):
    root = plain(tmp_path)
    expect_error(root, r"the pattern .* does not match case 'case0'", InputError, groups=pattern)
    expect_error(root, "case 'case1' has no group", InputError, groups={"case0": "a"})
    assert len(segcal.check(root, groups=pattern).problems) == 1


def test_spacing_of_unknown_cases_is_noted(tmp_path):
    cases = segcal.open_cases(plain(tmp_path), spacing={"case0": [1, 2], "zzz": [1, 1]})
    assert cases.notes == ("[spacing] names cases that do not exist: zzz",)


@pytest.mark.parametrize("zoom", [np.nan, np.inf, 1e30])
def test_a_header_with_an_impossible_spacing(tmp_path, zoom):
    root = plain(tmp_path, count=1, shape=(4, 6, 8))
    (root / "labels" / "case0.npy").unlink()
    path = root / "labels" / "case0.nii"
    save_nifti(path, labels(0, 4, (4, 6, 8)).T)
    data = bytearray(path.read_bytes())
    data[84:88] = np.float32(zoom).tobytes()  # pixdim[2]
    path.write_bytes(data)
    expect_error(root, r"spacing .*expected positive numbers.*spacing = \[", DataError)
    assert segcal.open_cases(root, spacing=[1, 1, 1])[0].spacing == (1, 1, 1)


@pytest.mark.parametrize("pooling", ["logits", "probs", None])
@pytest.mark.parametrize(("kind", "format"), [("logits", "npy"), ("probs", "npz"), ("logits", "zarr")])
def test_ensembles_are_pooled(tmp_path, kind, format, pooling):
    import zarr

    root = plain(tmp_path, count=1)
    (root / "logits" / "case0.npy").unlink()
    (root / "logits").rmdir()
    members = [logits(seed) for seed in range(3)]
    for index, z in enumerate(members):
        path = root / kind / f"fold{index}" / f"case0.{format}"
        path.parent.mkdir(parents=True)
        scores = z if kind == "logits" else softmax(z)
        if format == "npy":
            np.save(path, scores)
        elif format == "npz":
            np.savez(path, probabilities=scores)
        else:
            zarr.save(str(path), scores)
    case = segcal.open_cases(root, pooling=pooling)[0]
    z = np.stack(members).astype(np.float64)
    expected = np.stack([softmax(m) for m in z]).mean(0) if (pooling or kind) == "probs" else softmax(z.mean(0))
    np.testing.assert_allclose(case.logits.softmax(1)[0], expected, atol=2e-6)
    whole = case.logits
    parts = torch.cat([chunk.logits for chunk in segcal.open_cases(root, pooling=pooling)[0].chunks(values=60)], 2)
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("rank", [2, 3])
def test_chunks_equal_the_whole(tmp_path, rank):
    root = plain(tmp_path, count=1, shape=(9, 7, 5)[:rank])
    whole = segcal.open_cases(root)[0].load()
    case = segcal.open_cases(root)[0]
    chunks = list(case.chunks(values=60))
    assert len(chunks) > 3
    assert torch.equal(torch.cat([chunk.logits for chunk in chunks], 2), whole.logits)
    assert torch.equal(torch.cat([chunk.labels for chunk in chunks], 1), whole.labels)
    assert torch.equal(torch.cat([chunk.logits for chunk in whole.chunks(values=100)], 2), whole.logits)


def test_volumes_in_every_axis_order_agree(tmp_path):
    shape = (4, 6, 8)
    z, y = logits(0, 3, shape), labels(0, 3, shape)
    root = tmp_path
    for folder in ("labels", "logits"):
        (root / folder).mkdir()
    save_nifti(root / "labels" / "a.nii.gz", y.T, spacing=(1.0, 2.0, 3.0))
    np.save(root / "logits" / "a.npy", z)
    zyx = segcal.open_cases(root)[0].load()
    assert zyx.spacing == (3.0, 2.0, 1.0)
    np.save(root / "logits" / "a.npy", z.transpose(0, 3, 2, 1))
    expect_error(root, "the volume is transposed.*axes = 'xyz'", DataError)
    xyz = segcal.open_cases(root, axes="xyz")[0].load()
    (root / "logits" / "a.npy").unlink()
    save_nifti(root / "logits" / "a.nii", np.moveaxis(z, 0, -1).transpose(2, 1, 0, 3), spacing=(1.0, 2.0, 3.0))
    nifti = segcal.open_cases(root)[0].load()
    for other in (xyz, nifti):
        assert torch.equal(other.logits, zyx.logits)
        assert torch.equal(other.labels, zyx.labels)
    rows = torch.cat([chunk.logits for chunk in segcal.open_cases(root)[0].chunks(values=200)], 2)
    assert torch.equal(rows, zyx.logits)


@pytest.mark.parametrize("dtype", [">f4", ">f8", "<f8", "<f2"])
def test_any_byte_order_and_precision_is_read(tmp_path, dtype):
    root = plain(tmp_path, count=1)
    np.save(root / "logits" / "case0.npy", logits(0).astype(dtype))
    np.save(root / "labels" / "case0.npy", labels(0).astype(">i4"))
    case = segcal.open_cases(root)[0].load()
    np.testing.assert_array_equal(case.logits[0], logits(0).astype(dtype).astype(np.float32))
    np.testing.assert_array_equal(case.labels[0], labels(0))


@pytest.mark.parametrize("chunks", [(4, 3, 7), (1, 3, 7)])
def test_half_precision_stores_of_any_chunks_are_read(tmp_path, chunks):
    import zarr

    root = plain(tmp_path, count=1)
    (root / "logits" / "case0.npy").unlink()
    store = zarr.create_array(str(root / "logits" / "case0.zarr"), shape=(4, 9, 7), chunks=chunks, dtype="f2")
    store[:] = logits(0).astype(np.float16)
    np.testing.assert_array_equal(segcal.open_cases(root)[0].logits[0], logits(0).astype(np.float16))


def test_tensors_do_not_depend_on_their_file_any_more(tmp_path):
    root = plain(tmp_path, count=1)
    case = segcal.open_cases(root)[0].load()
    kept = case.logits.clone()
    case.logits.add_(1)
    np.testing.assert_array_equal(np.load(root / "logits" / "case0.npy"), logits(0))
    with (root / "logits" / "case0.npy").open("r+b") as file:
        file.truncate(0)
    assert torch.equal(case.logits, kept + 1)


def test_multilabel_channels_and_regions(tmp_path):
    root = plain(tmp_path, count=1, classes=2)
    truth = labels(0, 4)
    np.save(root / "labels" / "case0.npy", np.stack([np.isin(truth, (1, 2, 3)), truth == 3]))
    channels = segcal.open_cases(root, multilabel=True)[0].load()
    np.save(root / "labels" / "case0.npy", truth)
    regions = segcal.open_cases(root, regions={"whole": [1, 2, 3], "core": [3]})[0].load()
    assert channels.shape == (2, 2, 9, 7)
    assert torch.equal(channels.labels, regions.labels)
    assert torch.equal(channels.logits, regions.logits)
    assert torch.allclose(channels.logits.softmax(1)[:, 1], torch.from_numpy(logits(0, 2)).sigmoid(), atol=1e-6)


def test_single_sigmoid_channel(tmp_path):
    root = plain(tmp_path, count=1, classes=1, shape=(4, 9, 7))
    expect_error(root, "one channel.*multilabel = true", InputError)
    (problem,) = segcal.check(root).problems
    assert "case0.npy: scores have one channel; expected at least two classes" in str(problem)
    with pytest.raises(InputError, match="one channel.*multilabel = true"):
        segcal.evaluate(segcal.open_cases(root))
    assert segcal.open_cases(root, multilabel=True)[0].load().shape == (1, 2, 4, 9, 7)


# -- bad input: each message names the case or file, what came and what to do


def test_missing_labels_are_all_listed(tmp_path):
    root = plain(tmp_path)
    (root / "labels" / "case0.npy").unlink()
    expect_error(root, "case 'case0': no label")
    (root / "labels" / "case2.npy").unlink()
    expect_error(root, "2 problems(.|\n)*case0(.|\n)*case2")
    case = segcal.open_cases(root, need_labels=False)[0]
    assert case.logits.shape == (1, 4, 9, 7)
    with pytest.raises(DataError, match="case 'case0': has no label"):
        _ = case.labels


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((4, 9, 8), r"labels have shape \(9, 7\), scores \(4, 9, 8\)"),
        ((9, 7, 4), "channels come last"),
        ((5, 9, 7), "5 channels.*expected 4 classes"),
        ((4,), "shape"),
    ],
)
def test_shape_mismatch(tmp_path, shape, says):
    root = plain(tmp_path, count=2)
    np.save(root / "logits" / "case1.npy", np.zeros(shape, np.float32))
    with pytest.raises(DataError, match=f"case 'case1'.*{says}"):
        segcal.open_cases(root)[1].load()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda y: np.where(y == 3, 7, y), r"label 7 at \d+ voxels, first at \(\d, \d\); expected 0..3, or 255"),
        (lambda y: y.astype(np.int16) - 1, "label -1 .*ignore_index = -1"),
        (lambda y: y + 0.5, "whole numbers"),
        (lambda y: np.stack([y, y, y]), "3 colour channels"),
    ],
)
def test_wrong_labels(tmp_path, change, says):
    root = plain(tmp_path, count=1)
    np.save(root / "labels" / "case0.npy", change(labels(0)))
    expect_error(root, says, DataError)


def test_float_labels_with_whole_numbers_are_fine(tmp_path):
    root = plain(tmp_path, count=1)
    np.save(root / "labels" / "case0.npy", labels(0).astype(np.float64))
    np.testing.assert_array_equal(segcal.open_cases(root)[0].labels[0], labels(0))


@pytest.mark.parametrize(("value", "says"), [(np.nan, "NaN logits"), (np.inf, "infinite logits.*float16")])
def test_bad_logits_name_case_file_and_voxel(tmp_path, value, says):
    shape = (700, 500)  # Read in several parts: the voxel is that of the whole image all the same.
    root = plain(tmp_path, count=1, shape=shape)
    z = logits(0, shape=shape)
    z[2, 650, 6] = z[2, 650, 7] = value
    np.save(root / "logits" / "case0.npy", z)
    expect_error(root, rf"case 'case0', .*case0.npy: {says}")
    expect_error(root, r"at voxel \(650, 6\) and 1 others")


def test_impossible_class_is_legal(tmp_path):
    root = plain(tmp_path, count=1)
    z = logits(0)
    z[3] = -np.inf
    np.save(root / "logits" / "case0.npy", z)
    assert torch.isneginf(segcal.open_cases(root)[0].logits[0, 3]).all()


def test_probabilities_that_are_none(tmp_path):
    root = plain(tmp_path, count=1, kind="probs")
    np.save(root / "probs" / "case0.npy", softmax(logits(0)) * 0.9)
    expect_error(root, "do not sum to 1", InputError)


def test_kind_must_be_declared(tmp_path):
    root = plain(tmp_path)
    (root / "logits").rename(root / "softmax")
    expect_error(root, r"kind not declared.*found labels/, softmax/", DataError)
    expect_error(root, "kind not declared", DataError, scores="softmax")
    (root / "logits").mkdir()
    (root / "probs").mkdir()
    expect_error(root, "both logits/ and probs/", DataError)
    expect_error(root, "one kind", DataError, scores="logits", kind="probs")


def test_kind_of_the_array_name_must_agree(tmp_path):
    root = plain(tmp_path, count=1)
    (root / "logits" / "case0.npy").unlink()
    np.savez(root / "logits" / "case0.npz", probabilities=softmax(logits(0)))
    expect_error(root, "declared as logits, but the array is named 'probabilities'", DataError)


def test_two_files_pickles_png_scores_and_mixed_folders(tmp_path):
    root = plain(tmp_path, count=1)
    np.savez(root / "logits" / "case0.npz", logits=logits(0))
    expect_error(root, "two files for one case: case0.npy and case0.npz", DataError)
    (root / "logits" / "case0.npz").unlink()
    (root / "logits" / "x.pt").write_bytes(b"")
    expect_error(root, r"\.pt files are pickles", DataError)
    (root / "logits" / "x.pt").unlink()
    (root / "logits" / "member").mkdir()
    expect_error(root, "score files and the folders member", DataError)
    (root / "logits" / "member").rmdir()
    (root / "logits" / "case0.npy").unlink()
    Image.fromarray(labels(0)).save(root / "logits" / "case0.png")
    expect_error(root, "png files cannot hold scores", DataError)


def test_empty_and_absent_datasets(tmp_path):
    expect_error(tmp_path, "the folder is empty", DataError)
    expect_error(tmp_path / "nowhere", "does not exist", DataError)
    (tmp_path / "logits").mkdir()
    expect_error(tmp_path, "no cases", DataError)
    (tmp_path / "a.txt").write_text("")
    expect_error(tmp_path / "a.txt", "is a file", DataError)


def test_ensemble_member_that_lacks_a_case_or_differs(tmp_path):
    root = plain(tmp_path, count=2)
    for member in ("a", "b"):
        (root / "logits" / member).mkdir()
        for i in range(2):
            np.save(root / "logits" / member / f"case{i}.npy", logits(i))
    for i in range(2):
        (root / "logits" / f"case{i}.npy").unlink()
    (root / "logits" / "b" / "case1.npy").unlink()
    expect_error(root, "case 'case1': no scores from the ensemble members b", DataError)
    np.save(root / "logits" / "b" / "case1.npy", logits(1))
    np.save(root / "logits" / "b" / "case0.npy", logits(1, shape=(9, 8)))
    expect_error(root, "this ensemble member has shape", DataError)


def test_affine_mismatch_and_wrong_spacing(tmp_path):
    shape = (4, 6, 8)
    for folder in ("labels", "logits"):
        (tmp_path / folder).mkdir()
    save_nifti(tmp_path / "labels" / "a.nii.gz", labels(0, 3, shape).T)
    affine = np.eye(4)
    affine[0, 3] = 2.5
    scores = np.moveaxis(logits(0, 3, shape), 0, -1).transpose(2, 1, 0, 3)
    save_nifti(tmp_path / "logits" / "a.nii.gz", scores, affine=affine)
    expect_error(tmp_path, r"affine differs from that of .*labels/a.nii.gz by up to 2.5", DataError)
    save_nifti(tmp_path / "logits" / "a.nii.gz", scores)
    expect_error(tmp_path, "one number for each of the 3 spatial axes", DataError, spacing=[1, 1])


def test_image_and_mask_of_another_size(tmp_path):
    root = plain(tmp_path, count=1)
    for folder in ("images", "masks"):
        (root / folder).mkdir()
        np.save(root / folder / "case0.npy", np.zeros((5, 5), np.uint8))
    case = segcal.open_cases(root)[0]
    for name in ("image", "mask"):
        with pytest.raises(DataError, match=r"case 'case0'.*has spatial shape \(5, 5\); expected \(9, 7\)"):
            getattr(case, name)


def test_missing_zarr_chunks_in_scores(tmp_path):
    import zarr

    root = plain(tmp_path, count=1)
    (root / "logits" / "case0.npy").unlink()
    array = zarr.create_array(str(root / "logits" / "case0.zarr"), shape=(4, 9, 7), chunks=(1, 9, 7), dtype="f4")
    array[:3] = logits(0)[:3]
    expect_error(root, "1 of 4 chunks are missing", DataError)
