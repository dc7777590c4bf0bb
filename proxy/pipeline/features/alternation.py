"""Merge the proxy's messages with their neighbors for an upstream whose chat template wants alternating roles."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import msgspec
import structlog
from cachetools import TTLCache

from proxy.constants import DAY
from proxy.pipeline.attempt import Attempt, Run
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.response_start import ResponseStart, readable
from proxy.store.forgetting import drop

log = structlog.get_logger(__name__)

MODELS = 10_000
"""Models of tenants with such a template that are remembered, for a day."""

_STATUSES = frozenset({400, 422, 500})
_ROLES = re.compile(rb"alternat|\broles?\b")


class Alternation:
    """Finds and remembers the upstreams that refuse messages because of their roles."""

    def __init__(self) -> None:
        self._strict: TTLCache[tuple[str, str, str], bool] = TTLCache(MODELS, DAY)

    def apply(self, exchange: Exchange) -> None:
        """Treat a request as its upstream is known to need it."""
        if exchange.place in self._strict and not exchange.profile.strict_alternation:
            exchange.profile = replace(exchange.profile, strict_alternation=True)

    async def recover(self, run: Run, attempt: Attempt, start: ResponseStart) -> Attempt | None:
        """Return an attempt with alternating roles, if the upstream refused the roles of a compacted request."""
        exchange, input = run.exchange, attempt.input
        if start.answer.status not in _STATUSES or attempt.outcome.messages is None or input.strict:
            return None
        refusal = (await readable(start.answer, start.first)).lower()
        if b"tool_call" in refusal or not _ROLES.search(refusal):  # a call without a result isn't about roles
            return None
        self._strict[exchange.place] = True
        self.apply(exchange)
        log.info("alternation.learned")
        again = msgspec.structs.replace(input, strict=True, attempt=run.next_number)
        return await run.attempt(attempt.budget, again, may_ask=False)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        return drop(self._strict, forgotten, 2)
