"""The configuration of a training run: a TOML file whose every key is checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from torch import nn

from segcal.cases.toml import BOOL, Rule, check_known, checked, choice, is_number, is_text, is_whole, list_of, read_toml
from segcal.errors import MAX_SEED, ConfigError, check_name
from segcal.losses import LOSSES, CombinedLoss
from segcal.training.densenet import LAYERS_103
from segcal.training.networks import OPTIONS, Network
from segcal.training.unet import Norm

Augmentation = Literal["flip", "mirror", "rotate", "scale", "contrast"]
Precision = Literal["float16", "float32"]
Normalisation = Literal["scan", "train"]
PARTS = ("train", "validation", "test")

# Options of losses that the dataset and the trainer set.
_GIVEN = ("ignore_index", "reduction")


def _whole(lowest: int, highest: float = math.inf) -> Rule:
    text = f"a whole number of at least {lowest}" if highest == math.inf else f"{lowest} to {highest:.0f}"
    return Rule(lambda v: is_whole(v) and lowest <= v <= highest, text)


def _are_folders(value: Any) -> bool:
    return is_text(value) or (isinstance(value, list | tuple) and bool(value) and all(map(is_text, value)))


def _is_split(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) <= set(PARTS)
        and all(is_number(share) and share >= 0 for share in value.values())
        and 0 < sum(value.values()) <= 1 + 1e-9
    )


_TEXT = Rule(is_text, "a text")
_COUNT = _whole(1)
_NUMBER = Rule(is_number, "a number", float)
_TABLE = Rule(lambda v: isinstance(v, Mapping), "a table", dict)
_POSITIVE = Rule(lambda v: is_number(v, 0), "a positive number", float)
_FOLDERS = Rule(_are_folders, "a folder, or a list of them", lambda v: (v,) if isinstance(v, str) else tuple(v))
_SHARES = Rule(_is_split, "shares train, validation, test that sum to at most 1", dict)
_EPOCHS = list_of(_COUNT.good, "a list of epochs")
_AUGMENTATIONS = list_of(
    get_args(Augmentation).__contains__, "a list of 'flip', 'mirror', 'rotate', 'scale', 'contrast'; [] for none"
)
_LAYERS = list_of(_COUNT.good, "a list of numbers of layers")
_SIZE = list_of(_COUNT.good, "a size, one number for each axis")


@dataclass(frozen=True)
class LossSpec:
    """One summand of the loss: ``factor`` times the loss with this id of ``segcal.LOSSES``, made with ``options``."""

    id: str
    factor: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, classes: int, ignore_index: int) -> nn.Module:
        """The loss, without its factor."""
        cls = LOSSES[self.id]
        known = [name for name in cls.defaults() if name not in _GIVEN]
        check_known("option", self.options, known, f" of loss '{self.id}'")
        options, base = dict(self.options), self.options.get("base", "ce")
        if base == "none":
            options["base"] = None
        elif base != "ce":
            check_name("base", base, ("none", *LOSSES), error=ConfigError)
            options["base"] = LossSpec(base).build(classes, ignore_index)
        try:
            return cls.of_classes(classes, ignore_index=ignore_index, **options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"loss '{self.id}' with {dict(self.options)}: {error}") from None


def build_loss(specs: tuple[LossSpec, ...], classes: int, ignore_index: int) -> nn.Module:
    """The loss, or the weighted sum of several. Options are the keywords of the loss; ``base = "none"`` means None.

    ``base`` may also be the id of another loss, which then has its default options.

    Examples:
        >>> build_loss((LossSpec("nacl", options={"weight": 0.2, "base": "dice"}),), 4, 255).base
        Dice(smooth=1.0, ignore_index=255, reduction='mean')
    """
    parts = [(spec.factor, spec.build(classes, ignore_index)) for spec in specs]
    return parts[0][1] if len(parts) == 1 and parts[0][0] == 1 else CombinedLoss(parts)


def _loss(value: Any) -> LossSpec:
    table = {"id": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or not isinstance(table.get("id"), str):
        raise ConfigError(f"loss = {value!r}", expected="a loss id, or tables with id, factor, options")
    check_known("key of loss", table, [item.name for item in fields(LossSpec)])
    check_known("loss", [table["id"]], list(LOSSES))
    factor = _NUMBER.check("loss.factor", table.get("factor", 1.0))
    return LossSpec(table["id"], factor, _TABLE.check("loss.options", table.get("options", {})))


_LOSSES = Rule(lambda v: v != [], "at least one loss", lambda v: tuple(map(_loss, v if isinstance(v, list) else [v])))


@dataclass(frozen=True)
class TrainingConfig:
    """The keys of a training file; ``data`` and ``output`` are required, all others default to the papers' values.

    Examples:
        >>> config = parse_config({"data": "acdc", "output": "run", "loss": "nacl"})
        >>> config.loss, config.epochs
        ((LossSpec(id='nacl', factor=1.0, options={}),), 100)
    """

    data: Annotated[tuple[str, ...], _FOLDERS]
    """Dataset folders with ``images/`` and ``labels/``; relative to the file, as is ``output``."""
    output: Annotated[str, _TEXT]
    split: Annotated[Mapping[str, float] | None, _SHARES] = None
    """Shares ``train``, ``validation``, ``test``; by default the dataset's own lists, or else 0.7, 0.1, 0.2."""
    classes: Annotated[int | None, _whole(2)] = None
    """C, if the dataset's ``segcal.toml`` does not say it."""
    network: Annotated[Network, choice(Network)] = "unet"
    width: Annotated[int, _COUNT] = 64
    """Channels of the first level, of an EfficientNet U-Net of the last; of an FC-DenseNet those that a layer adds."""
    depth: Annotated[int, _whole(1, 8)] = 5
    """Levels of a U-Net."""
    layers: Annotated[tuple[int, ...], _LAYERS] = LAYERS_103
    """Layers of the dense blocks of an FC-DenseNet, from the finest to the coarsest."""
    encoder: Annotated[str | None, _TEXT] = None
    """A file with trained weights for the encoder of an EfficientNet U-Net; relative to the file, as is ``output``."""
    norm: Annotated[Norm, choice(Norm)] = "batch"
    dims: Annotated[int, _whole(2, 3)] = 2
    """2 trains on images, or on the slices of volumes; 3 on volumes."""
    loss: Annotated[tuple[LossSpec, ...], _LOSSES] = (LossSpec("ce"),)
    learning_rate: Annotated[float, _POSITIVE] = 1e-3
    milestones: Annotated[tuple[int, ...], _EPOCHS] = (50,)
    """Epochs after which the learning rate is multiplied by ``factor``."""
    factor: Annotated[float, _POSITIVE] = 0.1
    batch: Annotated[int, _COUNT] = 16
    """Images per step, in all processes together."""
    epochs: Annotated[int, _COUNT] = 100
    save_every: Annotated[int, _COUNT] = 1
    """Epochs between two checkpoints. The last epoch is always saved."""
    validate_every: Annotated[int, _COUNT] = 1
    """Epochs between two validations, which choose the best model. The last epoch is always validated."""
    seed: Annotated[int, _whole(0, MAX_SEED)] = 0
    amp: Annotated[bool, BOOL] = False
    """Mixed precision: bfloat16, or float16 on a GPU without it."""
    compile: Annotated[bool, BOOL] = False
    """Compile the network for training, which takes about a minute once and saves time in every step."""
    device: Annotated[str, _TEXT] = "auto"
    workers: Annotated[int, _whole(0)] = 0
    """Processes that read ahead; 0 reads in the training process."""
    augment: Annotated[tuple[Augmentation, ...], _AUGMENTATIONS] = ("flip", "rotate")
    normalise: Annotated[Normalisation, choice(Normalisation)] = "scan"
    """Whose mean and standard deviation of each channel become 0 and 1: of every scan, or of all training scans."""
    crop: Annotated[tuple[int, ...] | None, _SIZE] = None
    """Training images are cropped or padded to this size."""
    window: Annotated[tuple[int, ...] | None, _SIZE] = None
    """Scans are predicted in windows of this size, which overlap by half; by default whole."""
    background: Annotated[bool, BOOL] = False
    """Whether the background counts in the validation Dice that selects the best model."""
    logits: Annotated[Precision, choice(Precision)] = "float32"
    """Precision of the written logits."""

    def learning_rate_at(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 1."""
        return self.learning_rate * self.factor ** sum(epoch > milestone for milestone in self.milestones)

    def to_dict(self) -> dict[str, Any]:
        """All keys as JSON-able values."""
        return dict(json.loads(json.dumps(asdict(self))))


def load_config(path: str | Path) -> TrainingConfig:
    """Read a training file; its folders become relative to the working directory."""
    config = read_toml(Path(path), parse_config)
    here = Path(path).parent
    encoder = None if config.encoder is None else str(here / config.encoder)
    folders = tuple(str(here / folder) for folder in config.data)
    return replace(config, data=folders, output=str(here / config.output), encoder=encoder)


def parse_config(raw: Mapping[str, Any]) -> TrainingConfig:
    """Check the keys and values of a training file.

    Examples:
        >>> parse_config({"data": "d", "output": "o", "epoch": 3})
        Traceback (most recent call last):
        segcal.errors.ConfigError: unknown key 'epoch'; ... To fix: did you mean 'epochs'?
    """
    values = checked(TrainingConfig, raw)
    for name in ("data", "output"):
        if name not in raw:
            raise ConfigError(f"no key '{name}'", expected=f"{name} = '...'")
    config = TrainingConfig(**values)
    for name, size in (("crop", config.crop), ("window", config.window)):
        if size is not None and len(size) != config.dims:
            raise ConfigError(f"{name} = {list(size)}", expected=f"{config.dims} numbers, as dims = {config.dims}")
    if "scale" in config.augment and config.crop is None:
        raise ConfigError("augment with 'scale', and no crop", expected="crop = [...]: the size of scaled samples")
    if config.network in ("fc-densenet", "efficientnet-unet") and config.dims != 2:
        raise ConfigError(f"dims = {config.dims}", expected=f"dims = 2, as network = '{config.network}' takes images")
    known = OPTIONS[config.network]
    if idle := sorted({name for names in OPTIONS.values() for name in names} & set(raw) - {*known, "dims"}):
        raise ConfigError(f"{', '.join(idle)} with network = '{config.network}'", expected=f"only {', '.join(known)}")
    if config.encoder is not None and config.network != "efficientnet-unet":
        raise ConfigError(f"encoder with network = '{config.network}'", expected="network = 'efficientnet-unet'")
    return config
