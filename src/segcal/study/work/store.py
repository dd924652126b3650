"""What a study has finished, so that a stopped study can resume.

The name of an entry is a hash of everything that decides its content. A stale entry is never reused: other data, other
settings or another version of segcal give another name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.calibrators import Calibrator, load
from segcal.cases import CaseSet
from segcal.cases.caseset import CaseRef
from segcal.cases.splits import by_group
from segcal.errors import SegcalError
from segcal.files.atomic import file_state, write_text
from segcal.files.plain import plain
from segcal.files.versions import SEGCAL


class Store:
    """Finished pieces of work in a folder: JSON documents, and calibrators beside them.

    Examples:
        >>> import tempfile
        >>> store = Store(Path(tempfile.mkdtemp()))
        >>> key = content_key(method="ts", seed=0)
        >>> store.read("fit", key), store.write("fit", key, {"nll": float("nan")}), store.read("fit", key)
        (None, {'nll': None}, {'nll': None})
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, kind: str, key: str) -> dict[str, Any] | None:
        """A document, or None if it is missing or incomplete."""
        try:
            document = json.loads(self._path(kind, key, "json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return document if isinstance(document, dict) else None

    def write(self, kind: str, key: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a document. Returns it as ``read`` will, so that a resumed study computes with the same values."""
        text = json.dumps(plain(document), allow_nan=False)
        write_text(self._path(kind, key, "json"), text)
        kept: dict[str, Any] = json.loads(text)
        return kept

    def save(self, key: str, calibrator: Calibrator) -> None:
        """Keep a fitted calibrator."""
        calibrator.save(self._path("fit", key, "safetensors"))

    def load(self, key: str) -> Calibrator | None:
        """A kept calibrator, or None if it is missing or incomplete."""
        try:
            return load(self._path("fit", key, "safetensors"))
        except SegcalError:
            return None

    def fitted(self, key: str) -> Calibrator:
        """The calibrator of a fit that is known to be here."""
        calibrator = self.load(key)
        assert calibrator is not None, "a fit that was read or made a moment ago"
        return calibrator

    def _path(self, kind: str, key: str, suffix: str) -> Path:
        return self.folder / f"{kind}-{key}.{suffix}"


def content_key(**content: Any) -> str:
    """A hash of the content and of segcal's version.

    Examples:
        >>> content_key(a=1, b=("x",)) == content_key(b=["x"], a=1) != content_key(a=2, b=("x",))
        True
    """
    text = json.dumps([SEGCAL, content], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def class_key(cases: CaseSet) -> tuple[Any, ...]:
    """The classes, channels and groups of the cases, for a ``content_key``."""
    groups = sorted(by_group(cases.ids, cases.groups).values())
    return cases.num_classes, cases.ignore_index, cases.background, cases.class_names, cases.channel_names, groups


def fingerprints(cases: CaseSet) -> dict[str, str]:
    """A hash of where each case comes from: its files (names, sizes, times), its generator's arguments, or its content.

    Examples:
        >>> from segcal.synthetic import scenes
        >>> one, other = fingerprints(scenes(1, size=(32, 40))), fingerprints(scenes(1, size=(32, 40), seed=1))
        >>> one == fingerprints(scenes(1, size=(32, 40))), one == other
        (True, False)
    """
    return {ref.id: content_key(case=_origin(ref)) for ref in cases.refs}


def _origin(ref: CaseRef) -> Any:
    try:
        return _described(ref.open)
    except _UnknownOriginError:
        case = ref.open()
        members = [case.member_logits(index) for index in range(case.members or 0)]
        about = (case.id, case.spacing, case.ignore_index, case.pooling, members)
        return _described([*about, case.logits, case.labels, case.mask, case.image])


class _UnknownOriginError(Exception):
    """An object whose content cannot be described without opening the case."""


def _described(value: Any) -> Any:
    """A value as JSON: the same for the same content, in any process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, partial):
        return [_described(value.func), _described(value.args), _described(value.keywords)]
    # The version says what segcal's own functions and classes do. The name of anybody else's does not.
    own = str((value if isinstance(value, FunctionType) else type(value)).__module__).startswith("segcal.")
    if own and isinstance(value, FunctionType) and not value.__closure__ and value.__name__ != "<lambda>":
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Path):
        return file_state(value)
    if isinstance(value, torch.device):
        return str(value)
    if own and is_dataclass(value) and not isinstance(value, type):
        content = {item.name: _described(getattr(value, item.name)) for item in fields(value)}
        return [type(value).__qualname__, content]
    if isinstance(value, Mapping):
        return [[_described(key), _described(item)] for key, item in value.items()]
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().view(torch.uint8).numpy() if value.ndim else value.item()
    if isinstance(value, np.ndarray):
        return [list(value.shape), str(value.dtype), hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()]
    if isinstance(value, Sequence):
        return [_described(item) for item in value]
    raise _UnknownOriginError(type(value).__name__)
