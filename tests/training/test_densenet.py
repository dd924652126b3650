import pytest
import torch
from torch.nn import functional as F

from segcal.errors import SegcalError
from segcal.training import FCDenseNet, Trainer, load_network
from training.scans import small, write_scans

SMALL = {"width": 2, "layers": (1, 2, 2)}


@pytest.mark.parametrize("space", [(1, 1), (3, 17), (16, 16)])
def test_any_size_in_the_same_size_out(space):
    network = FCDenseNet(3, 5, **SMALL)
    logits = network(torch.randn(1, 3, *space))
    assert logits.shape == (1, 5, *space)
    logits.square().sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in network.parameters())


@pytest.mark.parametrize(
    ("width", "layers", "depth", "count"),
    # What a public implementation counts for a head of one class, 9.4 and 1.5 million in the paper.
    [(16, (4, 5, 7, 10, 12, 15), 103, 9_319_521), (12, (4,) * 6, 56, 1_374_865)],
)
def test_it_has_as_many_parameters_as_the_published_network(width, layers, depth, count):
    with torch.device("meta"):
        network = FCDenseNet(3, 11, width=width, layers=layers)
    head = network.head.in_channels + 1  # weights and bias of one class
    assert sum(parameter.numel() for parameter in network.parameters()) == count + 10 * head
    convolutions = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.ConvTranspose2d)]
    assert len(convolutions) == depth


def test_images_are_continued_by_their_border_and_cropped():
    network = FCDenseNet(1, 2, **SMALL).eval()
    image = torch.randn(1, 1, 9, 10)
    padded = F.pad(image, (0, 2, 0, 3), mode="replicate")
    torch.testing.assert_close(network(image), network(padded)[:, :, :9, :10])


def test_features_are_dropped_in_training_only():
    network, image = FCDenseNet(1, 2, **SMALL), torch.randn(2, 1, 8, 8)
    assert not torch.equal(network(image), network(image))
    network.eval()
    assert torch.equal(network(image), network(image))


def test_saved_and_loaded_it_says_the_same(tmp_path):
    network = FCDenseNet(2, 3, **SMALL)
    network(torch.randn(4, 2, 8, 8))  # moves the running means
    network.save(tmp_path / "best.safetensors")
    loaded, image = load_network(tmp_path / "best.safetensors"), torch.randn(1, 2, 7, 9)
    assert isinstance(loaded, FCDenseNet)
    assert torch.equal(loaded(image), network.eval()(image))


def test_a_resumed_run_drops_the_same_features(tmp_path):
    write_scans(tmp_path / "d", 6, (16, 16))
    keys = {"network": "fc-densenet", **SMALL, "epochs": 3, "device": "cpu"}
    whole = Trainer(small(tmp_path / "d", output="whole", **keys))
    whole.fit()
    output = "parts"
    Trainer(small(tmp_path / "d", output=output, **keys)).fit(stop=lambda: True)
    torch.rand(5)  # Whatever else draws random numbers in between.
    resumed = Trainer(small(tmp_path / "d", output=output, **keys), resume=True)
    resumed.fit()
    for mine, other in zip(whole.network.parameters(), resumed.network.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("wrong", [{"width": 0}, {"layers": (0, 2)}, {"layers": ()}])
def test_bad_sizes_are_refused(wrong):
    with pytest.raises(SegcalError, match="expected"):
        FCDenseNet(1, 2, **{**SMALL, **wrong})
