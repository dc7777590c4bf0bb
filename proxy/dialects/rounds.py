"""Hide a tool that the proxy added: in requests, in answers, and in later requests.

A response may take several rounds: the model calls the hidden tool, the proxy answers, and the model goes on. The
client gets one response with the text of all rounds. Text is never held back. A call is held only until its name is
known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from proxy.constants import UNDECODABLE
from proxy.dialects.request import NOTHING, encoded, fields_of, listed, value_of
from proxy.dialects.units import encode
from proxy.errors import BadBody
from proxy.http.sse import LONGEST_EVENT, EventSplitter, data_of, split_events

DONE = b"[DONE]"  # the data of the event that ends a stream of some APIs


class HiddenCall(msgspec.Struct):
    """A call of the hidden tool. ``place`` is its place among all calls of its message, ``raw`` its JSON."""

    id: str
    arguments: str
    place: int
    raw: bytes


class HiddenRound(msgspec.Struct, frozen=True):
    """The parts that one of the client's assistant units hides.

    ``prefix`` is a digest of the units before it, ``text`` and ``calls`` are what the client sees of it. The units
    ``before`` precede it. ``own_text`` is the text of its last round, ``None`` if that is all of it. ``hidden_calls``
    belong into it, by place, and ``results`` follow it. ``own`` is the unit of its last round with all calls, if the
    API's units can't be restored from the client's.
    """

    prefix: str
    text: str
    calls: list[str]
    before: list[bytes]
    own_text: str | None
    hidden_calls: list[tuple[int, bytes]]
    results: list[bytes]
    own: bytes | None = None


class VisibleResponse:
    """The response that the client gets, over all rounds.

    ``usage`` is the sum of the rounds that have ended, and ``identity`` the fields that all events share. ``parts`` are
    the calls, blocks, or items that the client gets, and ``calls`` are the ids of its calls. ``number`` is that of the
    last event, for APIs that number them.
    """

    def __init__(self) -> None:
        self.usage: dict[str, Any] = {}
        self.identity: dict[str, Any] = {}
        self.texts: list[str] = []
        self.calls: list[str] = []
        self.parts: list[Any] = []
        self.number = -1

    @property
    def text(self) -> str:
        """Return the text that the client gets."""
        return "".join(self.texts)


class HiddenTool(ABC):
    """How one API hides a tool. A part of an answer is a call, a block, or an item.

    ``CONVERSATION`` is the request's field with the messages or items. ``NO_CALLS`` is the tool choice that forbids
    calls. ``RESTORES`` is true if the client's unit has what is needed to restore the upstream's. ``SEPARATOR`` comes
    between the texts of two rounds that aren't streamed.
    """

    CONVERSATION: ClassVar[str] = "messages"
    NO_CALLS: ClassVar[Any] = "none"
    RESTORES: ClassVar[bool] = False
    SEPARATOR: ClassVar[str] = ""

    def accepts(self, raw: bytes, name: str) -> bool:
        """Return whether a request lets its model choose among tools, and has none of this name."""
        try:
            fields = fields_of(raw)
        except BadBody:
            return False
        if not self.allows_choice(fields):
            return False
        names = self._names(fields)
        return bool(names) and name not in names

    @abstractmethod
    def allows_choice(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        """Return whether the model may choose among tools, and the proxy may add one."""

    def tool_names(self, raw: bytes) -> list[str]:
        """Return the names of a request's tools, as far as it can be read; an empty one if a tool has none."""
        try:
            return self._names(fields_of(raw))
        except BadBody:
            return []

    def _names(self, fields: Mapping[str, msgspec.Raw]) -> list[str]:
        return [str(self.tool_name(tool) or "") for tool in self.tools(fields)]

    def tools(self, fields: Mapping[str, msgspec.Raw]) -> list[Any]:
        """Return all tools of a request."""
        return tools_in(fields)

    def tool_name(self, tool: Any) -> Any:
        """Return the name of a request's tool."""
        return field_of(tool, "name")

    @abstractmethod
    def definition(self, raw: bytes, name: str, description: str, parameters: Mapping[str, Any]) -> bytes:
        """Return the tool's JSON for a request."""

    def with_tool(self, raw: bytes, tool: bytes) -> bytes:
        """Return a body with one more tool, the last one."""
        fields = fields_of(raw)
        tools = bytes(fields["tools"]).rstrip()
        fields["tools"] = msgspec.Raw(tools[:-1].rstrip() + b"," + tool + b"]")
        return msgspec.json.encode(fields)

    def without_tool(self, sent: bytes) -> bytes:
        """Return a body without its last tool."""
        fields = fields_of(sent)
        fields["tools"] = listed(msgspec.json.decode(fields["tools"], type=list[msgspec.Raw])[:-1])
        return msgspec.json.encode(fields)

    def continued(self, sent: bytes, units: Sequence[bytes], *, last: bool) -> bytes:
        """Return a body with further units. With ``last``, the model may not call tools."""
        fields = fields_of(sent)
        fields[self.CONVERSATION] = self.lengthened(fields[self.CONVERSATION], units)
        if last:
            fields["tool_choice"] = encoded(self.NO_CALLS)
        return msgspec.json.encode(fields)

    @abstractmethod
    def lengthened(self, conversation: bytes, units: Sequence[bytes]) -> msgspec.Raw:
        """Return the JSON of a conversation with further units."""

    @abstractmethod
    def result(self, id: str, text: str) -> bytes:
        """Return the unit that answers a call."""

    @abstractmethod
    def visible(self, raw: bytes) -> tuple[str, list[str]] | None:
        """Return the text and the ids of the calls in an assistant's unit; ``None`` for other units."""

    def restored(self, raw: bytes, round: HiddenRound) -> bytes:
        """Return the client's unit as the last round of its response was, with the hidden calls."""
        return raw if round.own is None else round.own

    @abstractmethod
    def round(self, name: str, response: VisibleResponse, *, first: bool) -> StreamedRound:
        """Return a reader for one round of a stream. ``name`` is the tool's."""

    @abstractmethod
    def parts(self, answer: dict[str, Any]) -> list[Any]:
        """Return the parts of a whole answer."""

    @abstractmethod
    def is_call(self, part: Any) -> bool:
        """Return whether a part is a call that the client answers."""

    @abstractmethod
    def calls_tool(self, part: Any, tool: str) -> bool:
        """Return whether a part is a call of this tool."""

    @abstractmethod
    def call_ids(self, parts: Sequence[Any]) -> list[str]:
        """Return the ids of the calls that the client answers."""

    @abstractmethod
    def hidden_call(self, call: dict[str, Any], arguments: str, place: int) -> HiddenCall:
        """Return a call of the hidden tool. ``arguments`` are those of a stream; empty if they are in the call."""

    @abstractmethod
    def text(self, answer: Mapping[str, Any], parts: Sequence[Any]) -> str:
        """Return the text of a round."""

    @abstractmethod
    def unit(self, answer: Mapping[str, Any], parts: Sequence[Any]) -> bytes:
        """Return a round as a unit of the conversation."""

    @abstractmethod
    def shown(self, round: WholeRound) -> dict[str, Any]:
        """Return a whole answer for the client, without the usage."""

    def identity(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that the client's response has from the first round."""
        return {}

    def unlist(self, answer: Any, tool: str) -> bool:
        """Remove a tool from the request's fields that an answer repeats. Return whether it was there."""
        return False


class AnswerPart:
    """A part of an answer. ``shown`` is its place among the client's parts, ``None`` if it's hidden or undecided.

    ``arguments`` is the JSON text of arguments that were streamed.
    """

    def __init__(self, value: Any, shown: int | None = None, *, hidden: bool = False) -> None:
        self.value = value
        self.shown = shown
        self.hidden = hidden
        self.arguments = ""

    def whole(self) -> Any:
        """Return the part as it is in a message."""
        return self.value


class Round:
    """One round of a response. ``answer`` has what its unit needs besides ``parts``.

    ``failed`` is true after an error. The round's calls may be incomplete then, so nothing follows.
    """

    def __init__(self, api: HiddenTool, tool: str, response: VisibleResponse) -> None:
        self.api = api
        self.tool = tool
        self.response = response
        self.answer: dict[str, Any] = {}
        self.parts: Sequence[AnswerPart] = ()
        self.failed = False

    @property
    def hidden(self) -> list[HiddenCall]:
        """Return the calls of the hidden tool, in order."""
        if self.failed:
            return []
        calls = [(part, whole) for part in self.parts if self.api.is_call(whole := part.whole())]
        return [
            self.api.hidden_call(whole, part.arguments, place)
            for place, (part, whole) in enumerate(calls)
            if self.is_hidden(part)
        ]

    def is_hidden(self, part: AnswerPart) -> bool:
        """Return whether a call is one of the hidden tool."""
        return part.hidden

    @property
    def visible(self) -> int:
        """Return the number of the client's calls."""
        return sum(self.api.is_call(part.value) and not part.hidden for part in self.parts)

    @property
    def hides(self) -> bool:
        """Return whether the client doesn't get all parts."""
        return any(part.hidden for part in self.parts)

    @property
    def unit(self) -> bytes:
        """Return the round as a unit of the conversation, with all calls, as the upstream sent it."""
        return self.api.unit(self.answer, [part.whole() for part in self.parts])

    @property
    def own(self) -> bytes | None:
        """Return the unit that later replaces the client's. ``None`` if the client's can be restored."""
        return None if self.api.RESTORES else self.unit

    @property
    def content(self) -> str:
        """Return the text of this round."""
        return self.api.text(self.answer, [part.value for part in self.parts])


class StreamedRound(Round, ABC):
    """One round of a stream. A dialect's class returns in ``event`` the bytes for the client.

    ``usage`` is the round's own. ``closing`` are the events that end a response with hidden calls. The client gets
    them unless another round follows.
    """

    def __init__(self, api: HiddenTool, tool: str, response: VisibleResponse, *, first: bool) -> None:
        super().__init__(api, tool, response)
        self.first = first
        self.usage: dict[str, Any] = {}
        self.closing = bytearray()
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

    @abstractmethod
    def event(self, value: dict[str, Any] | None, data: bytes, as_it_came: bytes) -> bytes:
        """Return the bytes for the client. ``value`` is the data as an object, ``None`` if it isn't one."""

    def close(self, event: bytes) -> bytes:
        """Hold an event that ends the response if something is hidden."""
        if self.first and not self.hides:
            return event
        self.closing += event
        return b""

    def _event(self, lines: list[bytes]) -> bytes:
        if not any(lines):
            return b""
        as_it_came = b"\n".join(lines) + b"\n\n"
        data = data_of(lines)
        return self.event(decoded(data), data, as_it_came) if data else as_it_came


class WholeRound(Round):
    """A round that isn't streamed. ``changed`` is true if the upstream's body names the tool outside of its calls.

    ``calls`` are the client's.
    """

    def __init__(self, api: HiddenTool, tool: str, body: bytes, response: VisibleResponse) -> None:
        super().__init__(api, tool, response)
        self.answer = decoded(body) or {}
        self.parts = [AnswerPart(part, hidden=api.calls_tool(part, tool)) for part in api.parts(self.answer)]
        shown = [part.value for part in self.parts if not part.hidden]
        self.calls = [part for part in shown if api.is_call(part)]
        response.calls = api.call_ids(self.calls)
        response.parts += shown
        if text := api.text(self.answer, shown):
            response.texts.append(api.SEPARATOR + text if response.texts else text)
        response.identity = response.identity or api.identity(self.answer)
        if isinstance(usage := self.answer.get("usage"), dict):
            add_usage(response.usage, usage)
        self.changed = api.unlist(self.answer, tool)

    def body(self) -> bytes:
        """Return the body for the client, with the parts, the texts, and the usage of all rounds."""
        answer = self.api.shown(self)
        if self.response.usage:
            answer["usage"] = self.response.usage
        return encode(answer)


def add_usage(total: dict[str, Any], usage: Mapping[str, Any]) -> None:
    """Add the numbers of a usage and of its details, and append its lists. Other values are those of the last round."""
    for name, value in usage.items():
        before = total.get(name)
        if isinstance(value, dict):
            inner = dict(before) if isinstance(before, dict) else {}
            add_usage(inner, value)
            total[name] = inner
        elif isinstance(value, int | float) and not isinstance(value, bool):
            total[name] = value + (before if isinstance(before, int | float) else 0)
        elif isinstance(value, list) and isinstance(before, list):
            total[name] = [*before, *value]
        elif value is not None or before is None:
            total[name] = value


def place_of(value: object) -> int | str | None:
    """Return an index or id of an event; ``None`` if it's another value."""
    return value if isinstance(value, int | str) else None


def decoded(data: bytes) -> dict[str, Any] | None:
    """Return a JSON object; ``None`` if the data isn't one."""
    try:
        value = msgspec.json.decode(data)
    except UNDECODABLE:
        return None
    return value if isinstance(value, dict) else None


def field_of(value: Any, name: str) -> Any:
    """Return a field of an object; ``None`` for other values."""
    return value.get(name) if isinstance(value, dict) else None


def tools_in(fields: Mapping[str, msgspec.Raw]) -> list[Any]:
    """Return the tools in a request's fields."""
    tools = value_of(fields.get("tools", NOTHING))
    return tools if isinstance(tools, list) else []


def longer(values: bytes, more: Sequence[bytes]) -> msgspec.Raw:
    """Return a list's JSON with further values."""
    before = bytes(values).strip()[:-1].rstrip()
    return listed(more) if before == b"[" else msgspec.Raw(b",".join([before, *more]) + b"]")
