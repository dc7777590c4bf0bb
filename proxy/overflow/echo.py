"""The part of an error's sentence that repeats the client's own request.

Errors quote URLs, file names, arguments, and whole messages. A user can write any sentence into those, so a sentence
that the client sent states nothing about the upstream.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote_plus

import msgspec

from proxy.constants import UNDECODABLE

RUN = 3
"""Consecutive words that must also be in the request to count as repeated."""

_WORD = re.compile(r"[a-z]+|\d+|[^\W\d_a-z]")
_ENCODED = re.compile(r"%[0-9a-fA-F]{2}|\+")

_Run = tuple[str, ...]


class EchoedRequest:
    """The words of a request that an error may repeat. They are read only when an error is checked."""

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
        """Return the runs of words that are in the request."""
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
