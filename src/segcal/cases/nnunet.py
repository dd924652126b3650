"""nnU-Net folders as nnU-Net writes them: predictions, cross-validation, several models; and their padding."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from segcal.cases.config import DatasetConfig, parse_config
from segcal.cases.formats import Array, format_of, open_array, split_suffix
from segcal.cases.layout import CaseFiles, Found, Problems, attach, collect_members, list_folder
from segcal.errors import DataError, import_extra

# Formats of nnU-Net's segmentations, in order of preference.
_SEGMENTATIONS = (".nii.gz", ".nii", ".png", ".tif")
# Where nnU-Net keeps the labels of training cases: the variable, and the folder in that of the dataset.
_LABELS = (("nnUNet_raw", "labelsTr"), ("nnUNet_preprocessed", "gt_segmentations"))


class _Member(NamedTuple):
    """The probabilities of one model: ``files`` by case, and the folder that describes them."""

    folder: Path
    files: dict[str, Path]
    held_out: bool = False  # by cross-validation, so that these are training cases


def find_nnunet(roots: Sequence[Path], config: DatasetConfig) -> Found:
    """Find the cases of one or several nnU-Net folders; several are an ensemble.

    A folder is the output of ``nnUNetv2_predict --save_probabilities`` (``<case>.npz``), the folder of a trained model
    (``fold_*/validation/<case>.npz``, every case from the fold that held it out), one of these ``validation`` folders,
    or a folder of several outputs of ``nnUNetv2_predict``. ``dataset.json`` gives class names, ignore label and
    regions. The pickled sidecars are not opened. The ground truth of cross-validation is found where nnU-Net keeps it,
    if ``nnUNet_raw`` or ``nnUNet_preprocessed`` is set; otherwise ``labels`` says where it is.
    """
    problems, notes = Problems(), list[str]()
    members = [own for root in roots for own in _members(root / (config.scores or "."), problems, notes)]
    cases = collect_members([own.files for own in members], [own.folder for own in members], problems)
    if not cases and not problems:
        raise DataError("no <case>.npz files", where=str(roots[0]), expected="an nnU-Net folder with probabilities")
    config = _with_description(members, replace(config, kind="probs", key=config.key or "probabilities"))
    segmentations = {folder: _segmentations(folder) for folder in {case.members[0].parent for case in cases}}
    cases = tuple(replace(c, prediction=segmentations[c.members[0].parent].get(c.members[0].stem)) for c in cases)
    if any(str(_plans(own).get("image_reader_writer", "")).endswith("WithReorient") for own in members):
        _check_orientation(cases, problems)
    if config.labels is None and not (roots[0] / "labels").is_dir() and all(own.held_out for own in members):
        config = replace(config, labels=_labels_of_training(members))
    names = _names([own.folder for own in members]) if len(members) > 1 else ()
    return attach(Found(config, cases, names, problems, notes=notes), roots[0])


def connected_to_border(background: Array) -> Array:
    """The voxels of the padded exterior: exact one-hot background that is connected to the border.

    Args:
        background: ``(*spatial)`` bool, True where the scores are exactly (1, 0, ..., 0).

    Examples:
        >>> int(connected_to_border(np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1]], bool)).sum())
        8
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


# -- which files ------------------------------------------------------------------------------------------------------


def _members(base: Path, problems: Problems, notes: list[str]) -> list[_Member]:
    """The models whose probabilities are in a folder."""
    if here := _scores(base, problems):
        inside = base.resolve()
        if inside.name == "validation" and inside.parent.name.startswith("fold_"):  # one fold of a trained model
            _check_held_out(inside.parent)
            return [_Member(inside.parents[1], here, held_out=True)]
        return [_Member(base, here)]
    if folds := sorted(item for item in base.glob("fold_*") if item.is_dir()):
        return [_Member(base, _cross_validation(base, folds, problems, notes), held_out=True)]
    folders = [item for item in list_folder(base, Problems()) if item.is_dir()]
    if outputs := [item for item in folders if _scores(item, Problems())]:
        return [_Member(item, _scores(item, problems)) for item in outputs]
    if not problems:
        _check_version(base)
        models = [item.name for item in folders if any(item.glob("fold_*"))]
        if models:
            raise DataError(
                f"holds the trained models {', '.join(models)}",
                where=str(base),
                expected="the folder of a model",
                fix=f"name it, as in {base / models[0]}; several are an ensemble: segcal nnunet fit MODEL MODEL ...",
            )
        raise DataError(
            "no <case>.npz files",
            where=str(base),
            expected="an nnU-Net folder with probabilities",
            fix="predict with nnUNetv2_predict ... --save_probabilities, or validate: nnUNetv2_train ... --val --npz",
        )
    return []


def _scores(folder: Path, problems: Problems) -> dict[str, Path]:
    """The npz files of a folder, by case. The segmentations beside them are not scores."""
    return {path.stem: path for path in list_folder(folder, problems) if path.suffix.lower() == ".npz"}


def _cross_validation(model: Path, folds: list[Path], problems: Problems, notes: list[str]) -> dict[str, Path]:
    """The npz files of all folds of a model. Folds that have not been validated yet are noted."""
    _check_version(model)
    found: dict[str, Path] = {}
    if folds == [model / "fold_all"]:
        _check_held_out(folds[0])
    for fold in folds:
        if fold.name == "fold_all":
            notes.append(f"{fold}: not read, because its validation cases are those it was trained on")
            continue
        validation = fold / "validation"
        own = _scores(validation, problems) if validation.is_dir() else {}
        if lacking := sorted(_segmentations(validation).keys() - own.keys()):
            raise DataError(
                f"{len(lacking)} segmentations without probabilities ({lacking[0]}.npz): validated without --npz",
                where=str(validation),
                fix=_validate(model, fold),
            )
        if not own:
            notes.append(f"{fold}: not read, because it has not been validated; {_validate(model, fold)} does that")
        for name, path in own.items():
            if name in found:
                problem = f"two files for one case: in {found[name].parent.parent.name} and {fold.name}"
                problems.add(problem, case=name, expected="every case in the validation of one fold")
            found.setdefault(name, path)
    if not found and not problems:
        raise DataError("no fold has been validated", where=str(model), fix=_validate(model, folds[0]))
    return found


def _validate(model: Path, fold: Path) -> str:
    """nnU-Net's command that writes the missing probabilities of a fold."""
    model = model.resolve()
    trainer, plans, configuration = ([*model.name.split("__"), *("...",) * 3])[:3]
    number = fold.name.removeprefix("fold_")
    return f"nnUNetv2_train {model.parent.name} {configuration} {number} -tr {trainer} -p {plans} --val --npz"


def _check_held_out(fold: Path) -> None:
    """Raise if the cases of this fold are those that the network was trained on."""
    if fold.name == "fold_all":
        raise DataError(
            "fold 'all' was trained on the cases that it was validated on",
            where=str(fold),
            expected="folds of a cross-validation, or predictions of other cases",
            fix="train the folds 0 to 4 with --npz, or predict other cases with nnUNetv2_predict --save_probabilities",
        )


def _check_version(folder: Path) -> None:
    """Raise if a folder is of nnU-Net v1: its npz files hold cropped probabilities, under another name."""
    old = [*folder.glob("plans.pkl"), *folder.glob("fold_*/validation_raw"), *folder.glob("*/fold_*/validation_raw")]
    if old:
        raise DataError(
            f"holds {old[0].relative_to(folder)}, so it is a folder of nnU-Net v1",
            where=str(folder),
            expected="nnU-Net v2",
            fix="convert the dataset with nnUNetv2_convert_old_nnUNet_dataset, then train it with nnUNetv2_train --npz",
        )


def _names(folders: list[Path]) -> tuple[str, ...]:
    """The names of the folders or, if two have the same, their paths."""
    names = tuple(folder.resolve().name for folder in folders)
    return names if len(set(names)) == len(names) else tuple(map(str, folders))


def _segmentations(folder: Path) -> dict[str, Path]:
    """nnU-Net's segmentations in a folder, by case."""
    named = [(split_suffix(path.name), path) for path in list_folder(folder, Problems())]
    found = [(*parts, path) for parts, path in named if parts and parts[1].lower() in _SEGMENTATIONS]
    found.sort(key=lambda item: _SEGMENTATIONS.index(item[1].lower()), reverse=True)
    return {name: path for name, _, path in found}


def _labels_of_training(members: list[_Member]) -> str | None:
    """The folder of the labels of the training cases, if nnU-Net's variables lead to it."""
    dataset = str(_plans(members[0]).get("dataset_name") or members[0].folder.resolve().parent.name)
    places = [Path(os.environ[variable]) / dataset / name for variable, name in _LABELS if os.environ.get(variable)]
    return next((str(place.absolute()) for place in places if place.is_dir()), None)


# -- what nnU-Net says of them ----------------------------------------------------------------------------------------


def _plans(member: _Member) -> dict[str, Any]:
    """The plans of a model; empty if there are none."""
    path = member.folder / "plans.json"
    try:
        found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot be read ({error})", where=str(path), expected="nnU-Net's plans.json") from None
    return found if isinstance(found, dict) else {}


def _with_description(members: list[_Member], config: DatasetConfig) -> DatasetConfig:
    """Take class names, ignore label and regions from ``dataset.json`` unless the user declared them."""
    places = dict.fromkeys(place for own in members for place in (own.folder, own.folder.parent))
    path = next((item / "dataset.json" for item in places if (item / "dataset.json").is_file()), None)
    if path is None:
        return config
    try:
        about = json.loads(path.read_text("utf-8"))
        found, order = described(about), about.get("regions_class_order")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"cannot be read ({error})", where=str(path), expected="nnU-Net's dataset.json") from None
    if config.ignore_index is None:
        config = replace(config, ignore_index=found.ignore_index)
    if not found.regions:
        return replace(config, class_names=config.class_names or found.class_names)
    if not isinstance(order, list) or len(order) != len(found.regions):
        raise DataError(
            f"regions_class_order is {json.dumps(order)}" if order else "regions without regions_class_order",
            where=str(path),
            expected=f"a list of {len(found.regions)} labels, one for each region: {', '.join(found.regions)}",
            fix="copy it from the dataset.json with which the model was trained; nnU-Net needs it, too",
        )
    return replace(config, multilabel=True, regions=config.regions or found.regions)


def described(about: Mapping[str, Any]) -> DatasetConfig:
    """Class names or regions, and the ignore label, as the content of ``dataset.json`` has them.

    Examples:
        >>> described({"labels": {"background": 0, "whole": [1, 2], "core": [2], "ignore": 3}}).regions
        {'whole': (1, 2), 'core': (2,)}
    """
    labels = {name: _as_tuple(value) for name, value in about["labels"].items()}
    (ignore,) = labels.pop("ignore", (None,))
    regions = {name: value for name, value in labels.items() if value != (0,)}
    overlapping = any(len(value) > 1 for value in regions.values())
    names = sorted(labels, key=lambda name: (labels[name], name))
    return parse_config({"ignore_index": ignore, **({"regions": regions} if overlapping else {"class_names": names})})


def _as_tuple(value: Any) -> tuple[int, ...]:
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)


def _check_orientation(cases: Sequence[CaseFiles], problems: Problems) -> None:
    """Add a problem for each case whose files are not RAS: nnU-Net's probabilities are, if its reader turns images."""
    nibabel = import_extra("nibabel", "nifti", "reading the orientation of NIfTI files")
    for case in cases:
        if case.prediction is None or not ((format := format_of(case.prediction)) and format.geometry):
            continue
        geometry = open_array(case.prediction).geometry
        codes = "".join(nibabel.aff2axcodes(geometry.affine)) if geometry else "RAS"
        if codes != "RAS":
            problems.add(
                f"is {codes}, but nnU-Net turned the image to RAS, and left its probabilities so",
                case=case.id,
                where=str(case.prediction),
                expected="files that are RAS, or plans with a reader that does not turn images, such as SimpleITKIO",
                fix="turn images and labels to RAS and predict again",
            )
