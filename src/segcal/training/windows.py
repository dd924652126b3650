"""Predictions of scans in windows, for networks that were trained on crops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product

import torch
from torch import Tensor

# Standard deviations of the weights' bell that fit into a window.
_DEVIATIONS = 8


def in_windows(network: Callable[[Tensor], Tensor], images: Tensor, window: Sequence[int] | None) -> Tensor:
    """Logits of images ``(B, channels, *S)``: the means of those of windows that overlap by half, centres count most.

    A network that was trained on crops meets at the ends of a scan what it has met at the ends of crops. Without a
    window, or if images are no larger, they are predicted whole.

    Examples:
        >>> in_windows(lambda part: 2 * part, torch.arange(12.0).view(1, 1, 3, 4), (2, 3)).round().view(3, 4)
        tensor([[ 0.,  2.,  4.,  6.],
                [ 8., 10., 12., 14.],
                [16., 18., 20., 22.]])
    """
    size = images.shape[2:]
    if window is None or all(have <= want for have, want in zip(size, window, strict=True)):
        return network(images).float()
    shape = [min(have, want) for have, want in zip(size, window, strict=True)]
    weight = reduce(lambda outer, bell: outer[..., None] * bell, (_bell(length, images.device) for length in shape))
    total, weights = None, images.new_zeros(size)
    for starts in product(*map(_starts, size, shape)):
        inside = tuple(slice(start, start + length) for start, length in zip(starts, shape, strict=True))
        place = (slice(None), slice(None), *inside)
        logits = weight * network(images[place]).float()
        total = logits.new_zeros(*logits.shape[:2], *size) if total is None else total
        total[place] += logits
        weights[inside] += weight
    assert total is not None
    return total / weights


def _starts(size: int, window: int) -> list[int]:
    """The first voxels of windows that cover an axis evenly and overlap by half or more."""
    count = 1 + math.ceil((size - window) / max(1, window // 2))
    return [round(k * (size - window) / max(1, count - 1)) for k in range(count)]


def _bell(length: int, device: torch.device) -> Tensor:
    """Weights of a window along an axis: a Gaussian with a deviation of an eighth of it, as in nnU-Net."""
    distance = torch.arange(length, device=device) - (length - 1) / 2
    weights: Tensor = torch.exp(-0.5 * (distance / (length / _DEVIATIONS)) ** 2)
    return weights
