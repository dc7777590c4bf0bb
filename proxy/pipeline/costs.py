"""Find the price of a request, reserve what it may cost, and settle what it did cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import structlog
from cachetools import LRUCache
from msgspec.structs import replace

from proxy.access.spending import limit_of
from proxy.config import Route
from proxy.limits.prices import Price
from proxy.pipeline.attempt import Departure
from proxy.pipeline.billing import BYTES_A_TOKEN, CACHE_SECONDS, EXPECTED_OUTPUT, NO_BASIS, Basis, Pricing
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.runtime import Runtime
from proxy.store.forgetting import drop
from proxy.telemetry.record import Usage

log = structlog.get_logger(__name__)

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
