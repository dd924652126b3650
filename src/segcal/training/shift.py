"""Photometric corruptions of images: a covariate shift of known strength that keeps all labels valid.

The bank of Kirscher et al., Table 6, after ImageNet-C (Hendrycks and Dietterich, ICLR 2019): noise, blur, brightness,
JPEG compression and fog, each mild or strong. Images are ``(C, H, W)`` or ``(C, D, H, W)`` with values in [0, 1];
volumes are blurred and compressed slice by slice.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from functools import cached_property, partial
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch import Tensor

from segcal.errors import InputError, SegcalError, check_name
from segcal.scores import multilabel_view
from segcal.types import Case

Corruption = Literal["noise", "blur", "brightness", "jpeg", "fog"]
Severity = Literal["mild", "strong"]
CORRUPTIONS: tuple[Corruption, ...] = get_args(Corruption)
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

_NOISE = {"mild": 0.03, "strong": 0.10}  # standard deviation
_BLUR = {"mild": (5, 1.0), "strong": (13, 3.0)}  # kernel size, standard deviation
_BRIGHTNESS = {"mild": 1.2, "strong": 1.8}  # factor
_QUALITY = {"mild": 60, "strong": 10}
_FOG = {"mild": 0.1, "strong": 0.5}  # opacity


def corrupt(image: Tensor, name: str, kind: Corruption | None, severity: Severity, seed: int = 0) -> Tensor:
    """One corrupted copy of an image, the same for the same name and seed.

    With x the image and everything clipped to [0, 1]: ``noise`` x + N(0, sigma^2), sigma 0.03 or 0.10; ``blur`` a
    Gaussian of sigma 1 in 5 or 3 in 13 pixels, mirrored at the border; ``brightness`` 1.2 x or 1.8 x; ``jpeg`` quality
    60 or 10, of three channels together as colours, else of each channel; ``fog`` (1 - a) x + a, a 0.1 or 0.5.

    Args:
        image: ``(C, H, W)`` or ``(C, D, H, W)``, floating point, in [0, 1].
        name: The image's name. With the seed it determines the noise and, without ``kind``, the corruption.
        kind: Which corruption; None takes ``corruption_of(name, seed)``.
        severity: ``"mild"`` or ``"strong"``.
        seed: Seed of the noise and of the choice.

    Examples:
        >>> image = torch.full((3, 8, 8), 0.5)
        >>> corrupt(image, "a", "fog", "strong").unique(), corrupt(image, "a", "brightness", "mild").unique()
        (tensor([0.7500]), tensor([0.6000]))
    """
    if image.ndim not in (3, 4) or not image.is_floating_point():
        raise InputError(
            f"image is {image.dtype} of shape {tuple(image.shape)}",
            expected="floating point, (C, H, W) or (C, D, H, W)",
        )
    if not bool(((image >= 0) & (image <= 1)).all()):
        low, high = float(image.min()), float(image.max())
        raise InputError(f"image has values from {low:.4g} to {high:.4g}", expected="values in [0, 1]")
    check_name("severity", severity, SEVERITIES)
    chosen = corruption_of(name, seed) if kind is None else kind
    check_name("kind", chosen, CORRUPTIONS)
    functions: dict[Corruption, Callable[[Tensor], Tensor]] = {
        "noise": lambda x: _noisy(x, _NOISE[severity], _hash(f"noise {name}", seed)),
        "blur": lambda x: _blurred(x, *_BLUR[severity]),
        "brightness": lambda x: x * _BRIGHTNESS[severity],
        "jpeg": lambda x: _compressed(x, _QUALITY[severity]),
        "fog": lambda x: (1 - _FOG[severity]) * x + _FOG[severity],
    }
    return functions[chosen](image).clamp(0, 1)


def corruption_of(name: str, seed: int = 0) -> Corruption:
    """The corruption of an image, chosen by a hash of its name and the seed.

    Examples:
        >>> corruption_of("munster_000") == corruption_of("munster_000")
        True
    """
    return CORRUPTIONS[_hash(name, seed) % len(CORRUPTIONS)]


def value_range(image: Tensor) -> tuple[float, float]:
    """The values of black and white: (0, 1) or (0, 255) if all values lie within, else the image's extremes.

    Examples:
        >>> value_range(torch.tensor([0.2, 0.9])), value_range(torch.tensor([3.0, 90.0]))
        ((0.0, 1.0), (0.0, 255.0))
        >>> value_range(torch.tensor([-2.0, 3.0]))
        (-2.0, 3.0)
    """
    low, high = float(image.min()), float(image.max())
    if low >= 0:
        for white in (1.0, 255.0):
            if high <= white:
                return 0.0, white
    return low, high


class CorruptedCase:
    """A case with a corrupted image and the logits that a model predicts from it; all else is unchanged.

    Args:
        case: The clean case, with an image.
        model: Maps an image ``(1, channels, *spatial)`` to logits ``(1, C, *spatial)``.
        severity: ``"mild"`` or ``"strong"``.
        seed: Seed of the corruption.
        multilabel: Whether the model gives sigmoid logits ``(1, K, *spatial)``, one for each channel of multi-label
            data.
    """

    sliceable = True

    def __init__(
        self, case: Case, model: Callable[[Tensor], Tensor], severity: Severity, seed: int, *, multilabel: bool = False
    ) -> None:
        self.case, self.model, self.severity, self.seed, self.multilabel = case, model, severity, seed, multilabel
        self.id, self.spacing, self.ignore_index = case.id, case.spacing, case.ignore_index
        self.batch, self.num_classes, *spatial = case.shape
        self.spatial = tuple(spatial)
        self.labels, self.mask = partial(case.rows, "labels"), partial(case.rows, "mask")

    @cached_property
    def _image(self) -> Tensor:
        image = self.case.image
        if image is None:
            raise InputError("has no image", case=self.id, expected="an image to corrupt")
        low, high = value_range(image)
        span = (high - low) or 1.0
        moved = corrupt(((image[0] - low) / span).clamp(0, 1), self.id, None, self.severity, self.seed)
        return (moved * span + low)[None]

    @cached_property
    def _logits(self) -> Tensor:
        with torch.no_grad():
            logits = self.model(self._image)
        wanted = (1, self.batch if self.multilabel else self.num_classes, *self.spatial)
        if not isinstance(logits, Tensor) or tuple(logits.shape) != wanted:
            came = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise SegcalError(f"the model gave {came}", case=self.id, expected=f"logits of shape {wanted}")
        logits = logits.detach().cpu().float()
        return multilabel_view(logits, "logits") if self.multilabel else logits

    def logits(self, rows: slice) -> Tensor:
        """The model's logits of the corrupted image."""
        return self._logits[:, :, rows]

    def image(self, rows: slice) -> Tensor:
        """The corrupted image."""
        return self._image[:, :, rows]

    def posterior(self, rows: slice) -> None:
        """Unknown."""
        return


def _hash(name: str, seed: int) -> int:
    return zlib.crc32(f"{seed} {name}".encode())


def _noisy(image: Tensor, sigma: float, seed: int) -> Tensor:
    noise = np.random.default_rng(seed).standard_normal(tuple(image.shape))
    return image + sigma * torch.from_numpy(noise).to(image)


def _blurred(image: Tensor, size: int, sigma: float) -> Tensor:
    pixels = image.detach().cpu().double().numpy()
    # Unlike torch's padding, this mirrors small images as often as needed.
    blurred = gaussian_filter(pixels, sigma, radius=size // 2, axes=(-2, -1), mode="mirror")
    return torch.from_numpy(blurred).to(image)


def _compressed(image: Tensor, quality: int) -> Tensor:
    pixels = (image.detach().cpu() * 255).round().to(torch.uint8).numpy()
    if image.ndim == 3 and len(pixels) == 3:
        planes = [_jpeg(pixels.transpose(1, 2, 0), quality).transpose(2, 0, 1)]
    else:
        planes = [_jpeg(plane, quality) for plane in pixels.reshape(-1, *pixels.shape[-2:])]
    return torch.from_numpy(np.stack(planes).reshape(pixels.shape)).to(image) / 255


def _jpeg(pixels: NDArray[np.uint8], quality: int) -> NDArray[np.uint8]:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))
