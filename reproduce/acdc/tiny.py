"""A few small drawings of hearts in the form of ``acdc.npz``, to try the recipe without data."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# Patients, slices of each of their two volumes, and pixels of a side.
PATIENTS, SLICES, SIDE = 10, 3, 32
# Grey values of background, right ventricle, myocardium, left ventricle.
GREY = np.array([60, 160, 100, 190])


def write_tiny(path: Path, seed: int = 0) -> None:
    """Write the packed file."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    images, labels, volumes = [], [], []
    for patient in range(PATIENTS):
        for frame in (1, 2):
            row, column, size = *rng.uniform(13, 18, 2), rng.uniform(4, 5)
            for _ in range(SLICES):
                distance = np.hypot(rows - row, columns - column)
                label = np.zeros((SIDE, SIDE), np.uint8)
                label[np.hypot(rows - row, columns - column + 1.8 * size) < 1.2 * size] = 1
                label[distance < 1.6 * size] = 2
                label[distance < size] = 3
                image = GREY[label] + rng.normal(0, 25, label.shape)
                images.append(_encoded(image.clip(0, 255).astype(np.uint8), "JPEG"))
                labels.append(_encoded(label, "PNG"))
                volumes.append(f"patient{patient:03d}_frame{frame:02d}")
    path.parent.mkdir(parents=True, exist_ok=True)
    packed: dict[str, Any] = {}
    for name, items in (("images", images), ("labels", labels)):
        packed[name] = np.frombuffer(b"".join(items), np.uint8)
        packed[f"{name}_len"] = np.array([len(item) for item in items])
    np.savez(path, **packed, volume=np.array(volumes))


def _encoded(pixels: np.ndarray, kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()
