"""TOML files: read, checked key by key, and written.

A config class annotates each of its fields with the rule of its key.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from segcal.errors import ConfigError, OutputError, did_you_mean, naming

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Config = TypeVar("Config")


def read_toml(path: Path, parse: Callable[[Mapping[str, Any]], Config]) -> Config:
    """Read and parse a TOML file; errors of either name the file."""
    try:
        raw = tomllib.loads(path.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:  # ValueError: wrong TOML, or bytes that are not UTF-8
        raise ConfigError(f"cannot be read ({error})", where=str(path), expected="a TOML file in UTF-8") from None
    with naming(where=str(path)):
        return parse(raw)


def check_known(kind: str, given: Iterable[str], known: Sequence[str], of: str = "") -> None:
    """Raise unless all names given are known, such as the keys of a table; ``of`` says what they belong to."""
    for name in given:
        if name not in known:
            raise ConfigError(
                f"unknown {kind} '{name}'{of}", expected=f"one of {', '.join(known)}", fix=did_you_mean(name, known)
            )


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


def list_of(
    good: Callable[[Any], bool], expected: str, store: Any = lambda item: item, whole: Any = lambda items: True
) -> Rule:
    """A list of good items that is good as a whole, too, stored as a tuple."""
    return Rule(
        lambda v: isinstance(v, list | tuple) and all(map(good, v)) and whole(v),
        expected,
        lambda v: tuple(map(store, v)),
    )


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


def toml_document(values: Mapping[str, Any], comment: str = "") -> str:
    """A TOML file: texts, numbers, lists of them, and tables, which come last. None and empty tables are left out.

    Examples:
        >>> print(toml_document({"splits": {"test": ["a"]}, "classes": 3, "groups": None}), end="")
        # Written by segcal.
        classes = 3
        <BLANKLINE>
        [splits]
        test = ["a"]
    """
    lines = ["# Written by segcal.", *([f"# {comment}"] if comment else [])]
    for name, value in sorted(values.items(), key=lambda item: isinstance(item[1], Mapping)):
        if isinstance(value, Mapping) and value:
            lines += ["", f"[{name}]", *(f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items())]
        elif value is not None and not isinstance(value, Mapping):
            lines.append(f"{name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    return key if key.isascii() and key.isidentifier() else _toml_value(key)


def _toml_value(value: Any) -> str:
    """Numbers look the same in JSON and TOML. Texts have the same escapes, except for surrogate pairs.

    So only control characters are escaped, and the file must be written as UTF-8.

    Examples:
        >>> print(_toml_value(['left "big" \\\\ ventricle', "tumour \\U0001F9E0"]))
        ["left \\"big\\" \\\\ ventricle", "tumour 🧠"]
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OutputError(
            f"the name {value!r} is not valid text", expected="Unicode", fix="rename it and try again"
        ) from None
    return text
