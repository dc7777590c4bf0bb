"""Match an error message against rows of known wordings, and read its figures."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from proxy.overflow import general
from proxy.overflow.reading import Kind, OverflowReading, Remedy, Scope

_NUMBER = r"\d++(?:[,_]\d{3}(?!\d))*+(?:\.\d++)?+(?![km]\b)"
_MACROS = {
    "<limit>": rf"(?P<limit>{_NUMBER})",
    "<counted>": rf"(?P<counted>{_NUMBER})",
    "<output>": rf"(?P<output>{_NUMBER})",
    "<over>": rf"(?P<over>{_NUMBER})",
    "<n>": _NUMBER,
    # "maximum context length is 8192 tokens. However, ", "… of some-model is 32768. However, "
    "<window>": (
        r"maximum (?:context|model) length (?:of [\w./:-]{1,80} )?(?:is|of) "
        rf"(?P<limit>{_NUMBER})(?: tokens)?\W{{1,3}}"
    ),
    "<context>": r"(?:context|prompt|model)[ _-]?(?:length|window|size|limit)",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One family of messages. With ``figures``, the words around a number decide its role."""

    source: str
    pattern: re.Pattern[str]
    kind: Kind = "input"
    scope: Scope = "total"
    remedy: Remedy | None = None
    figures: bool = False


def row(
    source: str,
    pattern: str,
    kind: Kind = "input",
    scope: Scope = "total",
    remedy: Remedy | None = None,
    *,
    figures: bool = False,
) -> Row:
    for name, expression in _MACROS.items():
        pattern = pattern.replace(name, expression)
    return Row(source, re.compile(pattern), kind, scope, remedy, figures)


_PART = re.compile(
    rf"(?P<size>{_NUMBER}) (?:tokens )?(?:of |in |for |from )?(?:the |your )?(?P<what>[a-z]{{1,20}}(?: [a-z]{{1,20}})?)"
)
_OUTPUT_WORDS = ("completion", "output")


def read(text: str, rows: Iterable[Row]) -> OverflowReading | None:
    """Read a cleaned message in lower case; ``None`` if no row matches it."""
    for known in rows:
        if (found := known.pattern.search(text)) and not (known.figures and general.only_output(text)):
            return _reading(known, found, text)
    return None


def _reading(row: Row, found: re.Match[str], text: str) -> OverflowReading:
    groups = found.groupdict()
    limit, counted, output = (_number(groups.get(name)) for name in ("limit", "counted", "output"))
    if parts := groups.get("parts"):
        counted, output = _sum(parts)
    if limit is not None and (over := _number(groups.get("over"))) is not None:
        counted = limit + over
    if row.figures:
        said = general.reading(text)
        kind: Kind = "input_plus_output" if "input_plus_output" in (row.kind, said.kind) else "input"
        of_input = row.scope == "input" and kind == "input" and not general.names_a_window(text)
        scope = row.scope if of_input else said.scope
        return OverflowReading(kind, said.limit, scope, said.counted, said.output, row.remedy, at_least=said.at_least)
    return OverflowReading(row.kind, limit, row.scope, counted, output, row.remedy, at_least=bool(groups.get("least")))


def _number(digits: str | None) -> int | None:
    """Parse a number: ``300,000`` is 300000, ``50857.0`` is 50857."""
    if not digits:
        return None
    return int(digits.partition(".")[0].replace(",", "").replace("_", "")[:12] or 0)


def _sum(parts: str) -> tuple[int | None, int | None]:
    """Return input and output of ``122163 of text input, 58582 of tool input, 32000 in the output``."""
    counted, output = None, None
    for part in _PART.finditer(parts):
        size = _number(part["size"]) or 0
        if any(word in part["what"] for word in _OUTPUT_WORDS):
            output = (output or 0) + size
        else:
            counted = (counted or 0) + size
    return counted, output
