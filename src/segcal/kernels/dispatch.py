"""Which kernel takes an input: compiled loops where they suit it and pay, else torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from segcal.errors import InputError, SegcalError
from segcal.kernels import reference
from segcal.kernels.tally import Tally
from segcal.kernels.voxels import Voxels

Backend = Literal["auto", "reference", "numba"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "numba")

Kernel = Callable[[Voxels, int], Tally]

# Below this many logits the reference is done before numba has been imported.
_LARGE = 2**18
# A byte holds the labels of so many classes, and one number more for voxels without any.
_BYTE_CLASSES = 255


def tally(voxels: Voxels, backend: Backend = "auto", threads: int | None = None) -> tuple[Tally, float]:
    """All statistics of one update, by slot, and the shift that the energies are relative to.

    ``auto`` takes numba for at least 2^18 logits on the CPU in float32 or less, where numba is installed, and the
    reference otherwise (float64 logits keep their precision there). ``threads`` are numba's; None means torch's number.

    Examples:
        >>> from segcal.kernels.grid import BinGrid
        >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0])
        >>> tally(Voxels(logits, labels, BinGrid.top_label((15,)), None))[0].confusion
        array([[[1, 1],
                [0, 0]]])
    """
    voxels = dataclasses.replace(voxels, energy_shift=_rough_energy(voxels))
    kernel = _kernel(voxels, backend)
    return kernel(voxels, threads or torch.get_num_threads()), voxels.energy_shift


def fast_maps(logits: Tensor) -> ModuleType | None:
    """``segcal.kernels.apply_cpu`` where it suits these logits: many, on the CPU, with no need of a gradient."""
    if _recording() or (logits.requires_grad and torch.is_grad_enabled()):
        return None
    if not _suits_numba(logits) or logits.numel() < _LARGE:
        return None
    try:
        from segcal.kernels import apply_cpu
    except ImportError:
        return None
    return apply_cpu


def fast_penalties(logits: Tensor) -> ModuleType | None:
    """``segcal.kernels.penalty_cpu`` where it suits these logits: many, float32, contiguous, on the CPU."""
    if _recording() or logits.dtype != torch.float32 or logits.device.type != "cpu":
        return None
    if logits.numel() < _LARGE or logits.shape[1] > _BYTE_CLASSES or not logits.is_contiguous():
        return None
    try:
        from segcal.kernels import penalty_cpu
    except ImportError:
        return None
    return penalty_cpu


def _recording() -> bool:
    """Whether torch is recording operations, to compile, export or trace them: compiled loops would not be in it."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def _suits_numba(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float16, torch.bfloat16)


def _kernel(voxels: Voxels, backend: Backend) -> Kernel:
    logits = voxels.logits
    suits_numba = _suits_numba(logits)
    if backend == "auto":
        fast = _numba_kernel() if suits_numba and logits.numel() >= _LARGE else None
        return fast or reference.tally
    if backend == "numba":
        if not suits_numba:
            raise InputError(
                f"logits are {logits.dtype} on {logits.device}",
                expected="float32 or less on the CPU for backend 'numba'",
                fix="leave the backend to 'auto'",
            )
        fast = _numba_kernel()
        if fast is None:
            raise SegcalError("backend 'numba' needs numba, which is not installed", fix="pip install numba")
        return fast
    if backend == "reference":
        return reference.tally
    raise InputError(f"backend is {backend!r}", expected=f"one of {', '.join(BACKENDS)}")


def _numba_kernel() -> Kernel | None:
    try:
        from segcal.kernels import cpu
    except ImportError:  # numba has no wheel for every platform
        return None
    return cpu.tally


def _rough_energy(voxels: Voxels) -> float:
    """The free energy of about the first voxel: sums of squares around it lose no digits to the gauge."""
    if voxels.labels.numel() == 0:
        return 0.0
    corner = (slice(0, 1), slice(None)) + (slice(0, 1),) * (voxels.logits.ndim - 2)
    first = voxels.logits[corner].detach().to("cpu", torch.float64)
    energy = float((first if voxels.score_map is None else voxels.score_map(first)).amax())
    return energy if math.isfinite(energy) else 0.0
