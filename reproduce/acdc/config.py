"""All networks of the recipe, as keys of ``segcal train``."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from reproduce.acdc.halved import halved
from reproduce.common import Run
from segcal.training import convert

# Of every run. Papers: 100 epochs of Adam, 1e-3 and after 50 epochs 1e-4, batches of 16 slices, a U-Net. Ours: its
# width and batch normalisation (the papers do not say), and augmentation (they mention none): each in-plane axis is
# mirrored, and the slice rotated by up to 15 degrees, each with probability 1/2. The epoch with the best validation
# Dice counts.
TRAINING: dict[str, Any] = {
    "network": "unet", "width": 32, "depth": 5, "norm": "batch", "batch": 16, "epochs": 100, "learning_rate": 1e-3,
    "milestones": [50], "factor": 0.1, "augment": ["flip", "rotate"], "amp": True, "save_every": 20,
}  # fmt: skip
# At half the resolution, with a quarter of the features: half an hour a network on one core.
HALF = {**TRAINING, "width": 8, "depth": 4, "amp": False}
# In miniature: the same code in seconds.
SMOKE = {**TRAINING, "width": 4, "depth": 2, "epochs": 4, "learning_rate": 0.02, "milestones": [3], "amp": False}
# Seed of the split of patients, the same for all runs.
SPLIT_SEED = 0
SEEDS = (0, 1, 2)
# Networks whose weights are kept for the post-hoc part.
KEPT = ("ce-dice-0", "nacl-0")


def _loss(id: str, **options: Any) -> dict[str, Any]:
    return {"id": id, "options": options}


# Table 1 of both papers, with MEEP and mL1-ACE. NACL's table has MbLS with margin 5, CRaC's with margin 10. CRaC has no
# margin in its paper (1), but 5 in its released code, which also learns its multipliers from means over all voxels.
MAIN = {
    "ce-dice": _loss("ce-dice"),
    "fl": _loss("focal", gamma=3.0),
    "ecp": _loss("ecp", weight=0.1),
    "ls": _loss("ls", alpha=0.1),
    "svls": _loss("svls", sigma=2.0),
    "mbls-10": _loss("mbls", weight=0.1, margin=10.0),
    "mbls-5": _loss("mbls", weight=0.1, margin=5.0),
    "nacl": _loss("nacl", weight=0.1),
    "bwcr": _loss("bwcr"),
    "crac": _loss("crac"),
    "crac-margin5": _loss("crac", margin=5.0),
    "crac-code": _loss("crac", margin=5.0, average="all"),
    "meep": _loss("meep"),
    "ml1-ace": _loss("ml1-ace"),
}
# Tables 2 and 3 of NACL; the row "nacl" of MAIN is the one they are compared with.
ABLATION = {
    **{
        f"nacl-{prior}": _loss("nacl", weight=0.1, prior=prior)
        for prior in ("gaussian", "max", "min", "median", "mode")
    },
    "nacl-l2": _loss("nacl", weight=0.1, penalty="l2"),
    "nacl-softmax": _loss("nacl", weight=0.1, on="softmax"),
    "nacl-patch5": _loss("nacl", weight=0.1, patch=5),
}
# Figure 1 of CRaC, which learns its weights and has no lambda: its margin varies. MEEP has the weight of its released
# code.
SENSITIVITY = {
    **{f"nacl-{weight:g}": _loss("nacl", weight=weight) for weight in (0.01, 0.05, 0.2, 0.3, 1.0)},
    "crac-margin2": _loss("crac", margin=2.0),
    "meep-0.3": _loss("meep", weight=0.3),
}
GROUPS = {"main": MAIN, "ablation": ABLATION, "sensitivity": SENSITIVITY}


def images(data: Path, out: Path, *, half: bool = False) -> Path:
    """The folder of images, unpacked once, at half the resolution if asked for, and split 70/10/20 by patient."""
    folder, packed = out / "images", data / "acdc.npz"
    if not folder.is_dir():
        out.mkdir(parents=True, exist_ok=True)
        print(convert(halved(packed, out / "halved.npz") if half else packed, folder, seed=SPLIT_SEED), flush=True)
    return folder


def runs(
    data: str,
    training: dict[str, Any] = TRAINING,
    *,
    only: Collection[str] = (),
    seeds: Collection[int] = SEEDS,
    compile: bool = False,
) -> list[Run]:
    """The runs of some groups or rows: the main table, which alone has several seeds, before the others."""
    keys = {**training, "data": data, "compile": compile}
    found = []
    for group, losses in GROUPS.items():
        for seed in seeds if group == "main" else set(seeds) & {SEEDS[0]}:
            for name, loss in losses.items():
                if not only or group in only or name in only:
                    found.append(Run(name, seed, {**keys, "loss": [loss]}))
    return found
