"""Patches with one label or none, one bin for everything, and the first label that is out of range."""

import pytest
import torch

from reference import losses as reference
from segcal import losses
from segcal.errors import InputError

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
