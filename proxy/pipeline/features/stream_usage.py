"""Ask for the usage of a stream whose client didn't ask for it, where a budget or a price applies."""

from __future__ import annotations

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
from proxy.upstream.transport import CHAT_PATH

log = structlog.get_logger(__name__)

CAUSE = "usage"
"""The cause of a retry without asking."""

REFUSED_SECONDS = 3_600.0
"""Seconds for which streams of a model aren't asked for their usage after its upstream refused that."""

MODELS = 10_000
"""Models of tenants that refused it and are remembered."""


class StreamUsage:
    """Asks for the usage of streams, and remembers which upstreams refuse that."""

    def __init__(self) -> None:
        self._refusing: TTLCache[tuple[str, str, str], bool] = TTLCache(MODELS, REFUSED_SECONDS)

    def wanted(self, exchange: Exchange) -> bool:
        """Return whether to ask for the usage of a stream, because a budget or a price applies.

        Without a budget, a request that the proxy must not change stays as it is, and its usage is estimated.
        """
        body = exchange.body
        if not body.stream or exchange.dialect.path != CHAT_PATH or exchange.place in self._refusing:
            return False
        wanted = limit_of(exchange.caller) is not None
        wanted = wanted or (exchange.bill.price_of is not None and exchange.mode != "off")
        return wanted and bool(body.units) and body.model is not None and not asks_usage(body.raw)

    async def recover(self, run: Run, attempt: Attempt, start: ResponseStart) -> Attempt | None:
        """Return an attempt that doesn't ask for the usage of its stream, if the upstream refused that."""
        refused = attempt.asks_usage and start.answer.status in REFUSALS and start.overflow is None
        if not refused or not any(name in start.first for name in (b"stream_options", b"include_usage")):
            return None
        run.asks_usage = False
        return replace(attempt, asks_usage=False)

    def answered(self, run: Run, start: ResponseStart) -> None:
        """Remember that an upstream refuses, if it answered a request that no longer asks."""
        place = run.exchange.place
        if CAUSE in run.retries and start.answer.status == 200 and place not in self._refusing:
            self._refusing[place] = True
            log.info("usage.refused")

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the models of forgotten tenants, and return those tenants."""
        tenants = {place[2] for place in self._refusing if forgotten(place[2])}
        for place in [place for place in self._refusing if place[2] in tenants]:
            del self._refusing[place]
        return tenants
