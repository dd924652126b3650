"""A calibrator as a torch module: its tensors keep their dtype, and its state dict tells the number of classes."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import ParamSpec, Self

from segcal.errors import InputError
from segcal.fitting.limits import Limits

# Torch's name for the part of a state dict that is neither parameter nor buffer.
_EXTRA = "_extra_state"
P = ParamSpec("P")


def renamed(**names: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let a constructor also take arguments by their earlier names, as files and callers may have them.

    Examples:
        >>> @renamed(rate="learning_rate")
        ... def __init__(learning_rate):
        ...     print(learning_rate)
        >>> __init__(rate=0.1)
        0.1
    """

    def decorate(function: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(function)
        def renaming(*args: P.args, **arguments: P.kwargs) -> None:
            function(*args, **{names.get(name, name): value for name, value in arguments.items()})  # type: ignore[arg-type]

        return renaming

    return decorate


class CalibratorModule(nn.Module):
    """A module whose tensors keep their dtype, and whose state dict can be loaded before it has been fitted.

    ``.half()`` on a network also casts the modules inside it. A calibrator's tensors are small and need their
    precision, so only their device changes; ``forward`` returns the dtype of its input in any case.
    """

    id: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.num_classes: int | None = None
        self.class_names: tuple[str, ...] | None = None
        #: For multi-label data one calibrator per channel; this one then has no parameters of its own.
        self.channels: nn.ModuleList | None = None
        self.channel_names: tuple[str, ...] | None = None
        self.register_load_state_dict_post_hook(_check_limits)  # type: ignore[no-untyped-call]

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments, JSON-able; each is an attribute of the same name."""
        return {name: getattr(self, name) for name in _argument_names(type(self))}

    def allocate(self, num_classes: int) -> None:
        """Create the parameters whose shape depends on the number of classes."""

    def shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """The shapes of ``tensors()`` after ``allocate``, found without allocating."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors().items()}

    def upgraded(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of a file, which an earlier version may have written, as ``tensors()`` has them now."""
        return tensors

    def limits(self) -> Mapping[str, Limits]:
        """The values that ``tensors()`` may hold, by name; the default excludes only very large numbers."""
        return {}

    def single(self) -> Self:
        """A copy with a single map; it is unfitted if this one has a map per channel."""
        return copy.deepcopy(self) if self.channels is None else type(self)(**self.arguments())

    def hold_channels(self, names: Sequence[str], channels: Sequence[CalibratorModule]) -> Self:
        """Take these calibrators of channels, and drop the parameters of this one."""
        self.channels = None
        for module in self.modules():
            module._parameters.clear()
            module._buffers.clear()
        self.channels, self.channel_names = nn.ModuleList(channels), tuple(names)
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name: with the constructor's arguments, they define the map."""
        state: Mapping[str, Tensor] = self.state_dict()
        return {name: tensor for name, tensor in state.items() if not name.endswith(_EXTRA)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call, no-any-return]

    # -- the state dict ------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        """Method, classes and channels as JSON in a tensor of bytes, which is empty before a fit."""
        if self.num_classes is None:
            return torch.zeros(0, dtype=torch.uint8)
        about = {name: getattr(self, name) for name in ("id", "num_classes", "class_names", "channel_names")}
        return torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Do nothing: ``_load_from_state_dict`` has read it already."""

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *others: Any) -> None:
        extra = state_dict.get(prefix + _EXTRA)
        if extra is not None and extra.numel():
            own = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
            self._prepare_for(extra, {name: tuple(t.shape) for name, t in own.items() if not name.endswith(_EXTRA)})
        super()._load_from_state_dict(state_dict, prefix, *others)
        _, _, missing_keys, *_ = others
        if self.num_classes is not None and prefix + _EXTRA in missing_keys:
            missing_keys.remove(prefix + _EXTRA)  # not needed if the classes are known

    def _prepare_for(self, extra: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Allocate the parameters of a calibrator with this extra state, if ``shapes`` are those that it implies."""
        try:
            about = json.loads(bytes(extra.tolist()))
            num_classes = check_num_classes(about["num_classes"])
            # Earlier versions had no channels and no id.
            method = about.get("id", self.id)
            class_names, channel_names = (_names(about.get(name)) for name in ("class_names", "channel_names"))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(
                f"the classes of the state dict cannot be read ({type(error).__name__}: {error})",
                expected="what a calibrator's state_dict() returned",
            ) from None
        if method != self.id:  # its tensors may have the same shapes
            raise InputError(f"the state dict is that of a calibrator {method!r}", expected=f"one of {self.id!r}")
        device = next((tensor.device for tensor in self.buffers()), torch.device("cpu"))
        if self.channel_names != channel_names:
            become(self, self.single())
            if channel_names is not None:
                self.hold_channels(channel_names, [copy.deepcopy(self) for _ in channel_names])
        if self.num_classes != num_classes and channel_names is None:
            if self.shapes(num_classes) != shapes:  # checked before any memory is taken
                raise InputError(
                    f"the state dict holds {shapes}", expected=f"{self.shapes(num_classes)} for {num_classes} classes"
                )
            self.allocate(num_classes)
        self._apply(lambda tensor: tensor.to(device))
        self.num_classes, self.class_names = num_classes, class_names


def _argument_names(cls: Any) -> list[str]:
    """The arguments of a constructor; ``**options`` are those of the base class."""
    parameters = inspect.signature(cls).parameters.values()
    names = [own.name for own in parameters if own.kind is not own.VAR_KEYWORD]
    return names if len(names) == len(parameters) else names + _argument_names(cls.__base__)


def check_num_classes(value: Any) -> int:
    """The number of classes; raises unless it is one."""
    if type(value) is not int or not 2 <= value < 2**31:
        raise ValueError(f"num_classes is {value!r}")
    return value


def become(module: nn.Module, other: nn.Module) -> None:
    """Replace the state of a module by that of another."""
    module.__dict__.clear()
    module.__dict__.update(other.__dict__)


def _names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def _check_limits(module: nn.Module, _: Any) -> None:
    """Raise if a tensor is out of its limits; the base and the channels have checked theirs before."""
    assert isinstance(module, CalibratorModule)
    if module.num_classes is None or module.channels is not None:
        return
    limits = module.limits()
    for name, tensor in module.tensors().items():
        if not name.startswith("base."):
            limits.get(name, Limits()).check(name, tensor)
