"""Read YAML text without quotes as typed values."""

from __future__ import annotations

import re

from proxy.config.tree import Ambiguous

_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_TRUTH = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
_BASES = {"0x": 16, "0b": 2}
# No setting needs a longer number, and Python can't parse numbers with thousands of digits.
_LONGEST_NUMBER = 100


def typed(kind: str, text: str) -> str | int | float | bool | Ambiguous | None:
    """Return a plain scalar as YAML 1.1 reads it, or ``Ambiguous`` if YAML 1.2 reads another value."""
    if kind == "null":
        return None
    if kind == "bool":
        return _TRUTH[text.lower()]
    if kind == "timestamp":
        return Ambiguous("a date", text)
    if kind in ("int", "float"):
        return _number(kind, text)
    return text


def _number(kind: str, text: str) -> int | float | Ambiguous:
    if _SEXAGESIMAL.fullmatch(text):
        return Ambiguous("a number to base 60")
    if len(text) > _LONGEST_NUMBER:
        return Ambiguous("a number of too many digits")
    bare = text.replace("_", "").lower()
    if kind == "float":
        return float(bare.replace(".inf", "inf").replace(".nan", "nan"))
    unsigned = bare.lstrip("+-")
    base = _BASES.get(unsigned[:2], 10)
    if base != 10 and len(unsigned) == 2:
        return Ambiguous("a number without digits")
    if base == 10 and len(unsigned) > 1 and unsigned.startswith("0"):
        return Ambiguous("a number to base 8")
    return int(bare, base)
