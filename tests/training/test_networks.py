import pytest
import torch
from torch.nn import functional as F

from segcal.errors import SegcalError
from segcal.training import UNet, load_network


@pytest.mark.parametrize("network", ["unet", "residual-unet"])
@pytest.mark.parametrize("norm", ["batch", "instance", "none"])
@pytest.mark.parametrize("space", [(1, 1), (3, 17), (16, 16), (1, 2, 3), (9, 4, 11)])
def test_any_size_and_channels_in_the_same_size_out(network, norm, space):
    unet = UNet(len(space), 5, network=network, width=2, depth=4, norm=norm, dims=len(space))
    logits = unet(torch.randn(1, len(space), *space))
    assert logits.shape == (1, 5, *space)
    logits.square().sum().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in unet.parameters())


def test_the_default_is_the_size_that_is_known_of_the_papers_network():
    with torch.device("meta"):
        unet = UNet(3, 2)
    # The count that public implementations with batch normalisation and transposed convolutions report.
    assert sum(parameter.numel() for parameter in unet.parameters()) == 31_037_698


def test_images_are_continued_by_their_border_and_cropped():
    unet = UNet(1, 2, width=2, depth=3).eval()
    image = torch.randn(1, 1, 9, 10)
    padded = F.pad(image, (0, 2, 0, 3), mode="replicate")
    torch.testing.assert_close(unet(image), unet(padded)[:, :, :9, :10])


def test_a_residual_level_without_convolutions_is_its_shortcut():
    unet = UNet(2, 3, network="residual-unet", width=4, depth=1, norm="none")
    torch.nn.init.zeros_(unet.down[0].body[-1].weight)
    torch.nn.init.zeros_(unet.down[0].body[-1].bias)
    x = torch.randn(1, 2, 5, 5)
    torch.testing.assert_close(unet(x), unet.head(unet.down[0].shortcut(x).relu()))


def test_saved_and_loaded_it_says_the_same(tmp_path):
    unet = UNet(2, 3, network="residual-unet", width=3, depth=2, norm="batch")
    unet(torch.randn(4, 2, 8, 8))  # moves the running means
    unet.save(tmp_path / "best.safetensors")
    image = torch.randn(1, 2, 7, 9)
    assert torch.equal(load_network(tmp_path / "best.safetensors")(image), unet.eval()(image))


def test_bad_input_is_named(tmp_path):
    with pytest.raises(SegcalError, match=r"images have shape \(1, 2, 8, 8\); expected \(B, 1, H, W\)"):
        UNet(1, 2, width=2, depth=2)(torch.zeros(1, 2, 8, 8))
    for wrong in ({"dims": 4}, {"norm": "group"}, {"network": "fcn"}, {"depth": 0}, {"width": 0}):
        with pytest.raises(SegcalError, match=f"{next(iter(wrong))} is"):
            UNet(1, 2, **wrong)
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    with pytest.raises(SegcalError, match="cannot be read"):
        load_network(tmp_path / "x.safetensors")
