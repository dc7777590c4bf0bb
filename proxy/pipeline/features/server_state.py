"""Shorten a history that the server keeps, if a request that continues it overflows or would."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from urllib.parse import quote

import msgspec
import structlog
from msgspec.structs import replace

from proxy.compaction.settings import any_met
from proxy.constants import UNDECODABLE
from proxy.dialects.responses.request import ResponsesRequest
from proxy.dialects.responses.state import (
    calls_in,
    compact_request,
    continued,
    open_calls,
    previous_response,
)
from proxy.errors import BadBody, ProxyError
from proxy.http.headers import VIA, for_other_request, for_upstream
from proxy.overflow.silent import Finished
from proxy.pipeline.attempt import Attempt, Run
from proxy.pipeline.billing import Bill
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.job import reason_for
from proxy.pipeline.response_start import ResponseStart
from proxy.pipeline.runtime import Runtime
from proxy.pipeline.watching import Watch
from proxy.telemetry.record import Reason, with_trace
from proxy.upstream.relay import RelayTransport
from proxy.upstream.transport import RESPONSES_PATH, Answer

log = structlog.get_logger(__name__)

STEP = "server_state"
"""The step of a request whose history was compacted by the upstream that keeps it."""

Resolve = Callable[[Exchange], Awaitable[None]]

# A response begins with its own id. Strings escape quotation marks, so this is a field.
_FIRST_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,200})"')

_ADVICE = (
    "The upstream keeps this conversation, so the proxy can't shorten it{reason}. Send the whole conversation without "
    "'{field}', so that the proxy can compact it{example}."
)


class NotCompacted(Exception):
    """The upstream can't compact the history. The text is the reason, for the log and for the client."""


def advice(exchange: Exchange, reason: str = "") -> str:
    """Return the advice for a request that overflows with a history at the server, as an ASCII header value.

    ``reason`` says why the upstream couldn't compact it.
    """
    if exchange.dialect.path != RESPONSES_PATH:
        return _ADVICE.format(reason="", field="thread", example="")
    chain = previous_response(exchange.body.raw) is not None
    return _ADVICE.format(
        reason=f" (/responses/compact: {reason})" if reason and chain else "",
        field="previous_response_id" if chain else "conversation",
        example=", for example with store: false",
    )


class ServerState:
    """The histories that upstreams keep."""

    def __init__(self, runtime: Runtime, resolve: Resolve) -> None:
        """``resolve`` puts the items that a request refers to in its units."""
        self._runtime = runtime
        self._resolve = resolve

    async def first(self, run: Run, attempt: Attempt) -> Attempt:
        """Return the first attempt: with a compacted history if the conversation meets a trigger, or unchanged."""
        reason = await self._trigger_reached(run.exchange, attempt)
        return attempt if reason is None else await self._continued(run, attempt, reason) or attempt

    async def recover(self, run: Run, attempt: Attempt, start: ResponseStart) -> Attempt | None:
        """Return an attempt with a history that the upstream has compacted; ``None`` if it can't.

        An empty response says nothing here, because the size of the whole prompt is unknown.
        """
        refused = start.overflow is not None and run.exchange.body.continues
        if not refused or attempt.input.mode != "enforce" or attempt.outcome.verdict == "failed":
            return None
        return await self._continued(run, attempt)

    async def _continued(self, run: Run, attempt: Attempt, reason: Reason | None = None) -> Attempt | None:
        """Return an attempt with a compacted history.

        ``reason`` is the trigger that the conversation meets, ``None`` after an overflow. Then the client gets advice.
        """
        exchange = run.exchange
        if attempt.input.policy.responses.state == "off":
            run.advice = advice(exchange)
            return None
        transport = await exchange.configuration.upstreams.native(
            exchange.route.upstream, exchange.dialect.path, exchange.asker
        )
        try:
            if transport is None:
                raise NotCompacted("the upstream has no /v1/responses")
            body = await exchange.dialect.request.read(await recovered(exchange, transport))
        except (NotCompacted, BadBody) as error:
            if reason is None:
                run.advice = advice(exchange, str(error) if isinstance(error, NotCompacted) else "too many items")
            return None
        run.learns = False
        exchange.replace(body)
        await self._resolve(exchange)
        number = len(run.retries) + (reason is None)
        input = replace(attempt.input, body=exchange.body, attempt=number)
        again = await run.attempt(attempt.budget, input, may_ask=reason is not None)
        outcome = replace(again.outcome, verdict="compacted", steps=(STEP, *again.outcome.steps))
        return replace(again, outcome=replace(outcome, reason=reason or outcome.reason))

    async def _trigger_reached(self, exchange: Exchange, attempt: Attempt) -> Reason | None:
        """Return the trigger that a continued conversation meets, if the policy compacts ahead of an overflow.

        The size is the reported one of the earlier response and the counted one of the new items.
        """
        input, caller = attempt.input, exchange.caller
        if input.mode != "enforce" or input.policy.responses.state != "compact" or not caller.has_storage:
            return None
        previous = previous_response(exchange.body.raw)
        if previous is None:
            return None
        reported = self._runtime.stores.items.sizes(caller.tenant, [previous]).get(previous)
        if reported is None:
            return None
        _, added = await self._runtime.compactor.sizes(input.body, input.counter, input.tenant)
        size = int(reported / attempt.budget.factor) + sum(added)
        return reason_for(input, size, 0) if any_met(input.rules.trigger, size, 0, input.budget) else None

    def watch(self, exchange: Exchange, start: ResponseStart, watch: Watch) -> None:
        """Note the size of a response that a request may continue, and bill one that is made in the background."""
        exchange.bill.background = _background_response(exchange, start)
        if (sized := self._sized_response(exchange, start)) is not None:
            watch.at_end(partial(self._note_size, exchange, sized))

    def _sized_response(self, exchange: Exchange, start: ResponseStart) -> str | None:
        """Return the id of a response whose size decides about the request that continues it; ``None`` if none does."""
        caller = exchange.caller
        if (
            exchange.dialect.path != RESPONSES_PATH
            or caller.policy.responses.state != "compact"
            or not caller.has_storage
        ):
            return None
        return _id(start)

    def _note_size(self, exchange: Exchange, id: str, end: Finished) -> None:
        """Remember the reported tokens of a response and its prompt. A request that continues it begins with these."""
        if end.prompt:
            self._runtime.stores.items.note_size(exchange.caller.tenant, [id], end.prompt + (end.output or 0))


def _background_response(exchange: Exchange, start: ResponseStart) -> str | None:
    """Return the id of a response that the upstream makes in the background, or ``None``."""
    body = exchange.body
    return _id(start) if isinstance(body, ResponsesRequest) and body.background else None


def _id(start: ResponseStart) -> str | None:
    found = _FIRST_ID.search(start.first)
    return None if found is None else found[1].decode("utf-8", "replace")


async def recovered(exchange: Exchange, transport: RelayTransport) -> bytes:
    """Return the request's body with its history compacted by the upstream. Raises ``NotCompacted``.

    Asks the upstream once, with the caller's key. The upstream bills the compaction to the caller. The memory of the
    new body is charged to the request.
    """
    raw = exchange.body.raw
    previous = previous_response(raw)
    if previous is None:
        raise NotCompacted("only a chain of responses can be compacted")
    try:
        compact = compact_request(raw, exchange.route.model)
        output = _output(await _ask(exchange, transport, "POST", f"{RESPONSES_PATH}/compact", compact))
        calls: list[dict[str, object]] = []
        if wanted := open_calls(raw):
            stored = await _ask(exchange, transport, "GET", f"{RESPONSES_PATH}/{_segment(previous)}", None)
            calls = calls_in(_output(stored), wanted)
            if len(calls) < len(wanted):
                raise NotCompacted("the calls of the new outputs aren't in the earlier response")
        body = continued(raw, output, calls)
        await exchange.memory.more(len(body))
    except (NotCompacted, ProxyError) as error:
        reason = str(error) if isinstance(error, NotCompacted) else type(error).__name__
        log.warning("state.not_compacted", reason=reason)
        raise NotCompacted(reason) from error
    return body


def _segment(id: str) -> str:
    """Return an id as one segment of a path. Raises ``NotCompacted`` for a segment that means another path."""
    if id in (".", ".."):
        raise NotCompacted("the id of the earlier response isn't valid")
    return quote(id, safe="")


def _output(response: dict[str, object]) -> list[object]:
    output = response.get("output")
    if not isinstance(output, list) or not output:
        raise NotCompacted("no output")
    return output


async def _ask(
    exchange: Exchange, transport: RelayTransport, method: str, path: str, body: bytes | None
) -> dict[str, object]:
    """Return the JSON object that the upstream answers with, before the request's deadline.

    Raises ``NotCompacted``, and the errors of ``Connections.send``.
    """
    headers = for_other_request(for_upstream(exchange.scope["headers"]))
    headers = with_trace([*headers, (VIA, exchange.via)], exchange.record.trace)
    headers = transport.headers(headers, exchange.caller.credential)
    remaining = exchange.time.seconds
    bill = exchange.bill if method == "POST" else Bill()  # reading a stored response costs nothing
    try:
        async with exchange.time.limit():
            with bill.call(exchange.dialect.answers.tail(), len(body or b"")) as meter:
                answer = await transport.request(method, transport.url(path), headers, body, remaining)
                meter.watch(answer)
                try:
                    read = await _read(answer, exchange.configuration.settings.server.body_limit)
                finally:
                    await answer.close()
    except TimeoutError:
        raise NotCompacted("the deadline has passed") from None
    if answer.status != 200:
        raise NotCompacted(f"status {answer.status}")
    try:
        value = msgspec.json.decode(read)
    except UNDECODABLE:
        raise NotCompacted("not JSON") from None
    if not isinstance(value, dict):
        raise NotCompacted("not an object")
    return value


async def _read(answer: Answer, most: int) -> bytes:
    read = bytearray()
    async for chunk in answer.body:
        read += chunk
        if len(read) > most:
            raise NotCompacted(f"longer than {most:,} bytes")
    return bytes(read)
