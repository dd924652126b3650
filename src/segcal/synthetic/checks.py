"""Checks of arguments. Messages name the argument, its value and what was expected."""

from __future__ import annotations

import math
from collections.abc import Sequence

from segcal.errors import InputError


def positive(name: str, value: float) -> None:
    """Raise unless a value is positive and finite."""
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{name} is {value!r}", expected="a positive number")


def interval(name: str, value: float, most: float, meaning: str) -> None:
    """Raise unless a value is from 0 to ``most``."""
    if not 0 <= value <= most:
        raise InputError(f"{name} is {value!r}", expected=f"{meaning}, from 0 to {most:g}")


def per_class(name: str, values: Sequence[float], num_classes: int, least: float = -math.inf) -> None:
    """Raise unless there is one finite number of at least ``least`` for each class."""
    if len(values) != num_classes:
        raise InputError(f"{name} has {len(values)} values", expected=f"{num_classes}, one for each class")
    if not all(math.isfinite(value) and value >= least for value in values):
        floor = "" if least == -math.inf else f" of at least {least:.3g}"
        raise InputError(f"{name} are {tuple(values)}", expected=f"finite numbers{floor}")
