"""FC-DenseNet, also known as Tiramisu, for images of any size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from segcal.errors import check_whole
from segcal.training.segmenter import Segmenter

# Layers of the blocks of FC-DenseNet103, from the finest to the coarsest.
LAYERS_103 = (4, 5, 7, 10, 12, 15)
# Channels of the first convolution.
FIRST = 48
# Share of the features that are set to 0 after every convolution in training.
DROPOUT = 0.2


class FCDenseNet(Segmenter):
    """FC-DenseNet: a U-Net of dense blocks, each of whose layers sees the outputs of all before it (Jégou et al. 2017).

    A layer is batch normalisation, ReLU, a 3x3 convolution to ``width`` channels (the growth rate) and dropout. On the
    way up, only the new features of a block are passed on. FC-DenseNet56 has width 12 and six times 4 layers,
    FC-DenseNet67 width 16 and six times 5, FC-DenseNet103 width 16 and 4, 5, 7, 10, 12, 15 layers. Any size of image is
    padded as for ``UNet``.

    Args:
        channels: Channels of the image.
        classes: C.
        width: Channels that a layer adds.
        layers: Layers of each dense block, from the finest to the coarsest.

    Examples:
        >>> FCDenseNet(3, 11, width=4, layers=(1, 2, 2))(torch.zeros(2, 3, 33, 50)).shape
        torch.Size([2, 11, 33, 50])
    """

    def __init__(self, channels: int, classes: int, *, width: int = 16, layers: Sequence[int] = LAYERS_103) -> None:
        check_whole("channels", channels, 1)
        check_whole("classes", classes, 2)
        check_whole("width", width, 1)
        check_whole("number of blocks", len(layers), 1, 8)
        for count in layers:
            check_whole("layers", count, 1)
        options = {"network": "fc-densenet", "channels": channels, "classes": classes, "width": width}
        super().__init__(channels, 2, 2 ** (len(layers) - 1), {**options, "layers": list(layers)})
        self.first = nn.Conv2d(channels, FIRST, 3, padding=1)
        *finer, coarsest = layers
        size, skips = FIRST, []
        self.down, self.sink = nn.ModuleList(), nn.ModuleList()
        for count in finer:
            self.down.append(_Block(size, count, width))
            size += count * width
            skips.append(size)
            self.sink.append(nn.Sequential(*_layer(size, size, 1), nn.MaxPool2d(2)))
        self.bottom = _Block(size, coarsest, width)
        self.rise, self.up = nn.ModuleList(), nn.ModuleList()
        new = coarsest * width
        for count, skip in zip(reversed(finer), reversed(skips), strict=True):
            self.rise.append(nn.ConvTranspose2d(new, new, 3, stride=2, padding=1, output_padding=1))
            size, new = new + skip, count * width
            self.up.append(_Block(size, count, width))
        # The last block passes on its input, too.
        self.head = nn.Conv2d(size + new, classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        self.to_channels_last()

    def scores(self, images: Tensor) -> Tensor:
        """Logits of images whose sizes can be halved often enough."""
        x, skips = self.first(images), []
        for block, sink in zip(self.down, self.sink, strict=True):
            x = torch.cat((x, block(x)), 1)
            skips.append(x)
            x = sink(x)
        new = self.bottom(x)
        for rise, block in zip(self.rise, self.up, strict=True):
            x = torch.cat((rise(new), skips.pop()), 1)
            new = block(x)
        logits: Tensor = self.head(torch.cat((x, new), 1))
        return logits


class _Block(nn.Module):
    """A dense block; returns the new features only."""

    def __init__(self, before: int, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(*_layer(before + i * width, width, 3)) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for layer in self.layers:
            new = layer(x)
            found.append(new)
            x = torch.cat((x, new), 1)
        return torch.cat(found, 1)


def _layer(before: int, after: int, size: int) -> list[nn.Module]:
    return [
        nn.BatchNorm2d(before),
        nn.ReLU(),
        nn.Conv2d(before, after, size, padding=size // 2),
        nn.Dropout(DROPOUT),
    ]
