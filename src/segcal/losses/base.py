"""The shell that every loss module shares."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn

from segcal.errors import InputError
from segcal.losses.checks import ClassWeights, Reduction


class Options(TypedDict, total=False):
    """What every loss takes."""

    class_weights: ClassWeights | None
    ignore_index: int


class VoxelOptions(Options, total=False):
    """What losses take that are sums over voxels."""

    reduction: Reduction


class Loss(nn.Module):
    """A loss function with its options, which have the function's defaults.

    ``class_weights`` move with the module; ``base`` may be a module itself.
    """

    id: ClassVar[str]
    function: ClassVar[Callable[..., Tensor]]
    class_weights: Tensor | None
    base: Any

    def __init__(self, **options: Any) -> None:
        super().__init__()
        defaults = self.defaults()
        for name in options:
            if name not in defaults:
                raise TypeError(f"{type(self).__name__} has no option {name!r}, only {', '.join(defaults)}")
        self._options = {**defaults, **options}
        class_weights = self._options.pop("class_weights")
        self._has_base = "base" in defaults
        if self._has_base:
            self.base = self._options.pop("base")
        weights = None if class_weights is None else torch.as_tensor(class_weights)
        if weights is not None and not bool((weights >= 0).all() & weights.isfinite().all()):
            raise InputError(f"class_weights are {weights.tolist()}", expected="finite and not negative")
        self.register_buffer("class_weights", weights, persistent=False)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The options and their defaults."""
        parameters = inspect.signature(cls.function).parameters.values()
        return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of ``logits (B, C, *S)`` and ``labels (B, *S)``."""
        options = {**self._options, "class_weights": self.class_weights}
        if self._has_base:
            options["base"] = self.base
        return type(self).function(logits, labels, *self._arguments(), **options)

    def _arguments(self) -> tuple[Tensor, ...]:
        """What the function takes besides logits, labels and options."""
        return ()

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(f"{name}={value!r}" for name, value in self._options.items())
