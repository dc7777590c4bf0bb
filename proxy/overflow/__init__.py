"""Recognize responses that report a prompt as too long, and read the token counts in them.

    response → errors.read_errors   list the errors: codes, numbers, sentences
             → patterns.excluded     drop errors about other problems
             → patterns.read              match known sentences: kind, limit, size
             → general.read               read other sentences by their words and the words around their numbers
             → echo.EchoedRequest               drop words that repeat the client's request
             → general.read_rate          accept a rate limit that the request alone exceeds
             → recognise                  choose the reading with the most figures

Codes decide first, words second. ``silent.silent_overflow`` finds overflows without an error: the upstream cut the
prompt, or the response had no room.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from proxy.overflow import general, patterns
from proxy.overflow.echo import EchoedRequest
from proxy.overflow.errors import COUNT_FIELDS, LIMIT_FIELDS, ErrorInfo, read_errors
from proxy.overflow.figures import Overflow, OverflowReading, amounts
from proxy.overflow.patterns import (
    AMBIGUOUS_STATUS,
    CODE_SHAPE,
    CODES,
    FORBIDDEN_STATUS,
    NEVER_STATUS,
    RATE_STATUS,
    ROWS,
    Row,
    excluded,
)

__all__ = ["Overflow", "recognise"]

_INPUT_FIELDS = ("max_input", "max_prompt")
_CODE_HEADERS = ("x-amzn-errortype", "x-ms-error-code")
MOST_TEXT = 65_536
"""Characters of error messages after which ``recognise`` reads no further error of a response."""

_WINDOW_NAMED = re.compile(r"context (?:length|window|size|limit)")
_WAIT_HEADERS = ("retry-after", "retry-after-ms")


def recognise(
    status: int,
    body: bytes,
    headers: Iterable[tuple[str, str]] = (),
    *,
    rows: Iterable[Row] = ROWS,
    codes: Iterable[str] = CODES,
    request: EchoedRequest | None = None,
    rate_limits: bool = False,
) -> Overflow | None:
    """Read an error response, or the first events of a stream (status 200); ``None`` if it isn't an overflow.

    ``body`` is decompressed; ``headers`` have lower case names. Reads error fields only, never text that a provider
    echoes. Rate limits, quotas, byte limits, and limits on output alone, images, or other fields aren't overflows.
    ``rows`` and ``codes`` are the tables of known wordings. Sentences that repeat the ``request`` aren't evidence.
    With ``rate_limits``, a limit on tokens per minute that the request alone exceeds is an overflow, too.
    """
    errors = read_errors(status, body)
    if rate_limits and status in RATE_STATUS:
        for text in (text for error in errors for text in error.texts):
            if limit := _rate(text, request):
                return limit.resolve()
    if status in NEVER_STATUS:
        return None
    named = {value.partition(":")[0].lower() for name, value in headers if name in _CODE_HEADERS}
    if excluded(named, ()):
        return None
    ambiguous = status in AMBIGUOUS_STATUS or any(name in _WAIT_HEADERS for name, _ in headers)
    forbidden = status in FORBIDDEN_STATUS
    tables = tuple(rows), frozenset(codes)
    readings: list[OverflowReading] = []
    length = 0
    for error in errors:
        if not forbidden or any(_WINDOW_NAMED.search(text.lower()) for text in error.texts):
            readings += _read(error, *tables, request, ambiguous=ambiguous or forbidden)
        length += sum(map(len, error.texts))
        if length > MOST_TEXT:
            break
    return max(readings, key=lambda reading: reading.score).resolve() if readings else None


def _rate(text: str, request: EchoedRequest | None) -> OverflowReading | None:
    found = general.read_rate(text)
    return found if found is None or request is None else general.read_rate(request.without(text) or text)


def _read(
    error: ErrorInfo, rows: tuple[Row, ...], codes: frozenset[str], request: EchoedRequest | None, *, ambiguous: bool
) -> list[OverflowReading]:
    if excluded(error.codes, ()):
        return []
    about = [text for text in error.texts if not excluded((), (text,))]
    by_code = not error.codes.isdisjoint(codes)
    if not by_code and not ambiguous and len(about) == len(error.texts):
        by_code = any(CODE_SHAPE.search(code) for code in error.codes if not code.startswith("param:"))
    readings = []
    for text in about:
        reading = _sentence(text, rows, certain=by_code, ambiguous=ambiguous)
        if reading is not None and request is not None and (own := request.without(text)) is not None:
            reading = _confirmed(reading, own) or _sentence(own, rows, certain=by_code, ambiguous=ambiguous)
        if reading is not None:
            readings.append(reading)
    if by_code or (readings and error.numbers):
        readings.append(_numbers(error.numbers))
    return readings


def _sentence(text: str, rows: tuple[Row, ...], *, certain: bool, ambiguous: bool) -> OverflowReading | None:
    lowered = general.prepared(text)
    return patterns.read(lowered, rows) or general.read(lowered, certain=certain, ambiguous=ambiguous)


def _confirmed(reading: OverflowReading, own: str) -> OverflowReading | None:
    """Return the reading if the upstream's own words contain one of its figures. Conversations quote older errors."""
    figures = amounts(general.prepared(own))
    return reading if {reading.limit, reading.counted} & figures else None


def _numbers(numbers: Mapping[str, int]) -> OverflowReading:
    """Read the limit and the prompt's size from an error's numeric fields."""
    limit = next((name for name in LIMIT_FIELDS if name in numbers), None)
    counted = next((numbers[name] for name in COUNT_FIELDS if name in numbers), None)
    if limit is None:
        return OverflowReading(counted=counted)
    of_input = limit.startswith(_INPUT_FIELDS)
    return OverflowReading(limit=numbers[limit], scope="input" if of_input else "total", counted=counted)
