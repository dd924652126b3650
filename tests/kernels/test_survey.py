"""The first look at data, by the definition and by the compiled loop."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from segcal.errors import InputError
from segcal.kernels import fitting_passes
from segcal.kernels.fitting_passes import survey
from segcal.kernels.voxels import Voxels

EDGES = (0.6, 0.9, 0.99)
SHAPES = {
    "one voxel": (1, 3, 1, 1),
    "rows": (1500, 6),
    "small images": (70, 3, 31, 33),
    "volume": (1, 2, 40, 33, 29),
    "several pieces": (2, 2, 190, 180),
}


@pytest.fixture(params=["definition", "loop"])
def kernel(request):
    """Surveys voxels one way or the other."""

    def run(logits, labels, ignore_index=None, mask=None):
        voxels = Voxels(logits, labels, ignore_index=ignore_index, mask=mask)
        return (fitting_passes._survey_fast if request.param == "loop" else fitting_passes._survey)(
            voxels, np.array(EDGES, np.float32)
        )

    return run


def example(shape, dtype=torch.float32):
    random = torch.Generator().manual_seed(0)
    like = (shape[0], *shape[2:])
    z = (3 * torch.randn(shape, generator=random)).to(dtype)
    y = torch.randint(0, shape[1], like, generator=random)
    return z, y, torch.rand(like, generator=random) < 0.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_strata_are_winner_correctness_and_confidence(kernel, shape, dtype):
    z, y, mask = example(shape, dtype)
    y[..., 0] = 255
    found = kernel(z, y, 255, mask)
    valid = mask & (y != 255)
    confidence, winner = z.double().softmax(1).max(1)
    level = sum((confidence > edge).long() for edge in EDGES)
    expected = torch.where(valid, (2 * winner + (winner == y)) * 4 + level, -1).flatten().numpy()
    clear = torch.stack([(confidence - edge).abs() > 1e-6 for edge in EDGES]).all(0).flatten().numpy()
    assert np.array_equal(found.strata[clear], expected[clear])
    assert clear.mean() > 0.99
    assert np.array_equal(found.true, np.bincount(y[valid], minlength=shape[1]))
    exact = float(cross_entropy(z.double().movedim(1, -1)[valid], y[valid], reduction="sum")) if valid.any() else 0.0
    assert found.nll == pytest.approx(exact, rel=1e-6)
    assert not found.impossible


def test_impossible_classes_are_seen_where_they_count(kernel):
    z, y, _ = example((2, 3, 40, 50))
    for low in (-torch.inf, -1e9, -1500.0):
        z[1, 2, 39, 49], y[1, 39, 49] = low, 0
        found = kernel(z, y)
        assert found.impossible
        assert np.isfinite(found.nll)
        y[1, 39, 49] = 255
        assert not kernel(z, y, 255).impossible
        y[1, 39, 49] = 2
        with pytest.raises(InputError, match="labelled with a class whose logit is -inf, or more than 1000 below"):
            kernel(z, y)


@pytest.mark.parametrize(
    ("score", "label", "problem"),
    [(np.nan, 0, "NaN logits"), (np.inf, 0, "infinite logits"), (0.0, 3, "label 3"), (0.0, -7, "label -7")],
)
def test_unfit_voxels_are_named_unless_they_do_not_count(kernel, score, label, problem):
    z, y, _ = example((1, 3, 40, 50))
    z[0, 1, 30, 20], y[0, 30, 20] = score, label
    with pytest.raises(InputError, match=rf"{problem} at voxel \(30, 20\)"):
        kernel(z, y)
    mask = torch.ones_like(y, dtype=torch.bool)
    mask[0, 30, 20] = False
    found = kernel(z, y, mask=mask)
    assert found.strata[30 * 50 + 20] == -1
    assert np.isfinite(found.nll)


def test_large_inputs_take_the_loop_and_strides_do_not_matter():
    z, y, mask = example((2, 4, 200, 300))
    whole = survey(Voxels(z, y, ignore_index=0, mask=mask), EDGES)
    turned = survey(Voxels(z.transpose(2, 3), y.transpose(1, 2), ignore_index=0, mask=mask.transpose(1, 2)), EDGES)
    assert np.array_equal(whole.strata.reshape(2, 200, 300), turned.strata.reshape(2, 300, 200).transpose(0, 2, 1))
    assert whole.nll == pytest.approx(turned.nll, rel=1e-12)
    small = np.concatenate([survey(Voxels(z[n : n + 1, :, :100], y[n : n + 1, :100]), EDGES).strata for n in range(2)])
    assert (small != survey(Voxels(z, y), EDGES).strata.reshape(2, 200, 300)[:, :100].ravel()).mean() < 1e-4
