"""Recognize responses that report a prompt as too long, and read the token counts in them.

    response → errors.read_errors  list the errors: codes, numbers, sentences
             → patterns.excluded   drop errors about other problems
             → patterns.read       match known sentences: kind, limit, size
             → general.read        read other sentences by their words and the words around their numbers
             → EchoedRequest       drop words that repeat the client's request
             → general.read_rate   accept a rate limit that the request alone exceeds
             → recognise           choose the reading with the most figures

Codes decide first, words second. ``silent.silent_overflow`` finds overflows without an error: the upstream cut the
prompt, or the response had no room.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote_plus

import msgspec

from proxy.constants import UNDECODABLE
from proxy.overflow import general, media, patterns
from proxy.overflow.errors import COUNT_FIELDS, LIMIT_FIELDS, ErrorInfo, read_errors
from proxy.overflow.general import Overflow, OverflowReading, amounts
from proxy.overflow.media import MediaLimit
from proxy.overflow.patterns import (
    AMBIGUOUS_STATUS,
    CODE_SHAPE,
    CODES,
    FORBIDDEN_STATUS,
    NEVER_STATUS,
    RATE_STATUS,
    ROWS,
    TIER_GATE,
    TIER_LIMIT,
    Row,
    excluded,
)

__all__ = ["EchoedRequest", "MediaLimit", "Overflow", "media_limit", "recognise", "refuses_bytes"]

_INPUT_FIELDS = ("max_input", "max_prompt")
_CODE_HEADERS = ("x-amzn-errortype", "x-ms-error-code")
MOST_TEXT = 65_536  # characters of error messages after which `recognise` reads no further error of a response

_WINDOW_NAMED = re.compile(r"context (?:length|window|size|limit)")
_WAIT_HEADERS = ("retry-after", "retry-after-ms")

RUN = 3  # consecutive words that must also be in the request to count as repeated

_WORD = re.compile(r"[a-z]+|\d+|[^\W\d_a-z]")
_ENCODED = re.compile(r"%[0-9a-fA-F]{2}|\+")

_Run = tuple[str, ...]


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
    # An upstream may refuse a long prompt because of the caller's plan. The caller compares the count with the limit.
    gates = status in (*RATE_STATUS, *FORBIDDEN_STATUS, 400)
    if gates and request is not None and len(request) >= TIER_LIMIT // 2:
        texts = (text for error in errors for text in error.texts)
        if any(TIER_GATE.search((request.without(text) or text).lower()) for text in texts):
            return Overflow("input", TIER_LIMIT, "input", None, None, "compact", gate=True)
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


def refuses_bytes(body: bytes) -> bool:
    """Return whether the answer to a refused body (413) is empty or about its bytes, and not about tokens or a file."""
    texts = [text.lower() for error in read_errors(413, body) for text in error.texts]
    named = any(patterns.LARGE_BODY.search(text) for text in texts)
    return (named or not texts) and not any(patterns.NOT_BODY.search(text) for text in texts)


def media_limit(status: int, body: bytes, request: bytes, sent: Sequence[str]) -> MediaLimit | None:
    """Return the limit in the refusal of a request with media of the kinds ``sent``; ``None`` if it has none."""
    texts = [text for error in read_errors(status, body) for text in error.texts if media.read(text, sent)]
    if not texts or status not in media.STATUS:
        return None
    echoed = EchoedRequest(media.DATA.sub(b"", request))
    return next((found for text in texts if (found := media.read(echoed.without(text) or text, sent))), None)


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
    limit = next((name for name in LIMIT_FIELDS if name in numbers), None)
    counted = next((numbers[name] for name in COUNT_FIELDS if name in numbers), None)
    if limit is None:
        return OverflowReading(counted=counted)
    of_input = limit.startswith(_INPUT_FIELDS)
    return OverflowReading(limit=numbers[limit], scope="input" if of_input else "total", counted=counted)


class EchoedRequest:
    """The words of a request that an error may repeat. They are read only when an error is checked.

    Errors quote URLs, file names, arguments, and whole messages. A user can write any sentence into those, so a
    sentence that the client sent states nothing about the upstream.
    """

    def __init__(self, raw: bytes) -> None:
        """``raw`` is the request's body."""
        self._raw = raw
        self._runs: dict[frozenset[_Run], set[_Run]] = {}

    def __len__(self) -> int:
        """Return the size of the request in bytes."""
        return len(self._raw)

    def without(self, text: str) -> str | None:
        """Return a sentence without the words that repeat the request; ``None`` if it repeats nothing."""
        words = [(found[0], found.span()) for found in _WORD.finditer(text.lower())]
        runs = [tuple(word for word, _ in words[at : at + RUN]) for at in range(len(words) - RUN + 1)]
        repeated = self._repeated(frozenset(runs))
        covered = {at + step for at, run in enumerate(runs) if run in repeated for step in range(RUN)}
        if not covered:
            return None
        kept = list(text)
        for at in covered:
            start, end = words[at][1]
            kept[start:end] = " " * (end - start)
        return "".join(kept)

    def _repeated(self, wanted: frozenset[_Run]) -> set[_Run]:
        if wanted not in self._runs:
            found: set[_Run] = set()
            for text in _texts(self._raw):
                last: list[str] = []
                for match in _WORD.finditer(text.lower()):
                    last = [*last[1 - RUN :], match[0]]
                    if (run := tuple(last)) in wanted:
                        found.add(run)
            self._runs[wanted] = found
        return self._runs[wanted]


def _texts(raw: bytes) -> Iterator[str]:
    """Yield the strings of a JSON body, and those of URLs decoded; the body itself if it isn't JSON."""
    try:
        value: Any = msgspec.json.decode(raw)
    except UNDECODABLE:
        value = raw.decode("utf-8", "replace")
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            yield value
            if _ENCODED.search(value):
                yield unquote_plus(value)
        elif isinstance(value, dict):
            rest += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            rest += value
