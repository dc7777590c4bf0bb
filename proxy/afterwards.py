"""Learn from an answer once it is out: how the upstream counts, and whether it left out a part of the prompt.

Nobody waits for this: the client has the whole answer.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from proxy.body import ChatBody
from proxy.calibration import LEAST_COUNTED, plausible
from proxy.compactor import Case, Outcome
from proxy.comparable import adds_text, comparable
from proxy.exchange import Exchange
from proxy.limits import shown_by
from proxy.observe.metrics import SILENT
from proxy.room import Room
from proxy.service import Service
from proxy.tokens import has_remote_media
from proxy.upstream.ending import Tail
from proxy.upstream.opening import Opening
from proxy.upstream.overflow import Overflow
from proxy.upstream.overflow.lasting import asks_for_cuts, has_calls, kept_text
from proxy.upstream.overflow.silent import GROWN, WAVERING, Finished, Sent, counts_in_full, cut_prompt

log = structlog.get_logger(__name__)

WATCHED_BYTES = 4_096
"""Smaller requests fit into the smallest windows in use."""

BYTES_A_TOKEN = 8
"""Bytes of a request for each token that it has at least, if nobody counted it."""

BYTES_A_TOKEN_AT_MOST = 2
"""Bytes of a message for each token that it has at most, if it's gone and nobody can count it."""

AT_ONCE_BYTES = 32_768
"""Bytes of messages that are counted at once. More are counted in a thread."""

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


class Seen(msgspec.Struct, eq=False, frozen=True):
    """A request that was answered, and the end of its answer. ``wanted``: its count is wanted for the ratio alone."""

    exchange: Exchange
    outcome: Outcome
    tail: Tail
    wanted: bool


class Afterwards:
    """Looks at answers that are out."""

    def __init__(self, service: Service, room: Room, case: Callable[[Exchange], Case]) -> None:
        """``case`` returns the case that an exchange is for the compactor."""
        self._service = service
        self._room = room
        self._case = case
        self._turns: OrderedDict[int, tuple[Turn, ...]] = OrderedDict()

    def watch(self, exchange: Exchange, opening: Opening, outcome: Outcome) -> Seen | None:
        """What is to be known of an answer that is about to be sent on; ``None`` where nothing could be learned."""
        if opening.answer.status != 200 or opening.overflow is not None or not exchange.body.messages:
            return None
        if outcome.verdict in ("off", "failed"):
            return None
        place, size = exchange.place, len(exchange.body.raw)
        wanted = False
        if outcome.sent is None:
            wanted = size > LEAST_COUNTED and self._service.calibration.worth_counting(*place)
            of_use = wanted
        else:
            of_use = self._service.calibration.wants(*place) or self._service.learned.below(*place, outcome.sent)
        if not of_use and size <= WATCHED_BYTES:
            return None
        return Seen(exchange, outcome, Tail(), wanted)

    async def look(self, seen: Seen) -> None:
        """Learn from an answer that is out. A fault of the proxy is logged: the client has its answer."""
        try:
            await self._look(seen.exchange, seen.outcome, seen.tail.finished(), wanted=seen.wanted)
        except Exception as error:  # as in compaction: the fault is ours, and the caller has the answer
            log.exception("counting.failed", error=type(error).__name__)

    async def _look(self, exchange: Exchange, outcome: Outcome, end: Finished, *, wanted: bool) -> None:
        # The tokens of images and sound are an estimate.
        if has_remote_media(exchange.body.raw) if outcome.estimated is None else outcome.estimated:
            self._note(exchange, None, end)
            return
        factor = self._room.factor(exchange)
        counted = outcome.sent
        if counted is None and (wanted or _odd(end)):
            counted = await self._service.compactor.size(self._case(exchange), outcome)
        overflow = None
        if counted is not None:
            asked = outcome.output or exchange.body.max_output
            overflow = self._room.silent(exchange, end, int(counted * factor), asked)
        before = self._before(exchange, outcome, end)
        if overflow is None and before:
            counted, overflow = await self._cut(exchange, end, before, counted, factor)
        if overflow is not None and counted is not None:
            SILENT.inc()
            log.info("overflow.silent", upstream=exchange.route.upstream, counted=counted, limit=overflow.limit)
            if (shown := shown_by(overflow, counted, factor)) is not None:
                self._room.learn(exchange, shown)
            return
        self._note(exchange, counted, end)
        if counted is None:
            return
        self._service.learned.prove(*exchange.place, counted, end.prompt or None, factor)
        calibration = self._service.calibration
        if not end.prompt or not plausible(counted, end.prompt) or not calibration.wants(*exchange.place):
            return
        if comparable(exchange.body.raw):
            calibration.note(*exchange.place, counted, end.prompt)

    def _note(self, exchange: Exchange, counted: int | None, end: Finished) -> None:
        """Remember the size of a request that was answered, or a lower bound of it."""
        if end.empty:
            return
        sizes = [] if counted is None else [counted]
        if end.prompt:
            sizes.append(int(end.prompt / self._room.factor(exchange)))
        if not sizes and not has_remote_media(exchange.body.raw):
            sizes.append(len(exchange.body.raw) // BYTES_A_TOKEN)
        self._service.learned.answered(*exchange.place, min(sizes, default=0))

    def _before(self, exchange: Exchange, outcome: Outcome, end: Finished) -> list[Turn]:
        """Return the earlier turns of the conversation, oldest first, and remember this one for the next.

        The result is empty unless the reported size has changed little since the last turn, while the conversation has
        grown. A request that was compacted begins the conversation again.
        """
        body, conversation = exchange.body, _conversation(exchange)
        before = self._turns.pop(conversation, ())
        if outcome.messages is not None:
            return []
        turn = _turn(body, end.prompt or 0)
        before = tuple(known for known in before if known.begins(body.messages))
        self._turns[conversation] = (*before, turn)[-TURNS:] if turn.reported else before
        if len(self._turns) > CONVERSATIONS:
            self._turns.popitem(last=False)
        suspicious = _still(turn, before) and not (asks_for_cuts(body.raw) or adds_text(body.raw))
        return list(before) if suspicious else []

    async def _cut(
        self, exchange: Exchange, end: Finished, before: Sequence[Turn], counted: int | None, factor: float
    ) -> tuple[int | None, Overflow | None]:
        """Return our own count of a prompt, if it was counted, and the overflow if the upstream cut it."""
        case, messages = self._case(exchange), exchange.body.messages
        fixed, sizes = await self._service.compactor.sizes(case)
        calls = [size if has_calls(raw) else 0 for raw, size in zip(messages, sizes, strict=True)]
        gone = [turn.replaced(messages) for turn in before]
        counts = [
            fixed + sum(sizes[: turn.messages]) + (left or sizes[turn.messages])
            for turn, left in zip(before, gone, strict=True)
        ]
        full = [counts_in_full(int(factor * count), turn.reported) for count, turn in zip(counts, before, strict=True)]
        tools = any(
            agreed and factor * sum(calls[: turn.messages]) >= SHOWS_TOOLS * turn.reported
            for agreed, turn in zip(full, before, strict=True)
        )
        start = before[0].messages
        added = messages[start:]
        large = sum(map(len, map(bytes, added))) > AT_ONCE_BYTES
        kept = await asyncio.to_thread(_kept, case, added, tools=tools) if large else _kept(case, added, tools=tools)
        sent = [
            Sent(turn.reported, int(factor * (sum(kept[turn.messages - start + (not left) :]) - left)), agreed)
            for turn, agreed, left in zip(before, full, gone, strict=True)
        ]
        counted = fixed + sum(sizes) if counted is None else counted
        newest = int(factor * sum(sizes[before[-1].messages :]))
        window = exchange.profile.context_window
        return counted, cut_prompt(end, int(factor * counted), newest, sent, window)


def _kept(case: Case, messages: Sequence[msgspec.Raw], *, tools: bool) -> list[int]:
    """Return the tokens of each message that every chat template keeps."""
    return [case.counter.text(kept_text(msgspec.json.decode(message), tools=tools)) for message in messages]


def _odd(end: Finished) -> bool:
    """Return whether the end of an answer to a request that nobody counted asks for a closer look."""
    return end.empty or end.finish_reason not in (None, "stop", "tool_calls", "length", "function_call")


def _turn(body: ChatBody, reported: int) -> Turn:
    *others, last = body.messages
    mark = zlib.crc32(others[-1]) if others else 0
    return Turn(len(body.raw), reported, len(others), mark, len(bytes(last)), zlib.crc32(last))


def _still(now: Turn, before: Sequence[Turn]) -> bool:
    """Return whether the reported size stands still while the conversation grows."""
    if not before or not now.reported:
        return False
    near = [turn for turn in before if abs(turn.reported - now.reported) <= WAVERING * now.reported]
    return before[-1] in near and now.size - near[0].size >= (GROWN - 1) * now.reported * BYTES_A_TOKEN_AT_MOST


def _conversation(exchange: Exchange) -> int:
    """Return a hash that all turns of a conversation share, and that hardly any other conversation has."""
    messages = tuple(bytes(message) for message in exchange.body.messages[:2])
    return hash((exchange.place, messages))
