"""Take back what the proxy wrote into a request, if the upstream refuses it, and remember that for all requests.

Three kinds of words are the proxy's own: what it adds to a request, such as its wish for a stream's usage; the roles of
a compacted request; and each word of a translated one. ``upstream.traits`` has the table and the memory.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace as with_fields

import msgspec
import structlog
from msgspec.structs import replace

from proxy.access.spending import limit_of
from proxy.dialects.chat.request import asks_usage
from proxy.pipeline.attempt import Attempt, Run
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.response_start import LARGE_REQUEST, ResponseStart, readable
from proxy.pipeline.sending import REFUSALS
from proxy.upstream.refusals import ROLES, read
from proxy.upstream.traits import ALTERNATING, Edit, Memory, RefusedRequest
from proxy.upstream.transport import CHAT_PATH

log = structlog.get_logger(__name__)

CAUSE = "added"  # the cause of a retry without what the proxy wrote

STATUSES = REFUSALS | {500}

EDITS = 3  # retries of a request with other words
WORDS_BYTES = 4_096  # bytes of two refusals to compare

_VARIABLE = re.compile(rb"(?<!\S)[^\s\d]*\d\S*")


class Traits:
    """Finds out what upstreams don't take. ``memory`` is the same for all endpoints and for summary calls."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def begin(self, exchange: Exchange) -> None:
        """Treat a request as its upstream is known to need it."""
        exchange.edits = self._memory.edits(exchange.place)
        if exchange.profile.strict_alternation:
            exchange.edits = (*exchange.edits, ALTERNATING)
        elif ALTERNATING in exchange.edits:
            exchange.profile = with_fields(exchange.profile, strict_alternation=True)

    def asks_usage(self, exchange: Exchange) -> bool:
        """Return whether to ask for the usage of a stream, because a spending limit or a price applies.

        Without a limit, a request that the proxy must not change stays as it is, and its usage is estimated.
        """
        body = exchange.body
        if not body.stream or exchange.dialect.path != CHAT_PATH or _added("usage") in exchange.edits:
            return False
        wanted = limit_of(exchange.caller) is not None
        wanted = wanted or (exchange.bill.price_of is not None and exchange.mode != "off")
        return wanted and bool(body.units) and body.model is not None and not asks_usage(body.raw)

    def takes_output(self, exchange: Exchange) -> bool:
        """Return whether the upstream takes a lower output limit of the proxy's."""
        return not exchange.edits or _added("output") not in exchange.edits

    async def recover(self, run: Run, attempt: Attempt, start: ResponseStart) -> Attempt | None:
        """Return an attempt in other words, or without what the proxy added. ``None`` if neither can help.

        Of a translated request, all words are the proxy's own. Its bridge or LiteLLM's lane says what was refused.
        """
        if start.overflow is not None:
            return None
        place, refused = run.exchange.place, start.answer.refused
        edits = await _read(refused) if refused is not None and refused.status in STATUSES else ()
        edits = tuple(one for one in edits if one not in attempt.edits and self._memory.helps(place, one))
        if edits:
            run.edit(start, edits)
            return replace(attempt, edits=(*attempt.edits, *edits))
        # The reader takes the wish for the usage back, if the translation has one.
        added = tuple(_added(name) for name in attempt.added if refused is None or name != "usage")
        if not added or start.answer.status not in STATUSES or set(added) & set(run.tried):
            return None
        named = attempt.asks_usage and any(name in start.first for name in (b"stream_options", b"include_usage"))
        if not named and not any(self._memory.helps(place, one) for one in added):
            return None
        run.asks_usage = False
        run.edit(start, added)
        return replace(attempt, asks_usage=False, tool=None, output=None)

    async def roles(self, run: Run, attempt: Attempt, start: ResponseStart) -> Attempt | None:
        """Return an attempt with alternating roles, if the upstream refused the roles of a compacted chat request."""
        exchange, case = run.exchange, attempt.case
        if start.answer.status not in (400, 422, 500) or attempt.outcome.messages is None or case.strict:
            return None
        refusal = (await readable(start.answer, start.first)).decode("utf-8", "replace").lower()
        if "tool_call" in refusal or not ROLES.search(refusal):  # a call without a result isn't about roles
            return None
        self._memory.learn(exchange.place, (ALTERNATING,))
        self.begin(exchange)
        log.info("upstream.trait_learned", edits=[ALTERNATING.name])
        again = replace(case, strict=True, attempt=run.next_number)
        return await run.attempt(attempt.budget, again, may_ask=False)

    def answered(self, run: Run, attempt: Attempt, start: ResponseStart) -> tuple[str, ...]:
        """Learn from the last response which words an upstream doesn't take. Return the additions that it refused."""
        place = run.exchange.place
        if run.refused is None:
            if attempt.asks_usage and start.answer.status == 200 and attempt.added == ("usage",):
                self._memory.acquit(place, (_added("usage"),))
            return ()
        if start.answer.status == 200 and start.error is None:
            self._memory.learn(place, run.tried)
            log.info("upstream.trait_learned", edits=[edit.name for edit in run.tried])
            return tuple(edit.path for edit in run.tried if edit.kind == "added")
        if start.answer.status == run.refused.answer.status and _words(start) == _words(run.refused):
            self._memory.acquit(place, run.tried)
        return ()

    def refusal(self, run: Run, start: ResponseStart) -> ResponseStart:
        """Return the response for the client: the first of two refusals if the second may be about the edits."""
        if run.refused is None or start.answer.status not in REFUSALS or start.answer.status >= 500:
            return start
        return run.refused if any(edit.kind != "added" for edit in run.tried) else start

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        return self._memory.forget(forgotten)


def _added(name: str) -> Edit:
    """Return the edit that leaves out an addition to a request: ``usage``, ``tool``, or ``output``."""
    return Edit("added", name)


async def _read(refused: RefusedRequest) -> tuple[Edit, ...]:
    def reading() -> tuple[Edit, ...]:
        return read(refused.said, msgspec.json.decode(refused.sent), refused.sent)

    return await asyncio.to_thread(reading) if len(refused.sent) > LARGE_REQUEST else reading()


def _words(start: ResponseStart) -> bytes:
    """Return a refusal without ids and numbers."""
    return _VARIABLE.sub(b"", start.first[:WORDS_BYTES])
