import json
from dataclasses import replace
from functools import partial

import nibabel
import numpy as np
import pytest
import torch

import segcal
from datasets import labels, logits, plain, save_nifti, snapshot
from segcal.calibrators import TemperatureScaling
from segcal.cases import CaseRef, OutputFolder, write_dataset
from segcal.cases.formats import SCORE_FORMATS
from segcal.cases.tensors import tensors_as_cases
from segcal.cases.written import score_path, write_scores
from segcal.errors import DataError, InputError, OutputError
from segcal.evaluation.apply import apply, write_maps
from segcal.files.folders import JOURNAL
from segcal.synthetic import scenes


def assert_same(a, b):
    for left, right in zip(a, b, strict=True):
        assert left.id == right.id
        assert torch.equal(left.logits, right.logits)
        assert torch.equal(left.labels, right.labels)
        assert left.spacing == right.spacing or not left.spacing
        for name in ("image", "posterior", "mask"):
            x, y = getattr(left, name), getattr(right, name)
            assert (x is None) == (y is None)
            assert x is None or torch.equal(x, y)


@pytest.mark.parametrize("format", SCORE_FORMATS)
@pytest.mark.parametrize("size", [(24, 32), (6, 12, 16)])
def test_every_format_gives_bit_identical_canonical_logits(tmp_path, format, size):
    cases = scenes(3, size=size, ignored=0.1)
    write_dataset(cases, tmp_path / "out", format=format)
    assert_same(cases, segcal.open_cases(tmp_path / "out"))


def test_description_survives(tmp_path):
    root = plain(tmp_path / "in", shape=(4, 9, 7))
    (root / "segcal.toml").write_text(
        "class_names = ['a', 'b', 'say \"c\"', 'ü']\nignore_index = 1\ngroups = '^(case)\\d'\n"
        "[spacing]\ncase0 = [1, 2, 3]\ncase2 = [1, 1, 1]\n[splits]\ntest = ['case2']\n"
    )
    before = segcal.open_cases(root)
    write_dataset(before, tmp_path / "out")
    after = segcal.open_cases(tmp_path / "out")
    for name in ("ids", "class_names", "ignore_index", "groups", "splits", "num_classes"):
        assert getattr(after, name) == getattr(before, name)
    assert [case.spacing for case in after] == [(1.0, 2.0, 3.0), None, (1.0, 1.0, 1.0)]


def test_packing_pools_masks_and_halves(tmp_path):
    root = plain(tmp_path / "in", count=2)
    (root / "masks").mkdir()
    for i in range(2):
        np.save(root / "masks" / f"case{i}.npy", np.arange(63).reshape(9, 7) % 3 > 0)
        for member in ("a", "b"):
            (root / "logits" / member).mkdir(exist_ok=True)
            np.save(root / "logits" / member / f"case{i}.npy", logits(i + (member == "b")))
        (root / "logits" / f"case{i}.npy").unlink()
    before = segcal.open_cases(root, pooling="probs")
    report = write_dataset(before, tmp_path / "out", dtype="float16")
    after = segcal.open_cases(tmp_path / "out")
    assert np.load(tmp_path / "out" / "logits" / "case0.npy").dtype == np.float16
    for left, right in zip(before, after, strict=True):
        assert torch.equal(left.logits.argmax(1), right.logits.argmax(1))
        assert torch.allclose(left.logits, right.logits, rtol=1e-3, atol=1e-3)
        assert torch.equal(left.mask, right.mask)
    expected = sum(
        torch.nn.functional.cross_entropy(c.logits.movedim(1, -1)[c.valid], c.labels[c.valid], reduction="sum")
        for c in before
    )
    assert report.nll_input * report.voxels == pytest.approx(float(expected), rel=1e-6)
    assert abs(report.nll_stored - report.nll_input) < 1e-3


def test_multilabel_survives_packing(tmp_path):
    root = plain(tmp_path / "in", count=1, classes=3)
    y = np.random.default_rng(0).integers(0, 2, (3, 9, 7))
    np.save(root / "labels" / "case0.npy", y)
    before = segcal.open_cases(root, multilabel=True)[0]
    write_dataset(segcal.open_cases(root, multilabel=True), tmp_path / "out", dtype="float16")
    after = segcal.open_cases(tmp_path / "out")[0]
    assert torch.equal(before.labels, after.labels)
    assert torch.equal(before.logits.argmax(1), after.logits.argmax(1))
    assert torch.allclose(before.logits.softmax(1), after.logits.softmax(1), atol=1e-3)


def test_float16_overflow_is_refused_and_leaves_nothing(tmp_path):
    root = plain(tmp_path / "in", count=1)
    np.save(root / "logits" / "case0.npy", logits(0) * 1e5)
    with pytest.raises(InputError, match="do not fit torch.float16"):
        write_dataset(segcal.open_cases(root), tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_resume_makes_again_only_what_is_missing_changed_or_damaged(tmp_path):
    root, out = plain(tmp_path / "in", count=5), tmp_path / "out"
    write_dataset(segcal.open_cases(root), out)
    stamp = {path: path.stat().st_mtime_ns for path in out.rglob("*.npy")}
    with pytest.raises(OutputError, match="is not empty.*--resume"):
        write_dataset(segcal.open_cases(root), out)
    (out / "logits" / "case0.npy").unlink()
    damaged = np.load(out / "logits" / "case1.npy")
    damaged[0, 0, 0] += 1
    np.save(out / "logits" / "case1.npy", damaged)
    (out / "labels" / "case2.npy").write_bytes(b"cut")
    np.save(root / "logits" / "case3.npy", logits(33))
    report = write_dataset(segcal.open_cases(root), out, resume=True)
    assert (report.cases, report.skipped) == (5, 1)
    assert (out / "logits" / "case4.npy").stat().st_mtime_ns == stamp[out / "logits" / "case4.npy"]
    assert_same(segcal.open_cases(root), segcal.open_cases(out))
    assert write_dataset(segcal.open_cases(root), out, dtype="float16", resume=True).skipped == 0


def test_a_killed_run_can_be_resumed(tmp_path):
    root, out = plain(tmp_path / "in", count=4), tmp_path / "out"

    def kill(case):
        if case == "case2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_dataset(segcal.open_cases(root), out, progress=kill)
    journal = out / JOURNAL
    journal.write_text(journal.read_text() + '{"file": "logits/ca')
    assert write_dataset(segcal.open_cases(root), out, resume=True).skipped == 2
    assert_same(segcal.open_cases(root), segcal.open_cases(out))


def test_what_reads_back_differently_is_an_error(tmp_path, monkeypatch):
    from segcal.cases.formats.arrays import NpySink

    original = NpySink.write
    monkeypatch.setattr(NpySink, "write", lambda self, index, block: original(self, index, block + 1))
    with pytest.raises(OutputError, match="reads back differently"):
        write_dataset(segcal.open_cases(plain(tmp_path / "in", count=1)), tmp_path / "out")


def test_unwritable_output_and_unknown_choices(tmp_path):
    cases = segcal.open_cases(plain(tmp_path / "in", count=1))
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write_dataset(cases, tmp_path / "file" / "out")
    with pytest.raises(InputError, match="format is 'png'"):
        write_dataset(cases, tmp_path / "out", format="png")
    with pytest.raises(InputError, match="no cases to write"):
        write_dataset(cases[:0], tmp_path / "out")
    with pytest.raises(InputError, match="dtype is 'int8'"):
        write_dataset(cases, tmp_path / "out", dtype="int8")


@pytest.mark.parametrize(("format", "axes"), [("nii.gz", "zyx"), ("npy", "xyz"), ("h5", "zyx")])
def test_scores_are_written_in_the_format_axes_and_geometry_of_the_input(tmp_path, format, axes):
    import h5py

    z = logits(0, 3, (4, 6, 8))
    for folder in ("labels", "logits"):
        (tmp_path / folder).mkdir()
    affine = np.array([[0, 2, 0, 5], [-1, 0, 0, 6], [0, 0, 3, 7], [0, 0, 0, 1.0]])
    save_nifti(tmp_path / "labels" / "a.nii.gz", np.zeros((8, 6, 4), np.uint8), affine=affine)
    path = tmp_path / "logits" / f"a.{format}"
    if format == "nii.gz":
        save_nifti(path, z.T, affine=affine)
    elif format == "npy":
        np.save(path, z.transpose(0, 3, 2, 1))
    else:
        with h5py.File(path, "w") as file:
            file["network/logits"] = z
            file["other"] = [1]
    options = {"axes": axes, "key": "network/logits" if format == "h5" else None}
    cases = segcal.open_cases(tmp_path, **options)
    case = cases[0]
    output = OutputFolder(tmp_path / "out", cases, "scores", settings={})
    write_scores(output, case, ((chunk.rows, chunk.logits.log_softmax(1)) for chunk in case.chunks(values=300)))
    written = tmp_path / "out" / "probs" / f"a.{format}"
    assert score_path(output, case) == f"probs/a.{format}"
    expected = torch.from_numpy(z).softmax(0).numpy()
    if format == "nii.gz":
        image = nibabel.load(written)
        np.testing.assert_array_equal(image.affine, affine)
        np.testing.assert_allclose(np.asarray(image.dataobj), expected.T, atol=1e-6)
    elif format == "npy":
        np.testing.assert_allclose(np.load(written), expected.transpose(0, 3, 2, 1), atol=1e-6)
    else:
        with h5py.File(written) as file:
            np.testing.assert_allclose(file["network/logits"][:], expected, atol=1e-6)
    assert output.finished(score_path(output, case), case)


def test_sigmoid_scores_are_written_as_sigmoid_scores(tmp_path):
    root = plain(tmp_path / "in", count=1, classes=1)
    cases = segcal.open_cases(root, multilabel=True)
    case = cases[0]
    output = OutputFolder(tmp_path / "out", cases, "scores", settings={})
    write_scores(output, case, [(slice(0, 9), case.logits.log_softmax(1))])
    written = torch.from_numpy(np.load(tmp_path / "out" / "probs" / "case0.npy"))
    assert torch.allclose(written, torch.from_numpy(logits(0, 1)).sigmoid(), atol=1e-5)


def test_journal_is_plain_json_lines(tmp_path):
    write_dataset(segcal.open_cases(plain(tmp_path / "in", count=2)), tmp_path / "out")
    header, *records = [json.loads(line) for line in (tmp_path / "out" / JOURNAL).read_text().splitlines()]
    assert header == {"holds": "a dataset"}
    arrays = {f"{f}/case{i}.npy" for f in ("logits", "labels") for i in range(2)}
    assert {record["file"] for record in records} == {*arrays, "segcal.toml"}
    assert {record["file"] for record in records if "digest" in record} == arrays


def test_every_text_survives_the_toml(tmp_path):
    names = ['left "big" \\ one', "tumour \U0001f9e0", "tab\there", "délété\x7f"]
    root = plain(tmp_path / "in")
    (root / "segcal.toml").write_text(
        'class_names = [\'left "big" \\ one\', \'tumour \U0001f9e0\', "tab\\there", "délété\\u007f"]\n'
        "groups = '(\\d)'\n[splits]\ntest = ['case1', 'case0']\n[spacing]\ncase1 = [1.5, 2]\n",
        encoding="utf-8",
    )
    cases = segcal.open_cases(root)
    assert cases.class_names == tuple(names)
    write_dataset(cases, tmp_path / "out")
    again = segcal.open_cases(tmp_path / "out")
    assert (again.class_names, again.groups, again.splits) == (tuple(names), r"(\d)", {"test": ("case1", "case0")})
    assert [case.spacing for case in again] == [None, (1.5, 2.0), None]
    write_dataset(cases[:1], tmp_path / "one")
    assert segcal.open_cases(tmp_path / "one").splits == {"test": ("case0",)}


@pytest.mark.parametrize("name", ["../../x", "/x", "a/b", "a\\b", "..", "", "a\0b", ".a"])
def test_no_case_is_written_outside_of_its_folder(tmp_path, name):
    one = scenes(1, size=(32, 40))
    cases = replace(one, refs=[CaseRef(name, one.refs[0].open)])
    (tmp_path / "a" / "b").mkdir(parents=True)
    before = snapshot(tmp_path)
    for write in (write_dataset, write_maps, partial(apply, TemperatureScaling().fit(one))):
        with pytest.raises(OutputError, match="the name "):
            write(cases, tmp_path / "a" / "b" / "out")
    assert snapshot(tmp_path) == before


def test_two_cases_of_one_name_are_an_error(tmp_path):
    one = scenes(1, size=(32, 40))
    with pytest.raises(OutputError, match="is written a second time"):
        write_dataset(replace(one, refs=[*one.refs, *one.refs]), tmp_path / "out")


def test_a_link_in_the_folder_is_not_followed_out_of_it(tmp_path):
    root, out = plain(tmp_path / "in"), tmp_path / "out"
    write_dataset(segcal.open_cases(root), out)
    (out / "logits").rename(tmp_path / "elsewhere")
    (out / "logits").symlink_to(tmp_path / "elsewhere")
    np.save(root / "logits" / "case0.npy", logits(9))
    before = snapshot(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="leads out"):
        write_dataset(segcal.open_cases(root), out, resume=True)
    assert snapshot(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("format", SCORE_FORMATS)
@pytest.mark.parametrize("ignored", [0, 255, -1, -65536, -(2**31), 2**31, 2**40])
def test_whatever_label_is_ignored_stays_ignored(tmp_path, format, ignored):
    root = plain(tmp_path / "in", count=2)
    for i in range(2):
        truth = labels(i).astype(np.int64)
        truth[:, ::2] = ignored
        np.save(root / "labels" / f"case{i}.npy", truth)
    before = segcal.open_cases(root, ignore_index=ignored)
    write_dataset(before, tmp_path / "out", format=format)
    after = segcal.open_cases(tmp_path / "out")
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.valid, other.valid)
        assert torch.equal(one.labels[one.valid], other.labels[other.valid])
    one, other = (segcal.evaluate(cases, metrics=("nll", "ece", "dsc")).rows for cases in (before, after))
    assert one == other
    kept = after.ignore_index == ignored
    assert kept == (format not in ("nii", "nii.gz", "tif") or -(2**31) <= ignored < 2**31)
    assert kept or f"# {ignored} in the data" in (tmp_path / "out" / "segcal.toml").read_text()


def test_many_classes_and_a_far_ignored_label_in_a_small_format(tmp_path):
    logits_, truth = torch.zeros(1, 300, 4, 5), torch.arange(20).reshape(1, 4, 5) * 15
    truth[0, 0] = 2**50
    cases = tensors_as_cases(logits_, truth, 2**50, None)
    write_dataset(cases, tmp_path / "out", format="tif")
    after = segcal.open_cases(tmp_path / "out")
    assert after.ignore_index == -1
    assert torch.equal(after[0].labels[0], truth[0].masked_fill(truth[0] == 2**50, -1))


def test_labels_of_no_class_are_refused_but_where_they_do_not_count(tmp_path):
    scores, truth = torch.zeros(1, 3, 4, 5), torch.zeros(1, 4, 5, dtype=torch.long)
    truth[0, 1, 2] = 300  # would wrap to 44 in a byte
    with pytest.raises(DataError, match=r"label 300 at 1 voxels, first at .*; expected 0\.\.2, or 255"):
        write_dataset(tensors_as_cases(scores, truth, 255, None), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write_dataset(tensors_as_cases(scores, truth, 255, truth != 300), tmp_path / "out")
    after = segcal.open_cases(tmp_path / "out")[0]
    assert torch.equal(after.valid, truth != 300)


def test_a_lost_mask_is_written_again(tmp_path):
    root, out = plain(tmp_path / "in", count=2), tmp_path / "out"
    (root / "masks").mkdir()
    for i in range(2):
        np.save(root / "masks" / f"case{i}.npy", np.arange(63).reshape(9, 7) > 5)
    write_dataset(segcal.open_cases(root), out)
    (out / "masks" / "case1.npy").unlink()
    assert write_dataset(segcal.open_cases(root), out, resume=True).skipped == 1
    assert_same(segcal.open_cases(root), segcal.open_cases(out))


def test_batches_are_not_cut_to_their_first_image_and_channels_are_all_written(tmp_path):
    torch.manual_seed(0)
    scores, truth = torch.randn(20, 2, 4, 5), torch.randint(2, (20, 4, 5))
    batches = tensors_as_cases(scores, truth, 255, None)  # two images a case
    fitted = TemperatureScaling().fit(batches)
    for write in (write_dataset, partial(apply, fitted)):
        with pytest.raises(InputError, match="a batch of 2 images"):
            write(batches, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    channels = replace(batches[:1], channel_names=("one", "two"))
    apply(TemperatureScaling().fit(channels), channels, tmp_path / "applied")
    assert np.load(next((tmp_path / "applied" / "probs").iterdir())).shape == (2, 4, 5)
    write_dataset(channels, tmp_path / "packed")
    assert torch.equal(segcal.open_cases(tmp_path / "packed")[0].labels, channels[0].labels)


@pytest.mark.parametrize("write", [write_dataset, partial(apply, TemperatureScaling())])
def test_input_that_changes_while_it_is_read_is_an_error_and_is_read_again(tmp_path, write):
    root, out = plain(tmp_path / "in", count=3), tmp_path / "out"
    cases = segcal.open_cases(root)
    if isinstance(write, partial):
        write = partial(apply, TemperatureScaling().fit(cases))

    def change(case):
        if case == "case1":  # which has been read by now
            np.save(root / "logits" / "case1.npy", logits(7))

    with pytest.raises(DataError, match="'case1': its files changed while they were read"):
        write(cases, out, progress=change)
    assert write(segcal.open_cases(root), out, resume=True).skipped == 1
