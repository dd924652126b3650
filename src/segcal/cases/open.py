"""``open_cases``: from a folder to a ``CaseSet``."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from segcal.cases.caseset import CHANNEL_CLASSES, CaseRef, CaseSet, numbered_channels
from segcal.cases.config import CONFIG_NAME, DatasetConfig, load_config, parse_config
from segcal.cases.disk import DiskCase
from segcal.cases.formats import LOCAL_FIRST
from segcal.cases.layout import CaseFiles, Found, find_plain, is_text, looking, unreadable_name
from segcal.cases.nnunet import find_nnunet
from segcal.cases.oriented import missing_notes
from segcal.cases.splits import by_group, check_splits
from segcal.errors import ConfigError, DataError, InputError, SegcalError
from segcal.files.remote import RemotePath, as_path
from segcal.types import Case

#: A folder or, in nnU-Net's layout, several, which are an ensemble.
Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def open_cases(path: Folders, *, need_labels: bool = True, **declared: Any) -> CaseSet:
    """Open a dataset folder (or a ``segcal.toml`` that describes one elsewhere), local or at a URL.

    Files are listed now and read when a case is used. Every key of ``segcal.toml`` can also be given as a keyword,
    which then takes precedence: ``open_cases("predictions", layout="nnunet", labels="/data/labelsTs")``. Folders are
    relative to that of the dataset.

    Args:
        path: The folder, or the path of a ``segcal.toml``. At URLs (``s3://``, ``gs://``, ``https://``) it holds zarr.
            With ``layout="nnunet"`` it may be a list of folders, which are an ensemble.
        need_labels: Raise now if a case has no label. Turn off to apply a calibrator to new data.
        **declared: Keys of ``segcal.cases.config.DatasetConfig``.

    Examples:
        >>> import tempfile, segcal
        >>> from segcal.cases import write_dataset
        >>> folder = tempfile.mkdtemp()
        >>> _ = write_dataset(segcal.synthetic.scenes(3, size=(32, 40)), folder)
        >>> cases = segcal.open_cases(folder)
        >>> len(cases), cases.num_classes, cases[0].logits.shape
        (3, 6, torch.Size([1, 6, 32, 40]))
    """
    found = find_cases(path, **declared)
    problems = found.problems + (missing_labels(found) if need_labels else [])
    if len(problems) == 1:
        raise problems[0]
    if problems:
        shown = "\n".join(f"  - {problem}" for problem in problems[:10])
        more = f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise DataError(f"{len(problems)} problems\n{shown}{more}\n", where=_shown(path), fix="see 'segcal check'")
    return case_set(found)


@looking()
def find_cases(path: Folders, **declared: Any) -> Found:
    """List the files of a dataset without opening them, collecting problems instead of raising them."""
    if not isinstance(path, str | os.PathLike) and not path:
        raise InputError("no folders", where="path", expected="at least one")
    first, *others = [as_path(path)] if isinstance(path, str | os.PathLike) else map(as_path, path)
    for own in (first, *others):
        if not is_text(str(own)):
            raise unreadable_name(own)
        if not own.is_dir() and not (own.is_file() and own.suffix.lower() == ".toml" and not others):
            problem = "is a file" if own.exists() else "does not exist"
            raise DataError(problem, where=str(own), expected="a dataset folder or a segcal.toml")
    file = first if first.is_file() else first / CONFIG_NAME
    root = file.parent
    config = load_config(file) if file.is_file() else DatasetConfig()
    overrides = parse_config(declared)
    config = replace(config, **{name: getattr(overrides, name) for name in declared if declared[name] is not None})
    if config.layout == "nnunet" and isinstance(root, RemotePath):
        raise DataError("nnU-Net's layout at a URL", where=str(root), expected="a local folder", fix=LOCAL_FIRST)
    if others and config.layout != "nnunet":
        raise DataError("several folders", where=_shown(path), expected="one, unless layout = 'nnunet'")
    found = find_nnunet([root, *others], config) if config.layout == "nnunet" else find_plain(root, config)
    found = replace(found, config=found.config.with_defaults())
    if found.config.exterior == "mask" and found.config.kind == "logits":
        raise ConfigError(
            "exterior = 'mask' with logits", where=str(file), expected="probabilities, padded with one-hot"
        )
    names = [case.id for case in found.cases]
    for name, alike in by_group(names, partial(unicodedata.normalize, "NFC")).items():
        if len(alike) > 1:
            spellings = " and ".join(map(ascii, alike))
            found.problems.add(f"two cases look the same: {spellings}", case=name, expected="different names")
    spacing = found.config.spacing if isinstance(found.config.spacing, Mapping) else {}
    if unknown := sorted(set(spacing) - set(names)):
        found.notes.append(f"[spacing] names cases that do not exist: {', '.join(unknown[:3])}")
    try:
        by_group(names, found.config.groups)
        check_splits(found.config.splits, names, found.config.groups)
    except SegcalError as error:
        found.problems.append(error.at(where=str(file)))
    if not found.cases and not found.problems:
        raise DataError("no cases", where=str(root / (found.config.scores or ".")), expected="at least one score file")
    return found


def missing_labels(found: Found) -> list[SegcalError]:
    """One error for each case without a label."""
    folder = found.config.labels or "labels"
    fix = "add it, remove the scores, or say where the labels are with --labels"
    if found.config.layout == "nnunet" and found.config.labels is None:
        fix = "say where the labels are with --labels; those of training cases are found if nnUNet_raw is set"
    return [
        DataError("no label", case=case.id, expected=f"a file {folder}/{case.id}.*", fix=fix)
        for case in found.cases
        if case.label is None
    ]


def _shown(path: Folders) -> str:
    return str(path) if isinstance(path, str | os.PathLike) else ", ".join(map(str, path))


def case_set(found: Found) -> CaseSet:
    """The case set of listed files. The first case is opened: all must have its number of classes."""
    first = DiskCase(found.cases[0], found.config)
    config = replace(found.config, classes=first.members[0].shape[0])
    if (problem := wrong_names(config)) is not None:
        raise problem
    assert config.ignore_index is not None
    return CaseSet(
        refs=tuple(CaseRef(files.id, partial(open_case, files, config), files.members) for files in found.cases),
        num_classes=first.num_classes,
        ignore_index=config.ignore_index,
        background=config.background_class(first.num_classes),
        class_names=CHANNEL_CLASSES if config.multilabel else config.class_names,
        groups=config.groups,
        splits=config.splits,
        num_members=first.num_members,
        folders=found.folders,
        notes=(*found.notes, *missing_notes(found.cases)),
        channel_names=(config.names or numbered_channels(first.batch)) if config.multilabel else None,
    )


def wrong_names(config: DatasetConfig) -> ConfigError | None:
    """The error of class names that do not match the channels, of which there are ``config.classes``."""
    names = config.names
    if config.multilabel and names is not None and len(set(names)) < len(names):
        return ConfigError(f"class_names {', '.join(names)}", expected="a different name for every channel")
    if names is None or len(names) == config.classes:
        return None
    return ConfigError(f"{len(names)} class_names", expected=f"{config.classes}, one per channel of the scores")


def open_case(files: CaseFiles, config: DatasetConfig) -> Case:
    """Open one case: reads headers, checks shapes and geometry."""
    return Case(DiskCase(files, config))
