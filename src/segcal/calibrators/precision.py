"""Calibrators compute and are fitted as if autocast, ``no_grad`` and ``inference_mode`` around them were off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from segcal.kernels import recording


def full_precision() -> AbstractContextManager[Any]:
    """Without autocast, which would round the scores that maps and networks are made of to 8 or 11 bits."""
    kinds = () if recording() else [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds:
        return nullcontext()
    switched_off = ExitStack()
    for kind in kinds:
        switched_off.enter_context(torch.autocast(kind, enabled=False))
    return switched_off


@contextmanager
def fitting() -> Iterator[None]:
    """In full precision and with gradients, which are needed to train, whatever the caller has switched off."""
    with torch.inference_mode(False), torch.enable_grad(), full_precision():
        yield
