"""Patches with one label or none, one bin for everything, and the first label that is out of range."""

import pytest
import torch

from reference import losses as reference
from segcal import losses
from segcal.errors import InputError
from segcal.losses import voxelwise
from segcal.losses.checks import check_patch, prepare
from segcal.losses.patches import label_prior

CLASSES = 3
PRIORS = ["mean", "gaussian", "max", "min", "median", "mode"]


def few_labels(valid=0.05, seed=0, space=(9, 10)):
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, CLASSES, *space, generator=random, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (2, *space), generator=random)
    labels[torch.rand(labels.shape, generator=random) > valid] = 255
    return logits, labels


@pytest.mark.parametrize("prior", PRIORS)
def test_priors_of_patches_with_few_labels(prior):
    logits, labels = few_labels()
    expected = reference.nacl(reference.images(logits, labels), prior=prior)
    value = losses.nacl(logits.requires_grad_(), labels, prior=prior)
    assert value.item() == pytest.approx(expected, rel=1e-10)
    value.backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("penalty", ["l1", "l2"])
@pytest.mark.parametrize("on", ["logits", "softmax"])
@pytest.mark.parametrize("cached", [2**40, 1], ids=["whole", "pieces"])
def test_the_penalty_of_neighbours_alone_is_that_of_its_prior(penalty, on, cached, monkeypatch):
    monkeypatch.setattr(voxelwise, "CACHED_VALUES", cached)
    logits, labels = few_labels(valid=0.9)
    logits.requires_grad_()
    value = losses.nacl(logits, labels, base=None, weight=1.0, penalty=penalty, on=on)
    gap = (logits if on == "logits" else logits.softmax(1)) - label_prior(prepare(logits, labels), "mean", 3, 2.0)
    plain = (gap.abs() if penalty == "l1" else gap**2).mean(1)[labels != 255].mean()
    torch.testing.assert_close(value, plain)
    torch.testing.assert_close(*(torch.autograd.grad(one, logits)[0] for one in (value, plain)))


def test_gradients_have_no_derivative_of_their_own():
    logits, labels = few_labels(valid=0.9)
    (slope,) = torch.autograd.grad(losses.focal(logits.requires_grad_(), labels), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        slope.sum().backward()


def test_patches_are_of_images_and_volumes():
    check_patch(3, (3, 4))
    check_patch(3, (3, 4, 5))
    for space in ((9,), (9, 9, 9, 9)):
        with pytest.raises(InputError, match=f"{len(space)} spatial axes"):
            check_patch(3, space)


def test_who_looks_at_neighbours():
    found = {name for name, loss in losses.LOSSES.items() if loss.neighbourhood}
    assert found == {"svls", "nacl", "crac", "bwcr"}


@pytest.mark.parametrize("bins", ["hard", "soft"])
def test_one_bin_holds_everything(bins):
    logits, labels = few_labels(valid=0.5)
    expected = reference.ml1_ace(reference.images(logits, labels), bins=bins, num_bins=1)
    assert losses.ml1_ace(logits, labels, bins=bins, num_bins=1).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("label", [-1, CLASSES])
def test_the_first_labels_out_of_range_are_refused(label):
    logits, labels = few_labels(valid=1.0)
    labels[1, 2, 3] = label
    with pytest.raises(InputError, match=rf"labels contain {label} \(1 voxels"):
        losses.cross_entropy(logits, labels)
