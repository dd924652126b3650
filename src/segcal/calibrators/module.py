"""A calibrator as a torch module: its dtypes stay, and its state dict says for how many classes it is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from segcal.calibrators.storage import check_num_classes
from segcal.errors import InputError
from segcal.fitting.limits import Limits

# What torch calls the part of a state dict that is neither parameter nor buffer.
_EXTRA = "_extra_state"


class CalibratorModule(nn.Module):
    """A module whose tensors keep their dtype, and whose state dict can be loaded before it has been fitted.

    ``.half()`` on a network casts the modules in it too. A calibrator's tables and sums need the digits that they have,
    and few bytes: only the device follows, and ``forward`` respects the dtype of its input all the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_classes: int | None = None
        self.class_names: tuple[str, ...] | None = None
        #: Of multi-label data, one map for each channel, and then none of one's own.
        self.channels: nn.ModuleList | None = None
        self.channel_names: tuple[str, ...] | None = None
        self.register_load_state_dict_post_hook(_check_limits)  # type: ignore[no-untyped-call]

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments, JSON-able."""
        return {}

    def allocate(self, num_classes: int) -> None:
        """Give parameters whose shape depends on the number of classes that shape."""

    def shapes(self, num_classes: int) -> dict[str, tuple[int, ...]]:
        """Those of ``tensors()`` after ``allocate``, without the memory."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors().items()}

    def upgraded(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of a file, which an earlier version may have written, as ``tensors()`` has them now."""
        return tensors

    def limits(self) -> Mapping[str, Limits]:
        """What ``tensors()`` may hold, by name; those that are not named may hold all but very large numbers."""
        return {}

    def single(self) -> Self:
        """A copy that is one map; where there was one for each channel, it is not fitted."""
        return copy.deepcopy(self) if self.channels is None else type(self)(**self.arguments())

    def hold_channels(self, names: Sequence[str], channels: Sequence[CalibratorModule]) -> Self:
        """Be these maps of channels. One's own parameters go, so that nobody takes them for those of a channel."""
        self.channels = None
        for module in self.modules():
            module._parameters.clear()
            module._buffers.clear()
        self.channels, self.channel_names = nn.ModuleList(channels), tuple(names)
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name: all that shapes the map, besides the constructor's arguments."""
        state: Mapping[str, Tensor] = self.state_dict()
        return {name: tensor for name, tensor in state.items() if not name.endswith(_EXTRA)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call, no-any-return]

    # -- the state dict ------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> Tensor:
        """Classes and channels as JSON in bytes, none before a fit: a tensor, as every tool expects."""
        if self.num_classes is None:
            return torch.zeros(0, dtype=torch.uint8)
        about = {name: getattr(self, name) for name in ("num_classes", "class_names", "channel_names")}
        return torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing: ``_load_from_state_dict`` needs it earlier."""

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        extra = state_dict.get(prefix + _EXTRA)
        if extra is not None and extra.numel():
            own = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
            self._prepare_for(extra, {name: tuple(t.shape) for name, t in own.items() if not name.endswith(_EXTRA)})
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if self.num_classes is not None and prefix + _EXTRA in missing_keys:
            missing_keys.remove(prefix + _EXTRA)  # parameters alone will do where the classes are known

    def _prepare_for(self, extra: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Be ready for the parameters of a calibrator with this extra state, if they have the shapes that it says."""
        try:
            about = json.loads(bytes(extra.tolist()))
            num_classes = check_num_classes(about["num_classes"])
            # Earlier versions knew no channels.
            class_names, channel_names = (_names(about.get(name)) for name in ("class_names", "channel_names"))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(
                f"the classes of the state dict cannot be read ({type(error).__name__}: {error})",
                expected="what a calibrator's state_dict() returned",
            ) from None
        device = next((tensor.device for tensor in self.buffers()), torch.device("cpu"))
        if self.channel_names != channel_names:
            become(self, self.single())
            if channel_names is not None:
                self.hold_channels(channel_names, [copy.deepcopy(self) for _ in channel_names])
        if self.num_classes != num_classes and channel_names is None:
            if self.shapes(num_classes) != shapes:  # which takes no memory yet
                raise InputError(
                    f"the state dict holds {shapes}", expected=f"{self.shapes(num_classes)} for {num_classes} classes"
                )
            self.allocate(num_classes)
        self._apply(lambda tensor: tensor.to(device))
        self.num_classes, self.class_names = num_classes, class_names


def become(module: nn.Module, other: nn.Module) -> None:
    """Let a module be what another one is."""
    module.__dict__.clear()
    module.__dict__.update(other.__dict__)


def _names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def _check_limits(module: nn.Module, _: Any) -> None:
    """Raise where a calibrator was given what it cannot hold; its base and its channels were asked before."""
    assert isinstance(module, CalibratorModule)
    if module.num_classes is None or module.channels is not None:
        return
    limits = module.limits()
    for name, tensor in module.tensors().items():
        if not name.startswith("base."):
            limits.get(name, Limits()).check(name, tensor)
