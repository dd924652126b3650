"""Images with labels on disk, checked before training starts, and split into training, validation and test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from segcal.cases.config import CONFIG_NAME, DatasetConfig, load_config
from segcal.cases.disk import check_labels
from segcal.cases.formats import open_array
from segcal.cases.layout import CaseFiles, Found, Problems, attach, list_cases, looking
from segcal.cases.oriented import Oriented, check_values, orient
from segcal.cases.splits import Groups, by_group, check_splits, draw_parts, group_of, part_sizes
from segcal.errors import ConfigError, DataError, naming
from segcal.training.config import PARTS, TrainingConfig

# Shares of training, validation and test if neither the configuration nor the dataset says them.
SHARES = (0.7, 0.1, 0.2)
# Scans that take more bytes than this together are read when needed, and not held on a GPU.
HELD_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Scan:
    """One image or volume with its labels, read on demand.

    Files that can be read in parts (npy, zarr, h5, nii) are read slice by slice; others stay in memory once decoded.

    Attributes:
        images: Files of ``(channels, *spatial)`` or ``(*spatial)``, whose channels are concatenated.
        mean: The mean of each channel, over the scan or all training scans, used for normalisation.
        std: The standard deviation of each channel, likewise.
    """

    id: str
    images: tuple[Oriented, ...]
    label: Oriented
    mask: Oriented | None
    ignore_index: int
    spacing: tuple[float, ...] | None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def spatial(self) -> tuple[int, ...]:
        """The size of the image."""
        return self.label.shape

    @property
    def channels(self) -> int:
        """The number of channels of all image files together."""
        return sum(image.shape[0] if image.leading else 1 for image in self.images)

    def image(self, rows: slice) -> Tensor:
        """Some rows of the image ``(channels, rows, ...)`` as float32, not normalised."""
        parts = [image.read(rows) if image.leading else image.read(rows)[None] for image in self.images]
        return torch.from_numpy(np.concatenate(parts).astype(np.float32))

    def normalised(self, rows: slice) -> Tensor:
        """Some rows of the image, each channel less its mean, over its standard deviation."""
        shape = (-1, *(1,) * len(self.spatial))
        # A constant channel becomes 0.
        std = torch.tensor([own or 1.0 for own in self.std])
        return (self.image(rows) - torch.tensor(self.mean).view(shape)) / std.view(shape)

    def labels(self, rows: slice) -> Tensor:
        """Some rows of the labels ``(rows, ...)`` int64; masked voxels are ignored."""
        labels = self.label.read(rows).astype(np.int64)
        if self.mask is not None:
            labels[self.mask.read(rows) == 0] = self.ignore_index
        return torch.from_numpy(labels)


@dataclass(frozen=True)
class HeldScan(Scan):
    """A scan whose normalised image and labels are held on a device."""

    held: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)

    def normalised(self, rows: slice) -> Tensor:
        """Some rows of the normalised image, a view."""
        return self.held[0][:, rows]

    def labels(self, rows: slice) -> Tensor:
        """Some rows of the labels, a view: uint8 if they fit, else int64."""
        return self.held[1][rows]


def hold(scans: Sequence[Scan], device: torch.device, limit: int = HELD_BYTES) -> Sequence[Scan]:
    """The scans, held on a device if they take at most ``limit`` bytes there; otherwise as they are."""
    small = all(0 <= scan.ignore_index < 256 for scan in scans)
    if sum(math.prod(scan.spatial) * (4 * scan.channels + (1 if small else 8)) for scan in scans) > limit:
        return scans
    found = []
    for scan in scans:
        everything = slice(0, scan.spatial[0])
        labels = scan.labels(everything)
        if small and int(labels.max()) < 256:
            labels = labels.to(torch.uint8)
        found.append(HeldScan(**vars(scan), held=(scan.normalised(everything).to(device), labels.to(device))))
    return found


@dataclass(frozen=True)
class Dataset:
    """Scans with the same classes, channels and number of axes."""

    scans: Mapping[str, Scan]
    classes: int
    ignore_index: int
    background: int | None
    declared: DatasetConfig

    @property
    def folders(self) -> tuple[Path, ...]:
        """The input folders, where nothing may be written."""
        files = (part for scan in self.scans.values() for part in (*scan.images, scan.label))
        return tuple(dict.fromkeys(part.file.path.parent for part in files))

    @property
    def channels(self) -> int:
        """Channels of every image."""
        return next(iter(self.scans.values())).channels

    def normalised_by(self, names: Sequence[str]) -> Dataset:
        """The same scans, all with the mean and the standard deviation of each channel over some of them."""
        some = [self.scans[name] for name in names]
        voxels = np.array([math.prod(scan.spatial) for scan in some], np.float64)
        means, deviations = (np.array([getattr(scan, name) for scan in some]) for name in ("mean", "std"))
        mean = np.average(means, 0, voxels)
        std = np.sqrt(np.average(deviations**2 + (means - mean) ** 2, 0, voxels))
        own = tuple(mean.tolist()), tuple(std.tolist())
        scans = {name: replace(scan, mean=own[0], std=own[1]) for name, scan in self.scans.items()}
        return replace(self, scans=scans)

    def parts(self, shares: Mapping[str, float] | None, seed: int) -> dict[str, tuple[str, ...]]:
        """The names of the scans for ``train``, ``validation``, ``test``.

        With shares the split is random and keeps groups (patients) together. Without shares the dataset's lists are
        used: ``validation`` and ``test`` as listed, training on all scans that are in no list. Without lists, the
        shares are 70/10/20 percent.
        """
        splits, groups = self.declared.splits, self.declared.groups
        if shares is None and splits:
            held = {name for names in splits.values() for name in names}
            rest = tuple(name for name in self.scans if name not in held)
            check_splits({"train": rest, **splits}, list(self.scans), groups)
            found = {"train": rest, **{part: tuple(splits.get(part, ())) for part in PARTS[1:]}}
        else:
            sizes = SHARES if shares is None else tuple(shares.get(part, 0.0) for part in PARTS)
            found = split_names(list(self.scans), sizes, seed, groups)
        if not found["train"]:
            raise DataError(
                f"no scan is left to train on; {len(found['validation'])} validate and {len(found['test'])} test",
                where="split",
                expected="at least one scan for training",
                fix="give training a larger share, or name fewer scans under [splits] of segcal.toml",
            )
        return found


def split_names(
    names: Sequence[str], shares: Sequence[float], seed: int, groups: Groups | None
) -> dict[str, tuple[str, ...]]:
    """A random split of names into ``PARTS`` that keeps groups together.

    ``shares`` are those of the names; every part with a positive share gets at least one group.

    Examples:
        >>> names = [f"p{patient}_{frame}" for patient in range(10) for frame in "ab"]
        >>> {part: len(own) for part, own in split_names(names, (0.7, 0.1, 0.2), 0, "p.").items()}
        {'train': 14, 'validation': 2, 'test': 4}
    """
    members = by_group(names, groups)
    sizes = part_sizes([float(share) for share in shares], len(names))
    drawn = draw_parts(members, sizes, [share > 0 for share in shares], seed)
    if any(share > 0 and not part for share, part in zip(shares, drawn, strict=True)):
        raise DataError(
            f"{len(names)} scans of {len(members)} patients (groups)",
            where="split",
            expected="at least one patient for each of training, validation and test",
        )
    return {part: tuple(name for name in names if name in own) for part, own in zip(PARTS, drawn, strict=True)}


def open_dataset(config: TrainingConfig) -> Dataset:
    """Find, open and check all scans in the folders of a configuration."""
    first, *others = [_open_folder(Path(folder), config) for folder in config.data]
    scans, splits, groups = dict(first.scans), dict(first.declared.splits), first.declared.groups
    if any(other.declared.groups != groups for other in others):
        groups = {name: group_of(name, own.declared.groups or groups) for own in (first, *others) for name in own.scans}
    for folder, other in zip(config.data[1:], others, strict=True):
        if (other.classes, other.ignore_index) != (first.classes, first.ignore_index):
            raise DataError(
                f"{other.classes} classes, ignore_index {other.ignore_index}",
                where=folder,
                expected=f"{first.classes} and {first.ignore_index} as in {config.data[0]}",
            )
        if twice := sorted(set(scans) & set(other.scans)):
            raise DataError("is in two folders", case=twice[0], where=folder, expected="unique names")
        scans |= other.scans
        for part, names in other.declared.splits.items():
            splits[part] = (*splits.get(part, ()), *names)
    example = next(iter(scans.values()))
    for scan in scans.values():
        if (scan.channels, len(scan.spatial)) != (example.channels, len(example.spatial)):
            raise DataError(
                f"{scan.channels} channels and {len(scan.spatial)} axes",
                case=scan.id,
                expected=f"{example.channels} and {len(example.spatial)} as case '{example.id}' has",
            )
    if len(example.spatial) < config.dims or len(example.spatial) > 3:
        raise DataError(
            f"images have {len(example.spatial)} axes",
            case=example.id,
            expected="volumes (z, y, x), as dims = 3" if config.dims == 3 else "images (y, x) or volumes (z, y, x)",
        )
    return replace(first, scans=scans, declared=replace(first.declared, splits=splits, groups=groups))


@looking()
def _open_folder(root: Path, config: TrainingConfig) -> Dataset:
    if not root.is_dir():
        raise DataError("is not a folder", where=str(root), expected="a dataset folder with images/ and labels/")
    file = root / CONFIG_NAME
    declared = (load_config(file) if file.is_file() else DatasetConfig()).with_defaults()
    if declared.multilabel:
        raise ConfigError("multilabel data", where=str(file), expected="one label map with mutually exclusive classes")
    classes = config.classes or declared.classes
    if classes is None:
        raise ConfigError(
            "the number of classes is not known",
            where=str(root),
            expected="classes = ... in the training file or in segcal.toml",
        )
    if declared.classes not in (None, classes):
        raise ConfigError(f"classes = {classes}", expected=f"{declared.classes} as {file} says")
    if declared.class_names is not None and len(declared.class_names) != classes:
        raise ConfigError(f"{len(declared.class_names)} class_names", where=str(file), expected=f"{classes}")
    assert declared.ignore_index is not None
    scans = {files.id: _open_scan(files, declared, classes) for files in _find(root, declared)}
    return Dataset(scans, classes, declared.ignore_index, declared.background_class(classes), declared)


def _find(root: Path, declared: DatasetConfig) -> Sequence[CaseFiles]:
    """The files of every scan. A scan without image or label is an error."""
    problems = Problems()
    folders = root / (declared.images or "images"), root / (declared.labels or "labels")
    for folder in folders:
        if not folder.is_dir():
            raise DataError("is not a folder", where=str(folder), expected="images/ and labels/ of a dataset")
    images, labels = (list_cases(folder, problems) for folder in folders)
    found = attach(Found(declared, tuple(CaseFiles(name, ()) for name in labels), problems=problems), root)
    if problems:
        raise problems[0]
    if not found.cases:
        raise DataError("no labels", where=str(folders[1]), expected="at least one file for each of images and labels")
    for case in found.cases:
        if not case.images:
            raise DataError("no image", case=case.id, expected=f"a file {folders[0]}/{case.id}.*")
    used = {path for case in found.cases for path in case.images}
    if alone := [name for name, path in images.items() if path not in used]:
        raise DataError("no label", case=alone[0], expected=f"a file {folders[1]}/{alone[0]}.*")
    return found.cases


def _open_scan(files: CaseFiles, declared: DatasetConfig, classes: int) -> Scan:
    assert files.label is not None
    assert declared.ignore_index is not None
    with naming(case=files.id):
        label = _orient(files.label, declared)
        images = tuple(_orient(path, declared, label.shape, channels=True) for path in files.images)
        mask = None if files.mask is None else _orient(files.mask, declared, label.shape)
        spacing = declared.spacing.get(files.id) if isinstance(declared.spacing, Mapping) else declared.spacing
        geometry = label.file.geometry or images[0].file.geometry
        if spacing is None and geometry is not None:
            spacing = geometry.zooms[: len(label.shape)][::-1]
        return _check(Scan(files.id, images, label, mask, declared.ignore_index, spacing), classes)


def _orient(
    path: Path, declared: DatasetConfig, spatial: tuple[int, ...] | None = None, *, channels: bool = False
) -> Oriented:
    """An array of this size, or of any size if that is None; ``channels`` allows one more axis in front."""
    leading = int(channels and spatial is not None and len(open_array(path).shape) == len(spatial) + 1)
    array = orient(path, leading, axes=declared.axes, usual=("image", "labels", "label", "mask"))
    check_values(array.file)
    size = array.shape[leading:]
    if spatial is not None and size != spatial:
        raise DataError(f"has size {size}", where=str(path), expected=f"{spatial} as the labels have")
    return array


def _check(scan: Scan, classes: int) -> Scan:
    """Read a whole scan, check that its values are finite and its labels in range, and add mean and deviation."""
    everything = slice(0, scan.spatial[0])
    with naming(where=str(scan.label.file.path)):
        check_labels(scan.label.read(everything), classes, scan.ignore_index)
    image = scan.image(everything).double().flatten(1)
    if not bool(image.isfinite().all()):
        raise DataError(
            f"{int((~image.isfinite()).sum())} values are NaN or infinite",
            where=str(scan.images[0].file.path),
            expected="finite images",
        )
    deviation, mean = torch.std_mean(image, 1, correction=0)
    return replace(scan, mean=tuple(mean.tolist()), std=tuple(deviation.tolist()))
