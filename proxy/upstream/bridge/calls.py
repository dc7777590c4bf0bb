"""Put the tool calls of chat completions in the one form that both translations expect.

Servers stream parallel calls in turns, without an index, or with equal ids. A block of ``/v1/messages`` is streamed
whole before the next one, and each call has an id of its own.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from proxy.upstream.bridge.response_events import unique

Delta = dict[str, Any]

_CONTENT = frozenset({"content", "refusal", "reasoning_content", "thinking_blocks"})


async def ordered(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks with one part of one call in each, and each call whole before the next call or text.

    The first part of a call has its index, id, and name. The others have its index and arguments. The finish reason
    follows all calls, because servers may end each call with one.
    """
    order = _Order()
    last: dict[str, Any] = {}
    end: dict[str, Any] | None = None
    async for chunk in chunks:
        choice: Mapping[str, Any] = next(iter(chunk.get("choices") or ()), {})
        delta = choice.get("delta") or {}
        content = bool(delta.get("tool_calls")) or any(delta.get(name) for name in _CONTENT)
        reason = choice.get("finish_reason")
        if end is not None and not content and not reason:
            for one in order.finish():
                yield _with(end, one)
            yield end
            end = None
        if reason:
            if end is not None and reason == "stop":
                reason = end["choices"][0]["finish_reason"]
            end = _with({**(end or {}), **chunk}, {}, reason)
            chunk = {name: value for name, value in chunk.items() if name != "usage"}
        if content:
            for one in order.feed(delta):
                yield _with(chunk, one)
        elif not reason:
            yield chunk
        last = chunk
    for one in order.finish():
        yield _with(last, one)
    if end is not None:
        yield end


def with_ids(completion: Mapping[str, Any]) -> None:
    """Give each call of a completion an id of its own."""
    taken: set[str] = set()
    for call in completion["choices"][0]["message"].get("tool_calls") or ():
        call["id"] = _own(call.get("id"), taken)


def _with(chunk: Mapping[str, Any], delta: Delta, reason: str | None = None) -> dict[str, Any]:
    choice = next(iter(chunk.get("choices") or ()), {"index": 0})
    return {**chunk, "choices": [{**choice, "delta": delta, "finish_reason": reason}]}


def _own(id: str | None, taken: set[str]) -> str:
    own = id if id and id not in taken else unique("call")
    taken.add(own)
    return own


class _Call:
    """One call. ``number`` is its position in the answer, whatever the upstream's index."""

    def __init__(self, number: int, piece: Mapping[str, Any]) -> None:
        self.number = number
        self.closed = False
        self.name = ""
        self.index = piece.get("index")
        self.id = ""
        self._fields = piece
        self._opened = False
        self.arguments = ""
        self._sent = 0
        self._complete: bool | None = None

    def add(self, piece: Mapping[str, Any]) -> None:
        """Add a part. Raises ``ValueError`` if the client has the whole call already."""
        name, text = _function(piece)
        if self.closed and text.strip():
            raise ValueError("arguments after the end of a call")
        self.id = self.id or piece.get("id") or ""
        self.name = self.name or name
        self.arguments += text
        self._complete = None

    def matches(self, piece: Mapping[str, Any]) -> bool:
        """Return whether neither index nor id says that a part belongs to another call."""
        index, id = piece.get("index"), piece.get("id")
        return (index is None or self.index is None or index == self.index) and (not id or self.id in ("", id))

    def repeats(self, piece: Mapping[str, Any]) -> bool:
        """Return whether a part is the whole call again, as some servers send it at the end of a stream."""
        name, text = _function(piece)
        return piece.get("id") == self.id != "" and name == self.name and text == self.arguments and self.complete()

    def precedes(self, piece: Mapping[str, Any]) -> bool:
        """Return whether a part with the same index or id begins another call."""
        name, text = _function(piece)
        if not name or not self.name:
            return False
        return name != self.name or (bool(text.strip()) and self.complete())

    def complete(self) -> bool:
        """Return whether the call has a name and the arguments are a JSON object."""
        if self._complete is None:
            self._complete = bool(self.name) and _is_object(self.arguments)
        return self._complete

    def release(self, taken: set[str]) -> Iterator[Delta]:
        """Yield what the client doesn't have yet."""
        if not self.name:
            return
        text = self.arguments[self._sent :]
        self._sent = len(self.arguments)
        part: dict[str, Any] = {"index": self.number, "function": {"arguments": text}}
        if not self._opened:
            self._opened = True
            function = {**(self._fields.get("function") or {}), "name": self.name, "arguments": text}
            part = {**self._fields, **part, "id": _own(self.id, taken), "type": "function", "function": function}
        elif not text:
            return
        yield {"tool_calls": [part]}


class _Order:
    """The calls and texts of one answer. Those behind an incomplete call wait."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._waiting: deque[_Call | Delta] = deque()
        self._taken: set[str] = set()

    def feed(self, delta: Mapping[str, Any]) -> Iterator[Delta]:
        """Yield the deltas that a delta makes ready."""
        rest = {name: value for name, value in delta.items() if name != "tool_calls"}
        if any(rest.get(name) for name in _CONTENT):
            self._waiting.append(rest)
        for piece in delta.get("tool_calls") or ():
            self._add(piece)
        yield from self._ready(ended=False)

    def finish(self) -> Iterator[Delta]:
        """Yield all that waits. Raises ``ValueError`` for a call that has arguments and no name."""
        yield from self._ready(ended=True)

    def _add(self, piece: Mapping[str, Any]) -> None:
        found = next((call for call in reversed(self._calls) if call.matches(piece)), None)
        if found is not None and found.repeats(piece):
            return
        if found is None or found.precedes(piece):
            found = _Call(len(self._calls), piece)
            self._calls.append(found)
            self._waiting.append(found)
        found.add(piece)

    def _ready(self, *, ended: bool) -> Iterator[Delta]:
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, _Call):
                if ended and first.arguments and not first.name:
                    raise ValueError("a call without a name")
                yield from first.release(self._taken)
                if not ended and (len(self._waiting) == 1 or not first.complete()):
                    return
                first.closed = True
            else:
                yield first
            self._waiting.popleft()


def _function(piece: Mapping[str, Any]) -> tuple[str, str]:
    function = piece.get("function") or {}
    return function.get("name") or "", function.get("arguments") or ""


def _is_object(text: str) -> bool:
    if not text.rstrip().endswith("}"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
