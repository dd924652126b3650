"""What a fit will cost: a map with too many classes is refused before any work, and smaller ones are suggested."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from segcal.errors import InputError

#: The share of free memory that a fit may take.
SHARE = 0.5
# Matrices of all parameters held at once: penalty, sums, Hessians of the points compared, copies to factorise.
_MATRICES = 12
# Evaluations with curvature in a typical fit, and factorisations for each, as bounds become active and inactive.
_EVALUATIONS, _FACTORISATIONS = 12, 3
# Without Hessians: vectors of all parameters (penalties, bounds, scales, points compared, sums by thread), vectors of
# one expert's parameters (forty of them steps that are kept), and gradients in a typical fit.
_VECTORS, _STEPS, _GRADIENTS = 40, 70, 200
# Float64 multiplications and additions per second and thread on a typical processor.
_SPEED = 1e10
# Free memory assumed where the system does not report it.
_UNKNOWN = 8 * 2**30
# Where a container reports its memory limit.
_GROUP = Path("/sys/fs/cgroup")


class FitCost(NamedTuple):
    """Bytes that a fit holds at its peak besides the data, roughly how many seconds it takes, and what for."""

    memory: float
    seconds: float
    purpose: str


class Costly(Protocol):
    """A calibrator that knows the cost of its fit."""

    def cost(self, num_classes: int) -> FitCost | None:
        """The cost of a fit to so many classes; None if it is small."""


def curvature_cost(experts: int, outputs: int, columns: int, voxels: int) -> FitCost:
    """The cost of Newton's method for E experts with ``P = K L`` parameters each: K outputs, L inputs with the bias.

    Memory: ``8 E P^2 (12 + t / 4)`` bytes: twelve matrices of each expert's parameters, and one of symmetric sums, a
    quarter as large, for each of t threads.

    Time: twelve times ``n K (K + 3) L (L + 1) / 2`` operations for the curvature of n voxels (pairs of outputs by pairs
    of inputs), and three factorisations of ``P^3 / 3`` for each expert.

    Examples:
        >>> cost = curvature_cost(1, 300, 301, 400_000)
        >>> cost.memory > 600e9, cost.purpose
        (True, 'the curvature of 90,300 parameters')
    """
    threads = torch.get_num_threads()
    parameters = outputs * columns
    memory = 8 * experts * parameters**2 * (_MATRICES + threads / 4)
    sums = voxels * outputs * (outputs + 3) * columns * (columns + 1) / 2
    factors = _FACTORISATIONS * experts * parameters**3 / 3
    seconds = _EVALUATIONS * (sums + factors) / (_SPEED * threads)
    return FitCost(memory, seconds, f"the curvature of {experts * parameters:,} parameters")


def gradient_cost(experts: int, outputs: int, columns: int, voxels: int) -> FitCost:
    """The cost of a fit without Hessians; the arguments are those of ``curvature_cost``.

    Memory: forty vectors of all parameters, seventy of one expert's, and the sample with its features, probabilities
    and slopes, 48 bytes for each score. Time: two hundred gradients of ``4 n K L`` operations, at half the speed, as
    the steps themselves take as long.

    Examples:
        >>> gradient_cost(150, 150, 151, 200_000).memory < 4e9
        True
    """
    parameters = outputs * columns
    memory = 8.0 * parameters * (_VECTORS * experts + _STEPS) + 48.0 * voxels * outputs
    seconds = _GRADIENTS * 2 * 4 * voxels * parameters / (_SPEED * torch.get_num_threads())
    return FitCost(memory, seconds, f"{experts * parameters:,} parameters")


def check_cost(name: str, num_classes: int, cost: FitCost | None, known: Mapping[str, Callable[[], Costly]]) -> None:
    """Raise if a fit takes more than its share of free memory, and suggest which ``known`` calibrators fit."""
    if cost is None or cost.memory <= (budget := SHARE * available_memory()):
        return
    costs = {other: kind().cost(num_classes) for other, kind in known.items()}
    smaller = [other for other, own in costs.items() if own is None or own.memory <= budget]
    raise InputError(
        f"'{name}' of {num_classes} classes needs about {bytes_in_words(cost.memory)} for {cost.purpose}, and "
        f"{seconds_in_words(cost.seconds)}",
        expected=f"at most {bytes_in_words(budget)}, {SHARE:.0%} of the memory that is free",
        fix=f"take one of {', '.join(smaller)}, which fit, or merge classes",
    )


def available_memory() -> float:
    """Bytes available without swapping, within the limit of the container if there is one."""
    limits = [_free_in_group(), _free()]
    return min((limit for limit in limits if limit is not None), default=_UNKNOWN)


def _free() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * float(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    try:  # not Linux: the total memory
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return None


def _free_in_group() -> float | None:
    """Bytes that the container's control group leaves; None if it sets no limit."""
    try:
        limit, used = (float((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # "max" means no limit
        return None
    return max(limit - used, 0.0)


def bytes_in_words(count: float) -> str:
    """Such as ``1.5 GiB``."""
    unit, size = next((unit for unit in (("GiB", 2**30), ("MiB", 2**20)) if count >= unit[1]), ("KiB", 2**10))
    return f"{count / size:,.{int(unit == 'GiB')}f} {unit}"


def seconds_in_words(seconds: float) -> str:
    """Such as ``3 hours``."""
    units = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
    unit, size = next((unit for unit in units if seconds >= 2 * unit[1]), units[-1])
    return f"{seconds / size:,.0f} {unit}"
