"""Small datasets on disk, written with the format libraries themselves and not with segcal's writers."""

import json
from pathlib import Path

import nibabel
import numpy as np


def logits(seed=0, classes=4, shape=(9, 7)):
    return np.random.default_rng(seed).normal(0, 3, (classes, *shape)).astype(np.float32)


def softmax(z):
    e = np.exp(z - z.max(0))
    return (e / e.sum(0)).astype(np.float32)


def labels(seed=0, classes=4, shape=(9, 7)):
    return np.random.default_rng(100 + seed).integers(0, classes, shape).astype(np.uint8)


def plain(root: Path, count=3, classes=4, shape=(9, 7), kind="logits"):
    """``count`` cases case0, case1, ... as npy files in the plain convention."""
    for folder in (kind, "labels"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for i in range(count):
        z = logits(i, classes, shape)
        np.save(root / kind / f"case{i}.npy", z if kind == "logits" else softmax(z))
        np.save(root / "labels" / f"case{i}.npy", labels(i, classes, shape))
    return root


def save_nifti(path: Path, array, spacing=(1.0, 1.0, 1.0), affine=None):
    """Save an array given in nibabel's order (x, y, z[, C])."""
    affine = np.diag([*spacing, 1.0]) if affine is None else affine
    nibabel.Nifti1Image(array, affine).to_filename(path)


def nnunet(root: Path, count=2, classes=3, shape=(6, 8, 10), pad=2, names=None, regions=None):
    """An nnU-Net prediction folder: npz (C, z, y, x) padded with exact one-hot, segmentations, pickles, dataset.json.

    Returns the folder of the predictions and that of the labels; labels are NIfTI in (x, y, z), spacing (1, 2, 3).
    """
    predictions, truth = root / "predictions", root / "labelsTs"
    predictions.mkdir(parents=True)
    truth.mkdir()
    for i in range(count):
        name = f"scan_{i:03d}"
        z = logits(i, classes, shape)
        inner = tuple(slice(pad, size - pad) for size in shape)
        if regions is None:
            p = np.zeros((classes, *shape), np.float32)
            p[0] = 1
            p[(slice(None), *inner)] = softmax(z)[(slice(None), *inner)]
            segmentation = p.argmax(0).astype(np.uint8)
        else:
            p = np.zeros((classes, *shape), np.float32)
            p[(slice(None), *inner)] = 1 / (1 + np.exp(-z[(slice(None), *inner)]))
            segmentation = (p > 0.5).any(0).astype(np.uint8)
        np.savez_compressed(predictions / f"{name}.npz", probabilities=p)
        (predictions / f"{name}.pkl").write_bytes(b"never opened")
        save_nifti(predictions / f"{name}.nii.gz", segmentation.T, (1.0, 2.0, 3.0))
        high = classes if regions is None else 1 + max(max(r) for r in regions.values())
        save_nifti(truth / f"{name}.nii.gz", labels(i, high, shape).T, (1.0, 2.0, 3.0))
    described = {"background": 0, **(regions or {f"organ{k}": k for k in range(1, classes)}), **(names or {})}
    about = {"labels": described, "file_ending": ".nii.gz"}
    if regions is not None:
        about["regions_class_order"] = [values[0] for values in regions.values()]
    (predictions / "dataset.json").write_text(json.dumps(about))
    (predictions / "plans.json").write_text("{}")
    return predictions, truth


def snapshot(folder: Path):
    """All there is under a folder: what every entry is, its rights, and its bytes or the target of a link."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None,
        )
        for path in sorted(folder.rglob("*"))
    }
