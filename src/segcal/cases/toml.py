"""Reading and writing TOML. Python reads TOML but does not write it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from segcal.errors import ConfigError, OutputError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Config = TypeVar("Config")


def read_toml(path: Path, parse: Callable[[Mapping[str, Any]], Config]) -> Config:
    """Read and parse a TOML file; errors of either name the file."""
    try:
        with path.open("rb") as file:
            raw = tomllib.load(file)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: wrong TOML, or bytes that are not UTF-8
        raise ConfigError(f"cannot be read ({error})", where=str(path), expected="a TOML file in UTF-8") from None
    try:
        return parse(raw)
    except ConfigError as error:
        raise error.at(where=str(path)) from None


def check_known(kind: str, given: Iterable[str], known: Sequence[str], of: str = "") -> None:
    """Raise unless all names given are known, such as the keys of a table; ``of`` says what they belong to."""
    for name in given:
        if name not in known:
            raise ConfigError(
                f"unknown {kind} '{name}'{of}", expected=f"one of {', '.join(known)}", fix=did_you_mean(name, known)
            )


def toml_text(text: str) -> str:
    """A text in quotes, as a value or as a key.

    TOML has the escapes of JSON, except for surrogate pairs. So only control characters are escaped, and the file must
    be written as UTF-8.

    Examples:
        >>> print(toml_text('left "big" \\\\ ventricle'), toml_text("tumour \\U0001F9E0"))
        "left \\"big\\" \\\\ ventricle" "tumour 🧠"
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OutputError(
            f"the name {text!r} is not valid text", expected="Unicode", fix="rename it and try again"
        ) from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_texts(texts: Iterable[str]) -> str:
    """A list of texts."""
    return f"[{', '.join(map(toml_text, texts))}]"
