import io

import numpy as np
import pytest
from PIL import Image

from datasets import snapshot
from segcal.cases.config import load_config
from segcal.errors import SegcalError
from segcal.training import convert
from segcal.training.data import open_dataset
from training.scans import small


def pack(arrays, mode):
    blobs = []
    for array in arrays:
        file = io.BytesIO()
        Image.fromarray(array).save(file, mode)
        blobs.append(np.frombuffer(file.getvalue(), np.uint8))
    return np.concatenate(blobs), np.array([len(blob) for blob in blobs])


def slices(count, channels=None, seed=0):
    rng = np.random.default_rng(seed)
    shape = (count, 12, 10) if channels is None else (count, 12, 10, channels)
    return rng.integers(0, 256, shape).astype(np.uint8), rng.integers(0, 4, (count, 12, 10)).astype(np.uint8)


def write_volumes(path, patients=10, frames=2, depth=3):
    images, labels = slices(patients * frames * depth)
    names = [f"patient{p:03d}_frame{f:02d}" for p in range(patients) for f in range(frames) for _ in range(depth)]
    (pixels, pixel_len), (masks, mask_len) = pack(images, "PNG"), pack(labels, "PNG")
    np.savez(path, images=pixels, images_len=pixel_len, labels=masks, labels_len=mask_len, volume=np.array(names))
    return images, labels


def test_slices_become_volumes_divided_by_patient(tmp_path):
    images, labels = write_volumes(tmp_path / "acdc.npz")
    report = convert(tmp_path / "acdc.npz", tmp_path / "out")
    assert (report.scans, report.groups, report.classes) == (20, 10, 4)
    assert report.parts == {"train": 14, "validation": 2, "test": 4}
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "images" / "patient001_frame01.npy"), images[9:12])
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "labels" / "patient001_frame01.npy"), labels[9:12])
    config = load_config(tmp_path / "out" / "segcal.toml")
    assert config.class_names[2] == "myocardium"
    dataset = open_dataset(small(tmp_path / "out"))
    parts = dataset.parts(None, 0)
    assert {part: len(names) for part, names in parts.items()} == report.parts
    patients = [{name.split("_")[0] for name in names} for names in parts.values()]
    assert sum(map(len, patients)) == 10


def test_some_patients_are_drawn_by_seed(tmp_path):
    write_volumes(tmp_path / "acdc.npz")
    names = {}
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        report = convert(tmp_path / "acdc.npz", tmp_path / folder, patients=5, seed=seed)
        assert (report.scans, report.groups) == (10, 5)
        names[folder] = {path.name for path in (tmp_path / folder / "images").iterdir()}
    assert names["a"] == names["b"] != names["c"]


def test_given_splits_stay(tmp_path):
    arrays = {}
    for number, (part, count) in enumerate((("train", 6), ("val", 2), ("test", 4))):
        images, labels = slices(count, 3, number)
        labels[:, 0] = 11
        for kind, content in (("images", images), ("labels", labels)):
            arrays[f"{part}_{kind}"], arrays[f"{part}_{kind}_len"] = pack(content, "PNG")
        arrays[f"{part}_names"] = np.array([f"{part}{i}" for i in range(count)])
    np.savez(tmp_path / "camvid.npz", **arrays)
    report = convert(tmp_path / "camvid.npz", tmp_path / "out")
    assert report.parts == {"train": 6, "validation": 2, "test": 4}
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "images" / "test3.npy"), images[3].transpose(2, 0, 1))
    dataset = open_dataset(small(tmp_path / "out"))
    assert (dataset.ignore_index, dataset.channels, dataset.classes) == (11, 3, 11)
    assert dataset.parts(None, 0)["validation"] == ("val0", "val1")
    assert convert(tmp_path / "camvid.npz", tmp_path / "few", patients=6).parts == {
        "train": 3,
        "validation": 1,
        "test": 2,
    }


def test_other_files_take_their_classes_from_the_labels_or_the_user(tmp_path):
    write_volumes(tmp_path / "other.npz")
    assert convert(tmp_path / "other.npz", tmp_path / "a").classes == 4
    assert convert(tmp_path / "other.npz", tmp_path / "b", class_names="abcdef").classes == 6
    assert convert(tmp_path / "other.npz", tmp_path / "c", ignore_index=3).classes == 3
    with pytest.raises(SegcalError, match=r"case 'patient000_frame00', .*other.npz: label 3; expected 0\.\.1"):
        convert(tmp_path / "other.npz", tmp_path / "d", class_names="ab")


def test_bad_input_is_named(tmp_path):
    write_volumes(tmp_path / "acdc.npz", patients=3)
    with pytest.raises(SegcalError, match="9 patients; expected 1 to 3"):
        convert(tmp_path / "acdc.npz", tmp_path / "out", patients=9)
    with pytest.raises(SegcalError, match="does not match"):
        convert(tmp_path / "acdc.npz", tmp_path / "out", groups="^case")
    np.savez(tmp_path / "x.npz", a=np.zeros(3))
    with pytest.raises(SegcalError, match="holds the arrays a; expected images"):
        convert(tmp_path / "x.npz", tmp_path / "out")
    (tmp_path / "y.npz").write_bytes(b"nothing")
    for name in ("y.npz", "none.npz"):
        with pytest.raises(SegcalError, match=f"{name}: cannot be read"):
            convert(tmp_path / name, tmp_path / "out")
    with pytest.raises(SegcalError, match="is not empty"):
        convert(tmp_path / "acdc.npz", tmp_path)


HOSTILE = ["../../x", "/absolute", "a/b", "a\\b", "..", ".", "", "a\0b", ".hidden", "~/../x"]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("layout", ["volumes", "images"])
def test_no_name_leads_out_of_the_folder(tmp_path, name, layout):
    images, labels = slices(4)
    (pixels, pixel_len), (masks, mask_len) = pack(images, "PNG"), pack(labels, "PNG")
    arrays = {"images": pixels, "images_len": pixel_len, "labels": masks, "labels_len": mask_len}
    names = np.array(["p0", "p1", "p2", name])
    if layout == "volumes":
        np.savez(tmp_path / "x.npz", **arrays, volume=names)
    else:
        np.savez(tmp_path / "x.npz", **{f"train_{key}": value for key, value in arrays.items()}, train_names=names)
    (tmp_path / "a" / "b").mkdir(parents=True)
    before = snapshot(tmp_path)
    with pytest.raises(SegcalError, match="x.npz: the name ") as error:
        convert(tmp_path / "x.npz", tmp_path / "a" / "b" / "out", groups="^(.*)$")
    assert repr(name) in str(error.value)
    assert snapshot(tmp_path) == before


def change(tmp_path, **changes):
    write_volumes(tmp_path / "acdc.npz", patients=3)
    arrays = dict(np.load(tmp_path / "acdc.npz"))
    np.savez(tmp_path / "acdc.npz", **{key: changes.get(key, lambda a: a)(array) for key, array in arrays.items()})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"volume": lambda a: np.arange(len(a))}, "volume is a int64 array .*; expected a list of names"),
        ({"volume": lambda a: np.array(a[0])}, r"volume is a <U\d+ array of shape \(\)"),
        ({"volume": lambda a: a.astype("S")}, r"volume is a \|S\d+ array"),
        ({"volume": lambda a: a[:-1]}, "images_len is a int64 array .*; expected 17 lengths"),
        ({"labels_len": lambda a: a[:-1]}, "labels_len .*; expected 18 lengths"),
        ({"labels_len": lambda a: a - 1}, r"labels_len adds up to \d+; expected \d+, the bytes of labels"),
        ({"images": lambda a: a[:-5]}, "images_len adds up to"),
        ({"images_len": lambda a: a.astype(float)}, "images_len is a float64 array"),
        ({"images_len": lambda a: -a}, "none of them negative"),
        ({"images": lambda a: a[::-1]}, "case 'patient000_frame00'.*number 0 of images cannot be decoded"),
        ({"images": lambda a: np.where(np.arange(len(a)) == 60, 255 - a, a)}, "cannot be decoded"),
        ({"labels": lambda a: a.astype(np.int32)}, "labels is a int32 array"),
    ],
)
def test_arrays_that_do_not_fit_are_named_and_nothing_is_left(tmp_path, changes, says):
    change(tmp_path, **changes)
    before = snapshot(tmp_path)
    with pytest.raises(SegcalError, match=says):
        convert(tmp_path / "acdc.npz", tmp_path / "out")
    assert snapshot(tmp_path) == before


def test_labels_are_one_class_a_pixel(tmp_path):
    images, labels = slices(2, 3), slices(2)[1]
    for given in (images[0], np.repeat(labels, 2, axis=1)):  # colours; another size
        (pixels, pixel_len), (masks, mask_len) = pack(images[0], "PNG"), pack(given, "PNG")
        np.savez(
            tmp_path / "x.npz",
            **{"test_images": pixels, "test_images_len": pixel_len, "test_labels": masks, "test_labels_len": mask_len},
            test_names=np.array(["a", "b"]),
        )
        with pytest.raises(SegcalError, match="expected one class for every pixel"):
            convert(tmp_path / "x.npz", tmp_path / "out")


def test_class_names_survive_the_file_they_are_written_to(tmp_path):
    write_volumes(tmp_path / "other.npz", patients=3)
    names = ['left "big" \\ ventricle', "tumour \U0001f9e0", "tab\there", "délété\x7f"]
    convert(tmp_path / "other.npz", tmp_path / "out", class_names=names, groups=r"^(patient\d+)")
    config = load_config(tmp_path / "out" / "segcal.toml")
    assert config.class_names == tuple(names)
    assert config.groups == r"^(patient\d+)"
