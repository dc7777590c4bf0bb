"""One way to send a request, and what a recovery may use to find the next one."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from proxy.dialects.rounds import HiddenRound, HiddenTool
from proxy.pipeline.budget import TokenBudget
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.job import CompactionInput, Outcome
from proxy.pipeline.response_start import ResponseStart
from proxy.telemetry.record import Reason, RequestRecord, Window
from proxy.upstream.traits import Edit
from proxy.upstream.transport import Answer

UNLOADED = 20  # tools that a record names

LONGEST_NAME = 64


class Tool(NamedTuple):
    """A tool that the proxy adds to a request: its definition, and its size in tokens."""

    definition: bytes
    tokens: int


class Departure(msgspec.Struct, eq=False, frozen=True, kw_only=True):
    """A request as it leaves."""

    outcome: Outcome
    output: int | None = None  # the lower output limit to send, in tokens, if the requested one doesn't fit
    tool: Tool | None = None  # the proxy's own
    asks_usage: bool = False  # whether the proxy asks for the usage of a stream whose client didn't
    edits: tuple[Edit, ...] = ()  # those of the proxy's own words

    @property
    def after(self) -> int | None:
        """Return the tokens to send, with those of the tool; ``None`` if they aren't counted."""
        after = self.outcome.after
        return after if after is None or self.tool is None else after + self.tool.tokens

    @property
    def changes(self) -> bool:
        """Return whether the messages or the output limit differ from those that the client sent."""
        return self.outcome.messages is not None or self.output is not None

    @property
    def added(self) -> tuple[str, ...]:
        """Return the names of what the proxy added to the request, or lowered in it."""
        parts = {"usage": self.asks_usage, "tool": self.tool is not None, "output": self.output is not None}
        return tuple(name for name, there in parts.items() if there)

    def describe(self, record: RequestRecord) -> None:
        outcome, summary = self.outcome, self.outcome.summary
        record.verdict = outcome.verdict
        record.reason = record.reason or outcome.reason
        record.steps = outcome.steps
        record.checkpoints = outcome.checkpoints
        record.before, record.sent = outcome.before, self.after
        if outcome.forecast is not None:
            record.forecast, record.steps = outcome.forecast.after, outcome.forecast.steps
        record.summary, record.cause, record.breaker_open = summary.origin, summary.cause, summary.breaker_open
        record.replaced = summary.replaced
        record.output = self.output
        record.archive = list(outcome.archive)
        record.retention = dict(outcome.retention)
        record.state = outcome.state
        record.unloaded = [name[:LONGEST_NAME] for name in outcome.unloaded[:UNLOADED]]


class Attempt(Departure, eq=False, frozen=True, kw_only=True):
    """One way to send a request that the proxy can measure, with its limits and the input of its compaction."""

    budget: TokenBudget
    case: CompactionInput

    def describe(self, record: RequestRecord) -> None:
        super().describe(record)
        received, budget = self.outcome.received, self.budget
        if received is not None and received.sizes is not None:
            tools = received.sizes[0] - received.told + (0 if self.tool is None else self.tool.tokens)
            size = None if budget.input is None else budget.input + budget.free
            replacement, system = self.outcome.replacement, received.head + received.told
            record.window = Window(size, system, tools, replacement, budget.free)


class RecallState(msgspec.Struct, eq=False):
    """The state of a request that may get the tool, or has hidden rounds."""

    hidden: HiddenTool  # writes the API's form of the tool
    conversation: tuple[str, str]
    rounds: list[HiddenRound]  # the conversation's
    found: bool  # whether some were put back
    prefix: str  # a digest of the client's messages
    messages: int  # the number of the client's messages
    tool: Tool | None  # `None` if the request can't get it
    refused: bool = False  # whether the upstream has refused the tool in this request
    usage: dict[str, Any] = {}  # the sum of the usage objects of the response's finished rounds, as the API has them

    @property
    def offered(self) -> Tool | None:
        """Return the tool for the next attempt; ``None`` if the request gets none."""
        return None if self.refused else self.tool

    @property
    def adding(self) -> Callable[[bytes], bytes] | None:
        """Return a function that adds the tool to a body; ``None`` if the request gets none."""
        return None if self.offered is None else partial(self.hidden.with_tool, tool=self.offered.definition)

    def tool_for(self, outcome: Outcome) -> Tool | None:
        """Return the tool for a compacted request. The first checkpoint breaks the prompt cache anyway."""
        return self.offered if outcome.messages and outcome.checkpoints else None


class Run(ABC):
    """One request on the way to its answer."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.retries: list[str] = []  # their causes
        self.advice: str | None = None  # a header value for a client whose request can't be recovered
        self.asks_usage = False  # that of the next attempt
        self.learns = True  # the answer shows how the upstream counts the request as received
        self.refused: ResponseStart | None = None  # the refusal after which the edits `tried` were made
        self.tried: tuple[Edit, ...] = ()
        self.recall: RecallState | None = None

    @property
    def took_tool(self) -> bool:
        """Return whether the proxy took its tool back after a refusal."""
        return ("added", "tool") in [edit[:2] for edit in self.tried]

    def edit(self, start: ResponseStart, edits: tuple[Edit, ...]) -> None:
        """Note the edits of the next attempt, which follows a refusal. The client can still get the first refusal."""
        if self.refused is None:
            answer = start.answer
            self.refused = replace(start, answer=Answer.whole(answer.status, answer.headers, b""), complete=True)
        self.tried += edits
        if self.took_tool and self.recall is not None:
            self.recall.refused = True

    @property
    def next_number(self) -> int:
        """Return the number of attempts before the next one."""
        return len(self.retries) + 1

    def retry(self, cause: str, before: Outcome, after: Outcome) -> None:
        """Note a retry and why. The first trigger stays the reason, if the proxy acted on it."""
        record = self.exchange.record
        reason = record.reason or before.reason
        if reason is None or before.verdict != "compacted":
            crowded = after.reason is not None and after.reason.trigger == "media"
            reason = after.reason if crowded else Reason(cause, record.calls[-1].limit, after.before)
        self.retries.append(cause)
        record.reason = reason

    @abstractmethod
    def case(self, budget: TokenBudget) -> CompactionInput:
        """Return the input of the request's compaction."""

    @abstractmethod
    async def attempt(self, budget: TokenBudget, case: CompactionInput, *, may_ask: bool = True) -> Attempt:
        """Compact the request if needed. Raises ``UpstreamTimeout`` when the deadline passes, and no other error.

        With ``may_ask`` false, an extract replaces a summary that isn't stored yet.
        """


class Recovery(NamedTuple):
    """A way to go on after a response that the client shouldn't get."""

    cause: str  # its name in records
    next: Callable[[Run, Attempt, ResponseStart], Awaitable[Attempt | None]]  # returns `None` if it can't help
    most: int = sys.maxsize  # retries with the same cause after which it isn't asked


class Reply(NamedTuple):
    """The response that the client gets, the request that it answers, and the way there."""

    start: ResponseStart
    sent: Departure
    run: Run
