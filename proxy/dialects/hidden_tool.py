"""Define how an API hides a tool that the proxy added: in requests, in responses, and in later requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec


class HiddenCall(msgspec.Struct):
    """A call of the hidden tool. ``place`` is its place among all calls of its message, ``raw`` its JSON."""

    id: str
    arguments: str
    place: int
    raw: bytes


class HiddenRound(msgspec.Struct, frozen=True):
    """What one of the client's assistant units hides.

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

    ``usage`` is the sum of the rounds that have ended, and ``identity`` the fields that all events share. ``calls`` are
    the ids of the client's calls. ``parts`` are the blocks or items, for APIs whose answers are lists, and ``number``
    is that of the last event, for APIs that number them.
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


class HiddenRoundReader(Protocol):
    """One round of a response."""

    @property
    def hidden(self) -> list[HiddenCall]:
        """Return the calls of the hidden tool, in order."""
        ...

    @property
    def visible(self) -> int:
        """Return the number of the client's calls."""
        ...

    @property
    def unit(self) -> bytes:
        """Return the round as a unit of the conversation, with all calls, as the upstream sent it."""
        ...

    @property
    def own(self) -> bytes | None:
        """Return the unit that later replaces the client's. ``None`` if the client's can be restored."""
        ...

    @property
    def content(self) -> str:
        """Return the text of this round."""
        ...


class StreamedRound(HiddenRoundReader, Protocol):
    """A round that is streamed.

    ``closing`` are the events that end the response unless another round follows. It's empty if nothing is hidden.
    """

    closing: bytearray

    def feed(self, chunk: bytes) -> bytes:
        """Add a chunk. Return the bytes for the client, except those of ``closing``."""
        ...

    def finish(self) -> bytes:
        """End the round, and return the bytes for the client that are left."""
        ...


class WholeRound(HiddenRoundReader, Protocol):
    """A round that isn't streamed. ``changed`` is true if the upstream's body names the tool outside of its calls."""

    changed: bool

    def body(self) -> bytes:
        """Return the body for the client, with the texts and the usage of all rounds."""
        ...


class HiddenTool(Protocol):
    """How one API hides a tool."""

    def accepts(self, raw: bytes, name: str) -> bool:
        """Return whether a request lets its model choose among tools, and has none of this name."""
        ...

    def tool_names(self, raw: bytes) -> list[str]:
        """Return the names of a request's tools, as far as it can be read; an empty one if a tool has none."""
        ...

    def definition(self, raw: bytes, name: str, description: str, parameters: Mapping[str, Any]) -> bytes:
        """Return the tool's JSON for a request."""
        ...

    def with_tool(self, raw: bytes, tool: bytes) -> bytes:
        """Return a body with one more tool, the last one."""
        ...

    def without_tool(self, sent: bytes) -> bytes:
        """Return a body without its last tool."""
        ...

    def continued(self, sent: bytes, units: Sequence[bytes], *, last: bool) -> bytes:
        """Return a body with further units. With ``last``, the model may not call tools."""
        ...

    def response(self) -> VisibleResponse:
        """Return the client's response, still empty."""
        ...

    def round(self, name: str, response: VisibleResponse, *, first: bool) -> StreamedRound:
        """Return a reader for one round of a stream. ``name`` is the tool's."""
        ...

    def whole(self, name: str, body: bytes, response: VisibleResponse) -> WholeRound:
        """Read a round that isn't streamed."""
        ...

    def result(self, id: str, text: str) -> bytes:
        """Return the unit that answers a call."""
        ...

    def visible(self, raw: bytes) -> tuple[str, list[str]] | None:
        """Return the text and the ids of the calls in an assistant's unit; ``None`` for other units."""
        ...

    def restored(self, raw: bytes, round: HiddenRound) -> bytes:
        """Return the client's unit as the last round of its response was, with the hidden calls."""
        ...
