"""A few small drawings of streets in the form of ``camvid.npz``, to try the recipe without data."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# Images of each part, and their size.
COUNTS, SIZE = {"train": 12, "val": 6, "test": 8}, (32, 40)
# Sky, building and road lie above each other; an object of every other class is somewhere.
LAYERS, OBJECTS, CLASSES, VOID = (0, 1, 3), (2, 4, 5, 6, 7, 8, 9, 10), 11, 11


def write_tiny(path: Path, seed: int = 0) -> None:
    """Write the packed file."""
    rng = np.random.default_rng(seed)
    colours = rng.integers(40, 216, (CLASSES + 1, 3))
    packed: dict[str, Any] = {}
    for part, count in COUNTS.items():
        images, labels = [], []
        for _ in range(count):
            label = np.repeat(np.repeat(np.array(LAYERS, np.uint8), (10, 10, 12))[:, None], SIZE[1], 1)
            for object in (*OBJECTS, VOID):
                row, column = rng.integers(0, SIZE[0] - 8), rng.integers(0, SIZE[1] - 8)
                label[row : row + rng.integers(5, 9), column : column + rng.integers(5, 9)] = object
            image = colours[label] + rng.normal(0, 35, (*SIZE, 3))
            images.append(_encoded(image.clip(0, 255).astype(np.uint8), "JPEG"))
            labels.append(_encoded(label, "PNG"))
        for name, items in ((f"{part}_images", images), (f"{part}_labels", labels)):
            packed[name] = np.frombuffer(b"".join(items), np.uint8)
            packed[f"{name}_len"] = np.array([len(item) for item in items])
        packed[f"{part}_names"] = np.array([f"{part}_{index:03d}" for index in range(count)])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **packed)


def _encoded(pixels: np.ndarray, kind: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()
