"""Handle histories that the server keeps: shorten them, and resolve references to their items.

A request that continues a history overflows, or would, so the upstream compacts it. The items of answers are remembered
as they pass, for later requests that only refer to them.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from urllib.parse import quote

import msgspec
import structlog
from msgspec.structs import replace

from proxy.compaction.settings import any_met
from proxy.constants import DAY, UNDECODABLE
from proxy.dialects.answers import ItemReader
from proxy.dialects.request import Request
from proxy.dialects.responses.request import ResponsesRequest
from proxy.dialects.responses.state import calls_in, compact_request, continued, open_calls, previous_response
from proxy.errors import BadBody, ProxyError
from proxy.http.headers import VIA, for_other_request, for_upstream
from proxy.overflow.silent import Finished
from proxy.pipeline.attempt import Attempt, Run
from proxy.pipeline.billing import Bill
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.job import Outcome, reason_for
from proxy.pipeline.response_start import ResponseStart
from proxy.pipeline.runtime import Runtime
from proxy.pipeline.sending import Watch
from proxy.telemetry.record import Reason, with_trace
from proxy.upstream.bridge.returned import is_unique
from proxy.upstream.relay import RelayTransport
from proxy.upstream.transport import RESPONSES_PATH, read_most

log = structlog.get_logger(__name__)

PAUSES = (0.1, 0.2, 0.4)  # seconds between reads of items that another process may be writing


STEP = "server_state"  # the step of a request whose history was compacted by the upstream that keeps it

# A response begins with its own id. Strings escape quotation marks, so this is a field.
_FIRST_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,200})"')

_ADVICE = (
    "The upstream keeps this conversation, so the proxy can't shorten it{reason}. Send the whole conversation without "
    "'{field}', so that the proxy can compact it{example}."
)


class NotCompacted(Exception):
    """The upstream can't compact the history. The text is the reason, for the log and for the client."""


def advice(exchange: Exchange, reason: str = "") -> str:
    """Return the advice for an overflow with a history at the server, in ASCII. ``reason`` explains it."""
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

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def resolve(self, exchange: Exchange) -> None:
        """Put the items that a request refers to in its units, and the reported sizes of unknown ones."""
        body, tenant, archive = exchange.body, exchange.caller.tenant, exchange.caller.policy.archive
        if not body.references:
            return
        items = {} if archive is None else await self._stored(tenant, body, archive.days * DAY)
        unknown = [id for id in body.references if id not in items]
        size = body.size
        body.resolve(items, self._runtime.stores.items.sizes(tenant, unknown) if exchange.caller.has_storage else {})
        await exchange.memory.more(body.size - size)

    async def _stored(self, tenant: str, body: Request, seconds: float) -> dict[str, bytes]:
        """Return the known items that a request refers to, by id.

        An id that stands for several items is unknown, as the upstream couldn't know either which one is meant.
        Another process may be writing the items of the answer before, so wait briefly for ids that were never missed.
        """
        items, keys = self._runtime.stores.items, dict[str, set[str]]()
        for id, place in body.places():
            keys.setdefault(id, set()).add(_key(id, place))
        certain = {next(iter(several)): id for id, several in keys.items() if len(several) == 1}
        for pause in (*PAUSES, None):
            stored = await items.find(tenant, list(certain), seconds)
            found = {certain[key]: item for key, item in stored.items()}
            missing = [id for id in body.references if id not in found]
            if pause is None or not missing or not items.may_come(tenant, missing):
                break
            await asyncio.sleep(pause)
        items.missed(tenant, missing)
        return found

    def item_reader(self, exchange: Exchange, start: ResponseStart, outcome: Outcome) -> ItemReader | None:
        """Return a reader that remembers an answer's items; ``None`` without an archive or need."""
        archive = exchange.caller.policy.archive
        if archive is None or outcome.verdict == "off" or start.answer.status != 200 or not exchange.body.may_refer:
            return None
        keep = partial(self._runtime.stores.items.keep, exchange.caller.tenant, seconds=archive.days * DAY)
        place = exchange.body.place()
        return exchange.dialect.item_reader(lambda id, item: keep(_key(id, place), item))

    async def first(self, run: Run, attempt: Attempt) -> Attempt:
        """Return the first attempt: with a compacted history if the conversation meets a trigger, or unchanged."""
        reason = await self._trigger_reached(run.exchange, attempt)
        return attempt if reason is None else await self._continued(run, attempt, reason) or attempt

    async def recover(self, run: Run, attempt: Attempt, start: ResponseStart) -> Attempt | None:
        """Return an attempt with a history that the upstream has compacted; ``None`` if it can't."""
        refused = start.overflow is not None and run.exchange.body.continues
        if not refused or attempt.case.mode != "enforce" or attempt.outcome.verdict == "failed":
            return None
        return await self._continued(run, attempt)

    async def _continued(self, run: Run, attempt: Attempt, reason: Reason | None = None) -> Attempt | None:
        """Return an attempt with a compacted history. ``reason``: the trigger that was met."""
        exchange = run.exchange
        if attempt.case.policy.responses.state == "off":
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
        await self.resolve(exchange)
        number = len(run.retries) + (reason is None)
        case = replace(attempt.case, body=exchange.body, attempt=number)
        again = await run.attempt(attempt.budget, case, may_ask=reason is not None)
        outcome = replace(again.outcome, verdict="compacted", steps=(STEP, *again.outcome.steps))
        return replace(again, outcome=replace(outcome, reason=reason or outcome.reason))

    async def _trigger_reached(self, exchange: Exchange, attempt: Attempt) -> Reason | None:
        """Return the trigger that the earlier response's reported size and the new items meet, if any."""
        case, caller = attempt.case, exchange.caller
        if case.mode != "enforce" or case.policy.responses.state != "compact" or not caller.has_storage:
            return None
        previous = previous_response(exchange.body.raw)
        if previous is None:
            return None
        reported = self._runtime.stores.items.sizes(caller.tenant, [previous]).get(previous)
        if reported is None:
            return None
        _, added = await self._runtime.compactor.sizes(case.body, case.counter, case.tenant)
        size = int(reported / attempt.budget.factor) + sum(added)
        return reason_for(case, size, 0) if any_met(case.rules.trigger, size, 0, case.budget) else None

    def watch(self, exchange: Exchange, start: ResponseStart, watch: Watch) -> None:
        """Note the size of a response that a request may continue, and bill one that is made in the background."""
        body, caller, items = exchange.body, exchange.caller, self._runtime.stores.items
        background = isinstance(body, ResponsesRequest) and body.background
        continues = caller.policy.responses.state == "compact" and caller.has_storage
        if not background and (not continues or exchange.dialect.path != RESPONSES_PATH):
            return
        if (found := _FIRST_ID.search(start.first)) is None:
            return
        id = found[1].decode("utf-8", "replace")
        if background:
            exchange.bill.background = id

        def note_size(end: Finished) -> None:
            if end.prompt:  # a request that continues the response begins with these tokens
                items.note_size(caller.tenant, [id], end.prompt + (end.output or 0))

        if continues:
            watch.note = note_size


def _key(id: str, place: str) -> str:
    """Return the key of an item. An upstream may use an id again, so its items are known by their places, too."""
    return id if is_unique(id) else f"{id} {place}"


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
    """Return the JSON object that the upstream answers with. Raises ``NotCompacted`` and ``ProxyError``."""
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
                    most = exchange.configuration.settings.server.body_limit
                    read, whole = await read_most(answer.body, most)
                finally:
                    await answer.close()
    except TimeoutError:
        raise NotCompacted("the deadline has passed") from None
    if not whole:
        raise NotCompacted(f"longer than {most:,} bytes")
    if answer.status != 200:
        raise NotCompacted(f"status {answer.status}")
    try:
        value = msgspec.json.decode(read)
    except UNDECODABLE:
        raise NotCompacted("not JSON") from None
    if not isinstance(value, dict):
        raise NotCompacted("not an object")
    return value
