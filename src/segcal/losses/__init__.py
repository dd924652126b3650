"""Losses for training, and their registry.

Every loss is a function of logits ``(B, C, *S)`` and integer labels ``(B, *S)``, and a module of the same name. All
compute in float32 or float64, whatever the input's type, and leave ignored voxels out of value and gradient.

A new loss is one more line here: the star imports what its file lists in ``__all__``, and the registry finds its class.

Examples:
    >>> import torch
    >>> logits, labels = torch.zeros(1, 2, 4, 4), torch.zeros(1, 4, 4, dtype=torch.int64)
    >>> LOSSES["nacl"](weight=0.1)(logits, labels) == nacl(logits, labels, weight=0.1)
    tensor(True)
"""

from __future__ import annotations

from segcal.losses import callbacks as callbacks
from segcal.losses.adaptive import *
from segcal.losses.base import Loss as Loss
from segcal.losses.batchwise import *
from segcal.losses.combine import CombinedLoss as CombinedLoss
from segcal.losses.entropy import *
from segcal.losses.neighbours import *
from segcal.losses.voxelwise import *

#: Loss id to module, by the ids of METHODS.md section 4. ``of_classes(num_classes, **options)`` makes any of them; all
#: but CRaC can also be made without arguments.
LOSSES: dict[str, type[Loss]] = {cls.id: cls for cls in Loss.__subclasses__()}
