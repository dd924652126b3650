"""What property tests draw: hard logits with labels, by family, type, size and seed."""

from __future__ import annotations

import math

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from seeds import ROUNDS
from torture import inputs

SEEDS = st.integers(0, 2**32)


def examples(count: int) -> settings:
    """Settings with this many examples in a usual run, and more where more rounds are asked for."""
    return settings(max_examples=count * ROUNDS, deadline=None)


@st.composite
def voxels(draw, classes: int | None = None, most: int = 40, families=tuple(inputs.FAMILIES), dtypes=inputs.TYPES):
    """Logits ``(n, C)`` and labels ``(n,)``, none of which is impossible."""
    classes = draw(st.integers(2, 9)) if classes is None else classes
    family, dtype, seed = draw(st.sampled_from(families)), draw(st.sampled_from(dtypes)), draw(SEEDS)
    z = inputs.logits(family, draw(st.integers(1, most)), classes, dtype, seed)
    return z, inputs.labels(z, seed, deepest=1e3)


def order(n: int, seed: int) -> Tensor:
    """A permutation."""
    return torch.randperm(n, generator=inputs.generator("order", seed))


def chosen(n: int, seed: int) -> Tensor:
    """Some of n things, at least one."""
    which = torch.rand(n, generator=inputs.generator("chosen", seed)) < 0.6
    which[seed % n] = True
    return which


def image(z: Tensor) -> Tensor:
    """Voxels ``(n, C)`` as an image ``(1, C, h, w)`` with n = h w, as square as can be."""
    n = len(z)
    height = next(h for h in range(math.isqrt(n), 0, -1) if n % h == 0)
    return z.T.reshape(1, z.shape[1], height, n // height).contiguous()
