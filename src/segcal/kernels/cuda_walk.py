"""How the compiled loops of ``segcal.kernels.cuda`` and ``cuda_tally`` walk through voxels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.kernels.voxels import Voxels

#: Voxels of a block, and programs that take the blocks in turn: 32 warps for each of an H200's processors.
BLOCK, PROGRAMS = 64, 132 * 32
#: Up to how many classes a thread has all scores of a voxel.
FEW = 24
#: The label to ignore if there is none.
_NO_LABEL = int(np.iinfo(np.int64).min)


@dataclasses.dataclass(frozen=True)
class Walk:
    """How a kernel walks through voxels: logits ``(N, C, V)`` with their strides, and flat labels and mask."""

    logits: Tensor
    labels: Tensor
    mask: Tensor | None
    ignored: int

    @classmethod
    def of(cls, voxels: Voxels) -> Walk:
        """Copies as ``joined`` does."""
        logits = joined(voxels.logits)
        ignored = _NO_LABEL if voxels.ignore_index is None else voxels.ignore_index
        labels, mask = (flat(own, logits.device) for own in (voxels.labels, voxels.mask))
        assert labels is not None
        return cls(logits, labels, mask, ignored)

    @property
    def voxels(self) -> int:
        """Voxels of all images."""
        images, _, inner = self.logits.shape
        return images * inner

    @property
    def masked(self) -> bool:
        """Whether there is a mask."""
        return self.mask is not None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, labels and mask; without a mask anything that is not read."""
        return self.logits, self.labels, self.labels if self.mask is None else self.mask

    @property
    def sizes(self) -> tuple[int, ...]:
        """Classes, voxels of an image, strides by image, class and voxel."""
        return *self.logits.shape[1:], *self.logits.stride()

    def blocks(self, size: int = BLOCK) -> tuple[int, int]:
        """Blocks of all images and of one."""
        images, _, inner = self.logits.shape
        per_image = -(-inner // size)
        return images * per_image, per_image


def joined(logits: Tensor) -> Tensor:
    """Logits ``(N, C, V)``; copied only if their spatial axes cannot be flattened, or to join small images to one."""
    batch, classes, *spatial = logits.shape
    inner = math.prod(spatial)
    logits = logits.detach().reshape(batch, classes, inner)
    return logits if inner >= BLOCK else logits.transpose(0, 1).reshape(1, classes, batch * inner)


def flat(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """A tensor ``(N, *spatial)`` as one axis on the device."""
    return None if tensor is None else tensor.to(device).reshape(-1)


def launch(loop: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Run a loop in some programs, on the device of its first argument, which triton takes the current one for.

    Products are added unrounded, whatever the default of a version of triton is.
    """
    with torch.cuda.device_of(arguments[0]):  # type: ignore[no-untyped-call]
        loop[(programs,)](*arguments, enable_fp_fusion=True, **options)
