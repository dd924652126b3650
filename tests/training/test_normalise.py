"""Images are normalised one by one, or all like the training images; the network's file says how."""

import numpy as np
import pytest
import torch

from segcal.errors import ConfigError
from segcal.training import Trainer, load_network
from training.scans import small, write_scans


@pytest.fixture
def root(tmp_path):
    """Images of different brightness."""
    write_scans(tmp_path / "d", 6)
    for number, path in enumerate(sorted((tmp_path / "d" / "images").iterdir())):
        np.save(path, np.load(path) * (1 + number) + 10 * number)
    return tmp_path / "d"


def raw(scan):
    return scan.image(slice(0, scan.spatial[0]))


def test_the_mean_and_deviation_are_those_of_all_training_images(root):
    trainer = Trainer(small(root, normalise="train"))
    some = torch.stack([raw(trainer.dataset.scans[name]) for name in trainer.parts["train"]]).double()
    std, mean = torch.std_mean(some, (0, 2, 3), correction=0)
    for scan in trainer.dataset.scans.values():
        expected = (raw(scan) - mean[:, None, None]) / std[:, None, None]
        torch.testing.assert_close(scan.normalised(slice(0, scan.spatial[0])), expected.float())


@pytest.mark.parametrize("normalise", ["scan", "train"])
def test_the_network_of_a_file_normalises_as_training_did(root, normalise):
    trainer = Trainer(small(root, normalise=normalise, epochs=1))
    trainer.fit()
    network = load_network(trainer.output / "best.safetensors")
    assert ("mean" in network.options) == (normalise == "train")
    for scan in trainer.dataset.scans.values():
        torch.testing.assert_close(network.normalised(raw(scan)), scan.normalised(slice(0, scan.spatial[0])))
    case = trainer.predictions("test")[0]
    image = network.normalised(case.source.image(slice(0, case.shape[2]))[0])
    with torch.no_grad():
        torch.testing.assert_close(network(image[None]), case.logits)


def test_a_constant_channel_becomes_zero(root):
    for path in (root / "images").iterdir():
        np.save(path, np.full_like(np.load(path), 0.25))
    trainer = Trainer(small(root, normalise="train"))
    scan = trainer.dataset.scans[trainer.parts["test"][0]]
    assert not scan.normalised(slice(0, scan.spatial[0])).any()
    assert not trainer.network.normalised(raw(scan)).any()


def test_a_run_is_resumed_as_it_began(root):
    Trainer(small(root, epochs=1)).fit()
    with pytest.raises(ConfigError, match=r"normalise \('train', was 'scan'\)"):
        Trainer(small(root, normalise="train"), resume=True)
    with pytest.raises(ConfigError, match="normalise"):
        small(root, normalise="image")
