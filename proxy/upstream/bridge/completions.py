"""Read chat completions and chat streams as servers send them, and put their calls in order.

Servers stream parallel calls in turns, without an index, or with equal ids. A block of ``/v1/messages`` is streamed
whole before the next one, and each call has an id of its own. So a stream's calls are put in order before they are
translated.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from proxy.errors import UpstreamInterrupted
from proxy.upstream.bridge.transport import BROKEN, ErrorInStream, decoded_object, event_data

UNREADABLE = "The upstream's answer isn't a chat completion. Ask the operator to check the setting 'speaks'."

Delta = dict[str, Any]

_CONTENT = frozenset({"content", "refusal", "reasoning_content", "thinking_blocks"})

_UNIQUE = re.compile(r"[a-z]+_proxy[0-9a-f]{32}")


def with_reasoning(part: dict[str, Any]) -> None:
    """Rename ``reasoning`` of a message or delta, as vLLM and OpenRouter write it, to LiteLLM's name."""
    if isinstance(part.get("reasoning"), str) and not part.get("reasoning_content"):
        part["reasoning_content"] = part["reasoning"]
    part.pop("reasoning", None)


async def chunks(body: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of a chat stream up to its end.

    Raises ``ErrorInStream`` at an error, and ``UpstreamInterrupted`` if the stream ends without a finish reason.
    """
    finished = False
    async for data in event_data(body):
        if data == b"[DONE]":
            return
        chunk = decoded_object(data, UNREADABLE)
        if isinstance(error := chunk.get("error"), Mapping | str):
            raise ErrorInStream(error if isinstance(error, Mapping) else {"message": error})
        for choice in chunk.get("choices") or ():
            finished = finished or choice.get("finish_reason") is not None
            with_reasoning(choice.setdefault("delta", {}))
        yield chunk
    if not finished:
        raise UpstreamInterrupted(BROKEN)


def is_unique(id: str) -> bool:
    """Return whether a bridge made an id, so that it never occurs again."""
    return _UNIQUE.fullmatch(id) is not None


def unique(prefix: str) -> str:
    """Return a new id. Ids of upstreams may be empty, or occur again in other conversations."""
    return f"{prefix}_proxy{uuid.uuid4().hex}"


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


def give_ids(completion: Mapping[str, Any]) -> None:
    """Give each call of a completion an id of its own."""
    taken: set[str] = set()
    for call in completion["choices"][0]["message"].get("tool_calls") or ():
        call["id"] = _untaken(call.get("id"), taken)


def _with(chunk: Mapping[str, Any], delta: Delta, reason: str | None = None) -> dict[str, Any]:
    choice = next(iter(chunk.get("choices") or ()), {"index": 0})
    return {**chunk, "choices": [{**choice, "delta": delta, "finish_reason": reason}]}


def _untaken(id: str | None, taken: set[str]) -> str:
    """Return an id, or a new one if it's missing or taken. Add it to ``taken``."""
    chosen = id if id and id not in taken else unique("call")
    taken.add(chosen)
    return chosen


class _StreamedCall:
    """One call. ``number`` is its position in the answer, whatever the upstream's index."""

    def __init__(self, number: int, part: Mapping[str, Any]) -> None:
        self.number = number
        self.closed = False
        self.name = ""
        self.index = part.get("index")
        self.id = ""
        self._fields = part
        self._opened = False
        self.arguments = ""
        self._sent = 0
        self._complete: bool | None = None

    def add(self, part: Mapping[str, Any]) -> None:
        """Add a part. Raises ``ValueError`` if the client has the whole call already."""
        name, text = _function(part)
        if self.closed and text.strip():
            raise ValueError("arguments after the end of a call")
        self.id = self.id or part.get("id") or ""
        self.name = self.name or name
        self.arguments += text
        self._complete = None

    def matches(self, part: Mapping[str, Any]) -> bool:
        """Return whether neither index nor id says that a part belongs to another call."""
        index, id = part.get("index"), part.get("id")
        return (index is None or self.index is None or index == self.index) and (not id or self.id in ("", id))

    def repeats(self, part: Mapping[str, Any]) -> bool:
        """Return whether a part is the whole call again, as some servers send it at the end of a stream."""
        name, text = _function(part)
        return part.get("id") == self.id != "" and name == self.name and text == self.arguments and self.complete()

    def precedes(self, part: Mapping[str, Any]) -> bool:
        """Return whether a part with the same index or id begins another call."""
        name, text = _function(part)
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
            part = {**self._fields, **part, "id": _untaken(self.id, taken), "type": "function", "function": function}
        elif not text:
            return
        yield {"tool_calls": [part]}


class _Order:
    """The calls and texts of one answer. Those behind an incomplete call wait."""

    def __init__(self) -> None:
        self._calls: list[_StreamedCall] = []
        self._waiting: deque[_StreamedCall | Delta] = deque()
        self._taken: set[str] = set()

    def feed(self, delta: Mapping[str, Any]) -> Iterator[Delta]:
        """Yield the deltas that a delta makes ready."""
        rest = {name: value for name, value in delta.items() if name != "tool_calls"}
        if any(rest.get(name) for name in _CONTENT):
            self._waiting.append(rest)
        for part in delta.get("tool_calls") or ():
            self._add(part)
        yield from self._ready(ended=False)

    def finish(self) -> Iterator[Delta]:
        """Yield all that waits. Raises ``ValueError`` for a call that has arguments and no name."""
        yield from self._ready(ended=True)

    def _add(self, part: Mapping[str, Any]) -> None:
        call = next((one for one in reversed(self._calls) if one.matches(part)), None)
        if call is not None and call.repeats(part):
            return
        if call is None or call.precedes(part):
            call = _StreamedCall(len(self._calls), part)
            self._calls.append(call)
            self._waiting.append(call)
        call.add(part)

    def _ready(self, *, ended: bool) -> Iterator[Delta]:
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, _StreamedCall):
                if ended and first.arguments and not first.name:
                    raise ValueError("a call without a name")
                yield from first.release(self._taken)
                if not ended and (len(self._waiting) == 1 or not first.complete()):
                    return
                first.closed = True
            else:
                yield first
            self._waiting.popleft()


def _function(part: Mapping[str, Any]) -> tuple[str, str]:
    function = part.get("function") or {}
    return function.get("name") or "", function.get("arguments") or ""


def _is_object(text: str) -> bool:
    if not text.rstrip().endswith("}"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
