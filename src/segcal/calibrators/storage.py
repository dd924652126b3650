"""Calibrators on disk: safetensors with JSON metadata, versioned, checked on reading, never pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from segcal.errors import DataError
from segcal.results import number, plain
from segcal.types import FitReport

_FORMAT, _VERSION = "segcal.calibrator", 1


class Stored(NamedTuple):
    """What a calibrator's file holds."""

    tensors: dict[str, Tensor]
    id: str
    arguments: dict[str, Any]
    num_classes: int
    class_names: tuple[str, ...] | None
    fit_report: FitReport | None


def calibrator_bytes(
    tensors: Mapping[str, Tensor],
    *,
    id: str,
    arguments: Mapping[str, Any],
    num_classes: int,
    class_names: Sequence[str] | None,
    fit_report: FitReport | None,
) -> bytes:
    """What a calibrator's file holds."""
    about = {
        "format": _FORMAT,
        "version": _VERSION,
        "id": id,
        "arguments": dict(arguments),
        "num_classes": num_classes,
        "class_names": class_names,
        "fit_report": fit_report and asdict(fit_report),
    }
    metadata = {"segcal": json.dumps(plain(about), allow_nan=False)}
    return save({name: t.contiguous() for name, t in tensors.items()}, metadata)


def read_calibrator(path: Path, known: Sequence[str]) -> Stored:
    """Read and check a calibrator's file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        about = json.loads(metadata["segcal"], object_hook=_with_infinities)
        if (about["format"], about["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"format {about['format']} version {about['version']}")
        told = about["fit_report"]
        report = told and FitReport(
            **{**told, "certificate": number(told["certificate"]), "notes": tuple(told["notes"])}
        )
        names = about["class_names"] and tuple(about["class_names"])
        stored = Stored(tensors, about["id"], about["arguments"], int(about["num_classes"]), names, report)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"cannot be read ({type(error).__name__}: {error})",
            where=str(path),
            expected=f"a complete file written by Calibrator.save ({_FORMAT}, version {_VERSION})",
        ) from None
    if stored.id not in known:
        raise DataError(f"calibrator '{stored.id}'", where=str(path), expected=f"one of {', '.join(known)}")
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise DataError(f"parameter '{name}' is not finite", where=str(path), fix="fit and save it again")
    return stored


def _with_infinities(item: dict[str, Any]) -> dict[str, Any]:
    """What was written by ``plain``, with numbers again, such as the ``shrinkage`` of a map tuned to plain ``ts``."""
    return {key: float(value) if value in ("inf", "-inf") else value for key, value in item.items()}
