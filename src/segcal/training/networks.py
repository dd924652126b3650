"""U-Nets for images and volumes of any size: the plain one of the papers, and one with residual blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from segcal.errors import DataError, InputError, check_name, check_whole
from segcal.files.atomic import atomic_path

Network = Literal["unet", "residual-unet"]
Norm = Literal["batch", "instance", "none"]
_KEY = "segcal.training.UNet"
# The lowest and the highest value of each size.
_RANGES = {"channels": (1, None), "classes": (2, None), "width": (1, None), "depth": (1, 8), "dims": (2, 3)}


class UNet(nn.Module):
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
        network: Network = "unet",
        width: int = 64,
        depth: int = 5,
        norm: Norm = "batch",
        dims: int = 2,
    ) -> None:
        super().__init__()
        sizes = {"channels": channels, "classes": classes, "width": width, "depth": depth, "dims": dims}
        for name, (low, high) in _RANGES.items():
            check_whole(name, sizes[name], low, high)
        check_name("network", network, get_args(Network))
        check_name("norm", norm, get_args(Norm))
        self.options = {**sizes, "network": network, "norm": norm}
        self.dims, self.channels = dims, channels
        self.multiple: int = 2 ** (depth - 1)
        widths = [width * 2**level for level in range(depth)]
        block = _Residual if network == "residual-unet" else _Plain
        self.down = nn.ModuleList(
            block(before, after, norm, dims) for before, after in zip((channels, *widths), widths, strict=False)
        )
        self.pool = _of("MaxPool", dims)(2)
        self.rise = nn.ModuleList(_of("ConvTranspose", dims)(2 * w, w, 2, stride=2) for w in widths[-2::-1])
        self.up = nn.ModuleList(block(2 * width, width, norm, dims) for width in widths[-2::-1])
        self.head = _of("Conv", dims)(width, classes, 1)
        if dims == 2:  # makes convolutions on a CPU half as fast again
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(B, classes, *S)``."""
        if images.ndim != 2 + self.dims or images.shape[1] != self.channels:
            raise InputError(
                f"images have shape {tuple(images.shape)}",
                expected=f"(B, {self.channels}, {', '.join('DHW'[3 - self.dims :])})",
            )
        space = images.shape[2:]
        x = pad_end(images, [_padded(size, self.multiple) for size in space], mode="replicate")
        if self.dims == 2:
            x = x.contiguous(memory_format=torch.channels_last)
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            skips.append(x)
        skips.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat((skips.pop(), rise(x)), 1))
        logits: Tensor = self.head(x)
        inside = (slice(None), slice(None), *(slice(size) for size in space))
        return logits[inside].contiguous()

    def save(self, path: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the weights (or other ones for this network) and the constructor's arguments to a safetensors file."""
        weights = self.state_dict() if weights is None else weights
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        with atomic_path(path) as temporary:
            temporary.write_bytes(save(tensors, metadata={_KEY: json.dumps(self.options)}))


def load_network(path: str | Path) -> UNet:
    """The network in a file written by training, in evaluation mode.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "best.safetensors"
        >>> UNet(1, 3, width=4, depth=2).save(file)
        >>> load_network(file)(torch.zeros(1, 1, 8, 8)).shape
        torch.Size([1, 3, 8, 8])
    """
    try:
        with safe_open(path, "pt") as file:
            options = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot be read ({error})", where=str(path), expected="a network of segcal train") from None
    if options is None:
        raise DataError("holds no segcal network", where=str(path), expected="best.safetensors of segcal train")
    network = UNet(**json.loads(options))
    network.load_state_dict(tensors)
    return network.eval()


class _Plain(nn.Sequential):
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


def _padded(size: int, multiple: int) -> int:
    """The next multiple; at least twice it, because normalisation needs more than one voxel at the lowest level."""
    return max(2, -(-size // multiple)) * multiple if multiple > 1 else size


def pad_end(tensor: Tensor, size: Sequence[int], *, mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad the last axes at their end to a size; a tensor that has it is returned as it is."""
    missing = [want - have for want, have in zip(size, tensor.shape[-len(size) :], strict=True)]
    if not any(missing):
        return tensor
    return F.pad(tensor, [amount for lack in reversed(missing) for amount in (0, lack)], mode, value)
