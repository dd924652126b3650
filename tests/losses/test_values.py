"""Every loss against its float64 reference loop, its derivative, and its peers."""

import pytest
import torch
import torch.nn.functional as F

from reference import losses as reference
from segcal import losses
from segcal.kernels import fast_penalties
from segcal.losses.neighbours import boundary_weights

WEIGHTS = [0.5, 2.0, 1.25, 0.0]
TABLES = torch.tensor([[0.3, 1.0, 0.2, 0.6], [2.0, 0.1, 1.5, 0.7]], dtype=torch.float64)
RHO = torch.tensor([[0.1, 0.2, 3.0, 1.0], [0.5, 0.4, 0.3, 2.0]], dtype=torch.float64)


def batch(space=(6, 7), seed=0, images=2, classes=4, scale=2.0, ignored=0.1):
    """Logits and blocky labels, some of them ignored."""
    random = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(images, classes, *space, generator=random, dtype=torch.float64)
    coarse = torch.randint(0, classes, (images, 1, *[-(-s // 2) for s in space]), generator=random).double()
    labels = F.interpolate(coarse, size=space)[:, 0].long()
    labels[torch.rand(labels.shape, generator=random) < ignored] = 255
    return logits, labels


def views(space=(6, 7)):
    logits, labels = batch(space, images=4)
    labels = torch.cat((labels[:2], labels[:2]))
    labels[3, 0] = 255  # left the frame of one view only
    return logits, labels


NACLS = [
    {"prior": prior, "patch": patch, "penalty": penalty, "on": on}
    for prior, patch, penalty, on in [
        ("mean", 3, "l1", "logits"),
        ("mean", 5, "l2", "softmax"),
        ("gaussian", 3, "l2", "logits"),
        ("gaussian", 5, "l1", "softmax"),
        ("max", 3, "l1", "logits"),
        ("min", 5, "l1", "logits"),
        ("median", 3, "l2", "logits"),
        ("median", 5, "l1", "softmax"),
        ("mode", 3, "l1", "logits"),
    ]
]
CASES = [
    (losses.cross_entropy, reference.ce, {}, {}),
    (losses.cross_entropy, reference.ce, {"class_weights": WEIGHTS}, {"weights": WEIGHTS}),
    (losses.focal, reference.focal, {}, {}),
    (losses.focal, reference.focal, {"gamma": 0.5, "class_weights": WEIGHTS}, {"gamma": 0.5, "weights": WEIGHTS}),
    (losses.label_smoothing, reference.ls, {}, {}),
    (losses.label_smoothing, reference.ls, {"class_weights": WEIGHTS}, {"weights": WEIGHTS}),
    (losses.ecp, reference.ecp, {}, {}),
    (losses.meep, reference.meep, {"weight": 0.3}, {"weight": 0.3}),
    (losses.mbls, reference.mbls, {"margin": 1.5}, {"margin": 1.5}),
    (losses.svls, reference.svls, {}, {}),
    (losses.svls, reference.svls, {"sigma": 0.7, "class_weights": WEIGHTS}, {"sigma": 0.7, "weights": WEIGHTS}),
    (losses.dice, reference.dice, {}, {}),
    (losses.dice, reference.dice, {"class_weights": WEIGHTS}, {"weights": WEIGHTS}),
    (losses.mmce, reference.mmce, {}, {}),
    (losses.ml1_ace, reference.ml1_ace, {}, {}),
    (losses.ml1_ace, reference.ml1_ace, {"bins": "soft", "num_bins": 7}, {"bins": "soft", "num_bins": 7}),
    *[(losses.nacl, reference.nacl, options, options) for options in NACLS],
]


def crac(z, y, **options):
    return losses.crac(z, y, TABLES, RHO, **options)


@pytest.mark.parametrize("space", [(6, 7), (5, 6, 5)], ids=["2d", "3d"])
@pytest.mark.parametrize(("function", "naive", "options", "naive_options"), CASES)
def test_equals_the_reference(function, naive, options, naive_options, space):
    logits, labels = batch(space)
    expected = naive(reference.images(logits, labels), **naive_options)
    assert function(logits, labels, **options).item() == pytest.approx(expected, rel=1e-10)
    assert function(logits.float(), labels, **options).item() == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("space", [(6, 7), (5, 6, 5)], ids=["2d", "3d"])
@pytest.mark.parametrize("options", [{}, {"margin": 5.0}, {"patch": 5}])
def test_crac_equals_the_reference(space, options):
    logits, labels = batch(space)
    expected = reference.crac(reference.images(logits, labels), TABLES.tolist(), RHO.tolist(), **options)
    assert crac(logits, labels, **options).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("space", [(6, 7), (25, 3), (4, 5, 6)])
def test_bwcr_equals_the_reference(space):
    logits, labels = views(space)
    expected = reference.bwcr(reference.images(logits, labels))
    assert losses.bwcr(logits, labels).item() == pytest.approx(expected, rel=1e-6)  # the weights are float32


def test_boundary_weights_reach_ten_voxels():
    labels = torch.zeros(1, 3, 30, dtype=torch.long)
    labels[..., :5] = 1
    weights = boundary_weights(labels, torch.ones_like(labels, dtype=torch.bool))[0, 1]
    assert weights[5:].tolist() == pytest.approx([max(10 - d, 0) / 10 + 0.01 for d in range(25)])


GRADIENTS = [(function, options) for function, _, options, _ in CASES] + [(crac, {"margin": 5.0}), (losses.bwcr, {})]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("function", "options"), GRADIENTS)
def test_gradcheck(function, options, reduction):
    space = (5, 5) if options.get("patch") == 5 else (3, 4)
    logits, labels = views(space) if function is losses.bwcr else batch(space)
    if reduction != "mean":
        if function in (losses.mmce, losses.ml1_ace):
            pytest.skip("a statistic of the whole batch has no value per voxel")
        options = options | {"reduction": reduction}
    assert torch.autograd.gradcheck(lambda z: function(z, labels, **options), logits.requires_grad_())


@pytest.mark.parametrize("bins", ["hard", "soft"])
def test_ml1_ace_gradient_is_bounded_by_the_number_of_voxels(bins):
    logits, labels = batch((8, 8), classes=2, ignored=0)
    logits.requires_grad_()
    losses.ml1_ace(logits, labels, bins=bins, base=None).backward()
    assert logits.grad.abs().max() < 20


def test_sum_and_none_agree_with_the_mean():
    logits, labels = batch()
    count = (labels != 255).sum()
    for function in (losses.cross_entropy, losses.focal, losses.label_smoothing, losses.ecp, losses.mbls, losses.svls,
                     losses.nacl, crac):  # fmt: skip
        each = function(logits, labels, reduction="none")
        assert each.shape == labels.shape
        assert not each[labels == 255].any()
        torch.testing.assert_close(each.sum(), function(logits, labels, reduction="sum"))
        torch.testing.assert_close(each.sum() / count, function(logits, labels))
    assert losses.dice(logits, labels, reduction="none").shape == (2, 4)
    torch.testing.assert_close(losses.dice(logits, labels, reduction="none").mean(), losses.dice(logits, labels))


@pytest.mark.parametrize("weights", [None, torch.tensor(WEIGHTS, dtype=torch.float64)])
def test_agrees_with_pytorch(weights):
    logits, labels = batch()
    for smoothing, ours in ((0.0, losses.cross_entropy), (0.1, losses.label_smoothing)):
        theirs = F.cross_entropy(logits, labels, weight=weights, ignore_index=255, label_smoothing=smoothing)
        torch.testing.assert_close(ours(logits, labels, class_weights=weights), theirs)


def test_agrees_with_monai_focal_and_dice():
    monai = pytest.importorskip("monai.losses")
    logits, labels = batch(ignored=0)
    logits = logits.float()
    theirs = monai.FocalLoss(gamma=3.0, use_softmax=True, to_onehot_y=True)(logits, labels.unsqueeze(1))
    torch.testing.assert_close(losses.focal(logits, labels), theirs * 4)  # MONAI averages over classes too
    theirs = monai.DiceLoss(softmax=True, to_onehot_y=True, smooth_nr=1, smooth_dr=1)(logits, labels.unsqueeze(1))
    torch.testing.assert_close(losses.dice(logits, labels), theirs)


@pytest.mark.parametrize("penalty", ["l1", "l2"])
@pytest.mark.parametrize("space", [(8, 9), (6, 7, 6)])
def test_nacl_agrees_with_monai_away_from_the_border(penalty, space):
    # MONAI counts what lies outside the image as no class at all; inside, the two are the same loss.
    monai = pytest.importorskip("monai.losses")
    logits, labels = batch(space, ignored=0)
    ours, theirs = logits.float().requires_grad_(), logits.float().requires_grad_()
    losses.nacl(ours, labels, penalty=penalty, weight=0.3).backward()
    monai.NACLLoss(classes=4, dim=len(space), distance_type=penalty, alpha=0.3)(theirs, labels).backward()
    inside = (..., *[slice(1, -1)] * len(space))
    torch.testing.assert_close(ours.grad[inside], theirs.grad[inside])
    border = ours.grad - theirs.grad
    border[inside] = 0
    assert border.abs().max() > 1e-4 or penalty == "l1"


@pytest.mark.parametrize("space", [(37, 29), (7, 13, 17)])
@pytest.mark.parametrize("patch", [3, 5])
@pytest.mark.parametrize("margin", [1.0, 5.0])
@pytest.mark.parametrize("ignored", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_crac_in_one_compiled_pass(space, patch, margin, ignored, reduction, monkeypatch):
    """numba's loop, which takes large float32 batches on the CPU, and torch's operations in float64."""
    monkeypatch.setattr("segcal.kernels.dispatch._LARGE", 1)
    logits, labels = batch(space, images=3, ignored=ignored)
    logits[0, :, :4] = 0  # where tau is 0 too there is no slope
    if ignored:
        labels[1] = 255
    options = {"margin": margin, "patch": patch, "class_weights": WEIGHTS, "reduction": reduction}
    found = []
    for dtype in (torch.float32, torch.float64):
        z = logits.to(dtype).requires_grad_()
        assert (fast_penalties(z) is None) == (dtype == torch.float64)
        value = losses.crac(z, labels, TABLES, RHO, **options)
        value.square().sum().backward()
        with torch.no_grad():
            assert torch.equal(losses.crac(z, labels, TABLES, RHO, **options), value)
        found.append((value.detach().double(), z.grad.double()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
