"""The network of local temperature scaling: a tree of gated convolutions, with the padding and tiles that it needs.

A voxel's temperature depends on voxels up to ``HALO`` away, so a tile of rows needs that many more on either side.
Beyond the border the image is mirrored without repeating the border voxels: an axis of n voxels has the period
``2 (n - 1)``, so axes shorter than the halo are mirrored repeatedly and a single slice repeats. A tile with its halo
holds exactly the values that the whole padded image has there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segcal.errors import InputError
from segcal.kernels import recording
from segcal.scores import OFFSET_LIMIT

Neighbourhood = Literal["plane", "volume"]
Inputs = Literal["logits", "log-probs"]
# The tensors that are applied to the scores, and those that are applied to the image.
Prefix = Literal["", "image_"]

TAPS, DILATION = 5, 2
HALO = (TAPS - 1) * DILATION // 2
LEAVES, GATES = 4, 3
# Inputs are at most this many nats below the best class, which is impossible even at a temperature of 5. Without a
# floor, classes at -inf would make inputs or their standard deviation infinite; a higher one would hide the depth of
# the logits, which tells how overconfident an image is.
FLOOR = 60.0
# Bounds of the temperature, as in ``ts``: beyond them every softmax is one-hot or uniform.
COLDEST, HOTTEST = 1e-3, 1e3
# A smaller standard deviation counts as zero.
SMALLEST_SCALE = 1e-6
# softplus of this is 1.
UNIT = math.log(math.e - 1)


def tree_shapes(num_classes: int, image_channels: int, neighbourhood: Neighbourhood) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters and buffers of a ``TemperatureTree``."""
    kernel = (TAPS,) * (2 if neighbourhood == "plane" else 3)
    branches = LEAVES + GATES + (image_channels > 0)
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix, outputs, inputs in (("", branches, num_classes), ("image_", 1, image_channels)):
        if inputs:
            shapes |= {f"{prefix}weight": (outputs, inputs, *kernel), f"{prefix}bias": (outputs,)}
            shapes |= {f"{prefix}mean": (inputs,), f"{prefix}scale": (inputs,)}
    return shapes


class TemperatureTree(nn.Module):
    """From the scores around a voxel, and optionally its image, to a positive factor of the temperature.

    Leaves ``t`` and gates ``g`` are convolutions with one output, 5 taps and dilation 2 along each axis, and s is the
    logistic function: ``A = s(g1) t1 + (1 - s(g1)) t2``, ``B = s(g2) t3 + (1 - s(g2)) t4``,
    ``L = s(g3) A + (1 - s(g3)) B``, ``root = s(gI) tI + (1 - s(gI)) L`` with a leaf tI of the image, or ``root = L``;
    the factor is ``softplus(root + 0.5413)`` (Ding et al., ICCV 2021). All of them see the same scores, so they are
    computed by one convolution. Initially the leaves are 0 and the factor is 1. The gates start as noise: with equal
    gates, all leaves would get equal gradients and stay equal.

    Inputs are standardised with the means and scales in the buffers.

    Examples:
        >>> tree = TemperatureTree(num_classes=3)
        >>> tree(torch.randn(2, 3, 9 + 3, 9 + 5)).shape
        torch.Size([2, 4, 6])
    """

    weight: nn.Parameter
    bias: nn.Parameter
    mean: Tensor
    scale: Tensor

    def __init__(
        self, num_classes: int, *, image_channels: int = 0, neighbourhood: Neighbourhood = "plane", seed: int = 0
    ) -> None:
        super().__init__()
        self.image_channels = image_channels
        for name, shape in tree_shapes(num_classes, image_channels, neighbourhood).items():
            if name.endswith(("mean", "scale")):
                self.register_buffer(name, torch.zeros(shape) if name.endswith("mean") else torch.ones(shape))
            else:
                self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        generator = torch.Generator().manual_seed(seed)
        fan_in = self.weight[0].numel()
        noise = torch.randn(self.weight[LEAVES:].shape, generator=generator) / math.sqrt(fan_in)
        with torch.no_grad():
            self.weight[LEAVES:] = noise
        self.requires_grad_(False)  # only training needs gradients of the parameters

    @property
    def kernel_axes(self) -> int:
        """2 in a plane, 3 in a volume."""
        return self.weight.ndim - 2

    def standardise_by(self, mean: Tensor, scale: Tensor, prefix: Prefix = "") -> None:
        """Set means and scales of the scores or of the image; constant inputs get scale 1."""
        self.get_buffer(f"{prefix}mean").copy_(mean)
        self.get_buffer(f"{prefix}scale").copy_(torch.where(scale > SMALLEST_SCALE, scale, 1.0))

    def reset(self) -> None:
        """Make the factor 1 everywhere."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def forward(self, scores: Tensor, image: Tensor | None = None) -> Tensor:
        """Factors ``(N, *spatial)`` of padded scores ``(N, C, *(spatial + 8))`` and a padded image like them."""
        leaf = None if image is None else self._convolve(image, "image_")[:, 0]
        return _factor(self._convolve(scores), leaf)

    def at_points(self, scores: Tensor) -> Tensor:
        """Factors ``(v,)`` of scores ``(v, C)`` whose neighbours are all like themselves."""
        taps = tuple(range(2, self.weight.ndim))
        x = ((scores - self.mean.to(scores)) / self.scale.to(scores)).nan_to_num_(0.0)
        return _factor(F.linear(x, self.weight.sum(taps).to(x), self.bias.to(x)))

    def _convolve(self, x: Tensor, prefix: Prefix = "") -> Tensor:
        """The dilated convolution of standardised inputs; the weights, which are fewer, are divided by the scale."""
        column = (-1, *[1] * (x.ndim - 2))
        weight, bias = (self.get_parameter(prefix + name).to(x) for name in ("weight", "bias"))
        mean, scale = (self.get_buffer(prefix + name).to(x).view(column) for name in ("mean", "scale"))
        x = (x - mean).nan_to_num_(0.0)
        with exact_convolutions(x.device):
            return (F.conv2d if x.ndim == 4 else F.conv3d)(x, weight / scale, bias, dilation=DILATION)


def exact_convolutions(device: torch.device) -> AbstractContextManager[Any]:
    """On a GPU, convolutions in full float32 (cuDNN's default rounds to 10 bits) that give the same bits every time."""
    if device.type != "cuda" or recording():
        return nullcontext()
    return _exact_cudnn()


@contextmanager
def _exact_cudnn() -> Iterator[None]:
    """The flags of convolutions: those of PyTorch 2.9 and later refuse to be mixed with the earlier ones."""
    cudnn: Any = torch.backends.cudnn
    if not hasattr(cudnn, "conv"):
        with cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            yield
        return
    before = cudnn.deterministic, cudnn.benchmark, cudnn.conv.fp32_precision
    cudnn.deterministic, cudnn.benchmark, cudnn.conv.fp32_precision = True, False, "ieee"
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark, cudnn.conv.fp32_precision = before


def _factor(branches: Tensor, leaf: Tensor | None = None) -> Tensor:
    """The tree of leaves and gates ``(n, 7, ...)``; a leaf of the image has an eighth branch as its gate."""
    t1, t2, t3, t4, g1, g2, g3, *gate = branches.unbind(1)
    root = _gate(g3, _gate(g1, t1, t2), _gate(g2, t3, t4))
    return F.softplus((root if leaf is None else _gate(gate[0], leaf, root)) + UNIT)


def _gate(gate: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.lerp(other, one, torch.sigmoid(gate))


def temperature(factor: Tensor, beta: Tensor | float) -> Tensor:
    """The network's factor times the global temperature ``1 / beta``, within bounds."""
    return (factor / beta).clamp(COLDEST, HOTTEST)


def network_inputs(logits: Tensor, inputs: Inputs) -> Tensor:
    """The network's inputs for logits ``(N, C, ...)``: these or ``log S(z)``, at most ``FLOOR`` below the best class.

    Voxels without a softmax, such as ignored ones, are NaN; the network treats them as average voxels.

    Examples:
        >>> network_inputs(torch.tensor([[2.0, 2.0, -torch.inf]]), "logits")
        tensor([[  2.,   2., -58.]])
    """
    best = logits.amax(1, keepdim=True)
    if inputs == "logits":
        level = best.masked_fill(~torch.isfinite(best), torch.nan)
        return torch.maximum(logits, level - FLOOR).clamp(-OFFSET_LIMIT, OFFSET_LIMIT)
    return (logits - best).log_softmax(1).clamp(min=-FLOOR)


def mirrored(start: int, stop: int, size: int) -> list[int]:
    """Positions ``start..stop`` along an axis of ``size`` voxels, mirrored at the border voxels.

    Examples:
        >>> mirrored(-3, 6, 4), mirrored(-2, 3, 1)
        ([3, 2, 1, 0, 1, 2, 3, 2, 1], [0, 0, 0, 0, 0])
    """
    period = max(1, 2 * (size - 1))
    return [min(place % period, -place % period) for place in range(start, stop)]


def _recorded_mirror(start: int, stop: int, size: int, device: torch.device) -> Tensor:
    """``mirrored`` by operations that are recorded, so that they follow an axis of any size."""
    places = torch.arange(start, stop, device=device)
    period = (2 * torch.arange(size, device=device)[-1]).clamp(min=1)
    return torch.minimum(places % period, -places % period)


@lru_cache(maxsize=256)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Positions as a tensor; windows of images of one size share them, and a GPU need not wait for them again."""
    return torch.tensor(places, device=device)


class Window(NamedTuple):
    """A box of voxels, one ``(start, stop)`` per spatial axis, and its padding."""

    ranges: tuple[tuple[int, int], ...]
    size: tuple[int, ...]
    axes: int  # axes of the kernel; one in the plane treats the slices of a volume separately

    def _halos(self) -> list[tuple[int, int, int]]:
        """Start, stop and size of every axis, halo included."""
        halos = [0] * (len(self.size) - self.axes) + [HALO] * self.axes
        return [
            (start - halo, stop + halo, length)
            for (start, stop), halo, length in zip(self.ranges, halos, self.size, strict=True)
        ]

    def _places(self) -> list[list[int]]:
        return [mirrored(*own) for own in self._halos()]

    @property
    def source(self) -> slice:
        """The rows to read, halo included."""
        if recording():  # the box is the whole image, of a size that may not be known
            return slice(0, self.size[0])
        rows = self._places()[0]
        return slice(min(rows), max(rows) + 1)

    def inside(self, tensor: Tensor) -> Tensor:
        """The rows of the box, from a tensor ``(N, C, rows, ...)`` that holds those of ``source``."""
        (start, stop), first = self.ranges[0], self.source.start
        return tensor[:, :, start - first : stop - first]

    def padded(self, tensor: Tensor) -> Tensor:
        """The box with its halo; if the kernel is in the plane, the slices of a volume become batch items."""
        # Channels last: rows and columns are copied in runs, and the convolution is up to three times as fast.
        tensor = tensor.movedim(1, -1).contiguous()
        for axis, index in enumerate(self._indices(tensor.device), start=1):
            if index is not None:
                tensor = tensor.index_select(axis, index)
        if len(self.size) > self.axes:
            tensor = tensor.flatten(0, 1)
        return tensor.movedim(-1, 1)

    def _indices(self, device: torch.device) -> Iterator[Tensor | None]:
        """The positions of every axis in ``source``; None for an axis that is read as it is."""
        if recording():
            for start, stop, length in self._halos():
                yield _recorded_mirror(start, stop, length, device)
            return
        rows, *others = self._places()
        first, stop = self.source.start, self.source.stop
        lengths = stop - first, *self.size[1:]
        for places, length in zip(([row - first for row in rows], *others), lengths, strict=True):
            yield None if places == list(range(length)) else _index(tuple(places), device)


def check_space(spatial: tuple[int, ...], axes: int) -> None:
    """Raise if the kernel does not suit the spatial shape."""
    if len(spatial) not in (axes, 3):
        expected = "(N, C, height, width) or (N, C, depth, height, width)" if axes == 2 else "volumes"
        raise InputError(f"the space of the logits is {spatial}", expected=expected)


def check_image(image: Tensor | None, channels: int, shape: tuple[int, ...]) -> Tensor:
    """The image for logits of a shape ``(N, C, *spatial)``; raises if it is missing or does not fit."""
    if image is None:
        raise InputError(
            "no image", expected=f"one of {channels} channels", fix="fit with image_channels=0 to do without"
        )
    if image.ndim != len(shape) or image.shape[0] not in (1, shape[0]) or tuple(image.shape[2:]) != shape[2:]:
        raise InputError(
            f"the image has shape {tuple(image.shape)}", expected=f"(1, {channels}, {', '.join(map(str, shape[2:]))})"
        )
    if image.shape[1] != channels:
        raise InputError(f"the image has {image.shape[1]} channels", expected=f"image_channels = {channels}")
    if not recording() and not bool(torch.isfinite(image).all()):
        raise InputError(
            "the image holds NaN or infinite values", expected="numbers", fix="write 0 where there are none"
        )
    return image
