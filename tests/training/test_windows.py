"""Predictions in windows."""

import itertools

import numpy as np
import pytest
import torch

from segcal.errors import ConfigError
from segcal.training import Trainer
from segcal.training.windows import in_windows
from training.scans import small, write_scans


def means(part):
    """A network whose output depends on the window: its mean, and each voxel."""
    return torch.cat((part.mean((2, 3), keepdim=True).expand_as(part), part), 1)


def test_every_voxel_is_the_weighted_mean_of_its_windows():
    images = torch.randn(2, 1, 9, 7, generator=torch.Generator().manual_seed(0))
    total, weights = np.zeros((2, 2, 9, 7)), np.zeros((9, 7))
    # Windows are four and three voxels long, and begin at most two and one voxels apart.
    for row, column in itertools.product((0, 2, 3, 5), range(5)):
        for i, j in itertools.product(range(4), range(3)):
            weight = np.exp(-0.5 * ((i - 1.5) / 0.5) ** 2) * np.exp(-0.5 * ((j - 1) / 0.375) ** 2)
            part = means(images[:, :, row : row + 4, column : column + 3].double())
            total[:, :, row + i, column + j] += weight * part[:, :, i, j].numpy()
            weights[row + i, column + j] += weight
    np.testing.assert_allclose(in_windows(means, images, (4, 3)), total / weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, (9, 7), (20, 20)])
def test_images_that_are_no_larger_are_predicted_whole(window):
    images = torch.randn(2, 1, 9, 7)
    assert torch.equal(in_windows(means, images, window), means(images))


def test_a_window_may_be_longer_than_one_axis():
    seen = []
    in_windows(lambda part: seen.append(part.shape[2:]) or part, torch.zeros(1, 1, 4, 10, 6), (8, 4, 6))
    assert set(seen) == {(4, 4, 6)}
    assert len(seen) == 4


@pytest.mark.parametrize(("size", "dims"), [((5, 24, 28), 2), ((12, 24, 28), 3)])
def test_scans_are_predicted_so(tmp_path, size, dims):
    write_scans(tmp_path / "d", 6, size)
    window = [8, 16, 16][-dims:]
    trainer = Trainer(small(tmp_path / "d", dims=dims, window=window, epochs=1))
    trainer.fit()
    case, scan = trainer.predictions("test")[0], trainer.dataset.scans[trainer.parts["test"][0]]
    image = scan.normalised(slice(0, size[0]))
    image = image.transpose(0, 1) if dims == 2 else image[None]
    with torch.no_grad():
        expected = in_windows(trainer.network.eval(), image, window)
    torch.testing.assert_close(case.logits, expected.transpose(0, 1)[None] if dims == 2 else expected)


def test_a_window_has_the_dimensions_of_the_network(tmp_path):
    with pytest.raises(ConfigError, match=r"window = \[8, 8, 8\]; .* 2 numbers, as dims = 2"):
        small(tmp_path, window=[8, 8, 8])
