"""``segcal.toml``: describes a dataset folder where the plain convention is not enough."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from segcal.cases.splits import PARTS
from segcal.cases.toml import BOOL, Rule, Table, checked, choice, is_text, is_whole, list_of, read_toml
from segcal.errors import ConfigError
from segcal.types import Kind

CONFIG_NAME = "segcal.toml"
SPACING_RANGE = "positive numbers, 1e-12 to 1e12"

Layout = Literal["plain", "nnunet"]
Exterior = Literal["mask", "keep"]
Axes = Literal["zyx", "xyz"]


def is_spacing(value: float) -> bool:
    """Whether this is a valid voxel size. Beyond these bounds squared distances would overflow or vanish."""
    return 1e-12 <= value <= 1e12


def _is_int(value: Any) -> bool:
    return is_whole(value) and -(2**63) <= value < 2**63


def _groups(value: Any) -> Any:
    """A regular expression, or a table of groups."""
    try:
        return re.compile(value).pattern if isinstance(value, str) else value
    except re.error as error:
        raise ConfigError(f"groups = {value!r} ({error})", expected="a regular expression") from None


_TEXT = Rule(lambda v: isinstance(v, str), "a text")
_GROUPS = Rule(
    lambda v: all(map(_TEXT.good, v.values() if isinstance(v, Mapping) else (v,))),
    "a regular expression, or a table with the group of every case",
    _groups,
)
_INTEGER = Rule(_is_int, "a whole number that fits 64 bits")
_COUNT = Rule(lambda v: _is_int(v) and v > 0, "a whole number above 0")
_NAMES = list_of(is_text, "a list of texts, all different names, none empty", whole=lambda v: len(set(v)) == len(v))
_BACKGROUND = Rule(lambda v: v == "none" or _is_int(v), "the number of a class, or 'none'")
_LABELS = list_of(lambda v: _is_int(v) and v >= 0, "a list of labels", whole=bool)
_SIZES = list_of(
    lambda v: isinstance(v, int | float) and is_spacing(v), f"a list of {SPACING_RANGE}, one per axis", float
)
_CASES = list_of(_TEXT.good, f"{', '.join(PARTS)}: lists of case names")


@dataclass(frozen=True)
class DatasetConfig:
    """The keys of ``segcal.toml``; every one is optional. Folders are relative to the file.

    Examples:
        >>> parse_config({"kind": "probs", "ignore_index": 0}).kind
        'probs'
    """

    layout: Annotated[Layout, choice(Layout)] = "plain"
    kind: Annotated[Kind | None, choice(Kind)] = None
    """``logits`` or ``probs``; the folder names ``logits/`` and ``probs/`` declare it too."""
    scores: Annotated[str | None, _TEXT] = None
    """Folder of the scores. Plain layout: ``logits`` or ``probs``; nnunet: the folder itself."""
    labels: Annotated[str | None, _TEXT] = None
    images: Annotated[str | None, _TEXT] = None
    masks: Annotated[str | None, _TEXT] = None
    posteriors: Annotated[str | None, _TEXT] = None
    classes: Annotated[int | None, _COUNT] = None
    class_names: Annotated[tuple[str, ...] | None, _NAMES] = None
    ignore_index: Annotated[int | None, _INTEGER] = None
    """Label of voxels that are ignored; 255 by default."""
    background: Annotated[int | Literal["none"] | None, _BACKGROUND] = None
    """The class that metrics of the foreground leave out, or ``none``; 0 by default."""
    pooling: Annotated[Kind | None, choice(Kind)] = None
    """Space in which ensemble members are averaged; by default the one they are stored in."""
    multilabel: Annotated[bool | None, BOOL] = None
    """Channels are sigmoid outputs that may overlap; each is a two-class problem."""
    regions: Annotated[Mapping[str, tuple[int, ...]] | None, Table(_LABELS)] = None
    """Multi-label data with an integer label map: which labels make up each channel, in channel order."""
    exterior: Annotated[Exterior | None, choice(Exterior)] = None
    """Whether exact one-hot background connected to the border is masked (nnunet: yes; plain: no)."""
    axes: Annotated[Axes, choice(Axes)] = "zyx"
    """Order of the spatial axes in array files (npy, npz, zarr, h5, tif); NIfTI needs no declaration."""
    key: Annotated[str | None, _TEXT] = None
    """Name of the score array in npz, h5 and zarr files that hold several."""
    spacing: Annotated[tuple[float, ...] | Mapping[str, tuple[float, ...]] | None, Table(_SIZES, single=True)] = None
    """Voxel size per spatial axis ``(z, y, x)``, for all cases or per case; NIfTI files have their own."""
    groups: Annotated[str | Mapping[str, str] | None, _GROUPS] = None
    """Regular expression that finds the group (patient) in a case name, or a table with the group of every case;
    splits keep groups together."""
    splits: Annotated[Mapping[str, tuple[str, ...]], Table(_CASES)] = field(default_factory=dict)
    """``calibration``, ``validation``, ``test``: lists of case names."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the channels of the scores: classes or, in multi-label data, regions."""
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


def load_config(path: Path) -> DatasetConfig:
    """Read a ``segcal.toml``."""
    return read_toml(path, parse_config)


def parse_config(raw: Mapping[str, Any]) -> DatasetConfig:
    """Check the keys and values of a configuration; those that are None have their defaults."""
    values = checked(DatasetConfig, {name: value for name, value in raw.items() if value is not None})
    if values.get("regions") == {}:
        raise ConfigError("[regions] is empty", expected="a list of labels for every channel")
    for part in values.get("splits", ()):
        if part not in PARTS:
            raise ConfigError(f"splits.{part} = {list(values['splits'][part])}", expected=_CASES.expected)
    return DatasetConfig(**values)
