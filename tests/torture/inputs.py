"""Logits that are hard on floating point, and labels for them.

All families are rounded to the type first: what comes out is exact, and its float64 copy is the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Draw = Callable[[torch.Generator, int, int, torch.dtype], Tensor]


def generator(*seeds: int | str) -> torch.Generator:
    """Random numbers of their own for every combination of seeds; names are seeds, too."""
    number = 0
    for seed in seeds:
        for part in [seed] if isinstance(seed, int) else seed.encode():
            number = (number * 1_000_003 + part + 1) % 2**61
    return torch.Generator().manual_seed(number)


def normal(random: torch.Generator, n: int, classes: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(n, classes, generator=random, dtype=torch.float64)


def chance(random: torch.Generator, n: int, classes: int) -> Tensor:
    return torch.rand(n, classes, generator=random, dtype=torch.float64)


def ordinary(random: torch.Generator, n: int, classes: int, dtype: torch.dtype) -> Tensor:
    return normal(random, n, classes)


def flat(random: torch.Generator, n: int, classes: int, dtype: torch.dtype) -> Tensor:
    """Nearly the same everywhere."""
    return normal(random, n, classes, 1e-3)


def sure(random: torch.Generator, n: int, classes: int, dtype: torch.dtype) -> Tensor:
    """One class is 15 to 60 nats above all others: 1 - p is far below the rounding of p."""
    z = normal(random, n, classes, 1.0)
    winner = torch.randint(classes, (n, 1), generator=random)
    return z.scatter(1, winner, 20 + 40 * chance(random, n, 1))


def _large(random: torch.Generator, n: int, classes: int, size: float) -> Tensor:
    """A third of the logits are as large as this, up or down; some voxels have nothing else, or several at the top."""
    z, which = normal(random, n, classes), chance(random, n, classes)
    every = chance(random, n, 1) < 0.1
    z = torch.where((which < 0.2) | (every & (which < 0.5)), -size, z)
    return torch.where((which > 0.85) | (every & (which >= 0.5)), size, z)


def ten_thousand(random: torch.Generator, n: int, classes: int, dtype: torch.dtype) -> Tensor:
    return _large(random, n, classes, 1e4)


def largest(random: torch.Generator, n: int, classes: int, dtype: torch.dtype) -> Tensor:
    """The ends of the type: 65504, or 3e38."""
    return _large(random, n, classes, min(float(torch.finfo(dtype).max), 3e38))


def subnormal(random: torch.Generator, n: int, classes: int, dtype: torch.dtype) -> Tensor:
    """Between the smallest normal number and zero."""
    return normal(random, n, classes, 0.3) * torch.finfo(dtype).tiny


def ties(random: torch.Generator, n: int, classes: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers from 0 to 2, so that several classes win."""
    return torch.randint(3, (n, classes), generator=random).double()


def one_ulp(random: torch.Generator, n: int, classes: int, dtype: torch.dtype) -> Tensor:
    """Classes at the top, and others the least step below."""
    z = normal(random, n, classes).to(dtype)
    top, which = z.amax(1, keepdim=True), chance(random, n, classes)
    below = torch.nextafter(top, torch.full_like(top, -torch.inf))
    return torch.where(which < 0.2, top, torch.where(which < 0.4, below, z)).double()


def impossible(random: torch.Generator, n: int, classes: int, dtype: torch.dtype) -> Tensor:
    """A third of the classes at -inf, but one."""
    z, which = normal(random, n, classes), chance(random, n, classes)
    which.scatter_(1, torch.randint(classes, (n, 1), generator=random), 1.0)
    return z.masked_fill(which < 0.33, -torch.inf)


def offset(random: torch.Generator, n: int, classes: int, dtype: torch.dtype) -> Tensor:
    """A number added to all logits of a voxel, as large as the type leaves room for steps of about 1/16."""
    room = 0.05 / torch.finfo(dtype).eps
    return normal(random, n, classes) + min(room, 1e6) * (2 * chance(random, n, 1) - 1)


FAMILIES: dict[str, Draw] = {
    "ordinary": ordinary, "flat": flat, "sure": sure, "±1e4": ten_thousand, "±3e38": largest, "subnormal": subnormal,
    "ties": ties, "one ulp": one_ulp, "-inf": impossible, "offset": offset,
}  # fmt: skip


def logits(family: str, n: int, classes: int, dtype: torch.dtype, *seeds: int | str) -> Tensor:
    """Logits ``(n, C)`` of a family, in a type."""
    random = generator(family, n, classes, str(dtype), *seeds)
    z, highest = FAMILIES[family](random, n, classes, dtype), float(torch.finfo(dtype).max)
    return torch.where(torch.isinf(z), z, z.clamp(-highest, highest)).to(dtype)


def labels(z: Tensor, *seeds: int | str, deepest: float = torch.inf, right: float = 0.6) -> Tensor:
    """Labels ``(n,)``: the argmax as often as ``right`` says, else any class at most ``deepest`` below, not -inf."""
    random, exact = generator(z.shape[1], *seeds), z.double()
    gap = exact.amax(1, keepdim=True) - exact
    keys = chance(random, *z.shape).masked_fill((gap > deepest) | torch.isinf(exact), -1.0)
    return torch.where(chance(random, len(z), 1)[:, 0] < right, exact.argmax(1), keys.argmax(1))
