"""Learn from a complete response how the upstream counts, and whether it dropped a part of the prompt.

This doesn't delay the client, which has the whole response.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import msgspec
import structlog
import xxhash
from cachetools import LRUCache
from msgspec.structs import replace

from proxy.dialects.counting import Counter, Evidence
from proxy.dialects.request import Request
from proxy.limits.calibration import LEAST_COUNTED, plausible
from proxy.limits.learned import limit_from_usage
from proxy.overflow import Overflow
from proxy.overflow.silent import (
    GROWN,
    SAME,
    EarlierPrompt,
    Finished,
    asks_for_cuts,
    counts_in_full,
    cut_prompt,
    without_overstated,
)
from proxy.pipeline.attempt import Departure
from proxy.pipeline.budget import TokenBudgets
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.response_start import ResponseStart
from proxy.pipeline.runtime import Runtime
from proxy.store.forgetting import drop
from proxy.telemetry.metrics import SILENT

log = structlog.get_logger(__name__)

SMALLEST_BYTES = 4_096  # requests of fewer bytes fit the smallest windows in use
BYTES_A_TOKEN = 8  # bytes per token for a lower bound on the tokens of an uncounted request
BYTES_A_TOKEN_AT_MOST = 2  # bytes per token for an upper bound on the tokens of a message that the proxy no longer has
FRAME = 16  # tokens around the text of a message, at most

_BREAKPOINT = re.compile(rb'(?:,\s*+)?"cache_control"\s*:\s*\{[^{}]*\}')
"""A mark that clients move from turn to turn. The model doesn't see it."""

INLINE_BYTES = 32_768  # Bytes of messages that are counted on the event loop. More are counted in a thread.
CONVERSATIONS = 1_000  # conversations that are remembered, the latest ones
TURNS = 16  # turns of a conversation that are remembered, the latest ones

SHOWS_TOOLS = 0.2
"""Share of a prompt that tool calls and results must have for its reported size to show that templates keep them."""


class SentTurn(msgspec.Struct, frozen=True):
    """An earlier request of a conversation that the proxy sent unchanged."""

    size: int  # in bytes
    around: int  # bytes outside the messages
    reported: int  # in the upstream's tokens
    messages: int  # the number without the last one, which some clients replace in each turn
    mark: int  # a digest of these messages
    last: int  # bytes of the last message
    last_mark: int  # its checksum

    def begins(self, now: SentTurn, mark: Callable[[int], int]) -> bool:
        """Return whether a request only adds to this turn. ``mark`` returns a digest of a number of its first messages.

        A client that removed, shortened, or moved something of its own explains a small reported size.
        """
        return self.messages < now.messages and self.around <= now.around and mark(self.messages) == self.mark

    def replaced(self, messages: Sequence[bytes]) -> int:
        """Return an upper bound on the tokens of this turn's last message if these messages replace it, else 0."""
        return 0 if zlib.crc32(messages[self.messages]) == self.last_mark else self.last // BYTES_A_TOKEN_AT_MOST


class EarlierTurn(msgspec.Struct, frozen=True):
    """An earlier turn that a request continues."""

    turn: SentTurn
    replaced: int  # an upper bound on the tokens of its last message if the request replaces it, else 0
    calls: int = 0  # tokens of calls and results among the messages that both have, or 0 if not counted


class RequestFacts(msgspec.Struct, eq=False, frozen=True):
    """The facts about a request to compare its response with. They don't refer to its body."""

    counted: int | None  # tokens as the proxy sent it, if it counted them
    least: int  # a lower bound on the tokens
    asked: int | None  # the requested output
    estimated: bool  # whether it has images or audio
    compacted: bool  # whether the messages were changed
    comparable: bool
    turn: SentTurn  # without the reported size
    conversation: tuple[str, str]  # a hash
    earlier: tuple[EarlierTurn, ...]  # the turns that the request continues, oldest first
    sizes: tuple[int, list[int]] | None  # as `Outcome.sizes`
    messages: tuple[bytes, ...]  # the request's, if the reported size hasn't grown lately though it has
    unsized: Sequence[str] = ()  # the ids of items of unknown size


class Feedback(msgspec.Struct, eq=False, frozen=True):
    """A request that has been sent, and whose response can show something."""

    exchange: Exchange
    sent: Departure | None  # set only without `facts`
    facts: RequestFacts | None  # `None` if the proxy didn't count the request, which then keeps its body
    wanted: bool  # the ratio of the upstream's tokens to the proxy's needs the count

    @property
    def size(self) -> int:
        """The bytes of messages that are kept until the response has ended, without the request's body."""
        return 0 if self.facts is None else sum(map(len, self.facts.messages))


class UsageFeedback:
    """Learn from responses that clients have received."""

    def __init__(self, runtime: Runtime, budgets: TokenBudgets) -> None:
        self._runtime = runtime
        self._budgets = budgets
        self._turns: LRUCache[tuple[str, str], tuple[SentTurn, ...]] = LRUCache(CONVERSATIONS)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        return drop(self._turns, forgotten)

    def prepare(self, exchange: Exchange, start: ResponseStart, sent: Departure) -> Feedback | None:
        """Prepare to learn from a response before it is forwarded. Return ``None`` if it can't show anything.

        The result refers to the request's body only if the proxy didn't count the request. Errors are logged.
        """
        try:
            body, after, place, limits = exchange.body, sent.after, exchange.place, self._runtime.limits
            if start.answer.status != 200 or start.overflow is not None or not body.units or body.continues:
                return None
            size, wanted = len(body.raw), False
            if sent.outcome.verdict in ("off", "failed"):
                return None
            if after is not None:
                of_use = limits.calibration.wants(*place) or limits.learned.below(*place, after)
            elif size > LEAST_COUNTED or body.references:
                of_use = wanted = size > LEAST_COUNTED and limits.calibration.worth_counting(*place)
            else:
                return None
            unsized = body.unsized(sent.outcome.messages or body.units)
            if not of_use and not unsized and size <= SMALLEST_BYTES:
                return None
            if after is None:
                return Feedback(exchange, sent, None, wanted)
            return Feedback(exchange, None, self._facts(exchange, sent, compare=True), wanted)
        except Exception as error:  # as in `record`: the client gets its response
            log.exception("counting.failed", error=type(error).__name__)
            return None

    def _facts(self, exchange: Exchange, sent: Departure, *, compare: bool) -> RequestFacts:
        """Return the facts about a request that still has its body. ``compare``: its count will be compared."""
        body, conversation = exchange.body, exchange.conversation
        compacted = sent.outcome.messages is not None
        turn, mark = _turn(body)
        received = sent.outcome.received
        sizes = None if received is None else received.sizes
        known = None if received is None else received.estimated
        estimated = body.has_remote_media() if known is None else known
        before = [] if compacted else [one for one in self._turns.get(conversation, ()) if one.begins(turn, mark)]
        earlier = tuple(EarlierTurn(one, one.replaced(body.units)) for one in before)
        messages: tuple[bytes, ...] = ()
        # In the turn before this one, which adds to all of these, the reported size didn't grow.
        stalls = any(before[-1].reported <= one.reported * (1 + SAME) for one in before[:-1])
        if not estimated and stalls and not (asks_for_cuts(body.raw) or exchange.dialect.evidence.adds_text(body.raw)):
            # Copies: an undecoded message refers to the whole body.
            messages = tuple(map(bytes, body.units))
            if sizes is not None:
                earlier = _with_calls(exchange.dialect.evidence, earlier, body.units, sizes[1])
        bounded = estimated and not body.has_remote_media()
        wants = compare and self._runtime.limits.calibration.wants(*exchange.place)
        return RequestFacts(
            counted=sent.after,
            least=len(body.raw) // BYTES_A_TOKEN if bounded or not estimated else 0,
            asked=sent.output or body.max_output,
            estimated=estimated,
            compacted=compacted,
            comparable=wants and not estimated and exchange.dialect.evidence.comparable(body.raw),
            turn=turn,
            conversation=conversation,
            earlier=earlier,
            sizes=sizes if messages else None,
            messages=messages,
            unsized=body.unsized(sent.outcome.messages or body.units),
        )

    async def record(self, feedback: Feedback, end: Finished) -> None:
        """Learn from the end of a complete response. Log errors instead of raising them."""
        try:
            facts, sent = feedback.facts, feedback.sent
            count = sent is not None and (
                feedback.wanted or (end.empty or not feedback.exchange.dialect.answers.is_usual(end.finish_reason))
            )
            if facts is None and sent is not None:
                facts = self._facts(feedback.exchange, sent, compare=count)
            if facts is not None:
                await self._learn(feedback.exchange, facts, end, count=count)
        except Exception as error:  # the client has its response
            log.exception("counting.failed", error=type(error).__name__)

    async def _learn(self, exchange: Exchange, facts: RequestFacts, end: Finished, *, count: bool) -> None:
        """Learn from the end of a response. With ``count``, the request must be counted now."""
        if facts.unsized and facts.counted is not None and end.prompt:
            hidden = int(end.prompt / self._budgets.factor(exchange)) - facts.counted
            self._runtime.stores.items.note_size(exchange.caller.tenant, facts.unsized, max(0, hidden))
        # The tokens of images and audio are an estimate, and those of unknown items aren't counted.
        if facts.estimated or facts.unsized:
            self._note(exchange, facts, None, end)
            return
        factor = self._budgets.factor(exchange)
        counted = facts.counted
        if count:
            fixed, sizes = await self._sizes(exchange)
            counted = fixed + sum(sizes)
        overflow = None
        if counted is not None:
            overflow = self._budgets.silent(
                exchange, self._budgets.window(exchange), end, int(counted * factor), facts.asked
            )
        before = self._before(facts, end)
        if overflow is None and before:
            counted, overflow = await self._cut(exchange, facts, end, before, counted, factor)
        if overflow is not None and counted is not None:
            SILENT.inc()
            log.info("overflow.silent", upstream=exchange.route.upstream, counted=counted, limit=overflow.limit)
            if (shown := limit_from_usage(overflow, counted, factor)) is not None:
                self._budgets.learn(exchange, shown)
            return
        self._note(exchange, facts, counted, end)
        if counted is None:
            return
        self._runtime.limits.learned.confirm(*exchange.place, counted, end.prompt or None, factor)
        calibration = self._runtime.limits.calibration
        if not calibration.wants(*exchange.place):
            return
        if facts.comparable and end.prompt and plausible(counted, end.prompt):
            calibration.note(*exchange.place, counted, end.prompt)
        else:
            calibration.miss(*exchange.place, counted)

    async def _sizes(self, exchange: Exchange) -> tuple[int, list[int]]:
        assert exchange.counter is not None  # noqa: S101 - requests without a counter have no feedback
        return await self._runtime.compactor.sizes(exchange.body, exchange.counter, exchange.caller.tenant)

    def _note(self, exchange: Exchange, facts: RequestFacts, counted: int | None, end: Finished) -> None:
        """Remember the size of a request that succeeded, or a lower bound."""
        if end.empty:
            return
        sizes = [] if counted is None else [counted]
        if end.prompt:
            sizes.append(int(end.prompt / self._budgets.factor(exchange)))
        self._runtime.limits.learned.answered(*exchange.place, min(sizes, default=facts.least))

    def _before(self, facts: RequestFacts, end: Finished) -> list[EarlierTurn]:
        """Return the earlier turns of the conversation, oldest first, and remember this one.

        The result is empty unless the conversation has grown while the reported size has changed little. A compacted
        request starts the conversation again.
        """
        remembered = self._turns.pop(facts.conversation, ())
        if facts.compacted:
            return []
        turn = replace(facts.turn, reported=end.prompt or 0)
        earlier = [one for one in facts.earlier if one.turn in remembered]
        self._turns[facts.conversation] = (*remembered, turn)[-TURNS:] if turn.reported else remembered
        # The reported size must not have grown though the conversation has.
        least = (GROWN - 1) * turn.reported * BYTES_A_TOKEN_AT_MOST
        stalled = any(
            turn.reported <= one.turn.reported * (1 + SAME) and turn.size - one.turn.size >= least for one in earlier
        )
        return earlier if facts.messages and stalled else []

    async def _cut(
        self,
        exchange: Exchange,
        facts: RequestFacts,
        end: Finished,
        before: Sequence[EarlierTurn],
        counted: int | None,
        factor: float,
    ) -> tuple[int | None, Overflow | None]:
        """Return the proxy's count of a prompt, and the overflow if the upstream cut it."""
        if facts.sizes is None:
            fixed, sizes = await self._sizes(exchange)
            before = _with_calls(exchange.dialect.evidence, before, exchange.body.units, sizes)
        else:
            fixed, sizes = facts.sizes
        turns = [one.turn for one in before]
        counts = [
            fixed + sum(sizes[: turn.messages]) + (one.replaced or sizes[turn.messages])
            for one, turn in zip(before, turns, strict=True)
        ]
        full = [counts_in_full(int(factor * count), turn.reported) for count, turn in zip(counts, turns, strict=True)]
        tools = any(
            agreed and factor * one.calls >= SHOWS_TOOLS * one.turn.reported
            for agreed, one in zip(full, before, strict=True)
        )
        counter = exchange.counter
        assert counter is not None  # noqa: S101 - requests without a counter have no feedback
        count = partial(_kept, facts.messages, exchange.dialect.evidence, counter, tools=tools)
        kept = await asyncio.to_thread(count) if sum(map(len, facts.messages)) > INLINE_BYTES else count()
        loose = [0, *accumulate(max(0, size - text - FRAME) for size, text in zip(sizes, kept, strict=True))]
        sent = [
            EarlierPrompt(
                one.turn.reported,
                int(factor * (sum(kept[one.turn.messages + (not one.replaced) :]) - one.replaced)),
                agreed,
                int(factor * loose[one.turn.messages + 1]),
                one.turn.reported / max(1, whole),
            )
            for one, agreed, whole in zip(before, full, counts, strict=True)
        ]
        sent = without_overstated(sent, (end.prompt or 0) / max(1, fixed + sum(sizes)))
        counted = fixed + sum(sizes) if counted is None else counted
        newest = int(factor * sum(sizes[turns[-1].messages :]))
        window = exchange.profile.context_window
        return counted, cut_prompt(end, int(factor * counted), newest, sent, window)


def _kept(messages: Sequence[bytes], evidence: Evidence, counter: Counter, *, tools: bool) -> list[int]:
    """Return the tokens of each message that every chat template keeps. ``tools``: this upstream's keeps calls."""
    kept = [counter.text(evidence.kept_text(message, tools=tools)) for message in messages]
    if tools:
        for index, message in enumerate(messages):
            kept[index] += sum(counter.text(text) for _, text in counter.format.arguments(message))
    return kept


def _with_calls(
    evidence: Evidence, before: Sequence[EarlierTurn], messages: Sequence[bytes], sizes: Sequence[int]
) -> tuple[EarlierTurn, ...]:
    calls = [size if evidence.has_calls(message) else 0 for message, size in zip(messages, sizes, strict=True)]
    return tuple(replace(one, calls=sum(calls[: one.turn.messages])) for one in before)


def _turn(body: Request) -> tuple[SentTurn, Callable[[int], int]]:
    """Return a request's turn, and a function that returns the digest of a number of its first messages."""
    units, last, size = body.units[:-1], body.units[-1], len(body.raw)
    if b'"cache_control"' in body.raw:
        units = [_BREAKPOINT.sub(b"", unit) for unit in units]
    digests = list(map(xxhash.xxh3_64_digest, units))

    def mark(count: int) -> int:
        return xxhash.xxh3_64_intdigest(b"".join(digests[:count]))

    around = sum(map(len, body.overhead))
    return SentTurn(size, around, 0, len(units), mark(len(units)), len(last), zlib.crc32(last)), mark
