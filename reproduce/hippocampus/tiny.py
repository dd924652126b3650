"""A few drawings of hippocampi, two ellipsoids behind each other, as NIfTI files: to try the recipe without data."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np

# Volumes, and the size of the smallest one.
VOLUMES, SIZE = 10, (12, 18, 12)
# Grey values of background, anterior and posterior part, and their noise.
GREY, NOISE = np.array([60.0, 150.0, 120.0]), 25.0


def write_tiny(folder: Path, seed: int = 0) -> None:
    """Write ``images/`` and ``labels/``."""
    rng = np.random.default_rng(seed)
    for number in range(VOLUMES):
        size = tuple(int(rng.integers(low, low + 3)) for low in SIZE)
        x, y, z = np.ogrid[tuple(slice(length) for length in size)]
        middle = [length / 2 + rng.uniform(-1, 1) for length in size]
        across = ((x - middle[0]) / 3.2) ** 2 + ((z - middle[2]) / 3.2) ** 2
        labels = np.zeros(size, np.uint8)
        labels[across + ((y - middle[1] + 3) / 4) ** 2 < 1] = 2
        labels[across + ((y - middle[1] - 3) / 4) ** 2 < 1] = 1
        for kind, array in (("images", GREY[labels] + rng.normal(0, NOISE, size)), ("labels", labels)):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            stored = array.astype(np.uint8 if kind == "labels" else np.float32)
            image = nibabel.Nifti1Image(stored, np.eye(4))  # type: ignore[no-untyped-call]
            nibabel.save(image, folder / kind / f"tiny_{number:03d}.nii.gz")
