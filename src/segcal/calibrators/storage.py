"""Calibrator files: safetensors with JSON metadata, versioned, checked on reading, never pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from segcal.errors import DataError, check_name
from segcal.files.plain import number, plain
from segcal.types import FitReport

T = TypeVar("T")

# Files with a map for each channel of multi-label data have another version, so that no reader takes them for one map.
_FORMAT, _VERSION, _WITH_CHANNELS = "segcal.calibrator", 1, 2


class Stored(NamedTuple):
    """The content of a calibrator's file; for multi-label data also that of each channel, by name."""

    tensors: Mapping[str, Tensor]
    id: str
    arguments: Mapping[str, Any]
    num_classes: int
    class_names: tuple[str, ...] | None
    fit_report: FitReport | None
    channels: Mapping[str, Stored] = MappingProxyType({})


def calibrator_bytes(stored: Stored) -> bytes:
    """A calibrator's file."""
    about = {
        "format": _FORMAT,
        "version": _WITH_CHANNELS if stored.channels else _VERSION,
        "id": stored.id,
        **_variable(stored),
        "num_classes": stored.num_classes,
        "class_names": stored.class_names,
    }
    if stored.channels:
        about["channels"] = [{"name": name, **_variable(own)} for name, own in stored.channels.items()]
    metadata = {"segcal": json.dumps(plain(about), allow_nan=False)}
    return save({name: t.contiguous() for name, t in stored.tensors.items()}, metadata)


def _variable(stored: Stored) -> dict[str, Any]:
    """What differs from channel to channel, besides the tensors."""
    report = stored.fit_report
    return {"arguments": dict(stored.arguments), "fit_report": report and asdict(report)}


def read_calibrator(path: Path, known: Sequence[str]) -> Stored:
    """Read and check a calibrator's file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        about = json.loads(metadata["segcal"], object_hook=_with_infinities)
        if about["format"] != _FORMAT or about["version"] not in (_VERSION, _WITH_CHANNELS):
            raise ValueError(f"format {about['format']} version {about['version']}")
        num_classes = check_num_classes(about["num_classes"])
        stored = Stored(
            {name: _check_type(name, tensor) for name, tensor in tensors.items()},
            _check("id", about["id"], str),
            _check("arguments", about["arguments"], dict),
            num_classes,
            _class_names(about["class_names"], num_classes),
            _report(about["fit_report"]),
        )
        if about["version"] == _WITH_CHANNELS:
            stored = stored._replace(channels=_channels(stored, about["channels"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"cannot be read ({type(error).__name__}: {error})",
            where=str(path),
            expected=f"a complete file written by Calibrator.save ({_FORMAT}, version {_VERSION} or {_WITH_CHANNELS})",
        ) from None
    check_name("calibrator", stored.id, known, where=str(path), error=DataError)
    return stored


def check_num_classes(value: Any) -> int:
    """The number of classes; raises unless it is one."""
    if type(value) is not int or not 2 <= value < 2**31:
        raise ValueError(f"num_classes is {value!r}")
    return value


def _check(name: str, value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}, and not a {kind.__name__}")
    return value


def _check_type(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"'{name}' is {tensor.dtype}, and not float32 or float64")
    return tensor


def _class_names(names: Any, num_classes: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    found = tuple(_check("a class name", name, str) for name in _check("class_names", names, list))
    if len(found) != num_classes:
        raise ValueError(f"{len(found)} class names for {num_classes} classes")
    return found


def _channels(whole: Stored, channels: Any) -> dict[str, Stored]:
    """The content of each channel, with its own tensors."""
    prefixes = [f"channels.{index}." for index in range(len(_check("channels", channels, list)))]
    if not channels or any(not name.startswith(tuple(prefixes)) for name in whole.tensors):
        raise ValueError(f"{len(channels)} channels with the tensors {', '.join(whole.tensors)}")
    found = {
        _check("a channel's name", about["name"], str): whole._replace(
            tensors={name.removeprefix(own): t for name, t in whole.tensors.items() if name.startswith(own)},
            arguments=_check("arguments", about["arguments"], dict),
            fit_report=_report(about["fit_report"]),
        )
        for own, about in zip(prefixes, channels, strict=True)
    }
    if len(found) < len(channels):
        raise ValueError("channels of the same name")
    return found


def _report(told: Any) -> FitReport | None:
    """The report; raises if a field is missing or of another type."""
    if told is None:
        return None
    return FitReport(
        nll_before=number(told["nll_before"]),
        nll_after=number(told["nll_after"]),
        converged=_check("converged", told["converged"], bool),
        certificate=number(told["certificate"]),
        iterations=_check("iterations", told["iterations"], int),
        seconds=number(told["seconds"]),
        voxels_used=_check("voxels_used", told["voxels_used"], int),
        notes=tuple(_check("a note", note, str) for note in _check("notes", told["notes"], list)),
    )


def _with_infinities(item: dict[str, Any]) -> dict[str, Any]:
    """An object of JSON with infinities, which ``plain`` wrote as strings, such as a tuned ``shrinkage``."""
    return {key: float(value) if value in ("inf", "-inf") else value for key, value in item.items()}
