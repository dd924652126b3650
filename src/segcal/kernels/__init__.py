"""The voxel passes: one read of the logits gives every statistic. ``tally`` chooses the kernel.

``reference`` (torch, float64, any device) is the definition; ``cpu`` (numba) and ``cuda`` (triton) are its fast twins.
Tests check that they agree to 1e-6 relative on every statistic.
"""

from segcal.kernels.dispatch import (
    BACKENDS,
    Backend,
    cuda_kernels,
    fast_maps,
    fast_penalties,
    recording,
    tally,
    trust_maps,
)
from segcal.kernels.experts import ExpertMap, Features
from segcal.kernels.grid import FINE_BINS, BinGrid
from segcal.kernels.tally import Tally
from segcal.kernels.voxels import AffineMap, Voxels

__all__ = [
    "BACKENDS", "FINE_BINS", "AffineMap", "Backend", "BinGrid", "ExpertMap", "Features", "Tally", "Voxels",
    "cuda_kernels", "fast_maps", "fast_penalties", "recording", "tally", "trust_maps",
]  # fmt: skip
