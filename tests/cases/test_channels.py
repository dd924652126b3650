"""A channel of multi-label data is an ordinary two-class case."""

import numpy as np
import pytest
import torch

import segcal
from datasets import labels, nnunet, plain
from multilabel import channels, stacked
from segcal.cases import write_dataset
from segcal.cases.oriented import Oriented
from segcal.errors import InputError, SegcalError

NAMES = ("whole", "core", "rim")
REGIONS = {"whole": [1, 2], "core": [2], "rim": [1]}


def same(case, other):
    """The same tensors, whole and in rows, whatever was read before."""
    assert (case.id, case.shape, case.spacing, case.ignore_index) == (
        other.id, other.shape, other.spacing, other.ignore_index,
    )  # fmt: skip
    for rows in (slice(1, 3), slice(0, case.shape[2])):
        assert torch.equal(case.chunk(rows).logits, other.chunk(rows).logits)
        assert torch.equal(case.chunk(rows).labels, other.chunk(rows).labels)
        assert torch.equal(case.chunk(rows).valid, other.chunk(rows).valid)
    assert torch.equal(case.logits, other.logits)
    assert torch.equal(case.labels, other.labels)
    assert (case.mask is None) == (other.mask is None)


def expected(case, index):
    """What a channel must be, by slicing."""
    return {
        "logits": case.logits[index : index + 1],
        "labels": case.labels[index : index + 1],
        "valid": case.valid[index : index + 1],
    }


@pytest.mark.parametrize("members", [None, 3])
def test_a_channel_of_stacked_scenes_is_the_scene(members):
    own = channels(2, {"a": 1.0, "b": 3.0}, ignored=0.1, members=members)
    cases = stacked(**own)
    assert cases.channel_names == ("a", "b")
    for k, part in enumerate(own.values()):
        view = cases.channel(k)
        assert (view.ids, view.num_classes, view.channel_names) == (part.ids, 2, None)
        assert view.num_members == members
        for case, other in zip(view, part, strict=True):
            same(case, other)
            same(cases.select([case.id])[0].load().channel(k), other)
            assert torch.equal(case.image, own["a"].select([case.id])[0].image)  # the image is the case's
            assert torch.equal(case.posterior, other.posterior)


def test_members_are_seen_through_a_channel():
    own = channels(1, {"a": 1.0, "b": 3.0}, members=3)
    view, part = stacked(**own).channel(1), own["b"]
    assert view[0].members == 3
    assert torch.equal(view[0].member_logits(2), part[0].member_logits(2))
    for pooled, other in ((view.pooled("probs"), part.pooled("probs")), (view.members([0, 2]), part.members([0, 2]))):
        assert torch.equal(pooled[0].logits, other[0].logits)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_channels_of_files(tmp_path, suffix, dtype):
    root = plain(tmp_path, count=2, classes=3)
    for path in (root / "logits").iterdir():
        scores = np.load(path).astype(dtype)
        path.unlink()
        if suffix == "npy":
            np.save(path, scores)
        else:
            np.savez(path.with_suffix(".npz"), logits=scores)
    for i in range(2):
        np.save(root / "labels" / f"case{i}.npy", np.stack([labels(10 * i + k, 2) for k in range(3)]))
    (root / "masks").mkdir()
    np.save(root / "masks" / "case0.npy", labels(0, 2))
    cases = segcal.open_cases(root, multilabel=True, class_names=list(NAMES))
    assert (cases.channel_names, cases.class_names) == (NAMES, ("outside", "inside"))
    for k in range(3):
        for case, whole in zip(cases.channel(k), cases, strict=True):
            for name, tensor in expected(whole, k).items():
                assert torch.equal(getattr(case, name), tensor)
            rows = case.chunk(slice(2, 5))
            assert torch.equal(rows.logits, whole.logits[k : k + 1, :, 2:5])
            assert torch.equal(rows.labels, whole.labels[k : k + 1, 2:5])


def test_a_channel_is_read_without_the_others(tmp_path, monkeypatch):
    root = plain(tmp_path, count=1, classes=3)
    np.save(root / "labels" / "case0.npy", np.stack([labels(k, 2) for k in range(3)]))
    case = segcal.open_cases(root, multilabel=True).channel(1)[0]
    read, asked = Oriented.read, []
    monkeypatch.setattr(
        Oriented, "read", lambda self, rows, channels=slice(None): asked.append(channels) or read(self, rows, channels)
    )
    case.load()
    assert asked == [slice(1, 2)] * 2  # scores and labels


@pytest.mark.parametrize("members", [1, 2])
def test_regions_of_nnunet_name_the_channels(tmp_path, members):
    (tmp_path / "models").mkdir()
    for m in range(members):
        predictions, truth = nnunet(tmp_path / f"run{m}", regions=REGIONS)
        predictions.rename(tmp_path / "models" / f"model{m}")
    root = tmp_path / "models" if members > 1 else tmp_path / "models" / "model0"
    cases = segcal.open_cases(root, layout="nnunet", labels=str(truth))
    assert cases.channel_names == NAMES
    assert cases.num_members == (members if members > 1 else None)
    for k in range(3):
        for case, whole in zip(cases.channel(k), cases, strict=True):
            for name, tensor in expected(whole, k).items():
                assert torch.equal(getattr(case, name), tensor)
            assert not bool(case.mask.all())  # the exterior is masked in every channel


def test_channels_without_names_are_numbered(tmp_path):
    root = plain(tmp_path, count=1, classes=1)
    np.save(root / "labels" / "case0.npy", labels(0, 2)[None])
    cases = segcal.open_cases(root, multilabel=True)
    assert cases.channel_names == ("channel 0",)
    assert segcal.open_cases(plain(tmp_path / "other")).channel_names is None


def test_packing_keeps_the_channels_and_their_names(tmp_path):
    for names in (("a", "b"), ("only",)):
        cases = stacked(**channels(2, dict.fromkeys(names, 2.0)))
        write_dataset(cases, tmp_path / names[0])
        again = segcal.open_cases(tmp_path / names[0])
        assert again.channel_names == names
        for case, old in zip(again, cases, strict=True):
            torch.testing.assert_close(case.logits.log_softmax(1), old.logits.log_softmax(1), atol=1e-5, rtol=0)
            assert torch.equal(case.labels, old.labels)


def test_wrong_channels_are_refused(tmp_path):
    cases = stacked(**channels(1, {"a": 1.0, "b": 2.0}))
    for view in (lambda: cases.channel(2), lambda: cases[0].channel(2), lambda: cases.channel(-1)):
        with pytest.raises(InputError, match=r"channel (2|-1).*expected 0\.\.1"):
            view()
    with pytest.raises(InputError, match="multi-label data, which these are not"):
        cases.channel(0).channel(0)
    root = plain(tmp_path, count=1, classes=3)
    with pytest.raises(SegcalError, match=r"2 \[regions\]; expected 3"):
        segcal.open_cases(root, regions={"a": [1], "b": [2]})
