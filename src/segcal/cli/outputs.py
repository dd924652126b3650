"""Check the output files of a command before the work, so that no result is lost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from segcal.cases import CaseSet
from segcal.cases.config import CONFIG_NAME
from segcal.cases.formats import split_suffix
from segcal.errors import OutputError
from segcal.files.atomic import check_writable


def check_files(files: Sequence[Path | None], cases: CaseSet, calibrator: Path | None = None) -> None:
    """Raise unless every output file can be written, is named once, and is not an input."""
    asked = [file for file in files if file is not None]
    for number, file in enumerate(asked):
        check_writable(file)
        if any(os.path.realpath(file) == os.path.realpath(other) for other in asked[:number]):
            raise OutputError("is named for two results", where=str(file), expected="a different file for each")
        if file.exists() and (_belongs_to(file, cases) or (calibrator is not None and file.samefile(calibrator))):
            raise OutputError("is also an input", where=str(file), expected="a file apart from the input")


def _belongs_to(file: Path, cases: CaseSet) -> bool:
    """Whether an existing file describes a dataset, or is an array in a folder of the cases."""
    file = file.resolve()
    if file.name in (CONFIG_NAME, "dataset.json", "plans.json"):
        return True
    inside = any(folder.is_dir() and file.parent.samefile(folder) for folder in cases.folders)
    return inside and split_suffix(file.name) is not None
