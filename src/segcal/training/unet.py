"""U-Nets for images and volumes of any size: the plain one of the papers, and one with residual blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from segcal.errors import check_name, check_whole
from segcal.training.segmenter import Segmenter

Shortcut = Literal["unet", "residual-unet"]
Norm = Literal["batch", "instance", "none"]
# The lowest and the highest value of each size.
_RANGES = {"channels": (1, None), "classes": (2, None), "width": (1, None), "depth": (1, 8), "dims": (2, 3)}


class UNet(Segmenter):
    """U-Net: ``depth`` levels of two 3x3(x3) convolutions, with ``width`` channels that double from level to level.

    Max pooling goes down, transposed convolutions go up, and skip connections are concatenated (Ronneberger et al.
    2015, with width 64 and depth 5; Çiçek et al. 2016 in 3D). Convolutions are padded, so the output has the size of
    the input. ``network="residual-unet"`` adds the input of each level to the output of its convolutions, by a 1x1(x1)
    convolution (He et al. 2016). The input ``(B, channels, *S)`` may have any size: it is padded with its border values
    to a multiple of ``2^(depth - 1)``, and the logits ``(B, classes, *S)`` are cropped.

    Args:
        channels: Channels of the image.
        classes: C.
        network: ``unet`` or ``residual-unet``.
        width: Channels of the first level.
        depth: Number of levels.
        norm: Between convolution and ReLU: ``batch``, ``instance`` or ``none``.
        dims: 2 for images, 3 for volumes.

    Examples:
        >>> UNet(1, 4, width=4, depth=3)(torch.zeros(2, 1, 33, 50)).shape
        torch.Size([2, 4, 33, 50])
        >>> UNet(2, 3, width=4, depth=3, dims=3)(torch.zeros(1, 2, 5, 9, 12)).shape
        torch.Size([1, 3, 5, 9, 12])
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        *,
        network: Shortcut = "unet",
        width: int = 64,
        depth: int = 5,
        norm: Norm = "batch",
        dims: int = 2,
    ) -> None:
        sizes = {"channels": channels, "classes": classes, "width": width, "depth": depth, "dims": dims}
        for name, (low, high) in _RANGES.items():
            check_whole(name, sizes[name], low, high)
        check_name("network", network, get_args(Shortcut))
        check_name("norm", norm, get_args(Norm))
        super().__init__(channels, dims, 2 ** (depth - 1), {**sizes, "network": network, "norm": norm})
        widths = [width * 2**level for level in range(depth)]
        block = _Residual if network == "residual-unet" else Plain
        self.down = nn.ModuleList(
            block(before, after, norm, dims) for before, after in zip((channels, *widths), widths, strict=False)
        )
        self.pool = _of("MaxPool", dims)(2)
        self.rise = nn.ModuleList(_of("ConvTranspose", dims)(2 * w, w, 2, stride=2) for w in widths[-2::-1])
        self.up = nn.ModuleList(block(2 * width, width, norm, dims) for width in widths[-2::-1])
        self.head = _of("Conv", dims)(width, classes, 1)
        self.to_channels_last()

    def scores(self, images: Tensor) -> Tensor:
        """Logits of images whose sizes can be halved often enough."""
        x, skips = images, []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            skips.append(x)
        skips.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat((skips.pop(), rise(x)), 1))
        logits: Tensor = self.head(x)
        return logits


class Plain(nn.Sequential):
    """Two convolutions, each followed by normalisation and ReLU."""

    def __init__(self, before: int, after: int, norm: Norm, dims: int) -> None:
        super().__init__(*_layer(before, after, norm, dims), nn.ReLU(), *_layer(after, after, norm, dims), nn.ReLU())


class _Residual(nn.Module):
    """Two convolutions with a shortcut, and a ReLU after the sum."""

    def __init__(self, before: int, after: int, norm: Norm, dims: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_layer(before, after, norm, dims), nn.ReLU(), *_layer(after, after, norm, dims))
        self.shortcut = _of("Conv", dims)(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = F.relu(self.body(x) + self.shortcut(x))
        return total


def _layer(before: int, after: int, norm: Norm, dims: int) -> list[nn.Module]:
    # Normalisation has its own offset, so a bias before it would have no effect.
    convolution = _of("Conv", dims)(before, after, 3, padding=1, bias=norm == "none")
    if norm == "none":
        return [convolution]
    return [convolution, _of(f"{norm.title()}Norm", dims)(after, affine=True)]


def _of(kind: str, dims: int) -> Callable[..., nn.Module]:
    """The layer of this kind for images or volumes, such as ``nn.Conv2d``."""
    return getattr(nn, f"{kind}{dims}d")  # type: ignore[no-any-return]
