"""Answer the calls of the hidden tool, and continue the response until the client's part of it is complete."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import structlog

from proxy.dialects.rounds import HiddenRound, HiddenTool, Round, StreamedRound, VisibleResponse, decoded
from proxy.errors import ProxyError, UpstreamInterrupted, UpstreamTimeout
from proxy.pipeline.context import ConversationContext, RecallState
from proxy.pipeline.response_start import ResponseStart, is_encoded
from proxy.pipeline.sending import STOPPED
from proxy.recall.rounds import HiddenRounds
from proxy.recall.tool import MOST_CALLS, NAME, NO_MORE, TOO_MANY, ConversationArchive
from proxy.telemetry.metrics import RECALLS
from proxy.upstream.transport import Answer

log = structlog.get_logger(__name__)

DAY = 86_400.0

SHARE = 10
"""The result of one call has at most this part of the budget."""

LEAST = 200
"""Tokens. With less room, a result says that there is none."""

LARGEST = 16_000_000
"""Bytes of a response that isn't streamed. A longer one passes unread."""

NO_ROOM = "There is no room for earlier messages in this request. Continue without them."

INTERRUPTED = "The upstream did not continue its response after it read earlier messages. Try again."

Resend = Callable[[bytes, float], Awaitable[ResponseStart]]
"""Sends another body for the same request, before a time of the event loop's clock. Raises ``ProxyError``."""


@dataclass(frozen=True, slots=True)
class Room:
    """Tokens for the results of all calls, for each of them, and for results and the model's own messages together."""

    left: int
    each: int
    whole: float = math.inf

    def within(self, budget: int, used: int) -> Room:
        """Return the room in a request of ``used`` tokens."""
        return Room(self.left, min(self.each, budget // SHARE), budget - used)


class RecallRounds:
    """The rounds of one response."""

    def __init__(
        self,
        context: ConversationContext,
        state: RecallState,
        hidden: HiddenTool,
        memory: HiddenRounds,
        archive: ConversationArchive,
        room: Room,
        sent: bytes,
        resend: Resend,
    ) -> None:
        """``archive`` is the conversation's. ``sent`` is the body with the tool."""
        self._context = context
        self._state = state
        self._hidden = hidden
        self._memory = memory
        self._archive = archive
        self._room = room
        self._sent = sent
        self._resend = resend
        self._response = self._new_response()
        self._before: list[bytes] = []
        self._answered = 0
        self._plain = False
        self._remembered = False
        self._full = False
        self._last = False
        self._streams = False

    def stream(self, start: ResponseStart) -> ResponseStart:
        """Return a stream with the text and the client's calls of all rounds, as they arrive."""
        self._streams = True
        events = self._events(start)

        async def close() -> None:
            await events.aclose()
            self._archive.close()
            await self._context.close_answer()

        answer = Answer(200, start.answer.headers, events, close, keeps_request=True)
        return ResponseStart(answer, b"", False, None, start.answers, written=True)

    async def whole(self, start: ResponseStart) -> ResponseStart:
        """Return a response with the text and the client's calls of all rounds, before the request's deadline.

        Raises ``ProxyError``.
        """
        limit = self._context.clock.until(self._context.deadline)
        try:
            with limit:
                return await self._whole(start)
        except TimeoutError as error:
            if not limit.expired:
                raise
            raise UpstreamTimeout(STOPPED) from error
        finally:
            self._archive.close()

    async def _whole(self, start: ResponseStart) -> ResponseStart:
        while True:
            body, complete = await _rest(start)
            if not complete or (self._plain and not _is_response(start, body)):
                return ResponseStart(start.answer, body, False, None, start.answers, written=True)
            round = self._hidden.whole(NAME, body, self._response)
            if not self._follows(round):
                break
            start = await self._next(round)
            if start.answer.status != 200 or is_encoded(start.answer):
                return start
        if round.hidden or self._answered:
            await self._remember(round)
        if round.hidden or self._answered or round.changed:
            body = round.body()
        headers = [pair for pair in start.answer.headers if pair[0] not in ("content-length", "transfer-encoding")]
        answer = Answer(200, [*headers, ("content-length", str(len(body)))], start.answer.body, start.answer.close)
        return ResponseStart(answer, body, True, None, start.answers, written=True)

    async def _events(self, start: ResponseStart) -> AsyncGenerator[bytes, None]:
        while True:
            round = self._hidden.round(NAME, self._response, first=not self._answered)
            async for chunk in _chunks(start):
                if out := round.feed(chunk):
                    yield out
                if round.closing and not self._follows(round):
                    yield await self._closing(round)
            if out := round.finish():
                yield out
            if not self._follows(round):
                break
            async for beat in self._while_waiting(following := asyncio.ensure_future(self._next(round))):
                yield beat
            start = following.result()
            if start.answer.status != 200 or not start.is_stream:
                raise UpstreamInterrupted(INTERRUPTED)
        if out := await self._closing(round):
            yield out

    async def _closing(self, round: StreamedRound) -> bytes:
        """Return the events that end the response, and store the round before the client's next request."""
        if (round.hidden or self._before) and not self._remembered:
            self._remembered = True
            await self._remember(round)
        out = bytes(round.closing)
        round.closing.clear()
        return out

    async def _while_waiting(self, following: asyncio.Future[ResponseStart]) -> AsyncIterator[bytes]:
        """Yield a heartbeat now and then until the upstream has answered."""
        every = self._context.configuration.settings.server.keepalive
        try:
            while not (await asyncio.wait([following], timeout=every))[0]:
                yield self._context.dialect.heartbeat
        finally:
            if not following.done():
                following.cancel()
                await asyncio.wait([following])
        if (error := following.exception()) is not None:
            raise error if isinstance(error, UpstreamInterrupted) else UpstreamInterrupted(INTERRUPTED) from error

    def _follows(self, round: Round) -> bool:
        """Return whether the model waits for results, and for nothing from the client."""
        waits = bool(round.hidden) and not round.visible and not self._remembered
        return waits and not self._plain and not (self._last and self._has_text)

    @property
    def _has_text(self) -> bool:
        return bool(self._response.text.strip() or self._response.calls)

    async def _next(self, round: Round) -> ResponseStart:
        """Answer a round's calls, and return the start of the next one. Raises ``ProxyError``.

        If the upstream refuses to continue after a text, try shorter results. If that fails, too, or the model calls
        the tool although it may not, send the request without the tool, unless the client has a part of the response.
        """
        await self._context.close_answer()
        if self._last:
            return await self._without_tool()
        self._answered += 1
        last = self._full or self._answered > self._context.caller.policy.recall.max_rounds
        self._last, room = last, self._room
        results = await self._results(round, last=last)
        before = [*self._before, round.unit, *results]
        start = await self._tried(self._hidden.continued(self._sent, before, last=last))
        if start is not None:
            self._before = before
            RECALLS.labels(outcome="answered").inc()
            self._context.record.recalls += 1
            return start
        RECALLS.labels(outcome="failed").inc()
        if self._has_text:
            self._room = replace(room, each=room.each // 2)
            before = [*self._before, round.unit, *await self._results(round, last=last)]
            start = await self._tried(self._hidden.continued(self._sent, before, last=last))
            if start is not None:
                self._before = before
                self._context.record.recalls += 1
                return start
            if self._streams:
                raise UpstreamInterrupted(INTERRUPTED)
        return await self._without_tool()

    async def _without_tool(self) -> ResponseStart:
        """Send the request without the tool. Raises ``ProxyError``."""
        self._plain, self._before = True, []
        if not self._streams:  # the client has nothing yet
            self._response = self._new_response()
        return await self._sent_again(self._hidden.without_tool(self._sent))

    def _new_response(self) -> VisibleResponse:
        response = self._hidden.response()
        response.usage = self._state.usage
        return response

    async def _tried(self, body: bytes) -> ResponseStart | None:
        """Return a response to another body, or ``None`` if it isn't one to continue with."""
        try:
            start = await self._sent_again(body)
            if await self._continues(start):
                return start
        except ProxyError as error:
            log.warning("recall.not_continued", reason=error.code)
            return None
        reason = "body" if start.answer.status == 200 else "status"
        log.warning("recall.not_continued", reason=reason, status=start.answer.status)
        return None

    async def _continues(self, start: ResponseStart) -> bool:
        """Return whether a response has content. Read all of one that isn't streamed. Raises ``ProxyError``."""
        if start.answer.status != 200 or is_encoded(start.answer):
            return False
        if self._streams:
            return start.is_stream and start.error is None and not start.complete and not start.ended
        start.first, start.complete = await _rest(start)
        return not start.complete or _is_response(start, start.first)

    async def _sent_again(self, body: bytes) -> ResponseStart:
        """Send another body. A stream has begun, so each of its rounds has a deadline of its own."""
        context, deadline = self._context, self._context.deadline
        if self._streams:
            deadline = context.clock.now() + context.configuration.settings.server.deadline
        return await self._resend(body, deadline)

    async def _results(self, round: Round, *, last: bool) -> list[bytes]:
        """Return the messages that answer a round's calls. They leave room for two more rounds of this size."""
        counter = self._context.counter
        assert counter is not None  # noqa: S101 - requests without a counter get no tool
        most = self._context.caller.policy.recall.max_rounds
        size = counter.format.tokens(round.unit)
        left, whole, results = self._room.left, self._room.whole - 3 * size, []
        for number, call in enumerate(round.hidden):
            room = min(self._room.each, left, whole)
            if last:
                text = NO_MORE
            elif number >= MOST_CALLS:
                text = TOO_MANY
            elif room < LEAST:
                self._full, text = whole < LEAST, NO_ROOM
            else:
                text = await self._archive.result(call.arguments, counter.text, int(room))
            if self._answered == most and not last:
                text = f"{text}\n\n{NO_MORE}"
            result = self._hidden.result(call.id, text)
            tokens = counter.format.tokens(result)
            left, whole = left - tokens, whole - tokens
            results.append(result)
        self._room = replace(self._room, left=left, whole=whole + 2 * size)
        return results

    async def _remember(self, round: Round) -> None:
        """Store what the client doesn't see of this response, to put it back later."""
        mixed = bool(round.hidden) and bool(round.visible) and not self._plain
        results = await self._results(round, last=False) if mixed else []
        if mixed:
            RECALLS.labels(outcome="mixed").inc()
            self._context.record.recalls += 1
        archive = self._context.caller.policy.archive
        if archive is None or self._plain:
            return
        hidden = HiddenRound(
            prefix=self._state.prefix,
            text=self._response.text,
            calls=list(self._response.calls),
            before=self._before,
            own_text=round.content if self._before else None,
            hidden_calls=[(call.place, call.raw) for call in round.hidden] if mixed else [],
            results=results,
            own=round.own if mixed or self._before else None,
        )
        seen = hidden.prefix, hidden.text, hidden.calls
        others = [round for round in self._state.rounds if (round.prefix, round.text, round.calls) != seen]
        rounds = [*others, hidden]
        await self._memory.keep(self._state.conversation, self._state.messages, rounds, archive.days * DAY)


async def _chunks(start: ResponseStart) -> AsyncIterator[bytes]:
    yield start.first
    async for chunk in start.answer.body:
        yield chunk


def _is_response(start: ResponseStart, body: bytes) -> bool:
    """Return whether a whole body is the API's, and not an error."""
    return start.written and decoded(body) is not None


async def _rest(start: ResponseStart) -> tuple[bytes, bool]:
    """Return a whole body; false if it is too long to read."""
    body = bytearray(start.first)
    if not start.complete:
        async for chunk in start.answer.body:
            body += chunk
            if len(body) > LARGEST:
                return bytes(body), False
    return bytes(body), True
