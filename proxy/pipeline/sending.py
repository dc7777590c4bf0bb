"""Send a conversation to its upstream, read the start of the response, watch the rest of it, and settle the price."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter

import structlog
from cachetools import LRUCache
from msgspec.structs import replace

from proxy.access.spending import limit_of
from proxy.config import Route
from proxy.dialects.answers import ItemReader
from proxy.dialects.chat.request import with_usage
from proxy.errors import ProxyError, UpstreamTimeout
from proxy.http.decompression import Unpacking
from proxy.http.headers import VIA, client_query, for_other_request, for_upstream
from proxy.limits.prices import Price
from proxy.overflow.silent import Finished
from proxy.pipeline.attempt import Departure
from proxy.pipeline.billing import (
    BYTES_A_TOKEN,
    CACHE_SECONDS,
    EXPECTED_OUTPUT,
    NO_BASIS,
    UNPACKED_BYTES,
    Basis,
    Pricing,
)
from proxy.pipeline.exchange import DEADLINE, Exchange, TimeLeft
from proxy.pipeline.response_start import Asked, ResponseStart, read_start
from proxy.pipeline.runtime import Runtime
from proxy.store.forgetting import drop
from proxy.telemetry.record import ACCEPTED, CONTINUED, OVERFLOW, UpstreamCall, Usage, with_trace
from proxy.upstream.connections import not_in_time
from proxy.upstream.transport import Answer, Outgoing, Transport

log = structlog.get_logger(__name__)

REFUSALS = frozenset({400, 404, 415, 422, 501})  # statuses with which servers refuse a field

STOPPED = "The upstream started its response and then stopped sending. Try again."


def outgoing(exchange: Exchange, sent: Departure) -> Outgoing:
    """Return the request as it leaves. Raises ``UpstreamTimeout`` if the deadline has passed."""
    route, outcome = exchange.route, sent.outcome
    body = exchange.original if outcome.messages is None else exchange.body
    model = route.model if route.model != body.model and body.model is not None else None
    # The proxy reads the usage of all responses, and the beginning of a stream, so they must not be compressed.
    headers = [pair for pair in for_upstream(exchange.scope["headers"]) if pair[0] != "accept-encoding"]
    remaining = exchange.time.seconds
    if remaining <= 0:
        raise UpstreamTimeout(DEADLINE)
    trace = exchange.record.trace
    headers.append((VIA, exchange.via))
    if trace is not None:
        headers = with_trace(headers, trace, trace.attempt())
    raw = body.rewritten(units=outcome.messages, model=model, max_output=sent.output)
    if sent.tool is not None and exchange.dialect.hidden_tool is not None:
        raw = exchange.dialect.hidden_tool.with_tool(raw, sent.tool.definition)
    if sent.asks_usage:
        raw = with_usage(raw)
    return Outgoing(
        body=raw,
        model=route.model,
        stream=body.stream,
        headers=headers,
        credential=exchange.caller.credential,
        timeout=remaining,
        bounded=True,
        path=exchange.dialect.path,
        query=client_query(exchange.scope),
        expanded=partial(body.expanded, raw, outcome.messages) if body.references else None,
        edits=sent.edits,
        family=exchange.profile.family,
        reasons=exchange.profile.reasons,
    )


async def send(exchange: Exchange, transport: Transport, request: Outgoing, tokens: int | None) -> ResponseStart:
    """Send a request, and read the start of its response. ``tokens`` is the proxy's count. Raises ``ProxyError``."""
    began = perf_counter()
    asked = Asked(exchange.body.raw, exchange.caller.policy.rate_limit_as_limit, exchange.dialect.answers)
    try:
        start = await _start(exchange, transport, request, asked, exchange.time, tokens)
    except ProxyError as error:
        _describe_failure(exchange, error, began, tokens)
        raise
    start.milliseconds = milliseconds_since(began)
    return start


async def resend(
    exchange: Exchange, transport: Transport, request: Outgoing, body: bytes, time: TimeLeft
) -> ResponseStart:
    """Send another body within a time, to continue a response or to do without the tool. Raises ``ProxyError``."""
    began, remaining = perf_counter(), time.seconds
    before, tokens = exchange.bill.last, None
    if before is not None and before.tokens is not None:
        tokens = round(before.tokens * len(body) / max(1, before.sent))
    again = replace(request, body=body, headers=for_other_request(request.headers), timeout=remaining)
    try:
        if remaining <= 0:
            raise UpstreamTimeout(DEADLINE)
        asked = Asked(body, answers=exchange.dialect.answers, seconds=remaining)  # the response has begun
        start = await _start(exchange, transport, again, asked, time, tokens)
    except ProxyError as error:
        _describe_failure(exchange, error, began, None, CONTINUED)
        raise
    start.milliseconds = milliseconds_since(began)
    describe_call(exchange, start, CONTINUED, None)
    return start


async def _start(
    exchange: Exchange, transport: Transport, request: Outgoing, asked: Asked, time: TimeLeft, tokens: int | None
) -> ResponseStart:
    """Close the answer before, send a request, and read the start of its response. Raises ``ProxyError``."""
    await exchange.bill.close()
    call, answer = exchange.bill.call(asked.answers.tail(), len(request.body), tokens), None
    try:
        with call as meter:
            async with time.limit():
                meter.place, request.watch = len(exchange.record.calls), meter.watch
                answer = await transport.send(request)
                exchange.bill.opened(answer, meter)
                exchange.record.edited = list(answer.edited)
                start = await read_start(answer, asked)
                meter.response_started(start)
                return start
    except TimeoutError as error:
        raise not_in_time(request.timeout) if answer is None else UpstreamTimeout(STOPPED) from error


def milliseconds_since(start: float) -> float:
    """Return the milliseconds since a time of ``perf_counter``. The event loop's clock may be coarser."""
    return round((perf_counter() - start) * 1000, 3)


def describe_call(exchange: Exchange, start: ResponseStart, result: str | None, sent: int | None) -> None:
    """Add an attempt of ``sent`` tokens that got a response to the record.

    ``result`` is the cause of the next attempt, or ``CONTINUED`` for a call after the first round of a response.
    ``None`` means that the client gets the response.
    """
    limit = None if start.overflow is None else start.overflow.limit
    if result is None and start.overflow is not None:
        result = OVERFLOW
    elif result is None:
        result = ACCEPTED if start.answer.status < 400 and start.error is None else "error"
    call = UpstreamCall(result, start.answer.status, start.milliseconds, sent, limit, start.error)
    exchange.record.calls.append(call)
    log.debug("upstream.responded", result=call.result, status=call.status, ms=call.ms, tokens=sent, limit=limit)
    if start.overflow is not None:
        exchange.record.fits = False


def _describe_failure(
    exchange: Exchange, error: ProxyError, began: float, sent: int | None, result: str | None = None
) -> None:
    """Add an attempt without a response. Default of ``result``: the error's code."""
    call = UpstreamCall(result or error.code, None, milliseconds_since(began), sent)
    exchange.record.calls.append(call)
    log.debug("upstream.not_responded", result=call.result, ms=call.ms, tokens=sent)


class Tap:
    """Reads the items of an answer as it passes, before the client gets it."""

    def __init__(self, reader: ItemReader | None, answer: Answer, room: Callable[[], Awaitable[None]] | None) -> None:
        """``room`` waits while too many removed messages wait to be archived."""
        self._reader = reader
        self._room = room
        packed = reader is not None and answer.is_encoded
        self._unpacking = Unpacking(answer.header("content-encoding"), UNPACKED_BYTES) if packed else None

    async def begin(self, first: bytes) -> None:
        """Add the first bytes. If the archive is behind, let the client wait for it, so that little can be lost."""
        if self._room is not None:
            await self._room()
        self.add(first)

    def add(self, chunk: bytes) -> None:
        """Add a chunk, as it arrived from the upstream."""
        if self._reader is None:
            return
        if self._unpacking is not None:
            self._unpacking.feed(chunk)
            chunk = self._unpacking.take()
        self._reader.add(chunk)

    def finish(self) -> None:
        """Read what wasn't known before the end."""
        if self._reader is not None and (self._unpacking is None or not self._unpacking.ended):
            self._reader.finish()


class Watch:
    """The rest of a response. Call ``ended`` after its end, and ``learn`` once nothing waits for it.

    ``note`` gets the usage of a complete response in ``ended``, before the costs are settled. ``lesson`` gets it in
    ``learn``, unless the response had recalls: the usage of several rounds isn't the size of one prompt.
    """

    note: Callable[[Finished], None] | None = None
    lesson: Callable[[Finished], Awaitable[None]] | None = None

    def __init__(self, exchange: Exchange, tap: Tap | None) -> None:
        self.tap = tap
        self._exchange = exchange
        self._end: Finished | None = None

    def release(self, start: ResponseStart, sent: Departure, held: int) -> None:
        """Drop the bodies that nothing needs anymore, because a stream may take hours. ``held`` is the bytes to keep.

        A request that wasn't counted keeps its body, in case that the upstream reports no usage. A stream that may have
        recalls keeps the bytes that the proxy sent, to send them again.
        """
        exchange = self._exchange
        if exchange.original is not exchange.body:
            exchange.original.release()
        if sent.after is not None or exchange.counter is None:
            exchange.body.release()
        if not start.answer.keeps_request:
            exchange.memory.shrink(exchange.body.size + held)

    def ended(self) -> None:
        """Take note of the end of a response."""
        meter = self._exchange.bill.last
        if meter is None or (self.note is None and self.lesson is None) or (end := meter.end) is None:
            return
        if self.note is not None:
            self.note(end)
        self._end = None if self._exchange.record.recalls else end

    async def learn(self) -> None:
        """Learn how the upstream counts."""
        if self._end is not None and self.lesson is not None:
            await self.lesson(self._end)


CONVERSATIONS = 5_000  # conversations to remember, those with the latest requests


class Costs:
    """The prices of requests. Remembers when each conversation was last seen, and its checkpoints."""

    def __init__(self) -> None:
        self._seen: LRUCache[tuple[str, str], tuple[float, int]] = LRUCache(CONVERSATIONS)

    def price(self, exchange: Exchange, sent: Departure) -> None:
        """Note what the price of a request depends on. Call this while the request has its body."""
        outcome, received, basis = sent.outcome, sent.outcome.received, NO_BASIS
        if received is not None and exchange.body.units:
            key, now = exchange.conversation, time.time()
            last, checkpoints = self._seen.get(key, (-CACHE_SECONDS, 0))
            self._seen[key] = now, max(checkpoints, outcome.checkpoints)
            basis = Basis(
                received.tokens,
                sent.after,
                received.shared,
                outcome.forecast,
                now - last < CACHE_SECONDS,
                outcome.checkpoints > checkpoints,
                exchange.record.fits,
            )
        if exchange.bill.price_of is not None:
            exchange.bill.price_of = replace(exchange.bill.price_of, basis=basis)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        return drop(self._seen, forgotten)


def dearer(price: Price, other: Price | None) -> bool:
    return other is None or price.base.input + price.base.output > other.base.input + other.base.output


async def reserve(runtime: Runtime, exchange: Exchange, sent: Departure, factor: float) -> None:
    """Reserve what a request will probably cost its team. Raises ``SpendingExceeded``."""
    if limit_of(exchange.caller) is None:
        return
    counted = sent.after or sent.outcome.before or len(exchange.body.raw) // BYTES_A_TOKEN
    asked = sent.output or exchange.body.max_output or EXPECTED_OUTPUT
    usage = Usage(round(counted * factor), min(asked, EXPECTED_OUTPUT))
    await runtime.money.spending.reserve(exchange.caller, exchange.record.id, exchange.bill.amount(usage))


async def settle(runtime: Runtime, exchange: Exchange) -> None:
    """Count what the calls of a request cost, also if the client left. Errors are logged."""
    counter, bill, record = exchange.counter, exchange.bill, exchange.record
    try:
        if (limit := limit_of(exchange.caller)) is not None and limit.usd is not None:
            await _price_by_answer(runtime, exchange)
        if bill.price_of is not None and (models := bill.models):
            others = {model: await _price_of(runtime, exchange, model) for model in models}
            bill.price_of = replace(bill.price_of, others=others)
        await bill.settle(
            record,
            partial(size, runtime, exchange),
            None if counter is None else counter.text,
            partial(runtime.limits.calibration.factor, *exchange.place),
        )
        runtime.money.spending.settle(record)
        if bill.background is not None:
            runtime.money.background.begin(exchange.caller.tenant, bill.background, exchange.route.model, record)
    except Exception as error:  # the client has its response
        log.exception("counting.failed", error=type(error).__name__)


async def size(runtime: Runtime, exchange: Exchange) -> int | None:
    """Return the proxy's count of a request that wasn't counted and has its body; ``None`` if it can't count."""
    if exchange.counter is None or not exchange.body.raw:
        return None
    return await runtime.compactor.size(exchange.body, exchange.counter, exchange.caller.tenant)


async def _price_by_answer(runtime: Runtime, exchange: Exchange) -> None:
    """With a limit in US dollars, charge for the dearer of the models that the request and its answer name."""
    meter, known = exchange.bill.last, exchange.bill.price_of
    if meter is None or not meter.model or meter.model == exchange.route.model:
        return
    price = await _price_of(runtime, exchange, meter.model)
    if price is not None and dearer(price, None if known is None else known.price):
        exchange.bill.price_of = Pricing(price, NO_BASIS if known is None else known.basis)


async def _price_of(runtime: Runtime, exchange: Exchange, model: str) -> Price | None:
    route = Route(exchange.route.upstream, model, None)
    return exchange.configuration.price(route, await runtime.limits.profile(route, exchange.configuration))
