"""All choices of the recipe: folds, networks as keys of ``segcal train``, atlases, methods, and what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import segcal
from reproduce.common import Run
from segcal.files.atomic import write_text
from segcal.metrics import Column

# Five folds, drawn with this seed. Fold k tests on part k and calibrates on part k + 1; the other three parts train.
FOLDS, SPLIT_SEED = 5, 0
# Seed of weights and of the order of samples.
SEED = 0
CLASS_NAMES = ("background", "anterior", "posterior")
# Of both kinds of networks. Volumes differ in size, so they are cropped, to a size that every volume has and that the
# network does not pad (multiples of 8). A first run padded smaller volumes of a batch instead: networks that had met
# padded ends only took the last rows of other volumes for hippocampus. For the same reason volumes are predicted in
# windows of that size, which need no padding either. Each volume is normalised alone. Rotation by up to 15 degrees in
# the plane; no mirroring, because anterior and posterior would change places.
NETWORK: dict[str, Any] = {
    "network": "unet", "dims": 3, "width": 16, "depth": 4, "norm": "instance", "crop": [32, 40, 24],
    "window": [32, 40, 24], "augment": ["rotate"], "amp": True, "learning_rate": 1e-3, "save_every": 25,
}  # fmt: skip
# The paper's schedule for its 3D U-Net: 300 epochs of Adam, a tenth of the learning rate after 150 and 250.
TRAINING = {**NETWORK, "batch": 4, "epochs": 300, "milestones": [150, 250], "factor": 0.1}
# The paper's loss, and the usual one, whose networks are more overconfident.
LOSSES = ("ce", "ce-dice")
# The vote network's schedule is the paper's (500 epochs, half the rate after 200, 350, 450) in a tenth of the epochs.
VOTE = {**NETWORK, "loss": "ce", "batch": 8, "epochs": 50, "milestones": [20, 35, 45], "factor": 0.5}
# In miniature: the same code in seconds.
TINY = {
    "width": 4, "depth": 2, "crop": [8, 8, 8], "window": [8, 8, 8], "epochs": 2, "milestones": [1],
    "learning_rate": 0.02, "amp": False,
}  # fmt: skip
# Atlases of a target, the most similar ones of the fold's training volumes.
ATLASES = 8
# Steps of the affine registration by Adam, and their size.
REGISTRATION_STEPS, REGISTRATION_RATE = 60, 0.02

# The network as it is, then every calibrator for single networks.
METHODS = ("none", *(name for name in segcal.CALIBRATORS if name != "ensemble"))
# Those whose probabilities are fused: the paper's, and ours.
FUSED = ("none", "ts", "ibts", "lts", "lts-ti", "trust")


def _mean(metric: str, region: str = "everything", **options: Any) -> Column:
    return Column(metric, region, "per-image", options)


# Of every test volume. The paper's metrics have 10 bins in the foreground with its ring ("all") and at boundaries.
COLUMNS = {
    "nll": _mean("nll"),
    "brier": _mean("brier"),
    "ece": _mean("ece", num_bins=15),
    "ace": _mean("ace", num_bins=15),
    "ba-ece": _mean("ba-ece"),
    "dsc": _mean("dsc", background=False),
    "hd95": _mean("hd95"),
    **{
        f"{metric}-{region}": _mean(metric, region, num_bins=10)
        for metric in ("ece", "mce", "sce", "ace-adaptive")
        for region in ("all", "boundary")
    },
}
# Of every pair of a target and an atlas.
VOTE_COLUMNS = {name: _mean(name) for name in ("nll", "brier", "accuracy")}
# Of every fused segmentation.
FUSED_COLUMNS = {
    "dsc": _mean("dsc", background=False),
    "dsc-boundary": _mean("dsc", "boundary", background=False),
    "asd": _mean("asd"),
    "surface-dice": _mean("surface-dice"),
    "hd95": _mean("hd95"),
}


def parts(names: Sequence[str], fold: int) -> dict[str, list[str]]:
    """The volumes that calibrate and those that test in a fold; all others train."""
    drawn = [sorted(names)[place] for place in np.random.default_rng(SPLIT_SEED).permutation(len(names))]
    return {"calibration": drawn[(fold + 1) % FOLDS :: FOLDS], "test": drawn[fold::FOLDS]}


def dataset(data: Path, out: Path, fold: int) -> Path:
    """A folder for ``segcal train`` with links to the volumes and the lists of the fold."""
    source, folder = data / "hippocampus", out / "volumes" / f"fold{fold}"
    if not (folder / "segcal.toml").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for kind in ("images", "labels"):
            (folder / kind).unlink(missing_ok=True)
            (folder / kind).symlink_to((source / kind).resolve())
        names = [file.name.removesuffix(".nii.gz") for file in (source / "labels").glob("*.nii.gz")]
        write_lists(folder, CLASS_NAMES, parts(names, fold))
    return folder


def write_lists(folder: Path, class_names: Sequence[str], lists: dict[str, list[str]], **keys: str) -> None:
    """The ``segcal.toml`` of a dataset."""
    lines = [f"classes = {len(class_names)}", f"class_names = {list(class_names)}"]
    lines += [f"{name} = '{value}'" for name, value in keys.items()]
    lines += ["[splits]", *(f"{part} = {names}" for part, names in lists.items())]
    write_text(folder / "segcal.toml", "\n".join(lines) + "\n")


def network_runs(data: Path, out: Path, folds: Sequence[int], *, smoke: bool = False) -> list[Run]:
    """The segmentation networks, first all folds with the first loss. In miniature there is one loss."""
    keys = {**TRAINING, **(TINY if smoke else {})}
    return [
        Run(f"{loss}-fold{fold}", SEED, {**keys, "data": str(dataset(data, out, fold)), "loss": loss}, COLUMNS)
        for loss in (LOSSES[:1] if smoke else LOSSES)
        for fold in folds
    ]


def vote_runs(out: Path, folds: Sequence[int], *, smoke: bool = False) -> list[Run]:
    """The networks that say where an atlas is right, one for each fold."""
    keys = {**VOTE, **(TINY if smoke else {})}
    return [
        Run(f"vote-fold{fold}", SEED, {**keys, "data": str(out / "pairs" / f"fold{fold}")}, VOTE_COLUMNS)
        for fold in folds
    ]
