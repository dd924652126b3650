"""Atlases for every volume of a fold: registered, the nearest chosen, and written as pairs for the vote network.

The paper registers deformably. Here an affine map is found that maximises the correlation of the two images, starting
from the one that scales the atlas's grid to the target's: the volumes are cropped around the hippocampus, so that is a
fair start. Labels play no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from reproduce.hippocampus import config
from segcal.training import parse_config
from segcal.training.data import HeldScan, hold, open_dataset

# Between target and atlas in the name of a pair. The rank of the atlas comes next, so that names sort by it.
BETWEEN = "__"


def write_pairs(volumes: Path, folder: Path, *, count: int = config.ATLASES) -> None:
    """Write a fold's pairs as a dataset with two classes, whether the label of the atlas differs or agrees.

    An image has two channels, target and registered atlas, as the paper's network sees them. ``candidates/`` holds the
    registered labels. A training volume's atlases are the other training volumes.
    """
    if (folder / "segcal.toml").is_file():
        return
    data = open_dataset(parse_config({"data": str(volumes), "output": str(folder)}))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = list(data.scans)
    scans = dict(zip(names, hold(list(data.scans.values()), device), strict=True))
    lists = {part: list(own) for part, own in data.declared.splits.items()}
    train = [name for name in names if not any(name in own for own in lists.values())]
    for kind in ("images", "labels", "candidates"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    pairs: dict[str, list[str]] = {part: [] for part in lists}
    for target in names:
        others = [name for name in train if name != target]
        image, labels = _held(scans[target])
        atlases = [_held(scans[name]) for name in others]
        for rank, (place, theta) in enumerate(nearest(image, [atlas for atlas, _ in atlases], count)):
            moved, own = atlases[place]
            pair = f"{target}{BETWEEN}{rank:02d}-{others[place]}"
            candidate = warp(own.float(), image.shape, theta, "nearest").to(torch.uint8)
            both = torch.stack((image, warp(moved, image.shape, theta)))
            for kind, tensor in (("images", both), ("labels", candidate == labels), ("candidates", candidate)):
                kept = torch.float32 if kind == "images" else torch.uint8
                np.save(folder / kind / f"{pair}.npy", tensor.to(kept).cpu().numpy())
            for part, own_names in lists.items():
                if target in own_names:
                    pairs[part].append(pair)
    config.write_lists(folder, ("differs", "agrees"), pairs, background="none", groups=f"^(.+){BETWEEN}")


def nearest(image: Tensor, atlases: Sequence[Tensor], count: int) -> list[tuple[int, Tensor]]:
    """Place and affine map of the ``count`` atlases most correlated with an image once registered, best first."""
    start = torch.eye(3, 4, device=image.device)
    scaled = torch.stack([warp(atlas, image.shape, start) for atlas in atlases])
    maps = start.repeat(len(atlases), 1, 1).requires_grad_()
    optimiser = torch.optim.Adam([maps], config.REGISTRATION_RATE)
    for _ in range(config.REGISTRATION_STEPS):
        optimiser.zero_grad()
        torch.autograd.backward([-correlations(_sampled(scaled, maps, image.shape), image).sum()])
        optimiser.step()
    found = maps.detach()
    alike = correlations(_sampled(scaled, found, image.shape), image)
    return [(place, found[place]) for place in alike.argsort(descending=True)[:count].tolist()]


def correlations(images: Tensor, image: Tensor) -> Tensor:
    """The correlation of each of ``images (N, *S)`` with ``image (*S)``."""
    centred, other = images.flatten(1) - images.flatten(1).mean(1, keepdim=True), (image - image.mean()).flatten()
    found: Tensor = (centred @ other) / (centred.norm(dim=1) * other.norm())
    return found


def warp(volume: Tensor, size: Sequence[int], theta: Tensor, mode: str = "bilinear") -> Tensor:
    """A volume on the grid of another one; ``theta (3, 4)`` maps coordinates that run from -1 to 1 in both."""
    return _sampled(volume[None], theta[None], size, mode)[0]


def _sampled(volumes: Tensor, maps: Tensor, size: Sequence[int], mode: str = "bilinear") -> Tensor:
    grid = F.affine_grid(maps, [len(maps), 1, *size], align_corners=False)
    return F.grid_sample(volumes[:, None], grid, mode=mode, padding_mode="border", align_corners=False)[:, 0]


def _held(scan: object) -> tuple[Tensor, Tensor]:
    assert isinstance(scan, HeldScan)
    image, labels = scan.held
    return image[0], labels
