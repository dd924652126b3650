"""Train-time losses, and their registry.

Every loss is a function of logits ``(B, C, *S)`` and integer labels ``(B, *S)``, and a module of the same name. They
compute in float32 or better whatever the input's type, and leave ignored voxels out of value and gradient.
"""

from __future__ import annotations

from segcal.losses import callbacks
from segcal.losses.adaptive import CRaC, crac
from segcal.losses.base import Loss
from segcal.losses.calibration import ML1ACE, MMCE, ml1_ace, mmce
from segcal.losses.combine import CombinedLoss
from segcal.losses.consistency import BWCR, bwcr
from segcal.losses.entropy import ECP, MEEP, Focal, LabelSmoothing, ecp, focal, label_smoothing, meep
from segcal.losses.lagrangian import Multipliers
from segcal.losses.margin import MbLS, mbls
from segcal.losses.neighbours import NACL, SVLS, nacl, svls
from segcal.losses.regional import CrossEntropyDice, Dice, cross_entropy_dice, dice
from segcal.losses.voxelwise import CrossEntropy, cross_entropy

__all__ = [
    "BWCR",
    "ECP",
    "LOSSES",
    "MEEP",
    "ML1ACE",
    "MMCE",
    "NACL",
    "SVLS",
    "CRaC",
    "CombinedLoss",
    "CrossEntropy",
    "CrossEntropyDice",
    "Dice",
    "Focal",
    "LabelSmoothing",
    "Loss",
    "MbLS",
    "Multipliers",
    "bwcr",
    "callbacks",
    "crac",
    "cross_entropy",
    "cross_entropy_dice",
    "dice",
    "ecp",
    "focal",
    "label_smoothing",
    "mbls",
    "meep",
    "ml1_ace",
    "mmce",
    "nacl",
    "svls",
]

#: Loss id to module, as METHODS.md section 4 names them. All can be made without arguments but CRaC, which needs the
#: number of classes.
LOSSES: dict[str, type[Loss]] = {
    cls.id: cls
    for cls in (
        CrossEntropy,
        Dice,
        CrossEntropyDice,
        Focal,
        LabelSmoothing,
        ECP,
        SVLS,
        MbLS,
        NACL,
        CRaC,
        BWCR,
        MMCE,
        MEEP,
        ML1ACE,
    )
}
