"""The ranges of a calibrator's tensors, checked whenever a state is loaded from a file or a state dict."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from segcal.errors import InputError

#: Bounds of 1 / temperature: beyond them every softmax is uniform or one-hot in float32.
LOWEST, HIGHEST = 1e-3, 1e3
# Weights of networks are of the order of 1; up to this size, arithmetic stays finite for all finite logits.
_LARGEST = 1e6
# The largest rounding error of a sum of weights.
_ROUNDING = 1e-6


class Limits(NamedTuple):
    """Numbers from ``low`` to ``high``, which are scalars or have the tensor's shape.

    ``rising``: values never fall along the last axis. ``same_sum``: all sums over the last axis are equal. ``total``:
    they are equal to this.
    """

    low: float | Tensor = -_LARGEST
    high: float | Tensor = _LARGEST
    rising: bool = False
    same_sum: bool = False
    total: float | None = None

    def check(self, name: str, tensor: Tensor) -> None:
        """Raise where a tensor is outside.

        Examples:
            >>> Limits(0.0, 1.0).check("beta", torch.tensor(-1.0))
            Traceback (most recent call last):
            segcal.errors.InputError: 'beta' holds -1; expected numbers from 0 to 1. To fix: fit and save it again.
        """

        def wrong(problem: str, expected: str) -> InputError:
            return InputError(f"'{name}' {problem}", expected=expected, fix="fit and save it again")

        if not tensor.numel():
            return
        values = tensor.detach().double().cpu()
        if not bool(torch.isfinite(values).all()):
            raise wrong("is not finite", "numbers")
        low, high = (torch.as_tensor(bound, dtype=torch.float64).expand_as(values) for bound in (self.low, self.high))
        outside = (values < low) | (values > high)
        if bool(outside.any()):
            found, least, most = (float(own[outside][0]) for own in (values, low, high))
            raise wrong(f"holds {found:g}", f"numbers from {least:g} to {most:g}")
        if self.rising and bool((values.diff(dim=-1) < 0).any()):
            raise wrong("falls", "numbers that rise along the last axis")
        if self.same_sum or self.total is not None:
            sums = values.sum(-1).reshape(-1)
            wanted = sums.mean() if self.total is None else torch.tensor(self.total, dtype=torch.float64)
            worst = sums[(sums - wanted).abs().argmax()]
            if float((worst - wanted).abs()) > _ROUNDING * max(1.0, float(values.abs().max())):
                raise wrong(f"sums to {float(worst):g}", f"{float(wanted):g}")


#: Limits of 1 / temperature.
BETA = Limits(LOWEST, HIGHEST)
#: Limits of shares, probabilities and flags.
SHARE = Limits(0.0, 1.0)
#: Limits of counts.
COUNT = Limits(0.0, torch.inf)
