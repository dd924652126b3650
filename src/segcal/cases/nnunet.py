"""nnU-Net folders as nnU-Net writes them: predictions, cross-validation, several models; and their padding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from segcal.cases.config import DatasetConfig, parse_config
from segcal.cases.formats import Array, split_suffix
from segcal.cases.layout import CaseFiles, Found, Problems, attach, collect_members, list_folder
from segcal.errors import DataError

# Formats of nnU-Net's segmentations, in order of preference.
_SEGMENTATIONS = (".nii.gz", ".nii", ".png", ".tif")


def find_nnunet(root: Path, config: DatasetConfig) -> Found:
    """Find the cases of an nnU-Net folder.

    This is the output of ``nnUNetv2_predict --save_probabilities`` (``<case>.npz``), the folder of a trained model
    (``fold_*/validation/<case>.npz``, every case from the fold that held it out), one of these ``validation`` folders,
    or a folder of several such outputs, which is an ensemble. ``dataset.json`` gives class names, ignore label and
    regions. The pickled sidecars are not opened. The ground truth is elsewhere: ``labels`` says where.
    """
    base = root / (config.scores or ".")
    problems = Problems()
    folds = sorted(base.glob("fold_*/validation"))
    here = _scores(base, problems)
    members = [item for item in list_folder(base, Problems()) if item.is_dir() and _scores(item, Problems())]
    if here or folds:
        members = []
    if folds and not here:
        cases = _cross_validation(folds, problems)
    else:
        cases = collect_members([_scores(item, problems) for item in members] or [here], members, problems)
    if not cases and not problems:
        raise DataError(
            "no <case>.npz files",
            where=str(base),
            expected="an nnU-Net folder with probabilities",
            fix="predict with --save_probabilities (validation: nnUNetv2_train ... --val --npz)",
        )
    config = _with_description(base, members, replace(config, kind="probs"))
    segmentations = {folder: _segmentations(folder) for folder in {case.members[0].parent for case in cases}}
    cases = tuple(replace(c, prediction=segmentations[c.members[0].parent].get(c.members[0].stem)) for c in cases)
    return attach(Found(config, cases, tuple(item.name for item in members), problems), root)


def connected_to_border(background: Array) -> Array:
    """The voxels of the padded exterior: exact one-hot background that is connected to the border.

    Args:
        background: ``(*spatial)`` bool, True where the scores are exactly (1, 0, ..., 0).

    Examples:
        >>> connected_to_border(np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1]], bool)).sum()
        np.int64(8)
    """
    from scipy import ndimage  # slow to import, and rarely needed

    pieces, _ = ndimage.label(background)
    border = np.zeros(background.shape, bool)
    for axis in range(background.ndim):
        # An axis of length 1 means a 2D image: the faces along it are the whole image, not a border.
        if background.shape[axis] > 1:
            border[(slice(None),) * axis + ([0, -1],)] = True
    touching = np.unique(pieces[border & background])
    return np.isin(pieces, touching[touching > 0])


def _scores(folder: Path, problems: Problems) -> dict[str, Path]:
    """The npz files of a folder, by case. The segmentations beside them are not scores."""
    return {path.stem: path for path in list_folder(folder, problems) if path.suffix.lower() == ".npz"}


def _cross_validation(folds: list[Path], problems: Problems) -> tuple[CaseFiles, ...]:
    found: dict[str, Path] = {}
    for fold in folds:
        for name, path in _scores(fold, problems).items():
            if name in found:
                problem = f"two files for one case: in {found[name].parent.parent.name} and {fold.parent.name}"
                problems.add(problem, case=name, expected="every case in the validation of one fold")
            found.setdefault(name, path)
    return tuple(CaseFiles(name, (path,)) for name, path in sorted(found.items()))


def _segmentations(folder: Path) -> dict[str, Path]:
    """nnU-Net's segmentations in a folder, by case."""
    named = [(split_suffix(path.name), path) for path in list_folder(folder, Problems())]
    found = [(*parts, path) for parts, path in named if parts and parts[1].lower() in _SEGMENTATIONS]
    found.sort(key=lambda item: _SEGMENTATIONS.index(item[1].lower()), reverse=True)
    return {name: path for name, _, path in found}


def _with_description(base: Path, members: list[Path], config: DatasetConfig) -> DatasetConfig:
    """Take class names, ignore label and regions from ``dataset.json`` unless the user declared them."""
    places, here = [base, *members], base.resolve()
    if here.name == "validation" and here.parent.name.startswith("fold_"):  # one fold of a trained model
        places.append(here.parents[1])
    path = next((item / "dataset.json" for item in places if (item / "dataset.json").is_file()), None)
    if path is None:
        return config
    try:
        labels = {name: _as_tuple(value) for name, value in json.loads(path.read_text("utf-8"))["labels"].items()}
        (ignore,) = labels.pop("ignore", (None,))
        regions = {name: value for name, value in labels.items() if value != (0,)}
        overlapping = any(len(value) > 1 for value in regions.values())
        names = sorted(labels, key=lambda name: (labels[name], name))
        own = {"regions": regions} if overlapping else {"class_names": names}
        described = parse_config({"ignore_index": ignore, **own})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"cannot be read ({error})", where=str(path), expected="nnU-Net's dataset.json") from None
    if config.ignore_index is None:
        config = replace(config, ignore_index=described.ignore_index)
    if described.regions:
        return replace(config, multilabel=True, regions=config.regions or described.regions)
    return replace(config, class_names=config.class_names or described.class_names)


def _as_tuple(value: Any) -> tuple[int, ...]:
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)
