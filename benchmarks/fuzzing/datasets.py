"""Score and label files of every format, damaged with and without knowledge of the format."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from fuzzing.damage import damaged
from fuzzing.inside import INSIDE

FORMATS = ("npy", "npz", "nii", "nii.gz", "png", "tif", "zarr", "zarr+crc32c", "h5", "h5+fletcher32")
# Formats whose checksums cover the values: no other values may be accepted without a word.
COVERED = ("npz", "nii.gz", "png", "zarr+crc32c", "h5+fletcher32")
METRICS = ("nll", "ece")


class Dataset:
    """A dataset of one case in one format, of which the score file or the label file is damaged."""

    shape = (4, 96, 128)
    room = 48 * 2**20  # what a decoder of LZMA or a library needs

    def __init__(self, format: str) -> None:
        self.name = self.format = format
        self._truth: list[Any] = []

    def write(self, root: Path) -> None:
        """The valid dataset."""
        rng, shape = np.random.default_rng(0), self.shape
        labels = np.kron(rng.integers(0, shape[0], (shape[1] // 16, shape[2] // 16)), np.ones((16, 16)))
        logits = rng.normal(0, 1, shape) + 4 * (np.arange(shape[0])[:, None, None] == labels)
        arrays = {"logits": logits.round(1).astype(np.float32), "labels": labels.astype(np.uint8)}
        for folder, array in arrays.items():
            (root / folder).mkdir(parents=True)
            png_scores = self.format == "png" and folder == "logits"
            write_array(root / folder / "case", array, "npy" if png_scores else self.format)

    def damage(self, root: Path, rng: random.Random) -> str:
        """Damage one file; returns what was done. ``inside`` means that checksums, if any, were made right again."""
        folder = "labels" if self.format == "png" or rng.random() < 0.3 else "logits"
        path = next((root / folder).iterdir())
        if rng.random() < 0.4:
            INSIDE[self.format.split("+")[0]](path, rng)
            return "inside"
        if path.is_dir():
            files = sorted(item for item in path.rglob("*") if item.is_file())
            # A description has no checksum.
            chunks = [item for item in files if item.name != "zarr.json"]
            path = rng.choice(chunks if "+" in self.format or rng.random() < 0.5 else files)
            if rng.random() < 0.05:
                path.unlink()
                return "remove"
        data, kind = damaged(path.read_bytes(), rng)
        path.write_bytes(data)
        return kind

    def judge(self, root: Path, kind: str) -> str:
        """What segcal makes of it: ``check`` collects problems, ``evaluate`` stops at the first one."""
        import segcal
        from segcal.errors import SegcalError

        try:
            report = segcal.check(root)
        except SegcalError:
            report = None
        good = report is not None and not report.problems
        try:
            cases = segcal.open_cases(root)
            results = segcal.evaluate(cases, metrics=METRICS)
            case = cases[0]
            found = [case.logits.numpy(), case.labels.numpy(), results.to_json()]
        except SegcalError as error:
            return f"FAIL check sees no problem, evaluate says: {error}" if good else "refused"
        self._truth = self._truth or found  # The first dataset is the undamaged one.
        same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(found[:2], self._truth[:2], strict=True))
        if not good:
            # Blank or missing labels are problems that an evaluation may pass by; values that it reads are not.
            return "refused" if same else f"FAIL evaluate reads what check refuses: {report and report.problems}"
        if same:
            return "accepted" if found[2] == self._truth[2] else "FAIL other results from the same values"
        noted = report is not None and any("not stored" in note for note in report.notes)
        if kind != "inside" and self.format in COVERED and not noted:
            return "FAIL a checksum was ignored"
        return "changed"


def write_array(stem: Path, array: Any, format: str) -> None:
    path = stem.with_name(f"{stem.name}.{format.split('+')[0]}")
    chunks = (1,) * (array.ndim - 2) + (array.shape[-2] // 3, array.shape[-1])
    if format == "npy":
        np.save(path, array)
    elif format == "npz":
        np.savez_compressed(path, array)
    elif format in ("nii", "nii.gz"):
        import nibabel

        nibabel.Nifti1Image(array.T, np.eye(4)).to_filename(path)
    elif format == "png":
        from PIL import Image

        Image.fromarray(array).save(path)
    elif format == "tif":
        import tifffile

        tifffile.imwrite(path, array, photometric="minisblack", compression="zlib")
    elif format.startswith("zarr"):
        import zarr
        from zarr.codecs import Crc32cCodec, ZstdCodec

        codecs = [ZstdCodec(), Crc32cCodec()] if format.endswith("crc32c") else [ZstdCodec()]
        store = zarr.create_array(str(path), shape=array.shape, dtype=array.dtype, chunks=chunks, compressors=codecs)
        store[:] = array
    else:
        import h5py

        with h5py.File(path, "w") as file:
            checked = format.endswith("fletcher32")
            file.create_dataset("a", data=array, chunks=chunks, compression="gzip", fletcher32=checked)
