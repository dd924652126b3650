"""Checkpoints: everything that a run needs to resume exactly. Files hold tensors and plain values, no code."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from segcal.errors import DataError
from segcal.files.atomic import atomic_path

_FORMAT, _VERSION = "segcal.training", 1


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically."""
    with atomic_path(path) as temporary:
        try:
            torch.save({"format": _FORMAT, "version": _VERSION, **state}, temporary)
        except RuntimeError as error:  # torch reports a full disk this way.
            raise OSError("torch could not write all of it") from error


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint."""
    if not path.is_file():
        raise DataError(
            "there is no checkpoint to resume from",
            where=str(path),
            expected="the output folder of a run that finished an epoch",
            fix="start without --resume",
        )
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DataError(
            f"cannot be read ({type(error).__name__})", where=str(path), expected="a checkpoint of segcal train"
        ) from None
    if not isinstance(state, dict) or (state.get("format"), state.get("version")) != (_FORMAT, _VERSION):
        raise DataError(
            "is not a checkpoint of this version", where=str(path), expected=f"{_FORMAT}, version {_VERSION}"
        )
    return state


def random_states() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators."""
    name, keys, *rest = np.random.get_state()
    assert isinstance(keys, np.ndarray)
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore what ``random_states`` returned."""
    version, values, following = states["python"]
    random.setstate((version, tuple(values), following))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
