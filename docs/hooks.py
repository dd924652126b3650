"""What mkdocs does besides plugins: formulas become MathML; pages that load anything from elsewhere are refused."""

from __future__ import annotations

import html
import logging
import re
from typing import Any

from latex2mathml.converter import convert

log = logging.getLogger("mkdocs.hooks.segcal")

# What the markdown extension arithmatex leaves of $...$ and $$...$$.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_ELSEWHERE = re.compile(
    r'<(?:script|img|iframe)[^>]*\ssrc="https?:|<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="https?:'
)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw themselves."""
    return _FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    tag, kind, latex = found.groups()
    display = "block" if kind == "[" else "inline"
    return f'<{tag} class="formula">{convert(html.unescape(latex), display=display)}</{tag}>'


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Warn, which is an error in strict builds, of anything a reader's browser would fetch from another host."""
    for found in _ELSEWHERE.findall(output):
        log.warning("%s loads from elsewhere: %s", page.file.src_uri, found)
    return output
