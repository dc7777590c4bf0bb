"""Define what an API for conversations is. Each API is a folder with these parts, and a row in ``apis``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from proxy.dialects.answers import Answers, ItemReader, ItemSink
from proxy.dialects.counting import Counter, Evidence
from proxy.dialects.request import Request
from proxy.dialects.rounds import HiddenTool
from proxy.errors import ErrorShape
from proxy.http.sse import COMMENT
from proxy.limits.profiles.lookup import Profile
from proxy.overflow.silent import Finished


class NativeSummary(NamedTuple):
    """A unit in place of messages that the provider compacted, and its text; empty if the text is encrypted."""

    unit: bytes
    text: str


class NativeCompaction(ABC):
    """How to ask a provider to compact a part of a conversation.

    ``path`` is the path at the upstream, below its base URL. ``beta`` is the value of ``anthropic-beta`` that all
    requests with such a unit need; ``None`` if they don't. ``listed`` means that only models that LiteLLM's table lists
    for it can compact.
    """

    path: ClassVar[str]
    beta: ClassVar[str | None] = None
    listed: ClassVar[bool] = False

    @abstractmethod
    def accepts(self, raw: bytes) -> bool:
        """Return whether the options of a request allow such a unit in it."""

    @abstractmethod
    def request(self, sent: bytes, instructions: str, max_output: int) -> bytes | None:
        """Return the request to compact all messages of ``sent``; ``None`` if its options don't allow that."""

    @abstractmethod
    def read(self, answer: bytes) -> NativeSummary | None:
        """Return the result in a response of status 200; ``None`` if it has none."""

    @abstractmethod
    def read_usage(self, body: bytes) -> Finished:
        """Read the usage of a compaction."""


def _no_items(sink: ItemSink) -> None:
    """Return no reader: an API without references to items."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API for conversations.

    - ``name`` is its name in settings, records, and metrics. ``path`` is the path of its endpoint below ``/v1``, and at
      the upstream below its base URL. ``errors`` is the shape of its errors.
    - ``request`` parses and rewrites a body.
    - ``counters`` counts tokens. Its ``format`` are the API's units.
    - ``evidence`` tells which requests show how an upstream counts.
    - ``answers`` reads responses.
    - ``hidden_tool`` hides a tool in requests and responses; ``None`` if the proxy can't.
    - ``native`` asks the API's provider to compact; ``None`` if the API can't. ``item_reader`` returns a reader that
      passes each output item of an answer to the sink; ``None`` if the API has no references to items.
    - ``heartbeat`` keeps a stream's connection alive before the response: a comment, or the API's own event.
    """

    name: str
    path: str
    errors: ErrorShape
    request: type[Request]
    counters: type[Counter]
    evidence: Evidence
    answers: Answers
    hidden_tool: HiddenTool | None = None
    native: NativeCompaction | None = None
    item_reader: Callable[[ItemSink], ItemReader | None] = _no_items
    heartbeat: bytes = COMMENT

    async def parse(self, raw: bytes) -> Request:
        """Parse a body of any size. Raises ``BadBody`` for too many units or values."""
        return await self.request.read(raw)

    def counter(self, profile: Profile) -> Counter:
        """Return a counter. Raises ``ConfigurationError`` if its encoding isn't installed."""
        return self.counters(profile)

    def counter_key(self, profile: Profile) -> Hashable:
        """Return the key that ``counter`` gives to a profile's counter."""
        return self.counters.key_of(profile)
