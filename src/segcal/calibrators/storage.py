"""Calibrators on disk: safetensors with JSON metadata, versioned, checked on reading, never pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from segcal.errors import DataError, check_name
from segcal.results import number, plain
from segcal.types import FitReport

# A file with a map for each channel of multi-label data has the second version, so that nobody takes it for one map.
_FORMAT, _VERSION, _WITH_CHANNELS = "segcal.calibrator", 1, 2


class Stored(NamedTuple):
    """What a calibrator's file holds; of multi-label data the same for each channel, by its name."""

    tensors: dict[str, Tensor]
    id: str
    arguments: dict[str, Any]
    num_classes: int
    class_names: tuple[str, ...] | None
    fit_report: FitReport | None
    channels: Mapping[str, Stored] = MappingProxyType({})


def calibrator_bytes(
    tensors: Mapping[str, Tensor],
    *,
    id: str,
    arguments: Mapping[str, Any],
    num_classes: int,
    class_names: Sequence[str] | None,
    fit_report: FitReport | None,
    channels: Sequence[tuple[Mapping[str, Any], FitReport | None]] = (),
    channel_names: Sequence[str] | None = None,
) -> bytes:
    """What a calibrator's file holds; ``channels`` are the arguments and reports of each."""
    about = {
        "format": _FORMAT,
        "version": _WITH_CHANNELS if channels else _VERSION,
        "id": id,
        "arguments": dict(arguments),
        "num_classes": num_classes,
        "class_names": class_names,
        "fit_report": fit_report and asdict(fit_report),
    }
    if channels:
        about["channels"] = [
            {"name": name, "arguments": dict(own), "fit_report": report and asdict(report)}
            for name, (own, report) in zip(channel_names or (), channels, strict=True)
        ]
    metadata = {"segcal": json.dumps(plain(about), allow_nan=False)}
    return save({name: t.contiguous() for name, t in tensors.items()}, metadata)


def read_calibrator(path: Path, known: Sequence[str]) -> Stored:
    """Read and check a calibrator's file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        about = json.loads(metadata["segcal"], object_hook=_with_infinities)
        if about["format"] != _FORMAT or about["version"] not in (_VERSION, _WITH_CHANNELS):
            raise ValueError(f"format {about['format']} version {about['version']}")
        names = about["class_names"] and tuple(about["class_names"])
        stored = Stored(
            tensors, about["id"], about["arguments"], int(about["num_classes"]), names, _report(about["fit_report"])
        )
        if about["version"] == _WITH_CHANNELS:
            stored = stored._replace(channels=_channels(stored, about["channels"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"cannot be read ({type(error).__name__}: {error})",
            where=str(path),
            expected=f"a complete file written by Calibrator.save ({_FORMAT}, version {_VERSION})",
        ) from None
    check_name("calibrator", stored.id, known, where=str(path), error=DataError)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise DataError(f"parameter '{name}' is not finite", where=str(path), fix="fit and save it again")
    return stored


def _channels(whole: Stored, channels: Sequence[Mapping[str, Any]]) -> dict[str, Stored]:
    """The maps of the channels, each with the tensors that are its own."""
    prefixes = [f"channels.{index}." for index in range(len(channels))]
    if not channels or any(not name.startswith(tuple(prefixes)) for name in whole.tensors):
        raise ValueError(f"{len(channels)} channels with the tensors {', '.join(whole.tensors)}")
    found = {
        str(about["name"]): whole._replace(
            tensors={name.removeprefix(own): t for name, t in whole.tensors.items() if name.startswith(own)},
            arguments=about["arguments"],
            fit_report=_report(about["fit_report"]),
        )
        for own, about in zip(prefixes, channels, strict=True)
    }
    if len(found) < len(channels):
        raise ValueError("channels of the same name")
    return found


def _report(told: Mapping[str, Any] | None) -> FitReport | None:
    if told is None:
        return None
    return FitReport(**{**told, "certificate": number(told["certificate"]), "notes": tuple(told["notes"])})


def _with_infinities(item: dict[str, Any]) -> dict[str, Any]:
    """What was written by ``plain``, with numbers again, such as the ``shrinkage`` of a map tuned to plain ``ts``."""
    return {key: float(value) if value in ("inf", "-inf") else value for key, value in item.items()}
