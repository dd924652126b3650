"""What a training run is: a TOML file whose every key is checked."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from segcal.errors import MAX_SEED, ConfigError, did_you_mean
from segcal.losses import LOSSES
from segcal.training.networks import Network, Norm

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Augmentation = Literal["flip", "rotate"]
PARTS = ("train", "validation", "test")
#: What may differ from the checkpoint's when a run is resumed: nothing of it changes a step that was made. The scans
#: themselves are compared, wherever they are.
FREE = ("data", "output", "epochs", "device", "workers", "logits")


@dataclass(frozen=True)
class LossSpec:
    """One summand of the loss: ``factor`` times the loss with this id of ``segcal.LOSSES``, made with ``options``."""

    id: str
    factor: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingConfig:
    """The keys of a training file; ``data`` and ``output`` must be given, all else has the papers' values.

    Examples:
        >>> config = parse_config({"data": "acdc", "output": "run", "loss": "nacl"})
        >>> config.loss, config.epochs
        ((LossSpec(id='nacl', factor=1.0, options={}),), 100)
    """

    data: tuple[str, ...]
    """Dataset folders with ``images/`` and ``labels/``; relative to the file, as is ``output``."""
    output: str
    split: Mapping[str, float] | None = None
    """Shares ``train``, ``validation``, ``test``; by default the dataset's own lists, or else 0.7, 0.1, 0.2."""
    classes: int | None = None
    """C, where the dataset's ``segcal.toml`` does not say it."""
    network: Network = "unet"
    width: int = 64
    depth: int = 5
    norm: Norm = "batch"
    dims: int = 2
    """2 trains on images, or on the slices of volumes; 3 on volumes."""
    loss: tuple[LossSpec, ...] = (LossSpec("ce"),)
    learning_rate: float = 1e-3
    milestones: tuple[int, ...] = (50,)
    """After so many epochs the learning rate is multiplied by ``factor``."""
    factor: float = 0.1
    batch: int = 16
    """Images of one step, on all processes together."""
    epochs: int = 100
    seed: int = 0
    amp: bool = False
    """Mixed precision: float16 on CUDA, bfloat16 on a CPU."""
    device: str = "auto"
    workers: int = 0
    """Processes that read ahead; 0 reads in the training process."""
    augment: tuple[Augmentation, ...] = ("flip", "rotate")
    crop: tuple[int, ...] | None = None
    """Training images are cut, or padded, to this size."""
    background: bool = False
    """Whether the background counts in the validation Dice by which the best model is chosen."""
    logits: Literal["float16", "float32"] = "float32"
    """Precision of the written logits."""

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch; the first is 1."""
        return self.learning_rate * self.factor ** sum(epoch > milestone for milestone in self.milestones)

    def to_dict(self) -> dict[str, Any]:
        """All keys as JSON-able values."""
        return {name: _plain(value) for name, value in asdict(self).items()}


class _Rule(NamedTuple):
    """When a value is right, what to say otherwise, and how it is kept."""

    good: Callable[[Any], bool]
    expected: str
    keep: Callable[[Any], Any] = lambda value: value


def load_config(path: str | Path) -> TrainingConfig:
    """Read a training file; folders become relative to where the user is."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot be read ({error})", where=str(path), expected="a TOML file") from None
    try:
        config = parse_config(raw)
    except ConfigError as error:
        raise error.at(where=str(path)) from None
    here = path.parent
    return replace(config, data=tuple(str(here / folder) for folder in config.data), output=str(here / config.output))


def parse_config(raw: Mapping[str, Any]) -> TrainingConfig:
    """Check keys and values and give them their types.

    Examples:
        >>> parse_config({"data": "d", "output": "o", "epoch": 3})
        Traceback (most recent call last):
        segcal.errors.ConfigError: unknown key 'epoch'; ... To fix: did you mean 'epochs'?
    """
    _known("key", raw, [item.name for item in fields(TrainingConfig)])
    for name in ("data", "output"):
        if name not in raw:
            raise ConfigError(f"no key '{name}'", expected=f"{name} = '...'")
    config = TrainingConfig(**{name: _parse(name, value) for name, value in raw.items()})
    if config.crop is not None and len(config.crop) != config.dims:
        raise ConfigError(f"crop = {list(config.crop)}", expected=f"{config.dims} numbers, as dims = {config.dims}")
    return config


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """``key (mine, theirs)`` for the keys of two ``to_dict`` that differ and may not."""
    return [
        f"{name} ({mine.get(name)!r}, was {theirs.get(name)!r})"
        for name in sorted({*mine, *theirs} - {*FREE})
        if mine.get(name) != theirs.get(name)
    ]


def _known(kind: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(
                f"unknown {kind} '{name}'", expected=f"one of {', '.join(known)}", fix=did_you_mean(name, known)
            )


def _parse(name: str, value: Any) -> Any:
    if name == "loss":
        specs = value if isinstance(value, list) else [value]
        if not specs:
            raise ConfigError("loss = []", expected="at least one loss")
        return tuple(_loss(spec) for spec in specs)
    rule = _RULES[name]
    if not rule.good(value):
        raise ConfigError(f"{name} = {value!r}", expected=rule.expected)
    return rule.keep(value)


def _loss(value: Any) -> LossSpec:
    table = {"id": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or not isinstance(table.get("id"), str):
        raise ConfigError(f"loss = {value!r}", expected="a loss id, or tables with id, factor, options")
    _known("key of loss", table, [item.name for item in fields(LossSpec)])
    _known("loss", [table["id"]], list(LOSSES))
    factor, options = table.get("factor", 1.0), table.get("options", {})
    if not _number(factor):
        raise ConfigError(f"loss.factor = {factor!r}", expected="a number")
    if not isinstance(options, Mapping):
        raise ConfigError(f"loss.options = {options!r}", expected="a table")
    return LossSpec(table["id"], float(factor), dict(options))


def _whole(lowest: int, highest: float = math.inf) -> _Rule:
    text = f"a whole number of at least {lowest}" if highest == math.inf else f"{lowest} to {highest:.0f}"
    return _Rule(lambda v: isinstance(v, int) and not isinstance(v, bool) and lowest <= v <= highest, text)


def _number(value: Any, lowest: float = -math.inf) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and lowest < value < math.inf


def _choice(*choices: str) -> _Rule:
    return _Rule(lambda v: v in choices, "one of " + ", ".join(map(repr, choices)))


def _each(good: Callable[[Any], bool], expected: str) -> _Rule:
    return _Rule(lambda v: isinstance(v, list | tuple) and all(map(good, v)), expected, tuple)


def _is_folder_list(value: Any) -> bool:
    return bool(value) and (isinstance(value, str) or (isinstance(value, list | tuple) and _texts(value)))


def _texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) and value for value in values)


def _is_split(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) <= set(PARTS)
        and all(_number(share) and share >= 0 for share in value.values())
        and 0 < sum(value.values()) <= 1 + 1e-9
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


_BOOL = _Rule(lambda v: isinstance(v, bool), "true or false")
_TEXT = _Rule(lambda v: isinstance(v, str) and bool(v), "a text")
_COUNT = _whole(1)
_POSITIVE = _Rule(lambda v: _number(v, 0), "a positive number", float)
_RULES: dict[str, _Rule] = {
    "data": _Rule(_is_folder_list, "a folder, or a list of them", lambda v: (v,) if isinstance(v, str) else tuple(v)),
    "output": _TEXT,
    "split": _Rule(_is_split, "shares train, validation, test that sum to at most 1", dict),
    "classes": _whole(2),
    "network": _choice(*get_args(Network)),
    "width": _COUNT,
    "depth": _whole(1, 8),
    "norm": _choice(*get_args(Norm)),
    "dims": _whole(2, 3),
    "learning_rate": _POSITIVE,
    "milestones": _each(_COUNT.good, "a list of epochs"),
    "factor": _POSITIVE,
    "batch": _COUNT,
    "epochs": _COUNT,
    "seed": _whole(0, MAX_SEED),
    "amp": _BOOL,
    "device": _TEXT,
    "workers": _whole(0),
    "augment": _each(get_args(Augmentation).__contains__, "a list of 'flip', 'rotate'; [] for none"),
    "crop": _each(_COUNT.good, "a size, one number for each axis"),
    "background": _BOOL,
    "logits": _choice("float16", "float32"),
}
