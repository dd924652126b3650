"""The atom of each voxel, and boundary distances by atom. Plain torch for all kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from segcal.errors import InputError
from segcal.kernels.tally import Tally
from segcal.kernels.voxels import Voxels

_MAX_ATOMS = 256  # a slot is a uint8


def atoms_of(voxels: Voxels, masks: Sequence[Tensor]) -> tuple[tuple[int, ...], Tensor]:
    """The atoms among these voxels (bit r set: in region r) and each voxel's index among them, uint8."""
    slots = torch.empty(voxels.labels.shape, dtype=torch.uint8, device=voxels.labels.device)
    table = torch.full((2 ** len(masks),), -1, dtype=torch.int16, device=slots.device)
    atoms: list[int] = []
    for piece in voxels.pieces():
        codes = torch.zeros_like(voxels.flat(slots, piece), dtype=torch.int64)
        for bit, mask in enumerate(masks):
            codes |= voxels.flat(mask, piece).to(codes) << bit
        present = torch.bincount(codes, minlength=len(table)) > 0
        new = (present & (table < 0)).nonzero().squeeze(1).tolist()
        for atom in new:
            table[atom] = len(atoms)
            atoms.append(atom)
        if len(atoms) > _MAX_ATOMS:
            raise InputError(
                f"the regions overlap in more than {_MAX_ATOMS} different ways",
                fix="collect some of the regions in statistics of their own",
            )
        slots.view(-1)[piece.offset : piece.offset + len(codes)] = table[codes].to(torch.uint8)
    return tuple(atoms), slots


def add_distances(result: Tally, distance: Tensor, voxels: Voxels) -> None:
    """Sum and number of finite distances, and number of all, per slot; on the CPU, where sums have a fixed order."""
    size = len(result.distance)
    for piece in voxels.pieces():
        values, keep = voxels.flat(distance, piece).cpu().double(), voxels.valid(piece).cpu()
        slots = torch.zeros_like(keep) if voxels.slots is None else voxels.flat(voxels.slots, piece).cpu()
        slots = slots.long()
        finite = keep & torch.isfinite(values)
        result.distance[:, 0] += torch.bincount(slots[finite], weights=values[finite], minlength=size).numpy()
        result.distance[:, 1] += torch.bincount(slots[finite], minlength=size).numpy()
        result.distance[:, 2] += torch.bincount(slots[keep], minlength=size).numpy()
