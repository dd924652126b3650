"""Losses on a GPU: their values and gradients are those on the CPU, and the same in every run."""

import pytest
import torch

from segcal import losses

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def found(name, logits, labels):
    z = logits.clone().requires_grad_()
    value = losses.LOSSES[name].of_classes(4).to(logits.device)(z, labels)
    value.backward()
    return value.detach(), z.grad


@pytest.mark.parametrize("name", losses.LOSSES)
def test_as_on_the_cpu(name):
    random = torch.Generator().manual_seed(0)
    logits, labels = 2 * torch.randn(4, 4, 40, 50, generator=random), torch.randint(0, 4, (2, 40, 50), generator=random)
    labels[:, :3] = 255
    labels = torch.cat((labels, labels))  # two views, for bwcr
    torch.testing.assert_close(
        [t.cpu() for t in found(name, logits.cuda(), labels.cuda())], list(found(name, logits, labels))
    )


def test_dice_has_the_same_bits_in_every_run():
    logits, labels = torch.randn(8, 4, 224, 224, device="cuda"), torch.randint(0, 4, (8, 224, 224), device="cuda")
    first = found("dice", logits, labels)
    for _ in range(5):
        assert all(map(torch.equal, found("dice", logits, labels), first))
