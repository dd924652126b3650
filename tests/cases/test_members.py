"""Ensembles: members one by one, pooled in either space, and fewer of them."""

import pickle

import numpy as np
import pytest
import torch

import segcal
from datasets import labels, logits, nnunet, plain, softmax
from segcal.cases import write_dataset
from segcal.errors import InputError
from segcal.synthetic import scene_of, scenes

SHAPE = (9, 7)


def ensemble(root, kind="logits", format="npy", count=3, cases=2):
    """Members m0, m1, ... of case0, case1, ..."""
    (root / "labels").mkdir()
    for case in range(cases):
        np.save(root / "labels" / f"case{case}.npy", labels(case, 4, SHAPE))
        for member in range(count):
            path = root / kind / f"m{member}" / f"case{case}.{format}"
            path.parent.mkdir(parents=True, exist_ok=True)
            z = logits(10 * case + member, 4, SHAPE)
            scores = z if kind == "logits" else softmax(z)
            np.save(path, scores) if format == "npy" else np.savez(path, scores)
    return segcal.open_cases(root)


def expected(case, members, space):
    """Probabilities, by the definition, in float64."""
    z = [logits(10 * case + member, 4, SHAPE).astype(np.float64) for member in members]
    p = softmax(np.mean(z, 0)) if space == "logits" else np.mean([softmax(member) for member in z], 0)
    return torch.from_numpy(p.astype(np.float32))[None]


@pytest.mark.parametrize(("kind", "format"), [("logits", "npy"), ("probs", "npy"), ("probs", "npz")])
def test_both_spaces_and_all_choices_of_members(tmp_path, kind, format):
    cases = ensemble(tmp_path, kind, format)
    assert (cases.num_members, cases[0].members, cases[0].pooling) == (3, 3, kind)
    for space in ("logits", "probs"):
        for chosen in ([0], [2, 0], [0, 1, 2]):
            some = cases.pooled(space).members(chosen)
            assert some.num_members == len(chosen)
            for index, case in enumerate(some):
                assert case.pooling == space
                torch.testing.assert_close(case.logits.softmax(1), expected(index, chosen, space), atol=2e-6, rtol=0)
                assert torch.equal(case.labels, cases[index].labels)
    chosen = cases.members([2, 1]).members([1])  # counted among those chosen before
    torch.testing.assert_close(chosen[1].logits.softmax(1), expected(1, [1], kind), atol=2e-6, rtol=0)


@pytest.mark.parametrize("format", ["npy", "npz"])
def test_members_are_read_whole_or_by_rows(tmp_path, format):
    case = ensemble(tmp_path, "probs", format)[1]
    for index in range(3):
        whole = case.member_logits(index)
        torch.testing.assert_close(whole.exp(), expected(1, [index], "probs"))
        parts = [case.member_logits(index, slice(row, row + 3)) for row in (0, 3, 6)]
        assert torch.equal(torch.cat(parts, 2), whole)
    parts = [chunk.logits for chunk in case.pooled("logits").chunks(60)]
    assert len(parts) > 1
    assert torch.equal(torch.cat(parts, 2), case.pooled("logits").logits)


def test_only_one_decoded_member_is_kept(tmp_path):
    case = ensemble(tmp_path, "probs", "npz")[0]
    for index in range(3):
        case.member_logits(index, slice(0, 3))
        kept = [member.file._array is not None for member in case.source.members]
        assert kept == [other == index for other in range(3)]


def test_scenes_have_members_too():
    cases = scenes(2, size=(16, 20), members=3)
    case = cases[1]
    own = torch.stack(scene_of(case).members)[:, None]
    assert (cases.num_members, case.members, case.pooling) == (3, 3, "logits")
    assert torch.equal(case.member_logits(2, slice(4, 9)), own[2, :, :, 4:9])
    torch.testing.assert_close(cases.pooled("probs")[1].logits.exp(), own.softmax(2).mean(0))
    torch.testing.assert_close(cases.members([0, 2])[1].logits, own[[0, 2]].mean(0))
    assert torch.equal(cases.members([1])[1].logits, own[1])
    assert torch.equal(cases.pooled("probs").pooled("logits")[1].logits, case.logits)
    assert scene_of(case.pooled("probs")) is scene_of(case)  # not generated twice


def test_a_choice_of_members_survives_splits_and_processes(tmp_path):
    cases = ensemble(tmp_path, cases=4).pooled("probs").members([0, 2])
    part = cases.split(2, 0, 2).test
    again = pickle.loads(pickle.dumps(part))
    assert again.num_members == 2
    for one, other in zip(part, again, strict=True):
        assert torch.equal(one.logits, other.logits)


def test_all_choices_of_members_have_the_same_valid_voxels(tmp_path):
    # nnU-Net's exterior is where all members say exact background; one member alone would mask more.
    first, truth = nnunet(tmp_path / "a", pad=2)
    second, _ = nnunet(tmp_path / "b", pad=1)
    both = tmp_path / "both"
    both.mkdir()
    first.rename(both / "a")
    second.rename(both / "b")
    cases = segcal.open_cases(both, layout="nnunet", labels=str(truth))
    assert cases.num_members == 2
    mask = cases[0].mask
    assert not mask.all()
    for some in (cases.members([0]), cases.members([1]), cases.pooled("logits")):
        assert torch.equal(some[0].mask, mask)


def test_writing_a_choice_writes_what_it_pools(tmp_path):
    cases = ensemble(tmp_path).members([1]).pooled("probs")
    write_dataset(cases, tmp_path / "packed")
    packed = segcal.open_cases(tmp_path / "packed")
    assert packed.num_members is None
    assert torch.equal(packed[0].logits, cases[0].logits)
    write_dataset(ensemble_again := segcal.open_cases(tmp_path), tmp_path / "packed", resume=True)
    assert torch.equal(segcal.open_cases(tmp_path / "packed")[0].logits, ensemble_again[0].logits)


@pytest.mark.parametrize("make", [lambda root: segcal.open_cases(plain(root)), lambda root: scenes(1, size=(16, 20))])
def test_a_single_model_has_no_members(tmp_path, make):
    cases = make(tmp_path)
    assert (cases.num_members, cases[0].members, cases[0].pooling) == (None, None, None)
    for use in (
        lambda: cases.pooled("probs"),
        lambda: cases.members([0]),
        lambda: cases[0].pooled("probs"),
        lambda: cases[0].member_logits(0),
    ):
        with pytest.raises(InputError, match="no ensemble members; expected scores of several models"):
            use()


def test_wrong_members_and_spaces_are_named():
    cases = scenes(1, size=(16, 20), members=3)
    for wrong in ([], [0, 0], [3], [-1]):
        with pytest.raises(InputError, match=r"members \[.*\]; expected at least one of 0..2, each once"):
            cases.members(wrong)
    with pytest.raises(InputError, match=r"members \[3\]"):
        cases[0].member_logits(3)
    with pytest.raises(InputError, match="space is 'odds'; expected one of logits, probs"):
        cases.pooled("odds")
