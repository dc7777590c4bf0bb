"""Read the rounds of a response with a hidden tool: what the APIs have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.hidden_tool import VisibleResponse
from proxy.dialects.request import NOTHING, fields_of, listed, value_of
from proxy.errors import BadBody
from proxy.http.sse import LONGEST_EVENT, EventSplitter, data_of, split_events


class StreamedRound:
    """One round of a stream. A dialect's class returns in ``event`` the bytes for the client.

    ``usage`` is the round's own. ``closing`` are the events that end a response with hidden calls. The client gets
    them unless another round follows. ``failed`` is true after an error. The round's calls may be incomplete then, so
    nothing follows.
    """

    def __init__(self, response: VisibleResponse) -> None:
        self.response = response
        self.usage: dict[str, Any] = {}
        self.closing = bytearray()
        self.failed = False
        self._splitter = EventSplitter()
        self._given_up = False

    def feed(self, chunk: bytes) -> bytes:
        """Add a chunk. Return the bytes for the client, except those of ``closing``."""
        if self._given_up:
            return chunk
        events = self._splitter.feed(chunk)
        out = b"".join(map(self._event, split_events(events))) if events else b""
        if len(self._splitter.unfinished) > LONGEST_EVENT:
            # No call has so long an event. The client's parser judges it.
            self._given_up = True
            out += bytes(self.closing) + self._splitter.take(len(self._splitter.unfinished))
            self.closing.clear()
        return out

    def finish(self) -> bytes:
        """End the round: return an event that lacks its blank line, and add its usage to the response's."""
        rest = self._splitter.take(len(self._splitter.unfinished))
        out = b"".join(map(self._event, split_events(rest + b"\n\n"))) if rest.strip() else b""
        add_usage(self.response.usage, self.usage)
        return out

    def total_usage(self) -> dict[str, Any]:
        """Return the usage of all rounds so far."""
        total = dict(self.response.usage)
        add_usage(total, self.usage)
        return total

    def event(self, value: dict[str, Any] | None, data: bytes, as_it_came: bytes) -> bytes:
        """Return the bytes for the client. ``value`` is the data as an object, ``None`` if it isn't one."""
        raise NotImplementedError

    def _event(self, lines: list[bytes]) -> bytes:
        if not any(lines):
            return b""
        as_it_came = b"\n".join(lines) + b"\n\n"
        data = data_of(lines)
        return self.event(decoded(data), data, as_it_came) if data else as_it_came


def add_usage(total: dict[str, Any], usage: Mapping[str, Any]) -> None:
    """Add the numbers of a usage and of its details, and append its lists. Other values are those of the last round."""
    for name, value in usage.items():
        known = total.get(name)
        if isinstance(value, dict):
            inner = dict(known) if isinstance(known, dict) else {}
            add_usage(inner, value)
            total[name] = inner
        elif isinstance(value, int | float) and not isinstance(value, bool):
            total[name] = value + (known if isinstance(known, int | float) else 0)
        elif isinstance(value, list) and isinstance(known, list):
            total[name] = [*known, *value]
        elif value is not None or known is None:
            total[name] = value


def place_of(value: object) -> int | str | None:
    """Return an index or id of an event; ``None`` if it's another value."""
    return value if isinstance(value, int | str) else None


def decoded(data: bytes) -> dict[str, Any] | None:
    """Return a JSON object; ``None`` if the data isn't one."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def tools_in(fields: Mapping[str, msgspec.Raw]) -> list[Any]:
    """Return the tools in a request's fields."""
    tools = value_of(fields.get("tools", NOTHING))
    return tools if isinstance(tools, list) else []


def readable_tools(raw: bytes) -> list[Any]:
    """Return the tools of a body, as far as it can be read."""
    try:
        return tools_in(fields_of(raw))
    except BadBody:
        return []


def with_tool(raw: bytes, tool: bytes) -> bytes:
    """Return a body with one more tool, the last one."""
    fields = fields_of(raw)
    tools = bytes(fields["tools"]).rstrip()
    fields["tools"] = msgspec.Raw(tools[:-1].rstrip() + b"," + tool + b"]")
    return msgspec.json.encode(fields)


def without_tool(sent: bytes) -> bytes:
    """Return a body without its last tool."""
    fields = fields_of(sent)
    fields["tools"] = listed(msgspec.json.decode(fields["tools"], type=list[msgspec.Raw])[:-1])
    return msgspec.json.encode(fields)


def longer(values: bytes, more: Sequence[bytes]) -> msgspec.Raw:
    """Return a list's JSON with further values."""
    before = bytes(values).strip()[:-1].rstrip()
    return listed(more) if before == b"[" else msgspec.Raw(b",".join([before, *more]) + b"]")
