"""The encoder of EfficientNet U-Nets against the package whose files of weights it reads."""

import pytest
import torch

from segcal.training import EfficientUNet

peer = pytest.importorskip("efficientnet_lite_pytorch", reason="needs the extra test-integrations")


def test_it_computes_what_the_package_computes(tmp_path):
    torch.manual_seed(0)
    theirs = peer.EfficientNet.from_name("efficientnet-lite0").eval()
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2)
            elif "_bn" in name and tensor.is_floating_point():
                tensor.normal_(1, 0.3)
    torch.save(theirs.state_dict(), tmp_path / "lite0.pth")
    network = EfficientUNet(3, 2, width=1).eval()
    network.load_encoder(tmp_path / "lite0.pth")
    image = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        x, wanted = theirs._swish(theirs._bn0(theirs._conv_stem(image))), []
        for block in theirs._blocks:
            if block._block_args.stride in (2, [2]):
                wanted.append(x)
            x = block(x)
        ours = network.encoder(image)
    assert len(ours) == len(wanted) + 1
    for mine, other in zip(ours, [*wanted, x], strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
