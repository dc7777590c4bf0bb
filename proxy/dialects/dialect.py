"""Define the protocols of an API's format: how the pipeline reads requests and answers.

A dialect is one package under ``dialects``. ``endpoints.paths`` maps its path to it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from proxy.compaction.format import Format
from proxy.dialects.hidden_tool import HiddenTool
from proxy.errors import ErrorShape
from proxy.limits.profiles.lookup import Profile
from proxy.overflow.silent import Finished


class Request(Protocol):
    """A request as the client sent it. ``units`` are the bytes of the conversation's units, unchanged.

    ``model`` is ``None`` if the field is missing or isn't a string. ``max_output`` is the requested limit on output, in
    tokens. ``overhead`` are the bytes of the fields outside the conversation that take tokens, such as tools.
    """

    raw: bytes
    model: str | None
    stream: bool
    max_output: int | None
    overhead: tuple[bytes, ...]

    @property
    def units(self) -> Sequence[bytes]:
        """Return the bytes of each unit."""
        ...

    @property
    def size(self) -> int:
        """Return the bytes of memory that the body takes."""
        ...

    @property
    def references(self) -> Sequence[str]:
        """Return the ids of items that the body only refers to."""
        ...

    @property
    def may_refer(self) -> bool:
        """Return whether later requests of the client may refer to the items of the answer."""
        ...

    @property
    def continues(self) -> bool:
        """Return whether the request continues a history that the server keeps, so that its size is unknown."""
        ...

    @property
    def compacted(self) -> bool:
        """Return whether the client sent a compaction of its own, a prefix that stays as it is."""
        ...

    @property
    def budgets_thinking(self) -> bool:
        """Return whether the body states a budget for thinking that ``rewritten`` can't lower with the output."""
        ...

    @property
    def thinking(self) -> int:
        """Return the tokens of the output that are reserved for thinking. ``rewritten`` lowers them if it has to."""
        ...

    @property
    def hidden(self) -> float:
        """Return an upper bound on the tokens of items that the body refers to; infinity if they are unknown."""
        ...

    def place(self) -> str:
        """Return what identifies the end of the conversation, where the items of the answer come; empty without any."""
        ...

    def places(self) -> Iterable[tuple[str, str]]:
        """Return the id of each reference, and what identifies its place: ``place`` of the request for that item."""
        ...

    def resolve(self, items: Mapping[str, bytes], sizes: Mapping[str, int]) -> None:
        """Put known items in the place of references in ``units``, by id. ``rewritten`` puts the references back.

        ``sizes`` are the tokens of unknown items, if an upstream has reported them.
        """
        ...

    def expanded(self, body: bytes, units: Sequence[bytes] | None = None) -> bytes:
        """Return a body that ``rewritten`` made, with known items in the place of references.

        ``units`` are those of ``rewritten``.
        """
        ...

    def unsized(self, units: Sequence[bytes]) -> list[str]:
        """Return the ids of references in units whose items and sizes are unknown."""
        ...

    def named(self, model: str) -> Request:
        """Return the request with another model. Raises ``BadBody`` if the body isn't a JSON object."""
        ...

    def release(self) -> None:
        """Drop every byte of the request from memory. The model and the other decoded fields stay."""
        ...

    def overhead_fields(self) -> dict[str, Any]:
        """Return the fields of ``overhead``, decoded."""
        ...

    def rewritten(
        self, *, units: Sequence[bytes] | None = None, model: str | None = None, max_output: int | None = None
    ) -> bytes:
        """Return the body with other units, another model, or less output; ``raw`` itself if nothing changes.

        Every other value keeps its bytes and its place. Raises ``BadBody`` if the body isn't a JSON object.
        """
        ...


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


class ContentDetector(Protocol):
    """Checks a response without a stream's content type as it arrives."""

    def of(self, first: bytearray) -> Literal["answer", "events"] | None:
        """Return the kind of response by all bytes so far; ``None`` if it may be an error."""
        ...


class EventReader(Protocol):
    """Judges the first events of a stream as they arrive."""

    def feed(self, chunk: bytes) -> Literal["content", "error", "end"] | None:
        """Add bytes, and return the kind of the first event that has one."""
        ...

    def in_error(self) -> bool:
        """Return whether the unfinished event is an error."""
        ...


class AnswerTail(Protocol):
    """An answer as it passes. ``lost`` is the bytes that were too many to keep."""

    lost: int

    @property
    def model(self) -> str:
        """Return the model that the answer names; empty if it names none."""
        ...

    def add(self, chunk: bytes) -> None:
        """Add a chunk."""
        ...

    def written(self) -> str:
        """Return the text, calls, and reasoning in the answer so far, to count them."""
        ...

    def finished(self) -> Finished:
        """Return the answer's usage and finish reason."""
        ...


ItemSink = Callable[[str, bytes], None]
"""Takes an output item: its id, and its bytes."""


class ItemReader(Protocol):
    """Finds the output items in an answer as it passes."""

    def add(self, chunk: bytes) -> None:
        """Add a chunk of an uncompressed answer."""
        ...

    def finish(self) -> None:
        """Read what the end of the answer completes."""
        ...


class Answers(Protocol):
    """How to read an API's answers."""

    def fast_path(self, first: bytes) -> bool:
        """Return whether the first bytes have the usual form of an answer with content, and no error before it."""
        ...

    def content_detector(self) -> ContentDetector:
        """Return a detector for one response."""
        ...

    def event_reader(self) -> EventReader:
        """Return a reader for one stream."""
        ...

    def tail(self) -> AnswerTail:
        """Return an empty tail for one answer."""
        ...

    def read_usage(self, body: bytes) -> Finished:
        """Read the usage and finish reason of a whole answer, streamed or not."""
        ...

    def is_silence(self, body: bytes) -> bool:
        """Return whether a stream has no events except its end."""
        ...

    def gives_up(self, body: bytes) -> bool:
        """Return whether the server abandoned a stream after its first event, before it wrote anything."""
        ...

    def is_usual(self, reason: str | None) -> bool:
        """Return whether a finish reason says nothing about the size of the prompt."""
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
