"""Numbers as JSON can hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def encode(value: float) -> float | str | None:
    """JSON has no NaN and no infinities: null and texts stand for them."""
    return None if math.isnan(value) else str(value) if math.isinf(value) else value


def number(value: float | str | None) -> float:
    """A number that ``plain`` wrote.

    Examples:
        >>> number(0.5), number(None), number("-inf")
        (0.5, nan, -inf)
    """
    return math.nan if value is None else float(value)


def plain(value: Any) -> Any:
    """Dictionaries, lists, texts and numbers that JSON can hold: null stands for NaN, texts for infinities.

    Examples:
        >>> plain({"ece": (0.5, float("nan")), 3: float("inf")})
        {'ece': [0.5, None], '3': 'inf'}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return encode(value) if isinstance(value, float) else value
