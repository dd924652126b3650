"""What all networks of the trainer share: images of any size in, logits of the same size out, and their files."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from segcal.errors import InputError
from segcal.files.atomic import atomic_path

# Where files hold the arguments of the network's constructor; the first network gave it its name.
KEY = "segcal.training.UNet"


class Segmenter(nn.Module):
    """A network whose input ``(B, channels, *S)`` may have any size.

    Images are padded with their border values to a multiple of a size, and the logits ``(B, classes, *S)`` are cropped.

    Args:
        channels: Channels of the image.
        dims: 2 for images, 3 for volumes.
        multiple: Sizes that ``scores`` can take are multiples of it.
        options: The constructor's arguments, for the file.
    """

    def __init__(self, channels: int, dims: int, multiple: int, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.channels, self.dims, self.multiple, self.options = channels, dims, multiple, dict(options)

    @abstractmethod
    def scores(self, images: Tensor) -> Tensor:
        """Logits of images whose sizes are multiples of ``multiple``."""

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
        inside = (slice(None), slice(None), *(slice(size) for size in space))
        return self.scores(x)[inside].contiguous()

    def normalised(self, image: Tensor) -> Tensor:
        """An image ``(channels, *S)`` as the network was trained on: each channel less its mean, over its deviation.

        These are in ``options`` if they are those of the training images; otherwise they are those of the image.

        Examples:
            >>> from segcal.training.networks import new_network
            >>> new_network(1, 2, "unet", width=2, depth=2, mean=[10.0], std=[4.0]).normalised(torch.tensor([[14.0]]))
            tensor([[1.]])
        """
        shape = (-1, *(1,) * (image.ndim - 1))
        if "mean" in self.options:
            mean, deviation = (torch.tensor(self.options[name], device=image.device) for name in ("mean", "std"))
        else:
            deviation, mean = torch.std_mean(image.double().flatten(1), 1, correction=0)
        deviation = torch.where(deviation > 0, deviation, 1.0)  # a constant channel becomes 0
        return ((image - mean.view(shape)) / deviation.view(shape)).float()

    def to_channels_last(self) -> None:
        """Weights of a network for images are stored so, which makes convolutions on a CPU half as fast again."""
        if self.dims == 2:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def save(self, path: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the weights (or other ones for this network) and the constructor's arguments to a safetensors file."""
        weights = self.state_dict() if weights is None else weights
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        with atomic_path(path) as temporary:
            temporary.write_bytes(save(tensors, metadata={KEY: json.dumps(self.options)}))


def _padded(size: int, multiple: int) -> int:
    """The next multiple; at least twice it, because normalisation needs more than one voxel at the lowest level."""
    return max(2, -(-size // multiple)) * multiple if multiple > 1 else size


def pad_end(tensor: Tensor, size: Sequence[int], *, mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad the last axes at their end to a size; a tensor that has it is returned as it is."""
    missing = [want - have for want, have in zip(size, tensor.shape[-len(size) :], strict=True)]
    if not any(missing):
        return tensor
    return F.pad(tensor, [amount for lack in reversed(missing) for amount in (0, lack)], mode, value)
