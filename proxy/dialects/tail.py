"""The end of an answer, streamed or not."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from proxy.constants import UNDECODABLE
from proxy.overflow.silent import Finished

TAIL_BYTES = 4_096
"""Bytes to keep of each chunk."""
TAIL_CHUNKS = 16
"""Number of last chunks to keep."""

KEPT_BYTES = 131_072
"""Bytes of a stream that are kept until their text is extracted, and of its text. Usually the usage arrives first."""

LENIENT_BYTES = 1_000_000
"""Bytes of JSON that Python's slower parser tries to read."""

LARGEST = 16_000_000
"""Bytes of an answer that isn't streamed, or of one event, that are kept."""


_MODEL = re.compile(rb'"model"\s*:\s*"([^"\\]{1,200})"')
_REPORTS = re.compile(rb'"usage"\s*:\s*\{')
_USAGE = re.compile(r'"usage"\s*:\s*(?=\{)')
# Text that may follow the JSON object of an answer or an event.
_END = re.compile(r"\s*\Z|[\r\n]+(?:data|event|id|retry)?:")
_TRIED = 4
_decoder = json.JSONDecoder()


class Tail:
    """An answer as it passes: its last bytes, which usually contain its usage and finish reason, and its text.

    A dialect's class reads the last bytes in ``_end`` and any bytes in ``_read``. ``DELTAS`` finds the text in events:
    its first group is a part of a JSON string.
    """

    DELTAS: re.Pattern[bytes]

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque(maxlen=TAIL_CHUNKS)
        self._added = 0
        self._cut = False
        self._kept: list[bytes] = []
        self._size = 0
        self._limit = KEPT_BYTES
        self._texts: list[bytes] = []
        self.lost = 0
        """Bytes that were too many to keep."""

    def add(self, chunk: bytes) -> None:
        """Add a chunk, and drop the oldest one if there are too many."""
        self._kept.append(chunk)
        self._size += len(chunk)
        if self._size > self._limit:
            self._fold()
        if len(chunk) > TAIL_BYTES:
            self._chunks.clear()
            chunk = chunk[-TAIL_BYTES:]
            self._cut = True
        self._chunks.append(chunk)
        self._added += 1

    @property
    def body(self) -> bytes:
        """Return the bytes that were kept."""
        return b"".join(self._chunks)

    @property
    def whole(self) -> bool:
        """Return whether these are all bytes of the answer."""
        return not self._cut and self._added <= TAIL_CHUNKS

    def finished(self) -> Finished:
        """Return the answer's usage and finish reason. An answer longer than the kept bytes has content."""
        found = self._end()
        if self.whole or (found.prompt is not None and found.output is not None):
            return found
        body = b"".join(self._kept)
        if not self._is_json:
            body = b"\n".join([line for line in body.splitlines() if _REPORTS.search(line)][-_TRIED:])
        more = self._read(body) if body else found
        if more.prompt is None and more.output is None:
            return found
        return replace(more, finish_reason=found.finish_reason or more.finish_reason, empty=False)

    @property
    def model(self) -> str:
        """Return the model that the answer names; empty if it names none."""
        found = _MODEL.search(b"".join(self._kept))
        return "" if found is None else found[1].decode("utf-8", "replace")

    def written(self) -> str:
        """Return the text, calls, and reasoning in the answer so far, to count them."""
        body = b"".join(self._kept)
        if self._is_json:
            return "\n".join(_strings(next(json_objects(body), {})))
        parts = b"".join([*self._texts, *self.DELTAS.findall(body)])
        try:
            text: str = msgspec.json.decode(b'"' + parts + b'"', type=str)
        except UNDECODABLE:  # half of a surrogate pair, for example
            return parts.decode("utf-8", "replace")
        return text

    def _end(self) -> Finished:
        raise NotImplementedError

    def _read(self, body: bytes) -> Finished:
        raise NotImplementedError

    @property
    def _is_json(self) -> bool:
        return bool(self._kept) and not self._texts and self._kept[0].lstrip()[:1] == b"{"

    def _fold(self) -> None:
        """Extract the text of the whole lines, and keep the rest."""
        if self._is_json and self._limit < LARGEST:
            self._limit = LARGEST
            return
        data = b"".join(self._kept)
        if self._is_json:
            self.lost += len(data)
            data = b""
        end = data.rfind(b"\n") + 1
        # One object, because thousands of small ones take several times their size.
        text = b"".join([*self._texts, *self.DELTAS.findall(data, 0, end)])
        if len(text) > KEPT_BYTES:
            self.lost += len(text)
            text = b""
        self._texts = [text]
        rest = data[end:]
        if len(rest) > LARGEST:
            self.lost += len(rest)
            rest = b""
        self._kept, self._size, self._limit = [rest], len(rest), max(KEPT_BYTES, 2 * len(rest))


class WholeTail(Tail):
    """An answer that isn't streamed. ``read`` reads its usage and finish reason."""

    DELTAS = re.compile(rb"(?!)()")

    def __init__(self, read: Callable[[bytes], Finished]) -> None:
        super().__init__()
        self._read_whole = read

    def _end(self) -> Finished:
        return self._read_whole(b"".join(self._kept))

    def _read(self, body: bytes) -> Finished:
        return self._read_whole(body)


def outer_usage(text: str, counts: Callable[[Mapping[str, Any]], object]) -> Mapping[str, Any]:
    """Return the last usage object that ``counts`` accepts; empty if there is none.

    Strings escape quotation marks, so ``"usage":`` is a field. It is the answer's own only if its object is the
    outermost one, so only the next line of a stream may follow that object.
    """
    for match in list(_USAGE.finditer(text))[: -_TRIED - 1 : -1]:
        rest = '{"usage":' + text[match.end() :]
        try:
            value, end = _decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            continue
        usage: Mapping[str, Any] = value["usage"]
        if _END.match(rest, end) and counts(usage):
            return usage
    return {}


def deltas(names: str) -> re.Pattern[bytes]:
    """Return the expression for ``Tail.DELTAS``: the values of these fields. Strings escape quotation marks."""
    return re.compile(rb'"(?:%b)"\s*:\s*"([^"\\]*(?:\\.[^"\\]*)*)"' % names.encode())


_TEXTS = frozenset(
    {"content", "text", "reasoning_content", "reasoning", "refusal", "arguments", "thinking", "encrypted_content"}
)
_PARTS = frozenset(
    {"choices", "message", "content", "tool_calls", "function", "function_call", "output", "summary", "response"}
)


def _strings(value: object) -> Iterator[str]:
    """Yield the texts of an answer that isn't streamed."""
    if isinstance(value, list):
        for one in value:
            yield from _strings(one)
    elif isinstance(value, dict):
        for name, part in value.items():
            if isinstance(part, str):
                if name in _TEXTS:
                    yield part
            elif name == "input":  # the arguments of Anthropic's calls
                yield msgspec.json.encode(part).decode()
            elif name in _PARTS:
                yield from _strings(part)


def is_silence(body: bytes) -> bool:
    """Return whether a stream has no events except its end."""
    return all(_says_nothing(line.strip()) for line in body.splitlines())


def _says_nothing(line: bytes) -> bool:
    name, _, value = line.partition(b":")
    return name in (b"", b"event", b"id", b"retry") or (name == b"data" and value.strip() in (b"", b"[DONE]"))


def json_objects(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of an answer, or those of a stream's events."""
    text = body.strip()
    whole = text.startswith(b"{")
    for line in [text] if whole else text.splitlines():
        data = line if whole else line.removeprefix(b"data:").strip()
        if not whole and not line.startswith(b"data:"):
            continue
        value = _decoded(data)
        if isinstance(value, dict):
            yield value


def _decoded(data: bytes) -> object:
    """Return a JSON value, ``None`` if it isn't one. Half of a surrogate pair, for example, makes the parser slower."""
    try:
        value: object = msgspec.json.decode(data)
    except UNDECODABLE:
        try:
            value = json.loads(data, strict=False) if len(data) <= LENIENT_BYTES and b":" in data else None
        except (ValueError, RecursionError):
            return None
    return value
