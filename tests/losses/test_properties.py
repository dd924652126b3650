"""What must hold for every loss: ignored voxels, degenerate settings, symmetries, types, and bad input."""

import inspect

import pytest
import torch
import torch.nn.functional as F

from segcal import losses
from segcal.errors import InputError
from segcal.losses import checks, neighbours, voxelwise

CLASSES = 4
IDS = list(losses.LOSSES)
PENALISED = [name for name, cls in losses.LOSSES.items() if "base" in cls.defaults()]


def make(name, **options):
    return losses.LOSSES[name].of_classes(CLASSES, **options)


def batch(space=(8, 9), seed=0, ignored=0.1, dtype=torch.float32):
    """Two pairs of images; the second pair has the labels of the first, as ``bwcr`` wants its views."""
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(4, CLASSES, *space, generator=random, dtype=dtype)
    labels = torch.randint(0, CLASSES, (2, *space), generator=random)
    labels[torch.rand(labels.shape, generator=random) < ignored] = 255
    return logits, torch.cat((labels, labels))


def gradient(loss, logits, labels):
    z = logits.detach().clone().requires_grad_()
    value = loss(z, labels)
    value.backward()
    return value.detach(), z.grad


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("content", [1e30, float("inf"), float("nan")])
def test_ignored_voxels_change_nothing_and_get_exactly_zero(name, content):
    logits, labels = batch()
    away = (labels == 255).unsqueeze(1).expand_as(logits)
    value, slope = gradient(make(name), logits, labels)
    hidden, other = gradient(make(name), logits.masked_fill(away, content), labels)
    assert torch.equal(value, hidden)
    assert torch.equal(slope, other)
    assert not other[away].any()
    assert other[~away].any()


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("ignored", [0.0, 0.1])
def test_labels_checked_before_give_the_same_loss(name, ignored, monkeypatch):
    """What a GPU computes where nobody looks at the labels first."""
    logits, labels = batch(ignored=ignored)
    value, slope = gradient(make(name), logits, labels)
    for module in (checks, neighbours):
        monkeypatch.setattr(module, "takes_labels_for_valid", lambda labels: True)
    unseen, other = gradient(make(name), logits, labels)
    torch.testing.assert_close(unseen, value)
    torch.testing.assert_close(other, slope)


@pytest.mark.parametrize("name", IDS)
def test_all_ignored_is_zero(name):
    logits, labels = batch()
    value, slope = gradient(make(name), logits, torch.full_like(labels, 255))
    assert value == 0
    assert not slope.any()


@pytest.mark.parametrize("name", IDS)
def test_an_absent_class_is_fine(name):
    logits, labels = batch()
    value, slope = gradient(make(name), logits, labels.where(labels != 2, 1))
    assert value.isfinite()
    assert slope.isfinite().all()


# Losses in which a class of probability 0 that no label has counts nothing. The others ask something of its logit, as
# ``ls`` does, and are rightly infinite, or average over classes.
@pytest.mark.parametrize("name", ["ce", "focal", "ecp", "svls", "mmce", "meep"])
def test_an_impossible_class_counts_nothing(name):
    torch.manual_seed(0)
    z, y = torch.randn(2, 2, 6, 6), torch.randint(0, 2, (1, 6, 6)).expand(2, -1, -1)
    wider = torch.cat((z, torch.full((2, 1, 6, 6), -torch.inf)), 1).requires_grad_()
    loss = make(name)(wider, y)
    loss.backward()
    torch.testing.assert_close(loss, make(name)(z, y))
    assert bool(wider.grad.isfinite().all())


def test_views_that_agree_on_an_impossible_class_are_consistent():
    z, y = torch.randn(2, 2, 6, 6), torch.zeros(2, 6, 6, dtype=torch.long)
    wider = torch.cat((z, torch.full((2, 1, 6, 6), -torch.inf)), 1).requires_grad_()
    loss = make("bwcr", base=None)(wider, y)
    loss.backward()
    torch.testing.assert_close(loss, make("bwcr", base=None)(z, y) * 2 / 3)  # a mean over classes
    assert bool(wider.grad.isfinite().all())


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("shape", [(0, CLASSES, 6, 6), (2, CLASSES, 0, 6)])
def test_no_voxels_are_zero_or_refused(name, shape):
    z = torch.zeros(shape, requires_grad=True)
    y = torch.zeros(shape[0], *shape[2:], dtype=torch.long)
    if losses.LOSSES[name].neighbourhood and name != "bwcr" and shape[2] == 0:
        with pytest.raises(InputError, match="no smaller than the patch"):
            make(name)(z, y)
        return
    loss = make(name)(z, y)
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize("name", IDS)
def test_ignore_index_may_be_a_class_or_negative(name):
    logits, labels = batch()
    expected = make(name)(logits, labels.where(labels != 0, 255))
    assert torch.equal(make(name, ignore_index=0)(logits, labels.where(labels != 255, 0)), expected)
    moved = labels.where((labels != 0) & (labels != 255), -100)
    assert torch.equal(make(name, ignore_index=-100)(logits, moved), expected)


DEGENERATE = [
    losses.Focal(gamma=0.0),
    losses.LabelSmoothing(alpha=0.0),
    losses.SVLS(share=0.0),
    losses.MbLS(margin=float("inf")),
    *[make(name, weight=0.0) for name in PENALISED if "weight" in losses.LOSSES[name].defaults()],
]


@pytest.mark.parametrize("loss", DEGENERATE, ids=lambda loss: loss.id)
def test_degenerate_settings_are_cross_entropy(loss):
    logits, labels = batch(dtype=torch.float64)
    expected = gradient(lambda z, y: F.cross_entropy(z, y, ignore_index=255), logits, labels)
    for ours, theirs in zip(gradient(loss, logits, labels), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-6)


def test_crac_without_multipliers_is_cross_entropy():
    logits, labels = batch(dtype=torch.float64)
    zero = torch.zeros(2, CLASSES)
    torch.testing.assert_close(losses.crac(logits, labels, zero, zero), losses.cross_entropy(logits, labels))


def test_svls_leaves_uniform_labels_alone_and_sigma_goes_to_the_face_neighbours():
    logits, _ = batch(dtype=torch.float64)
    same = torch.full((4, 8, 9), 2)
    torch.testing.assert_close(losses.svls(logits, same), losses.cross_entropy(logits, same))
    labels = torch.zeros(4, 8, 9, dtype=torch.long)
    labels[:, 3, 3] = 1  # only its four face neighbours see it, a quarter of their half each
    small = losses.svls(logits, labels, sigma=1e-3, reduction="none") - losses.cross_entropy(
        logits, labels, reduction="none"
    )
    expected = torch.zeros_like(small)
    for y, x in ((2, 3), (4, 3), (3, 2), (3, 4)):
        expected[:, y, x] = (logits[:, 0, y, x] - logits[:, 1, y, x]) / 8
    expected[:, 3, 3] = (logits[:, 1, 3, 3] - logits[:, 0, 3, 3]) / 2
    torch.testing.assert_close(small, expected)


@pytest.mark.parametrize("name", IDS)
def test_permuting_classes_with_their_labels_changes_nothing(name):
    logits, labels = batch(dtype=torch.float64)
    order = torch.tensor([2, 0, 3, 1])
    moved = torch.where(labels == 255, labels, order.argsort()[labels.clamp_max(CLASSES - 1)])
    torch.testing.assert_close(make(name)(logits[:, order], moved), make(name)(logits, labels))


@pytest.mark.parametrize("name", IDS)
def test_constants_added_to_a_voxel_change_nothing_or_the_class_says_so(name):
    logits, labels = batch(dtype=torch.float64)
    moved = logits + batch(seed=1, dtype=torch.float64)[0][:, :1]
    same = torch.isclose(make(name)(moved, labels), make(name)(logits, labels), atol=1e-7, rtol=1e-7)
    assert bool(same) == losses.LOSSES[name].translation_invariant


@pytest.mark.parametrize("name", [name for name in IDS if losses.LOSSES[name].translation_invariant])
def test_large_offsets_cost_no_digits(name):
    logits, labels = batch()
    logits = (logits * 1024).round() / 1024  # exact also 4096 higher
    for ours, theirs in zip(
        gradient(make(name), logits + 4096, labels), gradient(make(name), logits, labels), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-6)


def test_the_gradient_of_focal_loss_is_finite_where_the_loss_is_not():
    z = torch.tensor([[0.0, -torch.inf], [3e38, -3e38]], requires_grad=True)
    losses.focal(z, torch.tensor([1, 1])).backward()
    assert z.grad.tolist() == [[0.5, -0.5], [0.5, -0.5]]


@pytest.mark.parametrize("name", IDS)
def test_the_gradient_is_the_derivative(name):
    logits, labels = batch((3, 4), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z: make(name)(z, labels), logits.requires_grad_())


@pytest.mark.parametrize("name", IDS)
def test_pieces_of_a_batch_give_what_the_whole_gives(name, monkeypatch):
    logits, labels = batch(dtype=torch.float64)
    whole = gradient(make(name), logits, labels)
    monkeypatch.setattr(voxelwise, "CACHED_VALUES", 3 * logits[0].numel())
    for ours, theirs in zip(gradient(make(name), logits, labels), whole, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["ce", "focal", "mbls", "svls", "nacl", "crac"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_pieces_of_unequal_sizes_give_what_the_whole_gives(name, reduction, monkeypatch):
    logits, labels = (part[:3] for part in batch(dtype=torch.float64))
    logits = logits.requires_grad_()
    slope = torch.rand(labels.shape if reduction == "none" else (), dtype=torch.float64)
    whole = make(name, reduction=reduction)(logits, labels)
    (expected,) = torch.autograd.grad(whole, logits, slope)
    monkeypatch.setattr(voxelwise, "CACHED_VALUES", 2 * logits[0].numel())
    parts = make(name, reduction=reduction)(logits, labels)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(parts, logits, slope)[0], expected)


@pytest.mark.parametrize("name", IDS)
def test_without_gradient(name):
    logits, labels = batch()
    with_gradient = make(name)(logits.requires_grad_(), labels)
    with torch.no_grad():
        without = make(name)(logits, labels)
    assert torch.equal(with_gradient, without)
    assert with_gradient.requires_grad
    assert not without.requires_grad


@pytest.mark.parametrize("name", IDS)
def test_a_retained_graph_gives_the_same_gradient_again(name):
    logits, labels = batch()
    logits.requires_grad_()
    value = 3 * make(name)(logits, labels)
    (first,) = torch.autograd.grad(value, logits, retain_graph=True)
    kept = first.clone()
    first.zero_()  # whoever got the first gradient may do what they like with it
    (second,) = torch.autograd.grad(value, logits)
    assert torch.equal(kept, second)


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name, dtype):
    logits, labels = batch()
    logits = logits.to(dtype)
    value, slope = gradient(make(name), logits, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = gradient(make(name), logits, labels)
    expected, true_slope = gradient(make(name), logits.float(), labels)
    assert value.dtype == torch.float32
    assert slope.dtype == dtype
    assert torch.equal(value, expected)
    assert torch.equal(inside, expected)
    torch.testing.assert_close(slope.float(), true_slope, atol=1e-6, rtol=1e-2)


@pytest.mark.parametrize("name", IDS)
def test_the_largest_half_precision_logits_stay_finite(name):
    logits, labels = batch()
    value, slope = gradient(make(name), (logits.sign() * 65504).half(), labels)
    assert value.isfinite()
    assert slope.isfinite().all()


@pytest.mark.parametrize("name", [name for name in IDS if not losses.LOSSES[name].neighbourhood])
def test_voxels_without_space(name):
    logits, labels = batch((6,))
    flat = logits.movedim(1, -1).reshape(-1, CLASSES), labels.reshape(-1)
    if name not in ("dice", "ce-dice", "ml1-ace"):  # These depend on which voxels form an image.
        torch.testing.assert_close(make(name)(*flat), make(name)(logits, labels))
    assert make(name)(*flat).isfinite()


@pytest.mark.parametrize("name", IDS)
def test_memory_layout_changes_nothing(name, monkeypatch):
    logits, labels = batch(dtype=torch.float64)
    monkeypatch.setattr(voxelwise, "CACHED_VALUES", 3 * logits[0].numel())
    expected = gradient(make(name), logits, labels)
    shuffled = labels.mT.contiguous().mT
    last = gradient(make(name), logits.contiguous(memory_format=torch.channels_last), shuffled)
    for ours, theirs in zip(last, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_channel_axis_of_labels_is_welcome():
    logits, labels = batch()
    for name in IDS:
        expected = make(name)(logits, labels)
        assert torch.equal(make(name)(logits, labels.unsqueeze(1).to(torch.int16)), expected)


def test_combined_losses_add_up():
    logits, labels = batch()
    dice, penalty = losses.Dice(), losses.NACL(weight=1.0, base=None)
    combined = losses.CombinedLoss([(0.5, dice), (0.2, penalty), (1.0, lambda z, y: z.mean())])
    expected = 0.5 * dice(logits, labels) + 0.2 * penalty(logits, labels) + logits.mean()
    torch.testing.assert_close(combined(logits, labels), expected)


@pytest.mark.parametrize("name", PENALISED)
def test_any_penalty_joins_any_base(name):
    logits, labels = batch()
    alone = make(name, base=None)(logits, labels)
    torch.testing.assert_close(make(name)(logits, labels), losses.cross_entropy(logits, labels) + alone)
    torch.testing.assert_close(make(name, base=losses.Dice())(logits, labels), losses.dice(logits, labels) + alone)
    weights = [1.0, 2.0, 3.0, 4.0]
    weighted = losses.cross_entropy(logits, labels, class_weights=weights)
    torch.testing.assert_close(make(name, class_weights=weights)(logits, labels), weighted + alone)
    with pytest.raises(InputError, match="class_weights with base"):
        make(name, class_weights=weights, base=None)(logits, labels)
    with pytest.raises(InputError, match="base is 'dice'"):
        make(name, base="dice")(logits, labels)


def test_joins_monai_dice_ce_and_meta_tensors():
    monai = pytest.importorskip("monai")
    logits, labels = batch(ignored=0)
    base = monai.losses.DiceCELoss(to_onehot_y=True, softmax=True)
    tracked = monai.data.MetaTensor(labels.unsqueeze(1))
    expected = base(logits, labels.unsqueeze(1)) + losses.nacl(logits, labels, base=None)
    assert float(losses.NACL(base=base)(logits, tracked)) == pytest.approx(float(expected))


def test_works_under_deep_supervision():
    logits, labels = batch((8, 8))
    scales = [(logits, labels.unsqueeze(1)), (logits[..., ::2, ::2], labels[:, None, ::2, ::2])]
    total = sum(w * losses.NACL()(z, y) for w, (z, y) in zip((1.0, 0.5), scales, strict=True))
    assert total.isfinite()


def test_mmce_needs_no_pairs():
    # All pairs of these voxels would be 2.6 TB.
    logits, labels = torch.randn(16, 2, 224, 224), torch.randint(0, 2, (16, 224, 224))
    assert losses.mmce(logits, labels, base=None) > 0


@pytest.mark.parametrize("name", IDS)
def test_bad_input(name):
    logits, labels = batch()
    loss = make(name)
    for bad in (7, -1, 256):
        with pytest.raises(InputError, match=f"labels contain {bad} .*expected 0..3, or ignore_index = 255"):
            loss(logits, labels.where(labels != 1, bad))
    with pytest.raises(InputError, match="labels have shape"):
        loss(logits, labels[..., :-1])
    with pytest.raises(InputError, match="labels have shape"):
        loss(logits, labels[0])
    with pytest.raises(InputError, match="labels have dtype"):
        loss(logits, labels.float())
    with pytest.raises(InputError, match="1 channel; expected at least two classes"):
        loss(logits[:, :1], labels)
    with pytest.raises(InputError, match="logits have shape"):
        loss(logits.long(), labels)


@pytest.mark.parametrize("name", [name for name in IDS if losses.LOSSES[name].neighbourhood and name != "bwcr"])
def test_a_neighbourhood_needs_space(name):
    logits, labels = batch((8, 2))
    with pytest.raises(InputError, match="patch is 3 but the image has shape"):
        make(name)(logits, labels)
    logits, labels = batch((8,))
    with pytest.raises(InputError, match="1 spatial axes; expected 2 .images. or 3 .volumes."):
        make(name)(logits, labels)


def test_bad_options():
    logits, labels = batch()
    bad = {
        "reduction is 'max'": losses.CrossEntropy(reduction="max"),
        "gamma is -1": losses.Focal(-1),
        "alpha is 2": losses.LabelSmoothing(2),
        "sigma is 0": losses.SVLS(0),
        "share is 1.5": losses.SVLS(share=1.5),
        "margin is nan": losses.MbLS(margin=float("nan")),
        "prior is 'average'": losses.NACL(prior="average"),
        "patch is 4": losses.NACL(patch=4),
        "penalty is 'l3'": losses.NACL(penalty="l3"),
        "on is 'probs'": losses.NACL(on="probs"),
        "bins is 'fuzzy'": losses.ML1ACE(bins="fuzzy"),
        "num_bins is 0": losses.ML1ACE(num_bins=0),
        "width is 0": losses.MMCE(width=0),
        "smooth is 0": losses.Dice(0),
        "class_weights have shape": losses.CrossEntropy(class_weights=[1.0, 2.0]),
        "multipliers have shape": losses.CRaC(3),
    }
    for message, loss in bad.items():
        with pytest.raises(InputError, match=message):
            loss(logits, labels)
    with pytest.raises(InputError, match="class_weights are"):
        losses.CrossEntropy(class_weights=[1.0, -1.0])
    with pytest.raises(InputError, match="parts are empty"):
        losses.CombinedLoss([])
    with pytest.raises(InputError, match="labels of the two views differ"):
        losses.bwcr(logits, torch.cat((labels[2:], labels[:2].flip(1))))
    with pytest.raises(InputError, match="two views of every image"):
        losses.bwcr(logits[:3], labels[:3])


def test_options_are_the_functions_options():
    assert losses.NACL(0.2, "max", patch=5)._options == losses.NACL(weight=0.2, prior="max", patch=5)._options
    assert list(inspect.signature(losses.SVLS).parameters) == list(losses.SVLS.defaults())
    with pytest.raises(TypeError, match="NACL has no option 'wait', only weight, prior, patch"):
        losses.NACL(wait=1)
    with pytest.raises(TypeError, match="too many positional"):
        losses.Focal(2.0, [1.0, 2.0])
    with pytest.raises(TypeError, match="multiple values for argument 'gamma'"):
        losses.Focal(2.0, gamma=1.0)


def test_class_weights_move_with_the_module():
    loss = losses.CrossEntropy(class_weights=[1.0, 2.0, 3.0, 4.0])
    assert loss.double().class_weights.dtype == torch.float64
    assert not loss.state_dict()
