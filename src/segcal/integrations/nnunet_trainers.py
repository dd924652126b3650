"""The file that gives nnU-Net a trainer for each of segcal's losses: written, found and removed."""

from __future__ import annotations

import os
from pathlib import Path

from segcal.errors import InputError, OutputError, import_extra
from segcal.files.atomic import write_text
from segcal.losses import LOSSES

FILE = "segcal_trainers.py"
# The first line, by which segcal knows its own file.
_MARK = '"""nnU-Net trainers with the losses of segcal, written by: segcal nnunet install-trainers."""'
# If segcal is gone, nnU-Net must still be able to import the file on its way to other trainers.
_HEAD = f"""{_MARK}

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

try:
    from segcal.integrations.nnunet import LossMixin
except ModuleNotFoundError:
    pass
else:
"""
_TRAINER = """
    class {name}(LossMixin, nnUNetTrainer):
        loss_id = "{loss}"
"""


def trainer_names() -> dict[str, str]:
    """The name of the trainer of each loss.

    Examples:
        >>> trainer_names()["ml1-ace"]
        'nnUNetTrainer_segcal_ML1ACE'
    """
    return {loss: f"nnUNetTrainer_segcal_{kind.__name__}" for loss, kind in LOSSES.items()}


def install_trainers(folder: Path | None = None) -> Path:
    """Write the trainers of all losses into one file, and return its path.

    Args:
        folder: A folder that the variable ``nnUNet_extTrainer`` names. By default nnU-Net's own folder of trainers,
            where every version finds them without a variable, and before it imports any other trainer.
    """
    path = _place(folder)
    if path.exists() and not _is_ours(path):
        raise OutputError("exists already, and segcal did not write it", where=str(path), fix="move it away")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(
            "cannot be written to",
            where=str(path.parent),
            expected="a folder of yours",
            fix="segcal nnunet install-trainers FOLDER, and nnUNet_extTrainer=FOLDER whenever nnU-Net runs",
        )
    trainers = [_TRAINER.format(loss=loss, name=name) for loss, name in trainer_names().items()]
    write_text(path, _HEAD + "".join(trainers))
    return path


def remove_trainers(folder: Path | None = None) -> Path | None:
    """Delete the file that ``install_trainers`` wrote, and return its path; None if there is none."""
    path = _place(folder)
    if not path.exists():
        return None
    if not _is_ours(path):
        raise OutputError("segcal did not write it", where=str(path), fix="move it away by hand")
    path.unlink()
    return path


def _place(folder: Path | None) -> Path:
    paths = import_extra("nnunetv2.paths", "nnunet", "installing trainers")
    if folder is None:
        return Path(paths.__file__).parent / "training" / "nnUNetTrainer" / FILE
    if not hasattr(paths, "nnUNet_extTrainer"):
        raise InputError(
            f"{folder} was named, but this version of nnU-Net does not read nnUNet_extTrainer",
            where="folder",
            expected="a newer version, or no folder: then the trainers go to nnU-Net's own",
        )
    if not folder.is_dir():
        raise InputError("is not a folder", where=str(folder), expected="a folder that exists")
    return folder.absolute() / FILE


def _is_ours(path: Path) -> bool:
    return path.read_text(encoding="utf-8", errors="replace").startswith(_MARK)
