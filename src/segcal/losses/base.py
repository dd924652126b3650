"""The shell that every loss module shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from segcal.errors import InputError


class Loss(nn.Module):
    """A loss function with its options. ``class_weights`` move with the module; ``base`` may be a module itself."""

    id: ClassVar[str]
    class_weights: Tensor | None
    base: Any

    def __init__(self, function: Callable[..., Tensor], *, class_weights: Any = None, **options: Any) -> None:
        super().__init__()
        self._function, self._options = function, options
        self._has_base = "base" in options
        if self._has_base:
            self.base = options.pop("base")
        weights = None if class_weights is None else torch.as_tensor(class_weights)
        if weights is not None and not bool((weights >= 0).all() & weights.isfinite().all()):
            raise InputError(f"class_weights are {weights.tolist()}", expected="finite and not negative")
        self._weighted = weights is not None
        self.register_buffer("class_weights", weights, persistent=False)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of ``logits (B, C, *S)`` and ``labels (B, *S)``."""
        options = dict(self._options)
        if self._has_base:
            options["base"] = self.base
        if self._weighted:
            options["class_weights"] = self.class_weights
        return self._function(logits, labels, *self._arguments(), **options)

    def _arguments(self) -> tuple[Tensor, ...]:
        """What the function takes besides logits, labels and options."""
        return ()

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(f"{name}={value!r}" for name, value in self._options.items())
