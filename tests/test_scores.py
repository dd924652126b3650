import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.checks import check_like, checked_labels
from segcal.errors import InputError
from segcal.scores import (
    DEPTH,
    canonical_logits,
    free_energy,
    multilabel_view,
    pool,
    round_keeping_argmax,
    some_impossible,
    sum_to_one,
)


def random_logits(seed, *shape, scale=4.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_probabilities_become_logits_with_the_same_softmax():
    probs = random_logits(0, 2, 5, 7, 3).softmax(1)
    logits = canonical_logits(probs, "probs")
    assert torch.allclose(logits.softmax(1), probs, atol=1e-7)


def test_zero_probability_stays_finite():
    logits = canonical_logits(torch.tensor([[1.0, 0.0]]), "probs")
    assert torch.isfinite(logits).all()
    assert float(logits[0, 1]) == pytest.approx(math.log(torch.finfo(torch.float32).tiny))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_read_exactly(dtype):
    stored = random_logits(1, 1, 4, 6).to(dtype)
    logits = canonical_logits(stored, "logits")
    assert logits.dtype == torch.float32
    assert torch.equal(logits.to(dtype), stored)


def test_float64_stays():
    assert canonical_logits(torch.zeros(1, 3, dtype=torch.float64), "logits").dtype == torch.float64


def test_half_precision_probabilities_of_many_classes_pass_the_sum_check():
    probs = random_logits(2, 1, 150, 500, scale=1.0).softmax(1).half()
    assert canonical_logits(probs, "probs").shape == probs.shape


@pytest.mark.parametrize(
    ("scores", "kind", "says"),
    [
        (torch.tensor([[0.0, torch.nan]]), "logits", "NaN logits"),
        (torch.tensor([[0.0, torch.inf]]), "logits", "infinite logits"),
        (torch.tensor([[-torch.inf, -torch.inf]]), "logits", "every class is -inf"),
        (torch.tensor([[0.6, 0.6]]), "probs", "do not sum to 1"),
        (torch.tensor([[0.5, torch.nan]]), "probs", "NaN probabilities"),
        (torch.tensor([[3.0, -2.0]]), "probs", "outside [0, 1]"),
        (torch.tensor([[1, 0]]), "probs", "dtype"),
        (torch.zeros(2, 1, 4), "logits", "one channel"),
        (torch.zeros(4), "logits", "shape"),
        (torch.zeros(1, 2), "softmax", "kind"),
    ],
)
def test_bad_scores_are_refused(scores, kind, says):
    with pytest.raises(InputError, match=says.replace("[", r"\[")):
        canonical_logits(scores, kind)


def test_bad_voxel_is_named():
    scores = torch.zeros(1, 3, 4, 5)
    scores[0, 1, 2, 3] = torch.nan
    with pytest.raises(InputError, match=r"at voxel \(2, 3\) and 0 others"):
        canonical_logits(scores, "logits")


def test_the_first_bad_voxel_says_what_is_wrong():
    scores = torch.zeros(1, 2, 4)
    scores[0, :, 1] = -torch.inf
    scores[0, 0, 3] = torch.inf
    with pytest.raises(InputError, match=r"every class is -inf at voxel \(1,\) and 1 others"):
        canonical_logits(scores, "logits")
    with pytest.raises(InputError, match="off by up to 0.2"):
        canonical_logits(torch.tensor([[0.5, 0.5], [0.6, 0.6]]), "probs")


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bool])
def test_only_integers_are_integers(dtype):
    like = torch.zeros(2, 3)
    check_like("slots", torch.zeros(2, 3, dtype=torch.uint8), like, "integers")
    with pytest.raises(InputError, match="expected shape .2, 3., integers.* scores are"):
        check_like("slots", torch.zeros(2, 3, dtype=dtype), like, "integers")
    with pytest.raises(InputError, match="expected .N, C"):
        checked_labels(torch.zeros(3), torch.zeros(3).long())


def test_probabilities_are_known_by_their_rows():
    p = random_logits(0, 2, 3, 3, 5).softmax(1)
    assert sum_to_one(p)
    for row in range(3):  # all of so few rows are looked at
        other = p.clone()
        other[:, :, row] *= 1.01
        assert not sum_to_one(other)
    below = torch.tensor([1.5, -0.5]).view(1, 2, 1).expand(1, 2, 4)
    assert not sum_to_one(below)


def test_a_class_is_impossible_within_its_voxel_only():
    logits = torch.zeros(1, 2, 3)
    logits[:, :, 1] = 3 * DEPTH  # far from the other voxels, but not from the other class
    assert not some_impossible(logits)
    logits[:, 0, 1] = 0
    assert some_impossible(logits)


def test_an_impossible_class_is_legal():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    assert torch.equal(canonical_logits(logits, "logits"), logits)


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_multilabel_view_gives_the_sigmoid(kind):
    z = random_logits(3, 2, 3, 4, 5)
    pairs = multilabel_view(z if kind == "logits" else z.sigmoid(), kind)
    assert pairs.shape == (6, 2, 4, 5)
    assert torch.allclose(pairs.softmax(1)[:, 1].reshape(z.shape), z.sigmoid(), atol=1e-6)


def test_multilabel_probabilities_need_not_sum_to_one_but_stay_in_range():
    assert canonical_logits(torch.full((1, 3, 2), 0.9), "probs", multilabel=True).shape == (3, 2, 2)
    with pytest.raises(InputError, match="outside"):
        canonical_logits(torch.full((1, 3, 2), 1.9), "probs", multilabel=True)


@given(seed=st.integers(0, 2**16), members=st.integers(2, 6))
@settings(max_examples=20, deadline=None)
def test_pooling_equals_the_float64_definition(seed, members):
    z = random_logits(seed, members, 2, 4, 9, scale=30.0)
    assert torch.allclose(pool(z, "logits").double(), z.double().mean(0), atol=1e-5)
    expected = z.double().softmax(2).mean(0).log()
    assert torch.allclose(pool(z, "probs").double(), expected, rtol=1e-6, atol=1e-6)


def test_probability_pooling_survives_underflow():
    z = torch.tensor([[0.0, 5000.0]])
    assert torch.isfinite(pool([z, z], "probs")).all()


def test_probability_pooling_does_not_see_the_gauge():
    z = random_logits(4, 3, 1, 5, 8)
    shifted = z + 100 * random_logits(5, 3, 1, 1, 8)
    assert torch.allclose(pool(z, "probs"), pool(shifted, "probs"), atol=1e-4)


def test_one_member_is_returned_as_it_is():
    z = random_logits(6, 1, 3, 4)
    assert pool([z], "probs") is z


def test_members_are_taken_one_at_a_time():
    alive = []

    def members():
        for seed in range(4):
            alive.append(seed)
            yield random_logits(seed, 1, 3, 4)

    pool(members(), "logits")
    assert alive == [0, 1, 2, 3]


def test_pooling_refuses_nothing_and_other_shapes():
    with pytest.raises(InputError, match="without members"):
        pool([], "logits")
    with pytest.raises(InputError, match="member 2 has shape"):
        pool([torch.zeros(1, 2), torch.zeros(1, 3)], "logits")
    with pytest.raises(InputError, match="pooling is"):
        pool([torch.zeros(1, 2)], "mean")


def test_free_energy_is_what_the_softmax_does_not_see():
    z = random_logits(7, 2, 5, 6)
    assert torch.allclose(z - free_energy(z)[:, None], z.log_softmax(1), atol=1e-6)


@given(seed=st.integers(0, 2**16), classes=st.integers(2, 20))
@settings(max_examples=30, deadline=None)
def test_rounding_keeps_every_argmax_even_of_near_ties(seed, classes):
    z = random_logits(seed, 1, classes, 400)
    top = z.amax(1, keepdim=True)
    crowded = torch.where(torch.rand_like(z) < 0.5, top + 1e-6 * torch.randn_like(z), z)
    stored = round_keeping_argmax(crowded, torch.float16)
    assert torch.equal(stored.argmax(1), crowded.argmax(1))
    assert torch.allclose(stored.float(), crowded, rtol=2e-3, atol=1e-6)


def test_rounding_refuses_overflow_and_keeps_impossible_classes():
    with pytest.raises(InputError, match="do not fit"):
        round_keeping_argmax(torch.tensor([[0.0, 7e4]]), torch.float16)
    assert torch.isneginf(round_keeping_argmax(torch.tensor([[0.0, -torch.inf]]), torch.float16)[0, 1])
