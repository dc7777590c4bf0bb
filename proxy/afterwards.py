"""What is learned from an answer once it is out: how the upstream counts, and whether it left out a part of the prompt.

Nobody waits for this: the client has the whole answer.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from proxy.calibration import LEAST_COUNTED
from proxy.compactor import Outcome
from proxy.comparable import comparable
from proxy.exchange import Exchange
from proxy.limits import shown_by
from proxy.observe.metrics import SILENT
from proxy.room import Room
from proxy.service import Service
from proxy.tokens import has_remote_media
from proxy.upstream.ending import Tail
from proxy.upstream.opening import Opening
from proxy.upstream.overflow.silent import GROWN, HALF, SAME, Finished, Sent, silent_overflow

log = structlog.get_logger(__name__)

WATCHED_BYTES = 4_096
"""Smaller requests fit into the smallest windows in use."""

BYTES_A_TOKEN = 6
"""Bytes of a request for each token that an upstream reports, from which its own count is worth comparing with ours."""

CONVERSATIONS = 1_000
"""So many are remembered, the latest ones, ..."""

TURNS = 4
"""... and so many of their latest turns."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An earlier request of a conversation: its bytes as it came, its tokens if they were counted, those reported."""

    size: int
    counted: int | None
    reported: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that was answered, and the end of its answer. ``wanted``: its count is wanted for the ratio alone."""

    exchange: Exchange
    outcome: Outcome
    tail: Tail
    wanted: bool


class Afterwards:
    """Looks at answers that are out."""

    def __init__(self, service: Service, room: Room, count: Callable[[Exchange, Outcome], Awaitable[int]]) -> None:
        """``count`` counts the tokens of a request as it was sent."""
        self._service = service
        self._room = room
        self._count = count
        self._turns: OrderedDict[bytes, tuple[Turn, ...]] = OrderedDict()

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
        """Learn from an answer that is out."""
        exchange, outcome = seen.exchange, seen.outcome
        end = seen.tail.finished()
        # What images and sound cost is an estimate in each request anew.
        if has_remote_media(exchange.body.raw) if outcome.estimated is None else outcome.estimated:
            return
        size, counted = len(exchange.body.raw), outcome.sent
        before = self._before(exchange, Turn(size, counted, end.prompt or 0))
        if counted is None and (seen.wanted or _odd(end, size) or _still(end, size, before)):
            counted = await self._counted(exchange, outcome)
        if counted is None:
            return
        factor = self._room.factor(exchange)
        earlier = [Sent(int(factor * (turn.counted or counted * turn.size / size)), turn.reported) for turn in before]
        overflow = silent_overflow(
            end,
            int(counted * factor),
            window=self._room.window(exchange),
            asked=outcome.output or exchange.body.max_output,
            before=earlier,
        )
        if overflow is not None:
            SILENT.inc()
            log.info("overflow.silent", upstream=exchange.route.upstream, counted=counted, limit=overflow.limit)
            if (shown := shown_by(overflow, counted, factor)) is not None:
                self._room.learn(exchange, shown)
            return
        self._service.learned.prove(*exchange.place, counted, end.prompt or None, factor)
        calibration = self._service.calibration
        if end.prompt and calibration.wants(*exchange.place) and comparable(exchange.body.raw):
            calibration.note(*exchange.place, counted, end.prompt)

    def _before(self, exchange: Exchange, turn: Turn) -> tuple[Turn, ...]:
        """The latest turns of the conversation whose usage is known; this one is kept for the next."""
        conversation = _conversation(exchange)
        before = self._turns.get(conversation, ())
        if turn.reported:
            self._turns[conversation] = (*before, turn)[-TURNS:]
            self._turns.move_to_end(conversation)
            if len(self._turns) > CONVERSATIONS:
                self._turns.popitem(last=False)
        return before

    async def _counted(self, exchange: Exchange, outcome: Outcome) -> int | None:
        """Tokens of a request that was sent as it came; ``None`` where counting failed, which is logged."""
        try:
            return await self._count(exchange, outcome)
        except Exception as error:  # as in compaction: the fault is ours, and the caller has the answer
            log.exception("counting.failed", error=type(error).__name__)
            return None


def _odd(end: Finished, size: int) -> bool:
    """Whether the end of an answer to a request of so many bytes, which nobody counted, asks for a closer look."""
    if end.prompt is not None and end.prompt * BYTES_A_TOKEN < size:
        return True
    return end.empty or end.finish_reason not in (None, "stop", "tool_calls", "length", "function_call")


def _still(end: Finished, size: int, before: Sequence[Turn]) -> bool:
    """Whether the reported size stands still while the conversation grows."""
    reported = end.prompt or 0
    return any(
        HALF * turn.reported <= reported <= (1 + SAME) * turn.reported and size >= GROWN * turn.size for turn in before
    )


def _conversation(exchange: Exchange) -> bytes:
    """The same for all turns of a conversation, and hardly for another one."""
    digest = hashlib.blake2b("\0".join(exchange.place).encode("utf-8", "surrogatepass"), digest_size=16)
    for message in exchange.body.messages[:2]:
        digest.update(b"\0")
        digest.update(message)
    return digest.digest()
