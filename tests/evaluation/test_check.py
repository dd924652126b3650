import sys

import numpy as np
import pytest
import torch

import segcal
from datasets import labels, logits, nnunet, plain
from segcal.errors import DataError


def test_sums_equal_a_float64_reference(tmp_path):
    root = plain(tmp_path, count=3)
    y = labels(2)
    y[:2] = 255
    np.save(root / "labels" / "case2.npy", y)
    (root / "masks").mkdir()
    for i in range(3):
        np.save(root / "masks" / f"case{i}.npy", np.arange(63).reshape(9, 7) % 5 > 0)
    report = segcal.check(root)
    z = torch.cat([c.logits.double().movedim(1, -1)[c.valid] for c in segcal.open_cases(root)])
    y = torch.cat([c.labels[c.valid] for c in segcal.open_cases(root)])
    log_p = z.log_softmax(1)
    n = len(y)
    assert (report.valid, report.voxels, report.ignored) == (n, 189, 14)
    assert report.voxels == report.valid + report.ignored + report.masked
    values = report.to_dict()
    assert values["nll"] == pytest.approx(float(-log_p.gather(1, y[:, None]).mean()), rel=1e-6)
    assert values["entropy"] == pytest.approx(float(-(log_p.exp() * log_p).sum(1).mean()), rel=1e-6)
    assert values["confidence"] == pytest.approx(float(log_p.exp().amax(1).mean()), rel=1e-6)
    assert values["accuracy"] == pytest.approx(float((z.argmax(1) == y).double().mean()))
    assert report.label_counts == torch.bincount(y, minlength=4).tolist()
    assert report.predicted_counts == torch.bincount(z.argmax(1), minlength=4).tolist()
    assert not report.problems


@pytest.mark.parametrize(("temperature", "sign"), [(3.0, 1), (0.3, -1)])
def test_over_and_underconfidence_have_their_signs(tmp_path, temperature, sign):
    plant = [segcal.synthetic.Temperature(temperature)]
    segcal.write_dataset(segcal.synthetic.scenes(4, size=(48, 48), plant=plant), tmp_path)
    values = segcal.check(tmp_path).to_dict()
    assert (values["confidence"] - values["accuracy"]) * sign > 0
    assert (values["nll"] - values["entropy"]) * sign > 0


def test_all_problems_of_all_cases_are_listed(tmp_path):
    root = plain(tmp_path, count=8)
    bad = logits(1)
    bad[0, 0, 0] = np.nan
    np.save(root / "logits" / "case1.npy", bad)
    np.save(root / "labels" / "case1.npy", labels(1) + 10)
    (root / "labels" / "case2.npy").unlink()
    np.save(root / "logits" / "case3.npy", logits(3, shape=(9, 8)))
    (root / "logits" / "case4.npy").write_bytes(b"cut")
    np.savez(root / "logits" / "case5.npz", logits=logits(5))
    np.save(root / "logits" / "case6.npy", np.array([{}], dtype=object), allow_pickle=True)
    (root / "images").mkdir()
    np.save(root / "images" / "case7.npy", np.full((9, 7), np.nan))
    report = segcal.check(root)
    found = {(problem.case, problem.problem.split(" ")[0]) for problem in report.problems}
    assert {case for case, _ in found} == {f"case{i}" for i in range(1, 8)}
    assert {("case1", "NaN"), ("case1", "label"), ("case2", "no"), ("case5", "two"), ("case7", "NaN")} <= found
    assert report.valid == 63 * 3


def test_a_folder_that_is_no_dataset_raises(tmp_path):
    with pytest.raises(DataError, match="empty"):
        segcal.check(tmp_path)


def test_scores_that_cannot_be_read_do_not_look_like_anything(tmp_path):
    root = plain(tmp_path, count=1, kind="logits")
    np.save(root / "logits" / "case0.npy", logits(0).astype(np.int32))
    report = segcal.check(root)
    assert len(report.problems) == 1
    assert not report.notes


def test_notes_on_what_is_legal_but_odd(tmp_path):
    root = plain(tmp_path, count=1, kind="logits")
    z = logits(0)
    p = np.exp(z) / np.exp(z).sum(0)
    np.save(root / "logits" / "case0.npy", p)
    assert "look like probabilities" in segcal.check(root).notes[0]
    z[3] = -np.inf
    np.save(root / "logits" / "case0.npy", z)
    report = segcal.check(root)
    assert any("label whose score is -inf" in note for note in report.notes)
    assert report.to_dict()["nll"] == "inf"
    assert np.isfinite(report.to_dict()["entropy"])
    np.save(root / "labels" / "case0.npy", np.zeros((9, 7), np.uint8))
    assert "never in the labels: 1, 2, 3" in segcal.check(root).notes
    np.save(root / "logits" / "case0.npy", np.zeros((200, 9, 7), np.float32))
    assert any(note.endswith("18, 19, 20 and 179 more") for note in segcal.check(root).notes)
    np.save(root / "logits" / "case0.npy", z)
    np.save(root / "labels" / "case0.npy", np.full((9, 7), 255, np.uint8))
    report = segcal.check(root)
    assert "no valid voxel: everything is ignored or masked" in report.notes
    assert report.to_dict()["accuracy"] is None


def assert_notices_transposed(root, z, y):
    """``check`` says that the labels are transposed, and is silent once they are not."""
    for folder, array in (("logits", z), ("labels", y)):
        (root / folder).mkdir()
        np.save(root / folder / "a.npy", array)
    assert any("transposed" in note for note in segcal.check(root).notes)
    np.save(root / "labels" / "a.npy", y.T)
    assert not any("transposed" in note for note in segcal.check(root).notes)


def test_transposed_cube_is_noticed(tmp_path):
    y = labels(0, 3, (8, 8, 8))
    z = 5 * (np.arange(3)[:, None, None, None] == y.T[None]).astype(np.float32)
    assert_notices_transposed(tmp_path, z, y)


def test_exterior_share_of_nnunet_folders(tmp_path):
    predictions, truth = nnunet(tmp_path)
    report = segcal.check(predictions, layout="nnunet", labels=str(truth))
    assert report.masked == 2 * (6 * 8 * 10 - 2 * 4 * 6)
    assert report.to_dict()["masked"] == report.masked


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c", "d", "e"]])
def test_class_names_of_another_number_are_a_problem(tmp_path, names):
    root = plain(tmp_path, count=2)
    np.save(root / "labels" / "case0.npy", np.zeros((9, 7), np.uint8))
    np.save(root / "labels" / "case1.npy", np.zeros((9, 7), np.uint8))
    report = segcal.check(root, class_names=names)
    assert [f"{len(names)} class_names; expected 4" in str(problem) for problem in report.problems] == [True]
    assert "never in the labels: 1, 2, 3" in report.notes


def test_voxels_that_were_never_written_are_noted(tmp_path):
    root = plain(tmp_path, count=1)
    z = logits(0)
    z[:, 6:] = 0
    z[:2, 0] = 0  # Not all of them.
    np.save(root / "logits" / "case0.npy", z)
    y = labels(0)
    y[8] = 255
    np.save(root / "labels" / "case0.npy", y)
    assert any("every logit is exactly 0 at 14 valid voxels" in note for note in segcal.check(root).notes)


def test_whatever_one_case_raises_the_others_are_checked(tmp_path, monkeypatch):
    from segcal.cases.disk import DiskCase

    root = plain(tmp_path, count=3)
    read = DiskCase.labels

    def labels_of(self, rows):
        if self.id == "case1":
            raise ZeroDivisionError("odd")
        return read(self, rows)

    monkeypatch.setattr(DiskCase, "labels", labels_of)
    report = segcal.check(root)
    assert [str(problem) for problem in report.problems] == [
        "case 'case1', labels: cannot be read (ZeroDivisionError: odd)."
    ]
    assert report.valid == 2 * 63


@pytest.mark.parametrize("size", [64, 200])
def test_large_transposed_images_are_noticed_on_a_grid(tmp_path, size):
    blocks = np.random.default_rng(0).integers(0, 3, (size // 8, size // 8))
    y = np.kron(blocks, np.ones((8, 8))).astype(np.uint8)
    z = 5 * (np.arange(3)[:, None, None] == y.T[None]).astype(np.float32)
    assert_notices_transposed(tmp_path, z, y)


def test_compressed_members_are_decoded_once(tmp_path, monkeypatch):
    from segcal.cases.formats.arrays import NpzFile

    root = plain(tmp_path, count=1)
    (root / "logits" / "case0.npy").unlink()
    for member in range(3):
        (root / "logits" / f"m{member}").mkdir()
        np.savez(root / "logits" / f"m{member}" / "case0.npz", logits=logits(member))
    decode, decoded = NpzFile._decode, []
    monkeypatch.setattr(NpzFile, "_decode", lambda self: decoded.append(self.path) or decode(self))
    monkeypatch.setattr(
        sys.modules["segcal.evaluation.check"], "row_slices", lambda shape: [slice(k, k + 1) for k in range(9)]
    )
    assert not segcal.check(root).problems
    assert len(decoded) == 3


def test_one_odd_case_is_the_only_one_reported_even_if_it_is_the_first(tmp_path):
    root = plain(tmp_path, count=4)
    path = root / "logits" / "case0.npy"
    np.save(path, np.load(path)[:3])
    report = segcal.check(root)
    assert [problem.case for problem in report.problems] == ["case0"]
    assert report.problems[0].expected == "4 classes, first axis"
    assert (report.channels, sum(report.shapes.values())) == (4, 3)
