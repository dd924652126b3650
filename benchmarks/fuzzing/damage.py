"""Damage that needs no knowledge of a format, and what every format's own damage is made of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

# Numbers that headers are edited with.
EXTREME = (0, 1, 2, 3, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1, 10**6, 10**7, 10**9)
# Values that documents are edited with.
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 10**5, 10**30, -(2**63), 1.5, float("inf"), float("nan"), 1e-320, "", "x", "inf",
    "..", "../x", "/", "float64", "uint8", "little", "a" * 300, "\u202e", "\ud800", [], [0], [1], [-1], [10**9] * 3,
    {}, {"x": 1},
)  # fmt: skip


def flip_bits(data: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.choice((1, 1, 1, 4, 32))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def cut_off(data: bytearray, rng: random.Random) -> bytearray:
    return data[: rng.choice((0, 1, rng.randrange(len(data)), rng.randrange(len(data)), len(data) - 1))]


def overwrite(data: bytearray, rng: random.Random) -> bytearray:
    start, size = rng.randrange(len(data)), rng.choice((1, 8, 512, 4096))
    data[start : start + size] = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))
    return data


def splice(data: bytearray, rng: random.Random) -> bytearray:
    """Move, insert or remove some bytes."""
    start, size = rng.randrange(len(data)), rng.choice((1, 3, 64, 5000))
    block, target = bytes(data[start : start + size]), rng.randrange(len(data))
    if rng.random() < 0.5:
        del data[start : start + size]
    if rng.random() < 0.7:
        data[target:target] = block
    return data


def edit_header(data: bytearray, rng: random.Random) -> bytearray:
    """A number of 1, 2, 4 or 8 bytes in the first kilobyte, or a decimal number in a text header."""
    end = min(len(data), 1024)
    digits = [k for k in range(end) if chr(data[k]).isdigit()]
    if digits and rng.random() < 0.3:
        at = rng.choice(digits)
        data[at : at + 1] = str(rng.choice(EXTREME)).encode()
        return data
    size, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
    at = rng.randrange(end)
    data[at : at + size] = (rng.choice(EXTREME) % 256**size).to_bytes(size, order)
    return data


_MUTATIONS: tuple[Callable[[bytearray, random.Random], bytearray], ...] = (
    flip_bits, flip_bits, cut_off, overwrite, splice, edit_header, edit_header,
)  # fmt: skip


def damaged(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """The bytes with some damage, and what was done."""
    if not data:
        return rng.randbytes(8), "fill"
    mutate = rng.choice(_MUTATIONS)
    return bytes(mutate(bytearray(data), rng)), mutate.__name__


def edited(document: Any, rng: random.Random) -> Any:
    """A document of JSON with one value replaced, removed, or moved to another place."""
    copy = json.loads(json.dumps(document))
    places = list(_places(copy))
    inner, key = rng.choice(places)
    if rng.random() < 0.2:
        del inner[key]
    elif rng.random() < 0.2:
        other, there = rng.choice(places)
        inner[key] = json.loads(json.dumps(other[there]))
    else:
        inner[key] = rng.choice(ODD_VALUES)
    return copy


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a document: what it lies in, and its key or index."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)
