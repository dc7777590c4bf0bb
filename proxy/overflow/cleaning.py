"""Prepare an error's sentence for searching: one line of bounded length, without quoted values."""

from __future__ import annotations

import html
import re

PREFIX = 65_536
"""Characters of a long text that are read."""
SENTENCE = 8_192
"""Characters of one error message that are read."""
SHORT_QUOTE = 16
"""Characters. A shorter quoted value is a name ("middle-out"), not a user's text."""
MOST_HIDDEN = 8
"""Hidden parts of a page that ``page_text`` removes, at most, for each tag."""

_HIDDEN = ("style", "script")
_QUOTED = re.compile(r"""(?P<key>['"]?\w{1,20}['"]?\s?[:=]\s?)?"(?P<text>[^"]*)["]""")
_QUOTED_ECHO = re.compile(
    r"""['"]?(?:content|text|input|prompt|arguments|value)['"]?\s?[:=]\s?(?:'[^']{0,4096}'|`[^`]{0,4096}`)"""
)
_ERROR_KEY = re.compile(r"""['"]?(?:message|msg|detail|details|error|reason|raw)['"]?\s?[:=]\s?$""", re.I)
_TAG = re.compile(r"<[^<>]{1,200}>")
_ESCAPES = {"\\n": " ", "\\t": " ", "\\r": " ", '\\"': '"', "\\/": "/", "\\`": "`"}
_NARROW: dict[int, int | str] = {
    **{full: full - 0xFEE0 for full in range(0xFF01, 0xFF5F) if chr(full) not in "！；？"},
    0x2009: "\u202f",
    0xA0: "\u202f",
}
"""Full-width East Asian characters, except the ends of sentences, and the spaces within numbers."""
_ONE_NUMBER = re.compile(r"(?<=\d)\u202f(?=\d{3}(?!\d))")


def page_text(page: str) -> str:
    """Return the first part of a page as text, without styles and scripts."""
    page = page[:PREFIX]
    for name in _HIDDEN:
        parts = re.split(rf"<{name}\b", page, maxsplit=MOST_HIDDEN, flags=re.I)
        page = parts[0] + "".join(re.split(rf"</{name}>", part, maxsplit=1, flags=re.I)[-1] for part in parts[1:])
    return html.unescape(_TAG.sub(" ", page[:SENTENCE]))


def cleaned(text: str) -> str:
    """Return one line of bounded length, without long quoted values, unless they are an error's message."""
    text = _ONE_NUMBER.sub("", unescaped(text[:SENTENCE]).translate(_NARROW))
    text = " ".join(text.split())
    return _QUOTED_ECHO.sub(" ", _QUOTED.sub(_unquote, text))


def _unquote(found: re.Match[str]) -> str:
    key = found["key"] or ""
    return found[0] if len(found["text"]) < SHORT_QUOTE or _ERROR_KEY.search(key) else f"{key} "


def unescaped(text: str) -> str:
    """Replace JSON's escapes in a text that was truncated, or was escaped twice."""
    if "\\" in text:
        for escape, plain in _ESCAPES.items():
            text = text.replace(escape, plain)
    return text
