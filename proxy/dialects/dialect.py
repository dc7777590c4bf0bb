"""Define the protocols of an API's format: how the pipeline reads requests and answers.

A dialect is one package under ``dialects``. ``endpoints.paths`` maps its path to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, Protocol

from proxy.compaction.format import Format
from proxy.dialects.answers import Answers, ItemReader, ItemSink
from proxy.dialects.request import Request
from proxy.dialects.rounds import HiddenTool
from proxy.errors import ErrorShape
from proxy.limits.profiles.profile import Profile
from proxy.overflow.silent import Finished


class Counter(Protocol):
    """Counts tokens as one model's provider does. Thread-safe; never raises for unusual input."""

    profile: Profile

    @property
    def format(self) -> Format:
        """Return the format of units, with this counter's tokenizer."""
        ...

    @property
    def key(self) -> Hashable:
        """Return the key. Counters with the same key count alike."""
        ...

    @property
    def ready(self) -> bool:
        """Return whether the encoding is loaded, so that a count starts immediately."""
        ...

    def text(self, text: str) -> int:
        """Return the tokens of a text without a frame."""
        ...

    def at_most(self, raw: bytes) -> float:
        """Return an upper bound for a body's tokens, without tokenizing."""
        ...

    def overhead(self, fields: Mapping[str, Any]) -> int:
        """Return a request's tokens outside its units. ``fields`` are those of ``Request.overhead_fields``."""
        ...


class Evidence(Protocol):
    """Which requests show, by the reported usage, how an upstream counts."""

    def comparable(self, raw: bytes) -> bool:
        """Return whether the proxy's count of a body and an upstream's usage cover the same parts."""
        ...

    def adds_text(self, raw: bytes) -> bool:
        """Return whether a body has a field that may add text to the prompt besides its units."""
        ...

    def has_calls(self, unit: bytes) -> bool:
        """Return whether a unit has a tool call or a tool's result."""
        ...

    def kept_text(self, unit: bytes, *, tools: bool) -> str:
        """Return the text of a unit that every upstream keeps. ``tools``: this upstream keeps tool results."""
        ...


class NativeSummary(NamedTuple):
    """A unit in place of messages that the provider compacted, and its text; empty if the text is encrypted."""

    unit: bytes
    text: str


class NativeCompaction(Protocol):
    """How to ask a provider to compact a part of a conversation."""

    @property
    def path(self) -> str:
        """Return the path at the upstream, below its base URL."""
        ...

    @property
    def beta(self) -> str | None:
        """Return the value of ``anthropic-beta`` that all requests with such a unit need; ``None`` if they don't."""
        ...

    @property
    def listed(self) -> bool:
        """Return whether only models that LiteLLM's table lists for it can compact."""
        ...

    def accepts(self, raw: bytes) -> bool:
        """Return whether the options of a request allow such a unit in it."""
        ...

    def request(self, sent: bytes, instructions: str, max_output: int) -> bytes | None:
        """Return the request to compact all messages of ``sent``; ``None`` if its options don't allow that."""
        ...

    def read(self, answer: bytes) -> NativeSummary | None:
        """Return the result in a response of status 200; ``None`` if it has none."""
        ...

    def read_usage(self, body: bytes) -> Finished:
        """Read the usage of a compaction."""
        ...


class Dialect(Protocol):
    """One API for conversations."""

    @property
    def name(self) -> str:
        """Return the name in settings, records, and metrics."""
        ...

    @property
    def path(self) -> str:
        """Return the path at the upstream, below its base URL."""
        ...

    @property
    def heartbeat(self) -> bytes:
        """Return what keeps a stream's connection alive before the response: a comment, or the API's own event."""
        ...

    @property
    def errors(self) -> ErrorShape:
        """Return the shape of the API's errors."""
        ...

    @property
    def answers(self) -> Answers:
        """Return how to read the API's answers."""
        ...

    @property
    def evidence(self) -> Evidence:
        """Return which requests show how an upstream counts."""
        ...

    @property
    def hidden_tool(self) -> HiddenTool | None:
        """Return how to hide a tool in requests and responses; ``None`` if the proxy can't."""
        ...

    @property
    def native(self) -> NativeCompaction | None:
        """Return how to ask the API's provider to compact; ``None`` if the API can't."""
        ...

    def item_reader(self, sink: ItemSink) -> ItemReader | None:
        """Return a reader that passes each output item to ``sink``; ``None`` if the API has no references to items."""
        ...

    async def parse(self, raw: bytes) -> Request:
        """Parse a body of any size. Raises ``BadBody`` for too many units or values."""
        ...

    def counter(self, profile: Profile) -> Counter:
        """Return a counter. Raises ``ConfigurationError`` if its encoding isn't installed."""
        ...

    def counter_key(self, profile: Profile) -> Hashable:
        """Return the key that ``counter`` gives to a profile's counter."""
        ...
