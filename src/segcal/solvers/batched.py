"""Newton's method for many convex functions at once, in tensors: all steps are taken where these are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Armijo's constant, the error assumed in f relative to f, and the factor of steps that are too long.
_DECREASE, _NOISE, _SHORTER = 1e-4, 1e-13, 0.25
# Steps at most, and how often one is shortened.
_STEPS, _TRIALS = 100, 20


class Minima(NamedTuple):
    """The points ``(B, P)``, the largest norm of a gradient there, and whether that is within the tolerance."""

    x: Tensor
    certificate: float
    converged: bool


def newton_of_blocks(
    problem: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], start: Tensor, tolerance: float
) -> Minima:
    """Minimise B strictly convex functions of P variables each, from ``start (B, P)``.

    ``problem`` gives values ``(B,)``, gradients ``(B, P)`` and Hessians ``(B, P, P)``. Steps are shortened until the
    function falls. A step waits for the device once for every trial.

    Examples:
        >>> def bowls(x):
        ...     return 0.5 * (x - 1).square().sum(1), x - 1, torch.eye(2, dtype=x.dtype).expand(3, 2, 2)
        >>> newton_of_blocks(bowls, torch.zeros(3, 2, dtype=torch.float64), 1e-9).x.sum()
        tensor(6., dtype=torch.float64)
    """
    x, (value, gradient, hessian) = start, problem(start)
    certificate = float(gradient.norm(dim=1).max())
    for _ in range(_STEPS):
        if certificate <= tolerance:
            break
        step = -torch.cholesky_solve(gradient.unsqueeze(2), torch.linalg.cholesky(hessian)).squeeze(2)
        slope, noise = (gradient * step).sum(1), _NOISE * value.abs()
        share = torch.ones_like(value)
        for _ in range(_TRIALS):
            found = problem(x + share[:, None] * step)
            falls = found[0] <= value + _DECREASE * share * slope + noise
            if bool(falls.all()):
                break
            share = torch.where(falls, share, _SHORTER * share)
        else:
            break
        x, (value, gradient, hessian) = x + share[:, None] * step, found
        certificate = float(gradient.norm(dim=1).max())
    return Minima(x, certificate, certificate <= tolerance)
