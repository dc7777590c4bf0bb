"""Let the model read archived messages through a tool that the client never sees.

The proxy adds the tool to a compacted request, answers its calls, and continues the response until the client's part of
it is complete. When the client sends the conversation again, the proxy puts the hidden rounds back. It doesn't do so in
a request that is surely small, or for an hour after the upstream refused the tool. Then the provider's prompt cache
ends at the first of these rounds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import structlog
import xxhash
from cachetools import TTLCache

from proxy.compaction.turn import Turn
from proxy.constants import DAY
from proxy.dialects.rounds import HiddenRound, HiddenTool, Round, StreamedRound, VisibleResponse, WholeRound, decoded
from proxy.errors import ProxyError, UpstreamInterrupted, UpstreamTimeout
from proxy.pipeline.attempt import Attempt, RecallState, Run, Tool
from proxy.pipeline.compactor import Compactor
from proxy.pipeline.exchange import Exchange, TimeLeft
from proxy.pipeline.job import CompactionInput
from proxy.pipeline.response_start import ResponseStart
from proxy.pipeline.sending import STOPPED
from proxy.recall.rounds import HiddenRounds, prefixes
from proxy.recall.tool import (
    DESCRIPTION,
    MOST_CALLS,
    NAME,
    NO_MORE,
    PARAMETERS,
    TOKENS,
    TOO_MANY,
    ConversationArchive,
    Reader,
)
from proxy.store.forgetting import drop
from proxy.store.interface import UNSTORED_TENANT
from proxy.telemetry.metrics import RECALLS
from proxy.upstream.transport import Answer

log = structlog.get_logger(__name__)

REFUSED_SECONDS = 3_600.0  # seconds for which a model gets no tool after its upstream refused a request with it
MODELS = 10_000  # models of tenants that refused the tool and are remembered
SHARE = 10  # the result of one call has at most this part of the budget
LEAST = 200  # Tokens. With less room, a result says that there is none.
LARGEST = 16_000_000  # Bytes of a response that isn't streamed. A longer one passes unread.

NO_ROOM = "There is no room for earlier messages in this request. Continue without them."

INTERRUPTED = "The upstream did not continue its response after it read earlier messages. Try again."

Resend = Callable[[bytes, TimeLeft], Awaitable[ResponseStart]]
"""Sends another body for the same request, within a time. Raises ``ProxyError``."""


class Recall:
    """The hidden tool, for the requests of one endpoint."""

    def __init__(self, reader: Reader, rounds: HiddenRounds, compactor: Compactor) -> None:
        self._reader = reader
        self._rounds = rounds
        self._compactor = compactor
        self._refusing: TTLCache[tuple[str, str, str], bool] = TTLCache(MODELS, REFUSED_SECONDS)

    async def begin(self, exchange: Exchange, case: CompactionInput) -> RecallState | None:
        """Decide whether a request may get the tool, and put back the rounds that its client didn't see.

        A request that can't get the tool, such as one with another ``tool_choice``, gets its rounds back, too.
        """
        if case.policy.recall.tool == "off" or case.mode != "enforce":
            return None
        hidden, counter, body = exchange.dialect.hidden_tool, exchange.counter, exchange.body
        if hidden is None or counter is None or not reserved(exchange) or body.references or body.continues:
            return None
        if exchange.place in self._refusing or self._compactor.untouched(case) is not None:
            return None
        offered, units = hidden.accepts(body.raw, NAME), await self._compactor.turns(case)
        if not offered and not _may_have_calls(hidden.tool_names(body.raw), units):
            return None
        answers = [place for place, turn in enumerate(units) if turn.facts.kind == "assistant"]
        chain = prefixes([turn.facts.digest for turn in units])
        conversation = _key(exchange, chain[answers[0] + 1] if answers else chain[-1])
        rounds = await self._rounds.of(conversation, answers) if answers else []
        restored, found = _restored(hidden, units, rounds, chain)
        if not offered and not found:
            return None
        tool = None
        if offered:
            definition = hidden.definition(body.raw, NAME, DESCRIPTION, PARAMETERS)
            tool = Tool(definition, counter.text(definition.decode()))
        if found:
            exchange.replace(await exchange.dialect.request.read(body.rewritten(units=restored)), original=body)
            await exchange.memory.more(exchange.body.size)
        return RecallState(hidden, conversation, rounds, found, chain[-1], len(units), tool)

    async def recover(self, run: Run, attempt: Attempt, start: ResponseStart) -> Attempt | None:
        """Return an attempt without the tool if the upstream compressed the response, so that calls are unreadable."""
        refused = start.answer.status == 200 and start.overflow is None and start.answer.is_encoded
        if not refused or run.recall is None or attempt.tool is None:
            return None
        run.recall.refused = True
        self.refuse(run.exchange, 200)
        return msgspec.structs.replace(attempt, tool=None)

    def refuse(self, exchange: Exchange, status: int) -> None:
        """Remember that the upstream refused a request for the tool with a status."""
        self._refusing[exchange.place] = True
        log.warning("recall.refused", status=status)

    async def response(
        self,
        exchange: Exchange,
        state: RecallState,
        attempt: Attempt,
        start: ResponseStart,
        sent: bytes,
        resend: Resend,
    ) -> ResponseStart:
        """Return a response without the tool's calls. It continues after them. ``sent`` is the request's body."""
        if start.answer.status != 200:
            return start
        self._rounds.answered(state.conversation, state.messages, state.rounds)
        if attempt.tool is None:
            return start
        settings = exchange.caller.policy.recall
        # One round more than `max_rounds`: a last one may mix hidden calls with the client's, and they get results.
        room = Room(settings.max_tokens * (settings.max_rounds + 1), settings.max_tokens)
        if attempt.case.budget is not None and (after := attempt.after) is not None:
            room = room.within(attempt.case.budget, after)
        # A search covers the newest checkpoint, which links to all before it, and the listed shortened messages.
        archive = self._reader.conversation(exchange.caller.tenant, attempt.outcome.archive)
        rounds = RecallRounds(exchange, state, self._rounds, archive, room, sent, resend)
        return rounds.stream(start) if start.is_stream else await rounds.whole(start)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        return drop(self._refusing, forgotten, 2)


@dataclass(frozen=True, slots=True)
class Room:
    """Tokens for the results of all calls, for each of them, and for results and the model's own messages together."""

    left: int
    each: int
    whole: float = math.inf

    def within(self, budget: int, used: int) -> Room:
        return Room(self.left, min(self.each, budget // SHARE), budget - used)


@dataclass(eq=False)
class RecallRounds:
    """The rounds of one response."""

    _exchange: Exchange
    _state: RecallState
    _memory: HiddenRounds
    _archive: ConversationArchive  # the conversation's
    _room: Room
    _sent: bytes  # the body with the tool
    _resend: Resend
    _before: list[bytes] = field(default_factory=list)  # units and results of finished rounds, for the next body
    _answered: int = 0  # rounds whose calls got results, even if the upstream didn't continue after them
    _plain: bool = False  # the request was sent without the tool, so no round follows, and none is stored
    _remembered: bool = False  # the stream's hidden rounds are stored, so no round follows
    _full: bool = False  # the request has no room left for a result
    _last: bool = False  # the model may not call the tool anymore: after `max_rounds`, or if `_full`
    _streams: bool = False  # the client gets a stream, so a part of it can't be withdrawn

    def __post_init__(self) -> None:
        self._hidden = self._state.hidden
        self._response = self._new_response()

    def stream(self, start: ResponseStart) -> ResponseStart:
        """Return a stream with the text and the client's calls of all rounds, as they arrive."""
        self._streams = True
        events = self._events(start)

        async def close() -> None:
            await events.aclose()
            self._archive.close()
            await self._exchange.bill.close()

        answer = Answer(200, start.answer.headers, events, close, keeps_request=True)
        return ResponseStart(answer, b"", False, None, start.answers, written=True)

    async def whole(self, start: ResponseStart) -> ResponseStart:
        """Return the response of all rounds before the request's deadline. Raises ``ProxyError``."""
        limit = self._exchange.time.limit()
        try:
            async with limit:
                return await self._whole(start)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise UpstreamTimeout(STOPPED) from error
        finally:
            self._archive.close()

    async def _whole(self, start: ResponseStart) -> ResponseStart:
        while True:
            body, complete = await _rest(start)
            if not complete or (self._plain and not _is_response(start, body)):
                return ResponseStart(start.answer, body, False, None, start.answers, written=True)
            round = WholeRound(self._hidden, NAME, body, self._response)
            if not self._follows(round):
                break
            start = await self._next(round)
            if start.answer.status != 200 or start.answer.is_encoded:
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
            try:
                start = await self._next(round)
            except UpstreamInterrupted:
                raise
            except ProxyError as error:
                raise UpstreamInterrupted(INTERRUPTED) from error
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
        await self._exchange.bill.close()
        if self._last:
            return await self._without_tool()
        self._answered += 1
        last = self._full or self._answered > self._exchange.caller.policy.recall.max_rounds
        self._last, room = last, self._room
        start = await self._continued(round, last=last)
        RECALLS.labels(outcome="failed" if start is None else "answered").inc()
        if start is None and self._has_text:
            self._room = replace(room, each=room.each // 2)
            start = await self._continued(round, last=last)
            if start is None and self._streams:
                raise UpstreamInterrupted(INTERRUPTED)
        return await self._without_tool() if start is None else start

    async def _without_tool(self) -> ResponseStart:
        self._plain, self._before = True, []
        if not self._streams:  # the client has nothing yet
            self._response = self._new_response()
        return await self._sent_again(self._hidden.without_tool(self._sent))

    def _new_response(self) -> VisibleResponse:
        response = VisibleResponse()
        response.usage = self._state.usage
        return response

    async def _continued(self, round: Round, *, last: bool) -> ResponseStart | None:
        """Return the start of the next round, or ``None`` if it isn't one to continue with."""
        before = [*self._before, round.unit, *await self._results(round, last=last)]
        try:
            start = await self._sent_again(self._hidden.continued(self._sent, before, last=last))
            if await self._continues(start):
                self._before = before
                self._exchange.record.recalls += 1
                return start
        except ProxyError as error:
            log.warning("recall.not_continued", reason=error.code)
            return None
        reason = "body" if start.answer.status == 200 else "status"
        log.warning("recall.not_continued", reason=reason, status=start.answer.status)
        return None

    async def _continues(self, start: ResponseStart) -> bool:
        """Return whether a response has content. Read all of one that isn't streamed. Raises ``ProxyError``."""
        if start.answer.status != 200 or start.answer.is_encoded:
            return False
        if self._streams:
            return start.is_stream and start.error is None and not start.complete and not start.ended
        start.first, start.complete = await _rest(start)
        return not start.complete or _is_response(start, start.first)

    async def _sent_again(self, body: bytes) -> ResponseStart:
        """Send another body. A stream has begun, so each of its rounds has a deadline of its own."""
        exchange, time = self._exchange, self._exchange.time
        if self._streams:
            time = TimeLeft(asyncio.get_running_loop().time() + exchange.configuration.settings.server.deadline)
        return await self._resend(body, time)

    async def _results(self, round: Round, *, last: bool) -> list[bytes]:
        """Return the messages that answer a round's calls. They leave room for two more rounds of this size."""
        counter = self._exchange.counter
        assert counter is not None  # noqa: S101 - requests without a counter get no tool
        most = self._exchange.caller.policy.recall.max_rounds
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
            self._exchange.record.recalls += 1
        archive = self._exchange.caller.policy.archive
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


def reserved(exchange: Exchange) -> int:
    """Return the tokens that prompts with and without the tool leave free for it, so that they share summaries."""
    policy, counter = exchange.caller.policy, exchange.counter
    if policy.recall.tool == "off" or policy.archive is None:
        return 0
    if counter is None or exchange.dialect.hidden_tool is None:
        return 0
    if exchange.caller.tenant == UNSTORED_TENANT or not exchange.caller.has_storage or not exchange.body.units:
        return 0
    return math.ceil(TOKENS * counter.profile.token_ratio)


def _key(exchange: Exchange, beginning: str) -> tuple[str, str]:
    """Return the tenant, and a digest of the conversation's messages up to the first answer."""
    upstream, model, tenant = exchange.place
    return tenant, xxhash.xxh3_128_hexdigest("\0".join((upstream, model, beginning)).encode())


def _may_have_calls(tools: Sequence[str], turns: Sequence[Turn]) -> bool:
    """Return whether hidden calls are valid in a request. Some APIs refuse calls in a request without any tool."""
    return NAME not in tools and (bool(tools) or any(turn.facts.calls for turn in turns))


def _restored(
    hidden: HiddenTool, turns: Sequence[Turn], rounds: Sequence[HiddenRound], chain: Sequence[str]
) -> tuple[list[bytes], bool]:
    """Return the units with their hidden rounds, and whether there are any."""
    known: dict[str, list[HiddenRound]] = {}
    for round in rounds:
        known.setdefault(round.prefix, []).insert(0, round)
    restored: list[bytes] = []
    found = False
    for turn, prefix in zip(turns, chain, strict=False):
        visible = hidden.visible(bytes(turn.raw)) if prefix in known else None
        seen = [round for round in known.get(prefix, ()) if _is_seen(visible, round)]
        if not seen:
            restored.append(turn.raw)  # the same object, because an API may split and join its messages
            continue
        found = True
        restored += [*seen[0].before, hidden.restored(bytes(turn.raw), seen[0]), *seen[0].results]
    return restored, found


def _is_seen(visible: tuple[str, list[str]] | None, round: HiddenRound) -> bool:
    """Return whether a message is what the client saw of a round. Some clients trim its text."""
    return visible is not None and visible[0].strip() == round.text.strip() and visible[1] == round.calls
