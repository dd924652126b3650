"""The choice of the kernel: compiled loops where they apply and are faster, else torch."""

from __future__ import annotations

import dataclasses
import math
from importlib import import_module
from types import ModuleType
from typing import Literal, cast

import torch
from torch import Tensor

from segcal.errors import InputError, SegcalError, check_name
from segcal.kernels import device_torch, reference
from segcal.kernels.tally import Tally
from segcal.kernels.voxels import Voxels

Backend = Literal["auto", "reference", "numba", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "numba", "triton")

# Below this many logits the reference is faster than importing numba.
_LARGE = 2**18
# Below this many voxels scipy's distances are faster than loading numba's.
_LARGE_MAP = 2**14
# The most classes whose labels fit a byte beside one value for voxels without a label.
_BYTE_CLASSES = 255
# The most classes of which a block of voxels fits the registers of a GPU's processor.
_TILE_CLASSES = 1024
# The oldest triton that compiles the loops for GPUs, which torch 2.8 brings; earlier ones have no tuples.
_TRITON = (3, 4)
# Where each backend's loops run.
_DEVICES = {"numba": "cpu", "triton": "cuda"}
_NEEDED = {
    "numba": ("numba", "pip install numba"),
    "triton": ("triton {}.{} or newer".format(*_TRITON), "pip install 'torch>=2.8', which brings it"),
}
_WORDS = {"numba": "the CPU", "triton": f"a CUDA device and at most {_TILE_CLASSES} classes"}


def tally(voxels: Voxels, backend: Backend = "auto", threads: int | None = None) -> tuple[Tally, float]:
    """All statistics of one update, by slot, and the shift that the energies are relative to.

    ``auto`` takes numba for at least 2^18 logits on the CPU and triton for logits on a CUDA device, both in float32 or
    less and where they are installed; on a CUDA device without triton torch does the same; and the reference otherwise
    (float64 logits keep their precision there). ``threads`` are numba's; None means torch's number.

    Examples:
        >>> from segcal.kernels.grid import BinGrid
        >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0])
        >>> tally(Voxels(logits, labels, BinGrid.top_label((15,)), None))[0].confusion
        array([[[1, 1],
                [0, 0]]])
    """
    kernels = _kernels(voxels, backend)
    if hasattr(kernels, "shifted_tally"):  # the device chooses the shift, and is waited for once
        return cast("tuple[Tally, float]", kernels.shifted_tally(voxels))
    voxels = dataclasses.replace(voxels, energy_shift=_rough_energy(voxels))
    return kernels.tally(voxels, threads or torch.get_num_threads()), voxels.energy_shift


def fast_maps(logits: Tensor, size: int | None = None) -> ModuleType | None:
    """``segcal.kernels.apply_cpu`` if it suits these logits: many, on the CPU, and no gradient is needed.

    ``size`` is the number of values of the whole that they are part of.
    """
    size = logits.numel() if size is None else size
    return None if _recorded(logits) or size < _LARGE or not _suits("numba", logits) else _compiled("apply_cpu")


def cuda_kernels(logits: Tensor) -> ModuleType | None:
    """``segcal.kernels.cuda`` if it suits these logits: on a CUDA device, and no gradient is needed."""
    suits = not _recorded(logits) and logits.numel() > 0 and _suits("triton", logits)
    return _compiled("cuda") if suits else None


def device_kernels(logits: Tensor) -> ModuleType | None:
    """``cuda_kernels`` of logits whose gradient does not matter; without triton ``device_torch``, which has sums."""
    suits = logits.numel() > 0 and _suits("triton", logits)
    return (_compiled("cuda") or device_torch) if suits else None


def trust_maps(values: Tensor, size: int | None = None) -> ModuleType | None:
    """``segcal.kernels.trust_cpu`` or ``cuda_trust``, whichever suits these float32 values; None if neither does.

    ``size`` is as in ``fast_maps``.
    """
    if values.dtype != torch.float32:
        return None
    if fast_maps(values, size) is not None:
        return _compiled("trust_cpu")
    return None if cuda_kernels(values) is None else _compiled("cuda_trust")


def fast_sums(size: int) -> ModuleType | None:
    """``segcal.kernels.curvature_loops`` for so many float64 features of voxels, if they are worth it."""
    return None if size < _LARGE else _compiled("curvature_loops")


def fast_rows(values: Tensor) -> ModuleType | None:
    """``segcal.kernels.row_loops`` if it suits these ``(..., C)`` of a sample: many, float32 or float64, on the CPU."""
    suits = values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64) and values.ndim > 1
    return _compiled("row_loops") if suits and values.numel() >= _LARGE else None


def fast_penalties(logits: Tensor) -> ModuleType | None:
    """``segcal.kernels.penalty_cpu`` if it suits these logits: many, float32, contiguous, on the CPU."""
    suits = logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.is_contiguous()
    small = logits.numel() < _LARGE or logits.shape[1] > _BYTE_CLASSES
    return None if recording() or small or not suits else _compiled("penalty_cpu")


def fast_distances(voxels: Tensor) -> ModuleType | None:
    """``segcal.kernels.distance_cpu`` or ``cuda_distance``, whichever suits so many voxels there; None if neither."""
    if recording():
        return None
    if voxels.is_cuda:
        return _compiled("cuda_distance")
    return None if voxels.numel() < _LARGE_MAP else _compiled("distance_cpu")


def recording() -> bool:
    """Whether torch is recording operations to compile, export or trace them: it would miss compiled loops."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def _recorded(logits: Tensor) -> bool:
    """Whether what happens to these logits is recorded, to be compiled or for gradients.

    To be asked first: what is asked of sizes before would become part of the recording.
    """
    return recording() or (logits.requires_grad and torch.is_grad_enabled())


def _suits(backend: str, logits: Tensor) -> bool:
    narrow = logits.dtype in (torch.float32, torch.float16, torch.bfloat16)
    small = backend == "numba" or logits.shape[1] <= _TILE_CLASSES
    return narrow and small and logits.device.type == _DEVICES[backend]


def _compiled(name: str) -> ModuleType | None:
    """A module of compiled loops; None without numba or triton, which have no wheel for every platform."""
    try:
        if name.startswith("cuda") and not _triton_compiles():
            return None
        return import_module(f"segcal.kernels.{name}")
    except ImportError:
        return None


def _triton_compiles() -> bool:
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) >= _TRITON


def _kernels(voxels: Voxels, backend: Backend) -> ModuleType:
    """The module whose ``tally`` suits these voxels."""
    check_name("backend", backend, BACKENDS)
    logits = voxels.logits
    if backend in _DEVICES and not _suits(backend, logits):
        raise InputError(
            f"logits are {logits.dtype} on {logits.device}, with {logits.shape[1]} classes",
            expected=f"float32 or less on {_WORDS[backend]} for backend {backend!r}",
            fix="leave the backend to 'auto'",
        )
    module: ModuleType | None = reference
    if backend == "numba" or (backend == "auto" and _suits("numba", logits) and logits.numel() >= _LARGE):
        module = _compiled("cpu")
    elif backend == "triton" or (backend == "auto" and _suits("triton", logits)):
        module = _compiled("cuda") or (device_torch if backend == "auto" else None)
    if module is None and backend != "auto":
        what, fix = _NEEDED[backend]
        raise SegcalError(f"backend {backend!r} needs {what}, which is not installed", fix=fix)
    return module or reference


def _rough_energy(voxels: Voxels) -> float:
    """The free energy of the first voxel that counts, or about that: sums of squares about it keep their digits.

    Voxels that do not count may hold anything.
    """
    first = voxels.first_valid()
    if first is None:
        return 0.0
    scores = voxels.logits[first].detach().to("cpu", torch.float64)[None]
    energy = float((scores if voxels.score_map is None else voxels.score_map(scores)).logsumexp(1))
    return energy if math.isfinite(energy) else 0.0
