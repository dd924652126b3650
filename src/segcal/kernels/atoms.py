"""Checks of the tensors of one update, the atom of each voxel, and boundary distances by atom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from segcal.checks import check_like
from segcal.errors import InputError
from segcal.kernels.dispatch import fast_distances
from segcal.kernels.tally import Tally
from segcal.kernels.voxels import PIECE_VOXELS, Voxels

_MAX_ATOMS = 256  # a slot is a uint8
# Voxels of a part on a GPU: 128 MB of codes.
_ON_DEVICE = 2**25


def check_tensors(num_classes: int, voxels: Voxels, distance: Tensor | None = None) -> None:
    """Raise unless there are so many classes, and what comes with the labels is ``(N, *spatial)`` of the right type."""
    logits = voxels.logits
    if logits.shape[1] != num_classes:
        raise InputError(f"logits have {logits.shape[1]} classes", expected=f"{num_classes}")
    for name, tensor, dtype in (
        ("mask", voxels.mask, "bool"),
        ("distance", distance, "floating point"),
        ("uncalibrated", voxels.uncalibrated, "integers"),
    ):
        if tensor is not None:
            check_like(name, tensor, logits[:, 0], dtype)


def region_masks(names: Sequence[str], labels: Tensor, regions: Mapping[str, Tensor] | Tensor | None) -> list[Tensor]:
    """One bool mask per region, in the order of ``names``, from masks by name or a tensor of indices."""
    if isinstance(regions, Tensor):
        check_like("regions", regions, labels, "integers")
        if bool((regions >= len(names)).any()):
            raise InputError(f"region index {int(regions.max())}", expected=f"less than {len(names)}")
        return [regions == index for index in range(len(names))]
    given = {} if regions is None else regions
    if set(given) != set(names):
        raise InputError(f"regions are {sorted(given)}", expected=f"{sorted(names)}, as named at construction")
    for name, mask in given.items():
        check_like(f"region {name!r}", mask, labels, "bool")
    return [given[name] for name in names]


def atoms_of(voxels: Voxels, masks: Sequence[Tensor]) -> tuple[tuple[int, ...], Tensor]:
    """The atoms among these voxels (bit r set: in region r) and each voxel's index among them, uint8."""
    slots = torch.empty(voxels.labels.shape, dtype=torch.uint8, device=voxels.labels.device)
    table = torch.full((2 ** len(masks),), -1, dtype=torch.int16, device=slots.device)
    atoms: list[int] = []
    for piece in _pieces(slots):
        codes = torch.zeros_like(slots.view(-1)[piece], dtype=torch.int32)
        for bit, mask in enumerate(masks):
            codes.add_(_flat(mask, piece).to(codes.device), alpha=1 << bit)
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
        slots.view(-1)[piece] = table.index_select(0, codes).to(torch.uint8)
    return tuple(atoms), slots


def add_distances(result: Tally, distance: Tensor, voxels: Voxels, threads: int | None = None) -> None:
    """Sum and number of finite distances, and number of all, per slot, added in a fixed order."""
    keep, slots, size = _kept(voxels), voxels.slots, len(result.distance)
    if (kernels := fast_distances(distance)) is not None:
        there = None if slots is None else slots.to(distance.device)
        result.distance[:] += kernels.sums_by_slot(distance, keep.to(distance.device), there, size, threads)
        return
    for piece in _pieces(distance):
        values, kept = _flat(distance, piece).cpu().double(), _flat(keep, piece).cpu()
        places = torch.zeros(len(kept), dtype=torch.int64) if slots is None else _flat(slots, piece).cpu().long()
        finite = kept & torch.isfinite(values)
        result.distance[:, 0] += torch.bincount(places[finite], weights=values[finite], minlength=size).numpy()
        result.distance[:, 1] += torch.bincount(places[finite], minlength=size).numpy()
        result.distance[:, 2] += torch.bincount(places[kept], minlength=size).numpy()


def _kept(voxels: Voxels) -> Tensor:
    """Which voxels count, ``(N, *spatial)`` bool."""
    labels, ignored, mask = voxels.labels, voxels.ignore_index, voxels.mask
    if ignored is None:
        return torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
    return labels != ignored if mask is None else (labels != ignored) & mask.to(labels.device)


def _pieces(tensor: Tensor) -> Iterator[slice]:
    """Parts of all voxels: few on a GPU, which is waited for in each."""
    step = _ON_DEVICE if tensor.is_cuda else PIECE_VOXELS
    return (slice(start, start + step) for start in range(0, tensor.numel(), step))


def _flat(tensor: Tensor, piece: slice) -> Tensor:
    """A part of all voxels of ``(N, *spatial)``."""
    return tensor.reshape(-1)[piece]
