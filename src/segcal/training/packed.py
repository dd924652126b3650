"""Packed files: a whole image dataset in one npz of JPEG and PNG bytes, and the dataset folder made from it."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from segcal.cases.config import CONFIG_NAME, background_line
from segcal.cases.formats import create_array
from segcal.cases.splits import by_group
from segcal.errors import DataError, InputError, OutputError
from segcal.files import atomic_path
from segcal.training.data import SHARES, split_names

Array = NDArray[Any]
_PREFIXES = {"train": "train_", "validation": "val_", "test": "test_"}
_CARDIAC = ("background", "right ventricle", "myocardium", "left ventricle")
_STREET = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")


@dataclass(frozen=True)
class Known:
    """What a packed file does not say of its dataset."""

    class_names: tuple[str, ...]
    ignore_index: int = 255
    background: int | None = 0


#: By the name of the file.
KNOWN = {"acdc": Known(_CARDIAC), "camvid": Known(_STREET, ignore_index=11, background=None)}


@dataclass(frozen=True)
class ConvertReport:
    """What was written: scans in all, and in each part."""

    scans: int
    groups: int
    classes: int
    parts: Mapping[str, int]


@dataclass(frozen=True)
class _Blobs:
    """Encoded images one after the other."""

    data: Array
    lengths: Array

    def read(self, index: int) -> Array:
        end = int(self.lengths[: index + 1].sum())
        with Image.open(io.BytesIO(self.data[end - int(self.lengths[index]) : end].tobytes())) as image:
            array = np.asarray(image)
        return np.moveaxis(array, -1, 0) if array.ndim == 3 else array


@dataclass(frozen=True)
class _Scan:
    """Where a scan's slices are: indices into the images and labels under a prefix; ``stacked`` ones are a volume."""

    name: str
    prefix: str
    slices: tuple[int, ...]
    stacked: bool


def convert(
    packed: str | Path,
    folder: str | Path,
    *,
    patients: int | None = None,
    seed: int = 0,
    groups: str = r"^([^_]+)",
    class_names: Sequence[str] | None = None,
    ignore_index: int | None = None,
    progress: Callable[[str], None] = lambda scan: None,
) -> ConvertReport:
    """Write a packed file as ``images/``, ``labels/`` and ``segcal.toml``.

    Two layouts are known. ``images``, ``images_len``, ``labels``, ``labels_len`` and ``volume`` (the volume's name per
    slice, in slice order): slices are stacked to volumes, and patients divided 70/10/20 into training, validation and
    test. Or these with ``train_``, ``val_``, ``test_`` before them and ``names``: images, divided as given.

    Args:
        packed: The npz file.
        folder: Where to write; new or empty.
        patients: Keep so many patients (of given splits: images), drawn at random.
        seed: Of the draw and the division.
        groups: Regular expression that finds the patient in a volume's name.
        class_names: One for each class. Known for files named acdc and camvid.
        ignore_index: The label that is ignored; 255, and 11 for camvid.
        progress: Called with the name of every scan.
    """
    packed, folder = Path(packed), Path(folder)
    known = KNOWN.get(packed.stem)
    names = tuple(class_names) if class_names is not None else known.class_names if known else None
    ignored = ignore_index if ignore_index is not None else known.ignore_index if known else 255
    background = known.background if known and class_names is None else 0
    if folder.is_dir() and any(folder.iterdir()):
        raise OutputError("is not empty", where=str(folder), fix="choose another folder")
    arrays = _open(packed)
    volumes = "volume" in arrays
    scans = _volumes(arrays["volume"]) if volumes else _images(arrays)
    parts = _divide(scans, patients, seed, groups) if volumes else _subset(scans, patients, seed)
    chosen = {name for part in parts.values() for name in part}
    kept = [scan for scan in scans if scan.name in chosen]
    prefixes = sorted({scan.prefix for scan in kept})
    blobs = {
        p: [_Blobs(arrays[f"{p}{key}"], arrays[f"{p}{key}_len"]) for key in ("images", "labels")] for p in prefixes
    }
    highest = 0
    for scan in kept:
        progress(scan.name)
        try:
            image, labels = (_join(source, scan) for source in blobs[scan.prefix])
        except UnidentifiedImageError:
            raise DataError("cannot be decoded", case=scan.name, where=str(packed), expected="JPEG or PNG") from None
        inside = labels[labels != ignored]
        highest = max(highest, int(inside.max(initial=0)))
        if names is not None and highest >= len(names):
            raise DataError(f"label {highest}", case=scan.name, expected=f"0..{len(names) - 1}, or {ignored} to ignore")
        for kind, array in (("images", image), ("labels", labels)):
            with create_array(folder / kind / f"{scan.name}.npy", array.shape, array.dtype, row_axis=0) as sink:
                sink.write((slice(None),) * array.ndim, array)
    classes = len(names) if names is not None else highest + 1
    with atomic_path(folder / CONFIG_NAME) as temporary:
        temporary.write_text(_describe(parts, classes, names, ignored, background, groups if volumes else None))
    count = len(by_group(sorted(chosen), groups)) if volumes else len(kept)
    return ConvertReport(len(kept), count, classes, {part: len(names) for part, names in parts.items()})


def _open(path: Path) -> Mapping[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot be read ({error})", where=str(path), expected="a packed npz file") from None
    kinds = ("images", "images_len", "labels", "labels_len")
    whole = all(key in arrays for key in (*kinds, "volume"))
    split = any(f"{p}names" in arrays for p in _PREFIXES.values()) and all(
        f"{p}{key}" in arrays for p in _PREFIXES.values() if f"{p}names" in arrays for key in kinds
    )
    if not whole and not split:
        raise DataError(
            f"holds the arrays {', '.join(arrays) or '(none)'}",
            where=str(path),
            expected=f"{', '.join(kinds)} and volume, or these and names with train_, val_, test_ before them",
        )
    return arrays


def _volumes(names: Array) -> list[_Scan]:
    slices: dict[str, list[int]] = {}
    for index, name in enumerate(names.tolist()):
        slices.setdefault(name, []).append(index)
    return [_Scan(name, "", tuple(indices), stacked=True) for name, indices in slices.items()]


def _images(arrays: Mapping[str, Array]) -> list[_Scan]:
    return [
        _Scan(name, prefix, (index,), stacked=False)
        for prefix in _PREFIXES.values()
        for index, name in enumerate(arrays.get(f"{prefix}names", np.array([])).tolist())
    ]


def _join(source: _Blobs, scan: _Scan) -> Array:
    """A volume ``([channels,] z, y, x)``, or an image ``([channels,] y, x)``."""
    slices = [source.read(index) for index in scan.slices]
    if not scan.stacked:
        return np.ascontiguousarray(slices[0])
    if len({array.shape for array in slices}) > 1:
        raise DataError("slices of different sizes", case=scan.name, expected="one size in a volume")
    return np.stack(slices, axis=slices[0].ndim - 2)


def _divide(scans: Sequence[_Scan], patients: int | None, seed: int, groups: str) -> dict[str, tuple[str, ...]]:
    """Volumes to training, validation and test by patient."""
    found = by_group([scan.name for scan in scans], groups)
    chosen = _draw(sorted(found), patients, seed)
    names = [scan.name for scan in scans if any(scan.name in found[patient] for patient in chosen)]
    return dict(zip(_PREFIXES, split_names(names, SHARES, seed, groups), strict=True))


def _subset(scans: Sequence[_Scan], images: int | None, seed: int) -> dict[str, tuple[str, ...]]:
    """The given parts, or about as large a share of each."""
    parts = {part: tuple(s.name for s in scans if s.prefix == prefix) for part, prefix in _PREFIXES.items()}
    if images is None:
        return parts
    share = images / len(scans)
    return {
        part: tuple(_draw(names, max(1, round(share * len(names))), seed)) for part, names in parts.items() if names
    }


def _draw(names: Sequence[str], count: int | None, seed: int) -> list[str]:
    if count is None:
        return list(names)
    if not 1 <= count <= len(names):
        raise InputError(f"{count} patients", where="patients", expected=f"1 to {len(names)}")
    chosen = np.random.default_rng(seed).choice(len(names), count, replace=False)
    return [names[index] for index in sorted(chosen.tolist())]


def _describe(
    parts: Mapping[str, Sequence[str]],
    classes: int,
    names: Sequence[str] | None,
    ignored: int,
    background: int | None,
    groups: str | None,
) -> str:
    """The ``segcal.toml``. Training scans are those that no list names. JSON's texts and lists are TOML's too."""
    lines = ["# Written by segcal.", f"classes = {classes}", f"ignore_index = {ignored}", background_line(background)]
    if names is not None:
        lines.append(f"class_names = {json.dumps(list(names))}")
    if groups is not None:
        lines.append(f"groups = {json.dumps(groups)}")
    lines += ["", "[splits]", *(f"{part} = {json.dumps(list(parts[part]))}" for part in parts if part != "train")]
    return "\n".join(lines) + "\n"
