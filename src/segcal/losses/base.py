"""The module that wraps a loss function. Every loss is a subclass that names its id and function in its class line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor, nn
from typing_extensions import Self

from segcal.errors import InputError
from segcal.losses.checks import DEFAULTS


class Loss(nn.Module):
    """A loss function with its options. The constructor takes the function's options, with the function's defaults.

    ``class_weights`` move with the module. ``base`` may be a module itself.

    Attributes:
        id: The loss's name in ``segcal.LOSSES``.
        function: ``(logits, labels, ..., **options)`` to a loss.
        translation_invariant: Whether a constant added to all logits of a voxel changes nothing.
        neighbourhood: Whether the loss of a voxel depends on the labels around it, so that it needs an image.
        views: How many views of each image a batch must hold, one after the other.
    """

    id: ClassVar[str]
    function: ClassVar[Callable[..., Tensor]]
    translation_invariant: ClassVar[bool] = True
    neighbourhood: ClassVar[bool] = False
    views: ClassVar[int] = 1
    _signature: ClassVar[inspect.Signature]
    class_weights: Tensor | None
    base: Any

    def __init_subclass__(cls, *, function: Callable[..., Tensor] | None = None, **attributes: Any) -> None:
        super().__init_subclass__()
        for name, value in attributes.items():
            setattr(cls, name, value)
        if function is not None:
            cls.function = staticmethod(function)
            parameters = _all_parameters(cls.function)
            cls._signature = inspect.Signature([one for one in parameters if one.default is not one.empty])
            # So that help() and notebooks show all options.
            cls.function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
            if "__init__" not in cls.__dict__:
                cls.__signature__ = cls._signature  # type: ignore[attr-defined]

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__()
        for name in options:
            if name not in self._signature.parameters:
                raise TypeError(f"{type(self).__name__} has no option {name!r}, only {', '.join(self.defaults())}")
        bound = self._signature.bind(*values, **options)
        bound.apply_defaults()
        self._options = dict(bound.arguments)
        class_weights = self._options.pop("class_weights")
        if "base" in self._options:
            self.base = self._options.pop("base")
        weights = None if class_weights is None else torch.as_tensor(class_weights)
        if weights is not None and not bool((weights >= 0).all() & weights.isfinite().all()):
            raise InputError(f"class_weights are {weights.tolist()}", expected="finite and not negative")
        self.register_buffer("class_weights", weights, persistent=False)

    @classmethod
    def of_classes(cls, num_classes: int, **options: Any) -> Self:
        """The loss for this many classes, which only some losses need to know."""
        return cls(**options)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The options and their defaults."""
        return {name: one.default for name, one in cls._signature.parameters.items()}

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of ``logits (B, C, *S)`` and ``labels (B, *S)``."""
        held = {name: getattr(self, name) for name in ("class_weights", "base") if name in self._signature.parameters}
        return type(self).function(logits, labels, *self._arguments(), **self._options, **held)

    def _arguments(self) -> tuple[Tensor, ...]:
        """What the function takes besides logits, labels and options."""
        return ()

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(f"{name}={value!r}" for name, value in self._options.items())


def _all_parameters(function: Callable[..., Tensor]) -> list[inspect.Parameter]:
    """The parameters of a loss function, with the options in place of ``**options``."""
    parameters = inspect.signature(function).parameters.values()
    shared = get_type_hints(function).get("options")  # Unpack[a TypedDict]
    names = () if shared is None else shared.__args__[0].__annotations__
    common = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name]) for name in names]
    return [*(one for one in parameters if one.kind is not one.VAR_KEYWORD), *common]
