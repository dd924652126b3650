"""Reading calibrators from files: everything is checked before anything is allocated, and nothing is unpickled."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from segcal.calibrators.base import (
    CALIBRATOR_PREFIX,
    CALIBRATORS,
    FORMAT,
    NETWORK_FORMAT,
    NETWORK_VERSION,
    VERSION,
    VERSION_WITH_CHANNELS,
    Calibrator,
    content_digest,
)
from segcal.calibrators.module import check_num_classes
from segcal.errors import DataError, SegcalError, check_name
from segcal.files.plain import number
from segcal.types import FitReport

T = TypeVar("T")


class _Stored(NamedTuple):
    """The content of a calibrator's file; for multi-label data also that of each channel, by name."""

    tensors: Mapping[str, Tensor]
    id: str
    arguments: Mapping[str, Any]
    num_classes: int
    class_names: tuple[str, ...] | None
    fit_report: FitReport | None
    channels: Mapping[str, _Stored] = MappingProxyType({})


def load(path: str | Path) -> Calibrator:
    """Read a calibrator that ``Calibrator.save`` wrote; whatever is wrong with the file is a ``DataError``.

    Of a file that also holds a model (``segcal.calibrate(...).save``) the calibrator is read, and the model is not.

    Examples:
        >>> import segcal, tempfile, torch
        >>> calibrator = segcal.calibrators.TemperatureScaling().fit(torch.randn(500, 3), torch.randint(0, 3, (500,)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     calibrator.save(f"{folder}/cal.safetensors")
        ...     load(f"{folder}/cal.safetensors").temperature == calibrator.temperature
        True
    """
    if os.path.isdir(path):  # noqa: PTH112 (Path.is_dir raises for names that no file can have)
        raise DataError("is a folder", where=str(path), expected="a file written by Calibrator.save")
    try:
        stored = _read(path)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"cannot be read ({type(error).__name__}: {error})",
            where=str(path),
            expected=f"a complete file written by Calibrator.save ({FORMAT}, version {VERSION} or "
            f"{VERSION_WITH_CHANNELS})",
        ) from None
    check_name("calibrator", stored.id, CALIBRATORS, where=str(path), error=DataError)
    try:
        if not stored.channels:
            return _built(stored)
        whole = CALIBRATORS[stored.id](**stored.arguments)
        return whole.take_channels(list(stored.channels), [_built(own) for own in stored.channels.values()])
    except SegcalError as error:
        raise DataError(error.problem, where=str(path), expected=error.expected, fix=error.fix) from None
    except Exception as error:  # arguments of any kind may come, and a constructor may raise anything
        raise DataError(
            f"cannot be a calibrator '{stored.id}' ({type(error).__name__}: {error})",
            where=str(path),
            expected="what Calibrator.save wrote",
            fix="fit and save it again",
        ) from None


def _built(stored: _Stored) -> Calibrator:
    """The calibrator of one map."""
    calibrator = CALIBRATORS[stored.id](**stored.arguments)
    wanted, tensors = calibrator.shapes(stored.num_classes), calibrator.upgraded(stored.tensors)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        raise DataError(f"holds the tensors {found}", expected=f"{wanted} for '{stored.id}'")
    calibrator.allocate(stored.num_classes)
    calibrator.num_classes, calibrator.class_names = stored.num_classes, stored.class_names
    calibrator.load_state_dict(tensors)
    calibrator.fit_report = stored.fit_report
    return calibrator


def _read(path: str | Path) -> _Stored:
    """The content of a file, each part of the right type."""
    with safe_open(path, framework="pt") as file:
        about, prefix = json.loads((file.metadata() or {})["segcal"]), ""
        if about["format"] == NETWORK_FORMAT:
            if about["version"] != NETWORK_VERSION:
                raise ValueError(f"format {about['format']} version {about['version']}")
            about, prefix = about["calibrator"], CALIBRATOR_PREFIX
        own = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dict
        tensors = {name.removeprefix(prefix): file.get_tensor(name) for name in own}
    if about["format"] != FORMAT or about["version"] not in (VERSION, VERSION_WITH_CHANNELS):
        raise ValueError(f"format {about['format']} version {about['version']}")
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"'{name}' is {tensor.dtype}, and not float32 or float64")
    # Files of earlier versions have no checksum.
    if "digest" in about and about.pop("digest") != content_digest(about, tensors):
        raise ValueError("its checksum does not match its content: it was damaged or edited")
    about = json.loads(json.dumps(about), object_hook=_with_infinities)
    num_classes, names = check_num_classes(about["num_classes"]), about["class_names"]
    if names is not None:
        names = _texts("class_names", names)
        if len(names) != num_classes:
            raise ValueError(f"{len(names)} class names for {num_classes} classes")
    arguments = _check("arguments", about["arguments"], dict)
    stored = _Stored(
        tensors, _check("id", about["id"], str), arguments, num_classes, names, _report(about["fit_report"])
    )
    with_channels = about["version"] == VERSION_WITH_CHANNELS
    return stored._replace(channels=_channels(stored, about["channels"])) if with_channels else stored


def _check(name: str, value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}, and not a {kind.__name__}")
    return value


def _texts(name: str, values: Any) -> tuple[str, ...]:
    return tuple(_check(f"one of {name}", value, str) for value in _check(name, values, list))


def _channels(whole: _Stored, channels: Any) -> dict[str, _Stored]:
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
    kinds = {"converged": bool, "iterations": int, "voxels_used": int}
    checked: dict[str, Any] = {name: _check(name, told[name], kind) for name, kind in kinds.items()}
    checked |= {name: number(told[name]) for name in ("nll_before", "nll_after", "certificate", "seconds")}
    later = {"cases": int, "fitted": str}  # Files of earlier versions have neither.
    known: dict[str, Any] = {
        name: _check(name, told[name], kind) for name, kind in later.items() if told.get(name) is not None
    }
    return FitReport(**checked, **known, notes=_texts("notes", told["notes"]))


def _with_infinities(item: dict[str, Any]) -> dict[str, Any]:
    """An object of JSON with infinities, which ``plain`` wrote as strings, such as a tuned ``shrinkage``."""
    return {key: float(value) if value in ("inf", "-inf") else value for key, value in item.items()}
