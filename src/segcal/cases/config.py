"""``segcal.toml``: describes a dataset folder where the plain convention is not enough."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from segcal.cases.toml import check_known, read_toml
from segcal.errors import ConfigError
from segcal.types import Kind

CONFIG_NAME = "segcal.toml"
SPACING_RANGE = "positive numbers, 1e-12 to 1e12"


@dataclass(frozen=True)
class DatasetConfig:
    """The keys of ``segcal.toml``; every one is optional. Folders are relative to the file.

    Examples:
        >>> parse_config({"kind": "probs", "ignore_index": 0}).kind
        'probs'
    """

    layout: Literal["plain", "nnunet"] = "plain"
    kind: Kind | None = None
    """``logits`` or ``probs``; the folder names ``logits/`` and ``probs/`` declare it too."""
    scores: str | None = None
    """Folder of the scores. Plain layout: ``logits`` or ``probs``; nnunet: the folder itself."""
    labels: str | None = None
    images: str | None = None
    masks: str | None = None
    posteriors: str | None = None
    classes: int | None = None
    class_names: tuple[str, ...] | None = None
    ignore_index: int | None = None
    """Label that takes a voxel out of everything; 255 by default."""
    background: int | Literal["none"] | None = None
    """The class that metrics of the foreground leave out, or ``none``; 0 by default."""
    pooling: Kind | None = None
    """Space in which ensemble members are averaged; by default the one they are stored in."""
    multilabel: bool | None = None
    """Channels are sigmoid outputs that may overlap; each is a two-class problem."""
    regions: Mapping[str, tuple[int, ...]] | None = None
    """Multi-label data with an integer label map: which labels make up each channel, in channel order."""
    exterior: Literal["mask", "keep"] | None = None
    """Whether exact one-hot background connected to the border is masked (nnunet: yes; plain: no)."""
    axes: Literal["zyx", "xyz"] = "zyx"
    """Order of the spatial axes in array files (npy, npz, zarr, h5, tif); NIfTI needs no declaration."""
    key: str | None = None
    """Name of the score array in npz, h5 and zarr files that hold several."""
    spacing: tuple[float, ...] | Mapping[str, tuple[float, ...]] | None = None
    """Voxel size per spatial axis ``(z, y, x)``, for all cases or per case; NIfTI files bring their own."""
    groups: str | None = None
    """Regular expression that finds the group (patient) in a case name, so that splits keep groups together."""
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """``calibration``, ``validation``, ``test``: lists of case names."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the channels of the scores: classes or, of multi-label data, regions."""
        return tuple(self.regions) if self.regions else self.class_names

    def background_class(self, num_classes: int) -> int | None:
        """The background class, or None if there is none.

        Examples:
            >>> [parse_config(raw).background_class(4) for raw in ({}, {"background": 3}, {"background": "none"})]
            [0, 3, None]
        """
        if self.multilabel and self.background is not None:
            raise ConfigError(
                f"background = {self.background!r} with multi-label data",
                expected="no background: every channel has its own outside",
            )
        if self.background == "none":
            return None
        index = self.background or 0
        if not 0 <= index < num_classes:
            raise ConfigError(f"background = {index}", expected=f"a class, 0 to {num_classes - 1}, or 'none'")
        return index

    def with_defaults(self) -> DatasetConfig:
        """The configuration with the remaining defaults filled in."""
        return replace(
            self,
            ignore_index=255 if self.ignore_index is None else self.ignore_index,
            multilabel=bool(self.multilabel or self.regions),
            exterior=self.exterior or ("mask" if self.layout == "nnunet" else "keep"),
        )


_CHOICES: dict[str, tuple[str, ...]] = {
    "layout": ("plain", "nnunet"),
    "kind": ("logits", "probs"),
    "pooling": ("logits", "probs"),
    "exterior": ("mask", "keep"),
    "axes": ("zyx", "xyz"),
}
_TEXTS = ("scores", "labels", "images", "masks", "posteriors", "key", "groups")


def background_line(background: int | None) -> str:
    """The line of ``segcal.toml`` that names the background class."""
    return 'background = "none"' if background is None else f"background = {background}"


def load_config(path: Path) -> DatasetConfig:
    """Read a ``segcal.toml``."""
    return read_toml(path, parse_config)


def parse_config(raw: Mapping[str, Any]) -> DatasetConfig:
    """Check the keys and values of a configuration and give them their types."""
    check_known("key", raw, [item.name for item in fields(DatasetConfig)])
    return DatasetConfig(**{name: _parse(name, value) for name, value in raw.items() if value is not None})


def _parse(name: str, value: Any) -> Any:
    if name in _CHOICES:
        return _require(name, value, value in _CHOICES[name], " or ".join(map(repr, _CHOICES[name])))
    if name == "multilabel":
        return _require(name, value, isinstance(value, bool), "true or false")
    if name == "classes":
        return _require(name, value, _is_int(value) and value > 0, "a whole number above 0")
    if name == "ignore_index":
        return _require(name, value, _is_int(value), "a whole number that fits 64 bits")
    if name in _TEXTS:
        text = _require(name, value, isinstance(value, str), "a text")
        return _pattern(text) if name == "groups" else text
    if name == "background":
        return _require(name, value, value == "none" or _is_int(value), "the number of a class, or 'none'")
    if name == "class_names":
        names = tuple(_require(name, value, _is_list(value, lambda item: isinstance(item, str)), "a list of texts"))
        return _require(name, names, len(set(names)) == len(names), "different names")
    if name == "spacing" and not isinstance(value, Mapping):
        return _spacing(name, value)
    table = _require(name, value, isinstance(value, Mapping), "a table")
    if name == "spacing":
        return {case: _spacing(f"spacing.{case}", item) for case, item in table.items()}
    if name == "regions":
        _require("[regions]", dict(table), bool(table), "a list of labels for every channel")
        return {
            region: tuple(
                _require(f"regions.{region}", item, _is_list(item, _is_label) and len(item) > 0, "a list of labels")
            )
            for region, item in table.items()
        }
    parts = ("calibration", "validation", "test")
    return {
        part: tuple(
            _require(
                f"splits.{part}",
                item,
                part in parts and _is_list(item, lambda name: isinstance(name, str)),
                f"{', '.join(parts)}: lists of case names",
            )
        )
        for part, item in table.items()
    }


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(f"groups = {text!r} ({error})", expected="a regular expression") from None
    return text


def is_spacing(value: float) -> bool:
    """Whether this is a valid voxel size. Beyond these bounds squared distances would overflow or vanish."""
    return 1e-12 <= value <= 1e12


def _spacing(name: str, value: Any) -> tuple[float, ...]:
    good = _is_list(value, lambda item: isinstance(item, int | float) and is_spacing(item))
    return tuple(float(item) for item in _require(name, value, good, f"a list of {SPACING_RANGE}, one per axis"))


def _is_int(value: Any) -> bool:
    """Whether this is a whole number that fits 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_label(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_list(value: Any, good: Callable[[Any], bool]) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(good, value))


def _require(name: str, value: Any, good: bool, expected: str) -> Any:
    if not good:
        raise ConfigError(f"{name} = {value!r}", expected=expected)
    return value
