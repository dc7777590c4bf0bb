"""Take back what the proxy added to a request that the upstream refuses, such as its request for a stream's usage.

The proxy asks for the usage of a stream whose client didn't ask for it, if a spending limit or a price applies.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import structlog
from cachetools import TTLCache
from msgspec.structs import replace

from proxy.access.spending import limit_of
from proxy.dialects.chat.request import asks_usage
from proxy.pipeline.attempt import Attempt, Run
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.response_start import ResponseStart
from proxy.pipeline.sending import REFUSALS
from proxy.store.forgetting import drop
from proxy.upstream.transport import CHAT_PATH

log = structlog.get_logger(__name__)

CAUSE = "added"
"""The cause of a retry without what the proxy added."""

STATUSES = REFUSALS | {500}

REMEMBERED_SECONDS = 3_600.0
"""Seconds for which the proxy remembers what an upstream refused, and which refusals had another reason."""

MODELS = 10_000
"""Models of tenants that are remembered."""

WORDS_BYTES = 4_096
"""Bytes of two refusals to compare."""

_VARIABLE = re.compile(rb"(?<!\S)[^\s\d]*\d\S*")


class Additions:
    """Takes back what the proxy added to a refused request. Asks for the usage of streams."""

    def __init__(self) -> None:
        self._refusing: TTLCache[tuple[str, str, str, str], bool] = TTLCache(MODELS, REMEMBERED_SECONDS)
        self._innocent: TTLCache[tuple[str, str, str, tuple[str, ...]], bool] = TTLCache(MODELS, REMEMBERED_SECONDS)

    def refused(self, exchange: Exchange, name: str) -> bool:
        """Return whether an upstream recently refused an addition."""
        return (*exchange.place, name) in self._refusing

    def wanted(self, exchange: Exchange) -> bool:
        """Return whether to ask for the usage of a stream, because a spending limit or a price applies.

        Without a limit, a request that the proxy must not change stays as it is, and its usage is estimated.
        """
        body = exchange.body
        if not body.stream or exchange.dialect.path != CHAT_PATH or self.refused(exchange, "usage"):
            return False
        wanted = limit_of(exchange.caller) is not None
        wanted = wanted or (exchange.bill.price_of is not None and exchange.mode != "off")
        return wanted and bool(body.units) and body.model is not None and not asks_usage(body.raw)

    def recover(self, run: Run, attempt: Attempt, start: ResponseStart) -> Attempt | None:
        """Return an attempt without what the proxy added or lowered, if the upstream refused the request in any words.

        ``None`` if it accepted the same additions before, or gave the same refusal without them.
        """
        added, status = attempt.added, start.answer.status
        if not added or status not in STATUSES or start.overflow is not None:
            return None
        named = attempt.asks_usage and any(name in start.first for name in (b"stream_options", b"include_usage"))
        if not named and (*run.exchange.place, added) in self._innocent:
            return None
        run.asks_usage, run.refused, run.taken = False, start, added
        return replace(attempt, asks_usage=False, tool=None, output=None)

    def answered(self, run: Run, attempt: Attempt, start: ResponseStart) -> tuple[str, ...]:
        """Learn from the last response which additions an upstream refuses. Return those that it refused now."""
        place, status = run.exchange.place, start.answer.status
        if run.refused is None:
            if status == 200 and attempt.added == ("usage",):
                self._innocent[(*place, attempt.added)] = True
            return ()
        if status == 200 and run.retries[-1] == CAUSE:
            self._refusing.update({(*place, name): True for name in run.taken})
            log.info("additions.refused", names=run.taken)
            return run.taken
        before = run.refused
        if status == before.answer.status and _words(start) == _words(before):
            self._innocent[(*place, run.taken)] = True
        return ()

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        return drop(self._refusing, forgotten, 2) | drop(self._innocent, forgotten, 2)


def _words(start: ResponseStart) -> bytes:
    """Return a refusal without ids and numbers."""
    return _VARIABLE.sub(b"", start.first[:WORDS_BYTES])
