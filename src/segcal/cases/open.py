"""``open_cases``: from a folder to a ``CaseSet``."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from segcal.cases.caseset import CHANNEL_CLASSES, CaseRef, CaseSet, numbered_channels
from segcal.cases.config import CONFIG_NAME, DatasetConfig, load_config, parse_config
from segcal.cases.disk import DiskCase
from segcal.cases.formats import LOCAL_FIRST
from segcal.cases.layout import CaseFiles, Found, find_plain, is_text, unreadable_name
from segcal.cases.nnunet import find_nnunet
from segcal.cases.oriented import missing_notes
from segcal.cases.splits import by_group, check_splits
from segcal.errors import ConfigError, DataError, SegcalError
from segcal.files.remote import RemotePath, as_path
from segcal.types import Case


def open_cases(path: str | os.PathLike[str], *, need_labels: bool = True, **declared: Any) -> CaseSet:
    """Open a dataset folder (or a ``segcal.toml`` that describes one elsewhere), local or at a URL.

    Files are listed now and read when a case is used. Every key of ``segcal.toml`` can also be given as a keyword,
    which then takes precedence: ``open_cases("predictions", layout="nnunet", labels="/data/labelsTs")``. Folders are
    relative to that of the dataset.

    Args:
        path: The folder, or the path of a ``segcal.toml``. At URLs (``s3://``, ``gs://``, ``https://``) it holds zarr.
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
    found = find_cases(as_path(path), **declared)
    problems = found.problems + (missing_labels(found) if need_labels else [])
    if len(problems) == 1:
        raise problems[0]
    if problems:
        shown = "\n".join(f"  - {problem}" for problem in problems[:10])
        more = f"\n  ... and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise DataError(f"{len(problems)} problems\n{shown}{more}\n", where=str(path), fix="see 'segcal check'")
    return case_set(found)


def find_cases(path: Path, **declared: Any) -> Found:
    """List the files of a dataset without opening them, collecting problems instead of raising them."""
    if not is_text(str(path)):
        raise unreadable_name(path)
    if not path.is_dir() and not (path.is_file() and path.suffix.lower() == ".toml"):
        problem = "is a file" if path.exists() else "does not exist"
        raise DataError(problem, where=str(path), expected="a dataset folder or a segcal.toml")
    file = path if path.is_file() else path / CONFIG_NAME
    root = file.parent
    config = load_config(file) if file.is_file() else DatasetConfig()
    overrides = parse_config(declared)
    config = replace(config, **{name: getattr(overrides, name) for name in declared if declared[name] is not None})
    if config.layout == "nnunet" and isinstance(root, RemotePath):
        raise DataError("nnU-Net's layout at a URL", where=str(root), expected="a local folder", fix=LOCAL_FIRST)
    found = find_nnunet(root, config) if config.layout == "nnunet" else find_plain(root, config)
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
    return [
        DataError(
            "no label",
            case=case.id,
            expected=f"a file {folder}/{case.id}.*",
            fix="add it, remove the scores, or say where the labels are with --labels",
        )
        for case in found.cases
        if case.label is None
    ]


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
