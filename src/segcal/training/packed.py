"""Packed files: a whole image dataset in one npz file of JPEG and PNG bytes. ``convert`` makes a folder from it."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from segcal.cases.config import CONFIG_NAME
from segcal.cases.formats import Array, ArraySpec, create_array
from segcal.cases.splits import by_group
from segcal.cases.toml import toml_document
from segcal.errors import DataError, InputError, check_seed, check_whole, naming
from segcal.files.atomic import atomic_path, file_name, writing
from segcal.training.data import SHARES, split_names

# The arrays of an image collection, and the prefixes they have where the collection comes already split.
_KEYS = ("images", "images_len", "labels", "labels_len")
_PREFIXES = {"train": "train_", "validation": "val_", "test": "test_"}
_CARDIAC = ("background", "right ventricle", "myocardium", "left ventricle")
_STREET = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")


@dataclass(frozen=True)
class Known:
    """Facts about a dataset that its packed file does not hold."""

    class_names: tuple[str, ...] | None = None
    ignore_index: int = 255
    background: int | None = 0


#: Datasets by the name of their packed file.
KNOWN = {"acdc": Known(_CARDIAC), "camvid": Known(_STREET, ignore_index=11, background=None)}


@dataclass(frozen=True)
class ConvertReport:
    """What was written: the number of scans, groups and classes, and of scans in each part."""

    scans: int
    groups: int
    classes: int
    parts: Mapping[str, int]


class _Scan(NamedTuple):
    """The slices of a scan, as indices into the arrays with a prefix. Without a prefix, they form a volume."""

    name: str
    prefix: str
    slices: tuple[int, ...]


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

    There are two layouts. With ``images``, ``images_len``, ``labels``, ``labels_len`` and ``volume`` (the name of each
    slice's volume, in slice order), slices are stacked to volumes, and patients are split 70/10/20 into training,
    validation and test. With the first four and ``names``, all prefixed by ``train_``, ``val_`` or ``test_``, images
    are split as the prefixes say.

    Args:
        packed: The npz file.
        folder: Where to write; new or empty.
        patients: How many patients (or images, if already split) to keep, drawn at random; None keeps all.
        seed: Seed of the draw and the split.
        groups: Regular expression that finds the patient in a volume's name.
        class_names: One for each class. Known for files named acdc and camvid.
        ignore_index: The label that is ignored; by default 255, and 11 for camvid.
        progress: Called with the name of every scan.
    """
    check_seed(seed)
    if patients is not None:
        check_whole("patients", patients, 1)
    packed, folder = Path(packed), Path(folder)
    about = KNOWN.get(packed.stem, Known())
    if class_names is not None:
        about = replace(about, class_names=tuple(class_names), background=0)
    if ignore_index is not None:
        check_whole("ignore_index", ignore_index, -(2**63), 2**63 - 1)
        about = replace(about, ignore_index=ignore_index)
    with atomic_path(folder, folder=True) as temporary:
        with naming(where=str(packed)):
            arrays = _open(packed)
            scans = _scans(arrays)
            volumes = "volume" in arrays
            parts = _split(scans, patients, seed, groups) if volumes else _subset(scans, patients, seed)
            chosen = {name for part in parts.values() for name in part}
            kept = [scan for scan in scans if scan.name in chosen]
            temporary.mkdir()
            classes = _write(arrays, kept, temporary, about, progress)
        with writing(folder):
            text = _describe(parts, classes, about, groups if volumes else None)
            (temporary / CONFIG_NAME).write_text(text, encoding="utf-8")
    count = len(by_group(sorted(chosen), groups)) if volumes else len(kept)
    return ConvertReport(len(kept), count, classes, {part: len(names) for part, names in parts.items()})


def _open(path: Path) -> Mapping[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # NumPy and zipfile raise many kinds of errors.
        raise DataError(f"cannot be read ({error})", expected="a packed npz file") from None
    prefixes = [prefix for prefix in _PREFIXES.values() if f"{prefix}names" in arrays]
    whole = "volume" in arrays or not prefixes
    expected = [*_KEYS, "volume"] if whole else [f"{prefix}{key}" for prefix in prefixes for key in _KEYS]
    if not all(key in arrays for key in expected):
        raise DataError(
            f"holds the arrays {', '.join(arrays) or '(none)'}",
            expected=f"{', '.join(_KEYS)} and volume, or these and names with train_, val_, test_ before them",
        )
    return arrays


def _scans(arrays: Mapping[str, Array]) -> list[_Scan]:
    """The volumes, or the images of all parts."""
    if "volume" in arrays:
        slices: dict[str, list[int]] = {}
        for index, name in enumerate(_names(arrays["volume"], "volume")):
            slices.setdefault(name, []).append(index)
        return [_Scan(name, "", tuple(indices)) for name, indices in slices.items()]
    scans = [
        _Scan(name, prefix, (index,))
        for prefix in _PREFIXES.values()
        if f"{prefix}names" in arrays
        for index, name in enumerate(_names(arrays[f"{prefix}names"], f"{prefix}names"))
    ]
    if twice := [name for name, count in Counter(scan.name for scan in scans).items() if count > 1]:
        raise DataError("two images have this name", case=twice[0], expected="unique names")
    return scans


def _names(array: Array, key: str) -> list[str]:
    """The names in an array, checked to be valid file names."""
    if array.ndim != 1 or array.dtype.kind != "U":
        raise DataError(f"{key} is a {array.dtype} array of shape {array.shape}", expected="a list of names (texts)")
    return [file_name(name) for name in array.tolist()]


def _write(
    arrays: Mapping[str, Array], scans: Sequence[_Scan], folder: Path, about: Known, progress: Callable[[str], None]
) -> int:
    """Write images and labels; returns the number of classes."""
    names, ignored = about.class_names, about.ignore_index
    encoded = {prefix: _encoded(arrays, prefix) for prefix in sorted({scan.prefix for scan in scans})}
    highest = 0
    for scan in scans:
        progress(scan.name)
        image, labels = (_decode(key, items, scan) for key, items in encoded[scan.prefix].items())
        if image.shape[image.ndim - labels.ndim :] != labels.shape or labels.ndim != (2 if scan.prefix else 3):
            raise DataError(
                f"labels of shape {labels.shape} for an image of {image.shape}",
                case=scan.name,
                expected="one class for every pixel",
            )
        highest = max(highest, int(labels[labels != ignored].max(initial=0)))
        if names is not None and highest >= len(names):
            raise DataError(f"label {highest}", case=scan.name, expected=f"0..{len(names) - 1}, or {ignored} to ignore")
        for kind, array in (("images", image), ("labels", labels)):
            with create_array(folder / kind / f"{scan.name}.npy", ArraySpec(array.shape, array.dtype)) as sink:
                sink.write((slice(None),) * array.ndim, array)
    return len(names) if names is not None else highest + 1


def _encoded(arrays: Mapping[str, Array], prefix: str) -> dict[str, list[Array]]:
    """The bytes of each image and label with a prefix, checked: one for each name, with lengths that add up."""
    count = len(arrays[f"{prefix}names" if prefix else "volume"])
    found = {}
    for key in (f"{prefix}images", f"{prefix}labels"):
        data, lengths = arrays[key], arrays[f"{key}_len"]
        if data.dtype != np.uint8 or data.ndim != 1:
            raise DataError(f"{key} is a {data.dtype} array of shape {data.shape}", expected="bytes (uint8, one axis)")
        if lengths.dtype.kind not in "iu" or lengths.shape != (count,) or (lengths < 0).any():
            raise DataError(
                f"{key}_len is a {lengths.dtype} array of shape {lengths.shape}",
                expected=f"{count} lengths, one for each name, none of them negative",
            )
        if (total := sum(lengths.tolist())) != len(data):
            raise DataError(f"{key}_len adds up to {total}", expected=f"{len(data)}, the bytes of {key}")
        found[key] = np.split(data, np.cumsum(lengths[:-1], dtype=np.int64))
    return found


def _decode(key: str, encoded: Sequence[Array], scan: _Scan) -> Array:
    """A volume ``([channels,] z, y, x)``, or an image ``([channels,] y, x)``."""
    slices = []
    for index in scan.slices:
        try:
            with Image.open(io.BytesIO(encoded[index].tobytes())) as image:
                array = np.asarray(image)
        except Exception as error:  # Decoders raise many kinds of errors.
            raise DataError(
                f"number {index} of {key} cannot be decoded ({error})", case=scan.name, expected="JPEG or PNG"
            ) from None
        slices.append(np.moveaxis(array, -1, 0) if array.ndim == 3 else array)
    if scan.prefix:
        return np.ascontiguousarray(slices[0])
    if len({array.shape for array in slices}) > 1:
        raise DataError("slices of different sizes", case=scan.name, expected="one size in a volume")
    return np.stack(slices, axis=slices[0].ndim - 2)


def _split(scans: Sequence[_Scan], patients: int | None, seed: int, groups: str) -> dict[str, tuple[str, ...]]:
    """A random split of the volumes by patient."""
    found = by_group([scan.name for scan in scans], groups)
    chosen = _draw(sorted(found), patients, seed)
    names = [scan.name for scan in scans if any(scan.name in found[patient] for patient in chosen)]
    return split_names(names, SHARES, seed, groups)


def _subset(scans: Sequence[_Scan], images: int | None, seed: int) -> dict[str, tuple[str, ...]]:
    """The parts that the prefixes give; with a number of images, the same share of each."""
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


def _describe(parts: Mapping[str, Sequence[str]], classes: int, about: Known, groups: str | None) -> str:
    """The text of ``segcal.toml``. Training scans are those that are in no list."""
    about_background = "none" if about.background is None else about.background
    held_out = {part: names for part, names in parts.items() if part != "train"}
    keys = {"classes": classes, "ignore_index": about.ignore_index, "background": about_background}
    return toml_document(keys | {"class_names": about.class_names, "groups": groups, "splits": held_out})
