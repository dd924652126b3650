"""Laws of losses, for any logits: ignoring is deletion, and no order matters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties.strategies import SEEDS, chosen, examples, order, voxels
from segcal import losses
from torture import inputs

CLASSES = 4
#: Losses in which a voxel has no neighbours, so that it can be taken out.
ALONE = [name for name, cls in losses.LOSSES.items() if not cls.neighbourhood and cls.views == 1]
DRAWN = voxels(classes=CLASSES, families=("ordinary", "flat", "sure", "ties", "±1e4", "offset"), dtypes=[torch.float64])


def value(name, z, y):
    """The loss of voxels ``(n, C)`` as one image ``(1, C, n)``."""
    return losses.LOSSES[name].of_classes(CLASSES)(z.T[None], y[None]).item()


@pytest.mark.parametrize("name", ALONE)
@examples(3)
@given(drawn=DRAWN, seed=SEEDS)
def test_ignoring_is_deletion_and_order_does_not_matter(name, drawn, seed):
    z, y = drawn
    kept, moved = chosen(len(y), seed), order(len(y), seed)
    near = {"rel": 1e-12, "abs": 1e-12}
    assert value(name, z, torch.where(kept, y, 255)) == pytest.approx(value(name, z[kept], y[kept]), **near)
    assert value(name, z[moved], y[moved]) == pytest.approx(value(name, z, y), **near)


@pytest.mark.parametrize("name", [name for name, cls in losses.LOSSES.items() if cls.views == 1])
@examples(2)
@given(family=st.sampled_from(["ordinary", "ties", "sure", "±1e4"]), seed=SEEDS)
def test_the_order_of_images_does_not_matter(name, family, seed):
    z = inputs.logits(family, 3 * 4 * 5, CLASSES, torch.float64, seed)
    y = inputs.labels(z, seed).view(3, 4, 5)
    z = z.view(3, 4, 5, CLASSES).movedim(-1, 1).contiguous()
    loss, moved = losses.LOSSES[name].of_classes(CLASSES), order(3, seed)
    assert loss(z[moved], y[moved]).item() == pytest.approx(loss(z, y).item(), rel=1e-12, abs=1e-12)
