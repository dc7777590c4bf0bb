"""Learn from a complete response how the upstream counts, and whether it dropped a part of the prompt.

This doesn't delay the client, which has the whole response.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import structlog
from cachetools import LRUCache

from proxy.dialects.chat.comparable import adds_text, comparable
from proxy.dialects.chat.counting import Counter
from proxy.dialects.chat.request import ChatRequest
from proxy.dialects.chat.usage import AnswerTail
from proxy.limits.calibration import LEAST_COUNTED, plausible
from proxy.limits.learned import limit_from_usage
from proxy.overflow import Overflow
from proxy.overflow.silent import (
    GROWN,
    WAVERING,
    Finished,
    Sent,
    asks_for_cuts,
    counts_in_full,
    cut_prompt,
    has_calls,
    kept_text,
)
from proxy.pipeline.budget import TokenBudget, TokenBudgets
from proxy.pipeline.context import ConversationContext
from proxy.pipeline.job import CompactionInput
from proxy.pipeline.outcome import Outcome
from proxy.pipeline.response_start import ResponseStart
from proxy.pipeline.services import Services
from proxy.telemetry.metrics import SILENT
from proxy.tokens import has_remote_media

log = structlog.get_logger(__name__)

WATCHED_BYTES = 4_096
"""Smaller requests fit into the smallest windows in use."""

BYTES_A_TOKEN = 8
"""Bytes per token for a lower bound on the tokens of an uncounted request."""

BYTES_A_TOKEN_AT_MOST = 2
"""Bytes per token for an upper bound on the tokens of a message that the proxy no longer has."""

AT_ONCE_BYTES = 32_768
"""Bytes of messages that are counted on the event loop. More are counted in a thread."""

CONVERSATIONS = 1_000
"""Conversations that are remembered, the latest ones, ..."""

TURNS = 8
"""... and their latest turns."""

SHOWS_TOOLS = 0.2
"""Share of a prompt that tool calls and results must have for its reported size to show that templates keep them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An earlier request of a conversation that was sent as it came.

    ``size`` is in bytes, ``reported`` in the upstream's tokens. ``messages`` is the number of messages but for the last
    one, which some clients replace in each turn; ``mark`` is a checksum of the one before it. ``last`` is the size of
    the last one in bytes and ``last_mark`` its checksum.
    """

    size: int
    reported: int
    messages: int
    mark: int
    last: int
    last_mark: int

    def begins(self, messages: Sequence[msgspec.Raw]) -> bool:
        """Return whether these messages seem to go on from this turn's, and are more."""
        if len(messages) <= self.messages + 1:
            return False
        return self.messages == 0 or zlib.crc32(messages[self.messages - 1]) == self.mark

    def replaced(self, messages: Sequence[msgspec.Raw]) -> int:
        """Return the tokens, at most, of this turn's last message if these messages have another one in its place."""
        return 0 if zlib.crc32(messages[self.messages]) == self.last_mark else self.last // BYTES_A_TOKEN_AT_MOST


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier turn that a request goes on from.

    ``replaced`` are the tokens, at most, of its last message if the request has another one in its place. ``calls`` are
    the tokens of tool calls and results among the messages that both have; zero unless they were looked for.
    """

    turn: Turn
    replaced: int
    calls: int = 0


class Known(msgspec.Struct, eq=False, frozen=True):
    """The facts about a request that its answer is compared with. They don't refer to its body.

    ``counted``, ``least``, ``fixed`` and ``sizes`` are in tokens: the whole request as it was sent, a lower bound,
    tools and framing, and each message as it came. ``counted`` and ``sizes`` are ``None`` if nobody counted them.
    ``estimated`` says whether the request has images or sound, ``asked`` the output it asks for. ``compacted`` says
    that the messages were changed.

    ``turn`` lacks the reported size, ``conversation`` is a hash, and ``earlier`` has the turns that the request goes on
    from, oldest first. ``added`` are the messages since the oldest one. It is empty unless the conversation has grown
    so much that an upstream which reports the same size must have cut it.
    """

    counted: int | None
    least: int
    asked: int | None
    estimated: bool
    compacted: bool
    comparable: bool
    turn: Turn
    conversation: int
    earlier: tuple[Earlier, ...]
    sizes: tuple[int, list[int]] | None
    added: tuple[bytes, ...]


class Seen(msgspec.Struct, eq=False, frozen=True):
    """A request that was answered, and the end of its answer.

    ``known`` is ``None`` if nobody counted the request: it keeps its body then. ``wanted`` says that its count is
    needed for the ratio between the upstream's tokens and ours.
    """

    context: ConversationContext
    outcome: Outcome | None
    known: Known | None
    tail: AnswerTail
    wanted: bool

    @property
    def size(self) -> int:
        """The bytes of messages that are kept until the answer is out, without the request's body."""
        return 0 if self.known is None else sum(map(len, self.known.added))


class UsageFeedback:
    """Learn from responses that clients have received."""

    def __init__(
        self,
        services: Services,
        budgets: TokenBudgets,
        case: Callable[[ConversationContext, TokenBudget], CompactionInput],
    ) -> None:
        """``case`` returns the input of a request's compaction."""
        self._services = services
        self._budgets = budgets
        self._case = case
        self._turns: LRUCache[int, tuple[Turn, ...]] = LRUCache(CONVERSATIONS)

    def watch(self, context: ConversationContext, opening: ResponseStart, outcome: Outcome) -> Seen | None:
        """Prepare to learn from an answer that is about to be sent on. Return ``None`` if it can't show anything.

        The result refers to the request's body only if nobody counted the request. A fault of the proxy is logged, and
        the client gets its answer.
        """
        try:
            return self._watch(context, opening, outcome)
        except Exception as error:  # as in `record`: the client gets its response
            log.exception("counting.failed", error=type(error).__name__)
            return None

    def _watch(self, context: ConversationContext, opening: ResponseStart, outcome: Outcome) -> Seen | None:
        if opening.answer.status != 200 or opening.overflow is not None or not context.body.messages:
            return None
        if outcome.verdict in ("off", "failed"):
            return None
        place, size = context.place, len(context.body.raw)
        wanted = False
        if outcome.after is None:
            wanted = size > LEAST_COUNTED and self._services.calibration.worth_counting(*place)
            of_use = wanted
        else:
            of_use = self._services.calibration.wants(*place) or self._services.learned.below(*place, outcome.after)
        if not of_use and size <= WATCHED_BYTES:
            return None
        if outcome.after is None:
            return Seen(context, outcome, None, AnswerTail(), wanted)
        return Seen(context, None, self._known(context, outcome, compare=True), AnswerTail(), wanted)

    def _known(self, context: ConversationContext, outcome: Outcome, *, compare: bool) -> Known:
        """Return the facts about a request whose body is still there.

        ``compare`` is true if our count of the request is known, or will be, so that it can be compared with the
        reported one.
        """
        body, conversation = context.body, _conversation(context)
        turn, compacted = _turn(body), outcome.messages is not None
        estimated = has_remote_media(body.raw) if outcome.estimated is None else outcome.estimated
        before = [] if compacted else [one for one in self._turns.get(conversation, ()) if one.begins(body.messages)]
        earlier = tuple(Earlier(one, one.replaced(body.messages)) for one in before)
        added: tuple[bytes, ...] = ()
        if not estimated and _may_stand_still(turn, before) and not (asks_for_cuts(body.raw) or adds_text(body.raw)):
            # Copies: an undecoded message refers to the whole body.
            added = tuple(bytes(message) for message in body.messages[before[0].messages :])
            if outcome.sizes is not None:
                earlier = _with_calls(earlier, body.messages, outcome.sizes[1])
        bounded = estimated and not has_remote_media(body.raw)
        wants = compare and self._services.calibration.wants(*context.place)
        return Known(
            counted=outcome.after,
            least=len(body.raw) // BYTES_A_TOKEN if bounded or not estimated else 0,
            asked=outcome.output or body.max_output,
            estimated=estimated,
            compacted=compacted,
            comparable=wants and not estimated and comparable(body.raw),
            turn=turn,
            conversation=conversation,
            earlier=earlier,
            sizes=outcome.sizes if added else None,
            added=added,
        )

    async def record(self, seen: Seen) -> None:
        """Learn from a complete response. Log errors instead of raising them."""
        try:
            known, outcome, end = seen.known, seen.outcome, seen.tail.finished()
            count = outcome is not None and (seen.wanted or _odd(end))
            if known is None and outcome is not None:
                known = self._known(seen.context, outcome, compare=count)
            if known is not None:
                await self._look(seen.context, outcome if count else None, known, end)
        except Exception as error:  # the client has its response
            log.exception("counting.failed", error=type(error).__name__)

    async def _look(self, context: ConversationContext, uncounted: Outcome | None, known: Known, end: Finished) -> None:
        """Learn from the end of an answer. ``uncounted`` is the outcome of a request that must be counted now."""
        # The tokens of images and sound are an estimate.
        if known.estimated:
            self._note(context, known, None, end)
            return
        factor = self._budgets.factor(context)
        counted = known.counted
        if uncounted is not None:
            counted = await self._services.compactor.size(self._case(context, self._budgets.of(context)), uncounted)
        overflow = None
        if counted is not None:
            overflow = self._budgets.silent(
                context, self._budgets.window(context), end, int(counted * factor), known.asked
            )
        before = self._before(known, end)
        if overflow is None and before:
            counted, overflow = await self._cut(context, known, end, before, counted, factor)
        if overflow is not None and counted is not None:
            SILENT.inc()
            log.info("overflow.silent", upstream=context.route.upstream, counted=counted, limit=overflow.limit)
            if (shown := limit_from_usage(overflow, counted, factor)) is not None:
                self._budgets.learn(context, shown)
            return
        self._note(context, known, counted, end)
        if counted is None:
            return
        self._services.learned.prove(*context.place, counted, end.prompt or None, factor)
        calibration = self._services.calibration
        if not calibration.wants(*context.place):
            return
        if known.comparable and end.prompt and plausible(counted, end.prompt):
            calibration.note(*context.place, counted, end.prompt)
        else:
            calibration.miss(*context.place, counted)

    def _note(self, context: ConversationContext, known: Known, counted: int | None, end: Finished) -> None:
        """Remember the size of a request that was answered, or a lower bound of it."""
        if end.empty:
            return
        sizes = [] if counted is None else [counted]
        if end.prompt:
            sizes.append(int(end.prompt / self._budgets.factor(context)))
        self._services.learned.answered(*context.place, min(sizes, default=known.least))

    def _before(self, known: Known, end: Finished) -> list[Earlier]:
        """Return the earlier turns of the conversation, oldest first, and remember this one for the next.

        The result is empty unless the reported size has changed little since the last turn, while the conversation has
        grown. A request that was compacted begins the conversation again.
        """
        remembered = self._turns.pop(known.conversation, ())
        if known.compacted:
            return []
        turn = replace(known.turn, reported=end.prompt or 0)
        earlier = [one for one in known.earlier if one.turn in remembered]
        before = tuple(one.turn for one in earlier)
        self._turns[known.conversation] = (*before, turn)[-TURNS:] if turn.reported else before
        return earlier if known.added and _still(turn, before) else []

    async def _cut(
        self,
        context: ConversationContext,
        known: Known,
        end: Finished,
        before: Sequence[Earlier],
        counted: int | None,
        factor: float,
    ) -> tuple[int | None, Overflow | None]:
        """Return our own count of a prompt, if it was counted, and the overflow if the upstream cut it."""
        if known.sizes is None:
            fixed, sizes = await self._services.compactor.sizes(self._case(context, self._budgets.of(context)))
            before = _with_calls(before, context.body.messages, sizes)
        else:
            fixed, sizes = known.sizes
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
        added, counter = known.added, context.counter
        start = len(sizes) - len(added)
        assert counter is not None  # noqa: S101 - a request that can't be measured isn't watched
        large = sum(map(len, added)) > AT_ONCE_BYTES
        kept = (
            await asyncio.to_thread(_kept, counter, added, tools=tools) if large else _kept(counter, added, tools=tools)
        )
        sent = [
            Sent(
                one.turn.reported,
                int(factor * (sum(kept[one.turn.messages - start + (not one.replaced) :]) - one.replaced)),
                agreed,
            )
            for one, agreed in zip(before, full, strict=True)
        ]
        counted = fixed + sum(sizes) if counted is None else counted
        newest = int(factor * sum(sizes[turns[-1].messages :]))
        window = context.profile.context_window
        return counted, cut_prompt(end, int(factor * counted), newest, sent, window)


def _with_calls(before: Sequence[Earlier], messages: Sequence[bytes], sizes: Sequence[int]) -> tuple[Earlier, ...]:
    """Return earlier turns with the tokens of the tool calls and results in them."""
    calls = [size if has_calls(message) else 0 for message, size in zip(messages, sizes, strict=True)]
    return tuple(replace(one, calls=sum(calls[: one.turn.messages])) for one in before)


def _kept(counter: Counter, messages: Sequence[bytes], *, tools: bool) -> list[int]:
    """Return the tokens of each message that every chat template keeps."""
    return [counter.text(kept_text(msgspec.json.decode(message), tools=tools)) for message in messages]


def _odd(end: Finished) -> bool:
    """Return whether the end of a response is unusual enough to count its request."""
    return end.empty or end.finish_reason not in (None, "stop", "tool_calls", "length", "function_call")


def _turn(body: ChatRequest) -> Turn:
    *others, last = body.messages
    mark = zlib.crc32(others[-1]) if others else 0
    return Turn(len(body.raw), 0, len(others), mark, len(bytes(last)), zlib.crc32(last))


def _still(now: Turn, before: Sequence[Turn]) -> bool:
    """Return whether the reported size stays about the same while the conversation grows."""
    if not before or not now.reported:
        return False
    near = [turn for turn in before if abs(turn.reported - now.reported) <= WAVERING * now.reported]
    return before[-1] in near and now.size - near[0].size >= (GROWN - 1) * now.reported * BYTES_A_TOKEN_AT_MOST


def _may_stand_still(now: Turn, before: Sequence[Turn]) -> bool:
    """Return whether ``_still`` can be true for some reported size."""
    if not before:
        return False
    least = before[-1].reported / (1 + WAVERING)
    grown = now.size - min(turn.size for turn in before)
    return grown >= (GROWN - 1) * least * BYTES_A_TOKEN_AT_MOST


def _conversation(context: ConversationContext) -> int:
    """Return a hash that all turns of a conversation share, and that hardly any other conversation has."""
    messages = tuple(bytes(message) for message in context.body.messages[:2])
    return hash((context.place, messages))
