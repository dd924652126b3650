"""Small image datasets on disk, from scenes with a known posterior."""

import numpy as np

from segcal.synthetic import scenes
from segcal.training import parse_config


def write_scans(root, count=8, size=(24, 28), classes=3, splits=True, **options):
    """``images/``, ``labels/`` and ``segcal.toml``; the last two scans test, the two before validate."""
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True)
    cases = scenes(count, size=size, num_classes=classes, **options)
    for case in cases:
        np.save(root / "images" / f"{case.id}.npy", case.image[0].numpy())
        np.save(root / "labels" / f"{case.id}.npy", case.labels[0].numpy().astype(np.uint8))
    text = f"classes = {classes}\n"
    if splits:
        text += f"[splits]\nvalidation = {list(cases.ids[-4:-2])}\ntest = {list(cases.ids[-2:])}\n"
    (root / "segcal.toml").write_text(text)
    return cases


def small(root, output="run", **options):
    """A configuration that trains in a second."""
    return parse_config({"data": str(root), "output": str(root.parent / output), **quick(options), **options})


def quick(options):
    """Keys that let the network of these options train in a second."""
    depth = {"depth": 2} if options.get("network", "unet") in ("unet", "residual-unet") else {}
    return {"width": 4, "batch": 2, "epochs": 2, "device": "cpu", **depth}


def write_toml(path, **options):
    """A training file."""
    lines = [
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
        for name, value in {**quick(options), **options}.items()
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
