"""The files of each case of a folder in the plain convention. Problems are collected, so that all can be shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from segcal.cases.config import DatasetConfig
from segcal.cases.formats import SCORE_FORMATS, format_of, split_suffix
from segcal.errors import DataError, SegcalError
from segcal.files.remote import under
from segcal.scores import KINDS

# Folders beside the scores, in the plain convention.
_EXTRAS = ("labels", "images", "masks", "posteriors")
# Characters of a name that an error shows.
_LONGEST = 200
_PICKLES = (".pkl", ".pickle", ".pt", ".pth")


@dataclass(frozen=True)
class CaseFiles:
    """The files of one case; several ``members`` make an ensemble."""

    id: str
    members: tuple[Path, ...]
    label: Path | None = None
    images: tuple[Path, ...] = ()
    mask: Path | None = None
    posterior: Path | None = None
    prediction: Path | None = None  # nnU-Net's segmentation, which has the geometry that its npz file lacks

    @property
    def paths(self) -> tuple[Path, ...]:
        """All of them."""
        some = (self.label, self.mask, self.posterior, self.prediction)
        return (*self.members, *self.images, *(path for path in some if path is not None))


class Problems(list[SegcalError]):
    """Errors that are collected, so that all can be shown at once."""

    def add(self, problem: str, **about: str) -> None:
        """Add a ``DataError``, which has the same arguments."""
        self.append(DataError(problem, **about))


@dataclass(frozen=True)
class Found:
    """What a folder holds.

    Attributes:
        config: The completed configuration.
        cases: The files of every case.
        members: The names of the ensemble members.
        problems: What is wrong.
        folders: The folders that are read; in the plain convention also those that would be.
        notes: What is legal but easily overlooked: files that belong to no case, cases without a mask.
    """

    config: DatasetConfig
    cases: tuple[CaseFiles, ...]
    members: tuple[str, ...] = ()
    problems: Problems = field(default_factory=Problems)
    folders: tuple[Path, ...] = ()
    notes: list[str] = field(default_factory=list)


def find_plain(root: Path, config: DatasetConfig) -> Found:
    """Find the cases of a folder in the plain convention (``logits/`` or ``probs/``, ``labels/``, ...)."""
    problems, notes = Problems(), list[str]()
    folder, config = _score_folder(root, config)
    members = [item for item in list_folder(folder, problems) if not format_of(item) and item.is_dir()]
    loose = list_cases(folder, problems, None if members else notes)
    if members and loose:
        problem = f"holds score files and the folders {', '.join(item.name for item in members)}"
        expected = "either one file per case, or one folder per ensemble member"
        problems.add(problem, where=str(folder), expected=expected)
        members = []
    cases = collect_members([list_cases(item, problems, notes) for item in members] or [loose], members, problems)
    return attach(Found(config, cases, tuple(item.name for item in members), problems, notes=notes), root)


@contextmanager
def looking() -> Iterator[None]:
    """Turn the system's errors about places that cannot be looked at, such as endless names, into clear ones."""
    try:
        yield
    except OSError as error:
        name = str(error.filename)
        raise DataError(
            f"cannot be read ({error.strerror or error})",
            where=name if len(name) <= _LONGEST else f"{name[:_LONGEST]}...",
            expected="a folder or file that this user may read",
        ) from None


def list_folder(folder: Path, problems: Problems) -> list[Path]:
    """The visible items of a folder, sorted. Names that are not UTF-8 are problems."""
    try:
        items = sorted(item for item in folder.iterdir() if not item.name.startswith("."))
    except OSError as error:
        problems.add(f"cannot be listed ({error.strerror})", where=str(folder), expected="a folder")
        return []
    problems.extend(unreadable_name(item) for item in items if not is_text(item.name))
    return [item for item in items if is_text(item.name)]


def is_text(name: str) -> bool:
    """Whether a file name is UTF-8. Python replaces other bytes with characters that cannot be printed."""
    return name == name.encode(errors="ignore").decode()


def unreadable_name(path: Path) -> DataError:
    """The error of a name that is not UTF-8."""
    return DataError(f"the name {os.fsencode(path.name)!r} is not UTF-8", expected="a readable name", fix="rename it")


def list_cases(folder: Path, problems: Problems, notes: list[str] | None = None) -> dict[str, Path]:
    """The files of known formats, by case. Two files for one case are a problem, and so are pickles."""
    found: dict[str, Path] = {}
    unknown = []
    for path in list_folder(folder, problems):
        parts = split_suffix(path.name)
        if parts is None:
            unknown.append(path.name)
            if path.suffix.lower() in _PICKLES:
                problems.add(
                    f"{path.suffix} files are pickles, which segcal never loads",
                    where=str(path),
                    expected=f"a file of the format {', '.join(SCORE_FORMATS)}",
                    fix="save the array itself, e.g. numpy.save(file, tensor.numpy())",
                )
        elif parts[0] in found:
            problem = f"two files for one case: {found[parts[0]].name} and {path.name}"
            fix = "remove or rename one of them"
            problems.add(problem, case=parts[0], where=str(folder), expected="one", fix=fix)
        else:
            found[parts[0]] = path
    if unknown and notes is not None:
        notes.append(f"{folder}: not read, because the format is not known: {_some(unknown)}")
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def collect_members(
    members: Sequence[dict[str, Path]], folders: Sequence[Path], problems: Problems
) -> tuple[CaseFiles, ...]:
    """Collect the members of each case. A member that lacks a case is a problem, and the case is left out."""
    cases = []
    for name in sorted(set().union(*members)):
        lacking = [folder.name for folder, files in zip(folders, members, strict=False) if name not in files]
        if lacking:
            problem = f"no scores from the ensemble members {', '.join(lacking)}"
            problems.add(problem, case=name, expected="a file in every member's folder")
        else:
            cases.append(CaseFiles(name, tuple(files[name] for files in members)))
    return tuple(cases)


def attach(found: Found, root: Path) -> Found:
    """Add labels, images, masks and posteriors to the cases, by name. Files that belong to no case are noted."""
    config, problems = found.config, found.problems
    ids = {case.id for case in found.cases}

    def folder(declared: str | None, usual: str) -> dict[str, Path]:
        path = under(root, declared or usual)
        if not path.is_dir():
            if declared:
                problems.add("is not a folder", where=str(path), expected=f"the {usual} that were declared")
            return {}
        files = list_cases(path, problems, found.notes)
        # nnU-Net names the channels of an image case_0000, case_0001, ...
        owners = {name: _owner(name, ids) if usual == "images" else name for name in files}
        strays = [files[name].name for name, owner in owners.items() if owner not in ids]
        lacking = sorted(ids - set(owners.values()))
        if ids and len(lacking) == len(ids) and (usual == "masks" or (declared and usual == "images")):
            problems.add(
                f"none of its {len(files)} files belongs to a case" + (f": {_some(strays)}" if strays else ""),
                where=str(path),
                expected=f"files named as the scores are, {lacking[0]}.*",
                fix="rename the files, or remove the folder",
            )
        elif ids and strays:
            found.notes.append(f"{path}: not read, because there are no scores of this name: {_some(strays)}")
        if usual == "masks" and lacking and len(lacking) < len(ids):
            found.notes.append(f"{path}: no mask, so every voxel counts, for {_some(lacking)}")
        return files

    labels, images, masks, posteriors = (folder(getattr(config, usual), usual) for usual in _EXTRAS)
    channels: dict[str, list[Path]] = {}
    for name, path in images.items():
        channels.setdefault(_owner(name, ids), []).append(path)
    cases = tuple(
        replace(
            case,
            label=labels.get(case.id),
            images=(images[case.id],) if case.id in images else tuple(channels.get(case.id, ())),
            mask=masks.get(case.id),
            posterior=posteriors.get(case.id),
        )
        for case in found.cases
    )
    usual = [root / name for name in (*KINDS, *_EXTRAS)] if config.layout == "plain" else []
    return replace(
        found, cases=cases, folders=tuple(dict.fromkeys([*usual, *(p.parent for c in cases for p in c.paths)]))
    )


def _owner(image: str, ids: set[str]) -> str:
    """The case of an image file: ``scan_0001`` is a channel of ``scan``, unless there is a case of that name."""
    return image if image in ids else re.sub(r"_\d{4}$", "", image)


def _score_folder(root: Path, config: DatasetConfig) -> tuple[Path, DatasetConfig]:
    if config.scores:
        named = [kind for kind in KINDS if kind == under(root, config.scores).name]
    else:
        named = [kind for kind in KINDS if (root / kind).is_dir()]
        if not named:
            raise _nothing_found(root)
    if config.kind is None and len(named) != 1:
        problem = f"the scores are in {config.scores}/, which does not name their kind"
        raise _undeclared(problem if config.scores else "there are both logits/ and probs/", root)
    kind = config.kind or named[0]
    folder = under(root, config.scores or kind)
    if not folder.is_dir():
        raise DataError("is not a folder", where=str(folder), expected="the folder of the scores")
    if folder.name in KINDS and folder.name != kind:
        raise DataError(f"kind = '{kind}' but the folder is {folder.name}/", where=str(root), expected="one kind")
    return folder, replace(config, kind=kind, scores=config.scores or kind)


def _undeclared(problem: str, root: Path) -> DataError:
    return DataError(
        f"kind not declared: {problem}",
        where=str(root),
        expected="a declaration of logits or probabilities: a wrong guess would make every number wrong",
        fix="name the folder logits/ or probs/, or write kind = 'logits' or kind = 'probs' into segcal.toml",
    )


def _nothing_found(root: Path) -> SegcalError:
    problems = Problems()
    entries = [item.name + ("/" if item.is_dir() else "") for item in list_folder(root, problems)]
    if problems:
        return problems[0]
    if not entries:
        return DataError("the folder is empty", where=str(root), expected="a dataset: logits/ or probs/, and labels/")
    if any(name.lower().endswith(".npz") or name.startswith("fold_") for name in entries):
        return DataError(
            "no logits/ or probs/ folder; it looks like an nnU-Net folder",
            where=str(root),
            fix="use --layout nnunet --labels FOLDER, or write layout = 'nnunet' and labels = '...' into segcal.toml",
        )
    shown = ", ".join(entries[:8]) + (", ..." if len(entries) > 8 else "")
    return _undeclared(f"no folder named logits/ or probs/ (found {shown})", root)
