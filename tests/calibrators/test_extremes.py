"""Logits of any size: masks written as large numbers, offsets, the ends of each type; in maps and in fits alike."""

import pytest
import torch

import segcal
from segcal.calibrators import CALIBRATORS
from segcal.cases.tensors import tensors_as_cases
from segcal.errors import InputError
from segcal.scores import DEPTH, only_possible

#: Few logits take torch's operations, many the compiled loops.
SIZES = {"small": (1, 6, 40, 30), "large": (1, 6, 256, 180)}
MASKS = (-1e4, -65504.0, -1e9, -1e30, -3e38, -torch.inf)
#: Probabilities are as near to those in float64 as their type allows, with the large parameters of these fits.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def logits(shape, seed=0):
    """Multiples of 1/1024, which offsets of 4096 leave exact in float32."""
    z = 4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (z * 1024).round() / 1024


def extreme(shape, dtype):
    """Logits of which every row has some that are as large as one of these sizes, up, down or both; or all of them."""
    z, highest = logits(shape).double(), torch.finfo(dtype).max
    random = torch.Generator().manual_seed(1)
    sizes = torch.tensor((1e4, 65504.0, 1e30, 3e38), dtype=torch.float64)
    size = sizes[torch.randint(4, (shape[2], 1), generator=random)]
    share = torch.tensor((0.0, 0.1, 0.5))[torch.randint(3, (2, shape[2], 1), generator=random)]
    chosen = torch.rand(shape, generator=random)
    chosen[:, 0] = chosen[:, 0].where(share.sum(0) > 0.9, 0.5)  # one class that is as it was, but where all are large
    z = torch.where(chosen < share[0], -size, torch.where(chosen >= 1 - share[1], size, z))
    return z.clamp(-highest, highest).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)
def test_every_finite_input_has_its_probabilities(fitted, dtype, shape):
    z = extreme(shape, dtype)
    p = fitted(z).double().exp()
    assert torch.allclose(p.sum(1), torch.ones(()).double(), atol=6 * TOLERANCE[dtype])
    # The maps of trust are steps, joined by lines that multiply rounding by up to a thousand.
    near = TOLERANCE[dtype] * (10 if fitted.id == "trust" else 1)
    assert torch.allclose(p, fitted(z.double()).exp(), atol=near, rtol=0)
    if fitted.preserves:
        assert torch.equal(p.argmax(1), z.argmax(1))


@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)
def test_however_a_mask_is_written(fitted, shape):
    z = logits(shape)
    found = []
    for mask in MASKS if shape == SIZES["small"] else MASKS[1::4]:
        z[:, 2] = mask
        found.append(fitted(z).exp())
        assert (found[-1][:, 2] == 0).all()
    for p in found[:-1]:
        assert torch.allclose(p, found[-1], atol=1e-7, rtol=0)


@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)
def test_an_offset_is_not_seen_by_maps_that_say_so(fitted, shape):
    z = logits(shape)
    if fitted.translation_invariant:
        assert torch.allclose(fitted(z + 4096).exp(), fitted(z).exp(), atol=1e-6, rtol=0)


def test_a_fit_refuses_labels_that_are_impossible(fitted):
    for shape, sizes in zip(SIZES.values(), ((2 * DEPTH, 3e38, torch.inf), (torch.inf,)), strict=True):
        z = logits(shape)
        labels = z.argmax(1)
        for size in sizes:
            masked = z.scatter(1, labels.unsqueeze(1), -size)
            some = torch.where(torch.arange(shape[2])[:, None] == 3, masked, z)
            with pytest.raises(InputError, match="labelled with a class whose logit is -inf, or more than 1000 below"):
                type(fitted)().fit(some, labels)


@pytest.mark.parametrize("name", CALIBRATORS)
def test_however_a_mask_is_written_a_fit_is_the_same(name, cases):
    z = torch.cat([case.logits for case in cases])
    y = torch.cat([case.labels for case in cases])
    here = (y != 2) & (logits(y.shape) < 0)  # where class 2 is never true
    reports = []
    for mask in (-65504.0, -torch.inf):
        masked = z.clone()
        masked[:, 2][here] = mask
        options = {"epochs": 2} if name in ("lts", "lts-ti", "ibts") else {}
        reports.append(CALIBRATORS[name](**options).fit(masked, y).fit_report)
    finite, infinite = reports
    assert finite.nll_before == pytest.approx(infinite.nll_before, rel=1e-6)
    assert finite.nll_after == pytest.approx(infinite.nll_after, rel=1e-6)
    assert 0 < finite.nll_after <= finite.nll_before


@pytest.mark.parametrize("mask", [-65504.0, -torch.inf])
def test_evaluation_sees_what_the_map_gives(fitted, mask):
    z = logits(SIZES["small"])
    labels = z[:, :2].argmax(1)
    z[:, 2][logits(labels.shape) > 0] = mask
    masked = tensors_as_cases(z, labels, 255, None)
    plain, fused = (segcal.evaluate(masked, own).value("nll") for own in (lambda x: fitted(x), fitted))
    assert fused == pytest.approx(plain, rel=1e-5)


def test_only_possible_leaves_what_is_possible():
    z = torch.tensor([[0.0, -DEPTH, -DEPTH - 1, -torch.inf]])
    assert only_possible(z).tolist() == [[0.0, -DEPTH, -torch.inf, -torch.inf]]
