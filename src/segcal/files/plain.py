"""Numbers and arrays as JSON can hold them."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


def plain(value: Any, digits: int = 17) -> Any:
    """Dictionaries, lists, texts and numbers that JSON can hold: null stands for NaN, texts for infinities.

    Numbers have at most ``digits`` significant digits; by default they are exact.

    Examples:
        >>> plain({"ece": (0.5, float("nan")), 3: float("inf")}), plain(0.123456, 3)
        ({'ece': [0.5, None], '3': 'inf'}, 0.123)
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, digits) for item in value]
    return encode(value if digits > 16 else float(f"{value:.{digits}g}")) if isinstance(value, float) else value


def packed(array: NDArray[Any]) -> dict[str, Any]:
    """An array as JSON can hold it, exact to the bit.

    Examples:
        >>> unpacked(packed(np.array([[0.1, np.nan]])))
        array([[0.1, nan]])
    """
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = base64.b64encode(zlib.compress(little.tobytes(), 1)).decode("ascii")
    return {"dtype": little.dtype.str, "shape": list(array.shape), "zlib": data}


def unpacked(content: Mapping[str, Any]) -> NDArray[Any]:
    """The array that ``packed`` wrote."""
    data = zlib.decompress(base64.b64decode(content["zlib"]))
    array: NDArray[Any] = np.frombuffer(data, np.dtype(content["dtype"])).reshape(content["shape"])
    return array.astype(array.dtype.newbyteorder("="))
