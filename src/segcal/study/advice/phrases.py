"""Numbers and names as text, for sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from segcal.errors import listed
from segcal.study.settings import UNCALIBRATED


def with_interval(row: Mapping[str, Any]) -> str:
    """A mean and its interval, if it has one.

    Examples:
        >>> with_interval({"mean": 0.5, "low": 0.4, "high": 0.61234})
        '0.5000 (0.4000 to 0.6123)'
    """
    return f"{row['mean']:.4f}" + ("" if math.isnan(row["low"]) else f" ({row['low']:.4f} to {row['high']:.4f})")


def change(row: Mapping[str, Any]) -> str:
    """A difference and its interval, if it has one.

    Examples:
        >>> change({"mean": 0.0031, "low": 0.0021, "high": 0.0043})
        '+0.0031, 95% interval +0.0021 to +0.0043'
    """
    interval = "" if math.isnan(row["low"]) else f", 95% interval {row['low']:+.4f} to {row['high']:+.4f}"
    return f"{row['mean']:+.4f}{interval}"


def share_less(before: float, after: float) -> str:
    """By how much a value fell, in percent; never 0% or 100% because of rounding.

    Examples:
        >>> share_less(0.2, 0.1), share_less(0.2, 0.1999), share_less(0.2, 1e-9)
        ('50%', 'less than 1%', 'more than 99%')
    """
    percent = 100 * (1 - after / before)
    return "less than 1%" if percent < 1 else "more than 99%" if 99.5 <= percent < 100 else f"{percent:.0f}%"


def counted(count: int, what: str) -> str:
    """A number of things.

    Examples:
        >>> counted(1, "case"), counted(1200, "case")
        ('1 case', '1,200 cases')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def ordinal(number: int) -> str:
    """A place in an order.

    Examples:
        >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21)]
        ['1st', '2nd', '3rd', '4th', '11th', '12th', '13th', '21st']
    """
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"


def quoted(names: Sequence[str]) -> str:
    """A list of names in quotes, not of hundreds."""
    return listed([f"'{name}'" for name in names])


def joined(words: Sequence[str]) -> str:
    """A list of words.

    Examples:
        >>> joined(["a"]), joined(["a", "b", "c"])
        ('a', 'a, b and c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def with_method(key: str) -> str:
    """A method after a number.

    Examples:
        >>> with_method("ts"), with_method("uncalibrated")
        ('with ts', 'uncalibrated')
    """
    return key if key == UNCALIBRATED else f"with {key}"
