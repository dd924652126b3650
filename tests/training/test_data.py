import numpy as np
import pytest

from datasets import save_nifti
from segcal.errors import SegcalError
from segcal.training.data import open_dataset
from training.scans import small, write_scans


@pytest.fixture
def root(tmp_path):
    write_scans(tmp_path / "d", 6)
    return tmp_path / "d"


def parts(root, **options):
    config = small(root, **options)
    return open_dataset(config).parts(config.split, config.seed)


def test_what_no_list_names_is_trained_on(root):
    found = parts(root)
    assert [len(names) for names in found.values()] == [2, 2, 2]
    assert len({name for names in found.values() for name in names}) == 6


def test_shares_keep_patients_together(tmp_path):
    write_scans(tmp_path / "d", 20, (8, 8), splits=False)
    for path in [*(tmp_path / "d").glob("*/*.npy")]:
        number = int(path.stem[-3:])
        path.rename(path.with_name(f"p{number // 2}_{number % 2}.npy"))
    with (tmp_path / "d" / "segcal.toml").open("a") as file:
        file.write('groups = "^(p[0-9]+)"\n')
    found = parts(tmp_path / "d", split={"train": 0.6, "validation": 0.2, "test": 0.2})
    assert [len(names) for names in found.values()] == [12, 4, 4]
    patients = [{name.split("_")[0] for name in names} for names in found.values()]
    assert sum(map(len, patients)) == len(set.union(*patients))
    assert found == parts(tmp_path / "d", split={"train": 0.6, "validation": 0.2, "test": 0.2})
    assert [len(names) for names in parts(tmp_path / "d").values()] == [14, 2, 4]


def test_two_folders_are_one_dataset(root, tmp_path):
    write_scans(tmp_path / "e", 3, splits=False)
    with pytest.raises(SegcalError, match="case 'image-000'.*is in two folders"):
        open_dataset(small(root, data=[str(root), str(tmp_path / "e")]))
    for path in [*(tmp_path / "e").glob("*/*.npy")]:
        path.rename(path.with_name(f"e-{path.name}"))
    config = small(root, data=[str(root), str(tmp_path / "e")])
    assert len(open_dataset(config).scans) == 9
    assert len(open_dataset(config).parts(None, 0)["train"]) == 5


def test_every_folder_has_its_own_groups(tmp_path):
    """One has a table, the other a pattern."""
    for name, groups in (("a", None), ("b", "^(b-image-00)")):
        write_scans(tmp_path / name, 4, (8, 8), splits=False)
        for path in [*(tmp_path / name).glob("*/*.npy")]:
            path.rename(path.with_name(f"{name}-{path.name}"))
        table = "\n".join(f'"a-image-00{n}" = "patient {n // 2}"' for n in range(4))
        with (tmp_path / name / "segcal.toml").open("a") as file:
            file.write(f"groups = '{groups}'\n" if groups else f"[groups]\n{table}\n")
    groups = open_dataset(small(tmp_path / "a", data=[str(tmp_path / "a"), str(tmp_path / "b")])).declared.groups
    assert [groups[f"a-image-00{n}"] for n in range(4)] == ["patient 0", "patient 0", "patient 1", "patient 1"]
    assert {groups[f"b-image-00{n}"] for n in range(4)} == {"b-image-00"}


def test_masks_channels_and_nifti(tmp_path):
    for folder in ("images", "labels", "masks"):
        (tmp_path / "d" / folder).mkdir(parents=True)
    volume = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)
    save_nifti(tmp_path / "d" / "images" / "a_0000.nii.gz", volume.T, (1.0, 2.0, 3.0))
    save_nifti(tmp_path / "d" / "images" / "a_0001.nii.gz", 2 * volume.T, (1.0, 2.0, 3.0))
    save_nifti(tmp_path / "d" / "labels" / "a.nii.gz", (volume > 0).astype(np.uint8).T, (1.0, 2.0, 3.0))
    np.save(tmp_path / "d" / "masks" / "a.npy", np.arange(120).reshape(4, 5, 6) % 2)
    scan = open_dataset(small(tmp_path / "d", classes=2)).scans["a"]
    assert (scan.channels, scan.spatial, scan.spacing) == (2, (4, 5, 6), (3.0, 2.0, 1.0))
    np.testing.assert_array_equal(scan.image(slice(1, 2))[1, 0], 2 * volume[1])
    labels = scan.labels(slice(0, 4)).numpy()
    assert (labels.ravel()[::2] == 255).all()
    assert (labels.ravel()[1::2] == (volume > 0).ravel()[1::2]).all()


def test_bad_files_are_named(root):
    def broken(match):
        with pytest.raises(SegcalError, match=match):
            open_dataset(small(root))

    image, label = root / "images" / "image-001.npy", root / "labels" / "image-001.npy"
    pixels, labels = np.load(image), np.load(label)
    np.save(label, labels + 9)
    broken(r"case 'image-001'.*label [\d, ]+ at .* voxels, first at .*expected 0\.\.2")
    np.save(label, labels.astype(np.float32) + 0.5)
    broken(r"case 'image-001'.*value [012]\.5; expected whole numbers")
    np.save(label, labels[:-1])
    broken(r"case 'image-001'.*has size \(24, 28\); expected \(23, 28\)")
    np.save(label, labels)
    pixels[0, 3, 4] = np.nan
    np.save(image, pixels)
    broken("case 'image-001'.*1 values are NaN or infinite")
    np.save(image, labels)
    broken("case 'image-001': 1 channels and 2 axes; expected 3 and 2 as case 'image-000' has")
    image.unlink()
    broken("case 'image-001': no image")
    np.save(image, labels)
    label.unlink()
    broken("case 'image-001': no label")


def test_bad_datasets_are_named(root, tmp_path):
    with pytest.raises(SegcalError, match="is not a folder"):
        open_dataset(small(tmp_path / "nowhere"))
    with pytest.raises(SegcalError, match="volumes .* as dims = 3"):
        open_dataset(small(root, dims=3))
    with pytest.raises(SegcalError, match="classes = 5; expected 3"):
        open_dataset(small(root, classes=5))
    (root / "segcal.toml").write_text("")
    with pytest.raises(SegcalError, match="number of classes is not known"):
        open_dataset(small(root))
    (root / "segcal.toml").write_text('classes = 3\n[splits]\ntest = ["other"]')
    with pytest.raises(SegcalError, match="splits.test names 'other'"):
        parts(root)
    names = [path.stem for path in (root / "labels").iterdir()]
    (root / "segcal.toml").write_text(f"classes = 3\n[splits]\ntest = {names}")
    with pytest.raises(SegcalError, match="no scan is left to train on; 0 validate and 6 test"):
        parts(root)
