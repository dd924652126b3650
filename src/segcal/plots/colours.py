"""Class colours that also people with colour blindness can tell apart."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.float64]

# Slate for class 0, which usually is the background, then the palette of Okabe and Ito. More are found by distance.
_FIRST = ("#30363D", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")

# Linear sRGB as seen with normal, red-blind and green-blind vision (Machado et al. 2009).
_VISIONS = np.array(
    [
        np.eye(3),
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    ]
)
# Normal vision distinguishes many more colours, so its distances count half.
_WEIGHTS = np.array([0.5, 1.0, 1.0])

# OKLab (Ottosson 2020): linear sRGB to cone responses to lightness and two opponent axes.
_CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_OPPONENTS = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


@functools.lru_cache
def class_colours(num_classes: int) -> tuple[str, ...]:
    """One colour per class, as hex. The colour of a class does not depend on the number of classes.

    After eight fixed colours, each is the candidate with the largest distance in OKLab to its nearest predecessor, as
    seen with whichever of normal, red-blind and green-blind vision separates the two least. Beyond about 20 classes no
    palette works for everyone.

    Examples:
        >>> class_colours(3), class_colours(30)[:3] == class_colours(3)
        (('#30363D', '#E69F00', '#56B4E9'), True)
    """
    levels = np.linspace(0.05, 0.95, 10)
    candidates = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(-1, 3)
    lightness, *opponents = _views(candidates)[0].T
    # Not as light as the page or ignored voxels, not as dark as the slate, and not grey.
    candidates = candidates[(lightness > 0.35) & (lightness < 0.9) & (np.hypot(*opponents) > 0.05)]
    views = _views(candidates)
    colours = list(_FIRST)
    nearest = np.min([_separation(views, colour) for colour in colours], axis=0)
    while len(colours) < num_classes:
        colours.append(_hex(candidates[nearest.argmax()]))
        nearest = np.minimum(nearest, _separation(views, colours[-1]))
    return tuple(colours[:num_classes])


def _views(rgb: _Array) -> _Array:
    """``(n, 3)`` sRGB in [0, 1] to OKLab for each kind of vision, ``(3, n, 3)``."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ _VISIONS.transpose(0, 2, 1), 0, 1)
    views: _Array = np.cbrt(seen @ _CONES.T) @ _OPPONENTS.T
    return views


def _separation(views: _Array, colour: str) -> _Array:
    """``(n,)`` weighted distance from one colour, for the vision that separates them least."""
    own = _views(np.array([_rgb(colour)]))
    separation: _Array = (_WEIGHTS[:, None] * np.linalg.norm(views - own, axis=-1)).min(0)
    return separation


def _rgb(colour: str) -> list[float]:
    return [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]


def _hex(rgb: Iterable[float]) -> str:
    return "#" + "".join(f"{round(255 * value):02X}" for value in rgb)
