"""Rules for the keys of configuration files. A field of a config class is annotated with its rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args, get_type_hints

from segcal.cases.toml import check_known
from segcal.errors import ConfigError


class Rule(NamedTuple):
    """Which values a key may have, how an error describes them, and how a value is stored."""

    good: Callable[[Any], bool]
    expected: str
    store: Callable[[Any], Any] = lambda value: value

    def check(self, name: str, value: Any) -> Any:
        """Raise unless the value is good. Returns it as it is stored."""
        if not self.good(value):
            raise ConfigError(f"{name} = {value!r}", expected=self.expected)
        return self.store(value)


class Table(NamedTuple):
    """A rule for every value of a table; ``single`` also allows one such value without a table."""

    rule: Rule
    single: bool = False

    def check(self, name: str, value: Any) -> Any:
        """Raise unless every value is good. Returns them as they are stored."""
        if self.single and not isinstance(value, Mapping):
            return self.rule.check(name, value)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} = {value!r}", expected="a table")
        return {key: self.rule.check(f"{name}.{key}", item) for key, item in value.items()}


def is_whole(value: Any) -> bool:
    """Whether this is a whole number, which true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any, lowest: float = -math.inf) -> bool:
    """Whether this is a finite number above ``lowest``."""
    return isinstance(value, int | float) and not isinstance(value, bool) and lowest < value < math.inf


def is_text(value: Any) -> bool:
    """Whether this is a text that is not empty."""
    return isinstance(value, str) and bool(value)


def choice(literal: Any) -> Rule:
    """One of the values of a ``Literal``."""
    return Rule(lambda v: v in get_args(literal), " or ".join(map(repr, get_args(literal))))


def list_of(good: Callable[[Any], bool], expected: str) -> Rule:
    """A list, stored as a tuple."""
    return Rule(lambda v: isinstance(v, list | tuple) and all(map(good, v)), expected, tuple)


BOOL = Rule(lambda v: isinstance(v, bool), "true or false")


def checked(cls: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys and values of a file, each checked and stored by the rule of the field of this name.

    Examples:
        >>> from segcal.cases.config import DatasetConfig
        >>> checked(DatasetConfig, {"kind": "probs", "class_names": ["a", "b"]})
        {'kind': 'probs', 'class_names': ('a', 'b')}
    """
    hints = get_type_hints(cls, include_extras=True)
    check_known("key", raw, list(hints))
    return {name: get_args(hints[name])[1].check(name, value) for name, value in raw.items()}
