"""The page: template, style sheet, scripts and data in one text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any

# The order matters: later scripts use what earlier ones define.
_SCRIPTS = (
    "dom", "format", "model", "charts", "lines", "headline", "methods", "matrix", "channels", "reliability", "bands",
    "tradeoff", "paired", "browser", "diagnosis", "statistics", "robustness", "definitions", "main",
)  # fmt: skip

# Characters that could end the script element or start a comment in it. json itself escapes all that is not ASCII.
_UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}


def page(data: Mapping[str, Any], *, title: str) -> str:
    """The whole HTML text. Nothing in ``data`` or ``title`` can become markup.

    Examples:
        >>> text = page({"case": "</script><b>"}, title="<i>")
        >>> "</script><b>" in text, "<title>&lt;i&gt;</title>" in text
        (False, True)
    """
    script = '(() => {\n"use strict";\n' + "\n".join(_asset(f"{name}.js") for name in _SCRIPTS) + "})();"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": escape(title.encode(errors="replace").decode()),
        # The browser enforces that the page loads nothing and runs only this script.
        "policy": f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:",
        "style": _asset("style.css"),
        "data": embedded(data),
        "script": script,
    }
    # A single pass, so that placeholders in the text of the study are not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element.

    Examples:
        >>> embedded({"case": "</script>"})
        '{"case":"\\\\u003c/script\\\\u003e"}'
    """
    return json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_UNSAFE)


def _asset(name: str) -> str:
    return (resources.files("segcal.report") / "assets" / name).read_text(encoding="utf-8")
