"""TOML as segcal writes it. Python reads TOML but does not write it."""

from __future__ import annotations

import json
from collections.abc import Iterable

from segcal.errors import OutputError


def toml_text(text: str) -> str:
    """A text in quotes, as a value or as a key.

    JSON's escapes are TOML's, too, but for characters beyond the first plane, which JSON writes as two halves: so all
    characters but control characters stay as they are. The file must be written as UTF-8.

    Examples:
        >>> print(toml_text('left "big" \\\\ ventricle'), toml_text("tumour \\U0001F9E0"))
        "left \\"big\\" \\\\ ventricle" "tumour 🧠"
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OutputError(
            f"the name {text!r} is not valid text", expected="Unicode", fix="rename it, and try again"
        ) from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_texts(texts: Iterable[str]) -> str:
    """A list of texts."""
    return f"[{', '.join(map(toml_text, texts))}]"
