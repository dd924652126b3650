"""Options of metrics, as users write them in brackets: ``ece[num_bins=50]``. They are checked before any work.

The options of a metric are the keyword arguments of its function whose annotations are numbers, switches or words.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from segcal.errors import InputError, did_you_mean
from segcal.kernels.grid import MAX_BINS
from segcal.metrics.measure import MetricSpec

__all__ = ["check_options", "options_of"]

_Range = tuple[Callable[[float], bool], str]
# The range of each option, as a test and in words, the same for all metrics; that of the others.
_RANGES: dict[str, _Range] = {
    "num_bins": (lambda number: 1 <= number <= MAX_BINS, f"from 1 to {MAX_BINS}"),
    "threshold": (lambda number: 0 < number < 1, "between 0 and 1"),
}
_NOT_NEGATIVE: _Range = lambda number: number >= 0, "of 0 or more"


@dataclass(frozen=True)
class Option:
    """The values of an option: some words, true or false, or a number within bounds."""

    name: str
    words: tuple[str, ...]
    number: type | None  # bool, int, float, or None where only words will do

    @property
    def expected(self) -> str:
        """The possible values, in words."""
        found = [repr(word) for word in self.words]
        if self.number is bool:
            found.append("true or false")
        elif self.number is not None:
            kind = "a whole number" if self.number is int else "a number"
            found.append(f"{kind} {_RANGES.get(self.name, _NOT_NEGATIVE)[1]}")
        return " or ".join(found)

    def value(self, given: object) -> Any:
        """The value in the function's own type, from a value or its text; None if it is invalid."""
        if isinstance(given, str) and given in self.words:
            return given
        if self.number is bool:
            return {"true": True, "false": False}.get(str(given).lower())
        if self.number is None or isinstance(given, bool):
            return None
        try:
            number = self.number(given)
            whole = isinstance(given, str) or number == given
        except (TypeError, ValueError, OverflowError):
            return None
        inside, _ = _RANGES.get(self.name, _NOT_NEGATIVE)
        return number if whole and math.isfinite(number) and inside(number) else None


@cache
def options_of(function: Callable[..., Any]) -> Mapping[str, Option]:
    """The options of a metric's function.

    Examples:
        >>> from segcal.metrics import METRICS
        >>> [*options_of(METRICS["tace"].function)], options_of(METRICS["tace"].function)["num_bins"].expected
        (['num_bins', 'threshold', 'binning'], 'a whole number from 1 to 4096')
    """
    found = {}
    for name in function.__kwdefaults__ or ():
        hint = get_type_hints(function)[name]
        parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        words = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
        numbers = [part for part in parts if part in (bool, int, float)]
        if name != "region" and (words or numbers):
            found[name] = Option(name, words, numbers[0] if numbers else None)
    return found


def check_options(spec: MetricSpec, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a metric with values in its function's own types; an error names what is wrong.

    Examples:
        >>> from segcal.metrics import METRICS
        >>> check_options(METRICS["sce"], {"num_bins": "50", "divide": "true"})
        {'num_bins': 50, 'divide': True}
    """
    known = options_of(spec.function)
    checked = {}
    for name, given in options.items():
        if name not in known:
            raise InputError(
                f"metric '{spec.id}' has no option '{name}'",
                expected=", ".join(known) if known else "no options",
                fix=did_you_mean(name, known),
            )
        value = known[name].value(given)
        if value is None:
            raise InputError(f"option {name} of metric '{spec.id}' is {given!r}", expected=known[name].expected)
        checked[name] = value
    return checked
