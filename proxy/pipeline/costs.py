"""Compute the price of a request, and estimate its price without the proxy.

Without the proxy, the provider's prompt cache would have served the part of the prompt that the conversation's last
request already had, if that was recent. So the estimate charges that part at the cache's price. A negative saving is
possible: a checkpoint changes the prompt, and the next request can't use the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import structlog
from cachetools import LRUCache
from msgspec.structs import replace

from proxy.access.spending import limit_of
from proxy.config import Route
from proxy.limits.prices import NO_OTHERS, Price, below_step, price_of
from proxy.limits.profiles import Profile
from proxy.pipeline.billing import BYTES_A_TOKEN, EXPECTED_OUTPUT
from proxy.pipeline.job import Forecast
from proxy.store.forgetting import drop
from proxy.telemetry.record import Cost, Usage

if TYPE_CHECKING:  # the runtime has the compactor, which asks for summaries and their price
    from proxy.pipeline.attempt import Departure
    from proxy.pipeline.exchange import Exchange
    from proxy.pipeline.runtime import ConfigSnapshot, Runtime

log = structlog.get_logger(__name__)

CACHE_SECONDS = 300.0  # lifetime of an entry in a provider's prompt cache after its last use, at most providers
CONVERSATIONS = 5_000  # conversations to remember, those with the latest requests


class Basis(msgspec.Struct, frozen=True):
    """The facts about a request that its price depends on, without its content.

    ``recent`` is true if the conversation's last request is at most ``CACHE_SECONDS`` old. ``new_checkpoint`` is true
    if this request is the first after a checkpoint. ``fits`` is false if the request as received was too large.
    """

    before: int | None = None
    sent: int | None = None
    shared: int | None = None
    forecast: Forecast | None = None
    recent: bool = False
    new_checkpoint: bool = False
    fits: bool = True


NO_BASIS = Basis()


class Costs:
    """The prices of requests. Remembers when each conversation was last seen, and its checkpoints."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """``clock`` returns seconds."""
        self._clock = clock
        self._seen: LRUCache[tuple[str, str], tuple[float, int]] = LRUCache(CONVERSATIONS)

    def price(self, exchange: Exchange, sent: Departure) -> None:
        """Note what the price of a request depends on. Call this while the request has its body."""
        basis = self._basis(exchange, sent)
        if isinstance(exchange.bill.price_of, Pricing):
            exchange.bill.price_of = Pricing(exchange.bill.price_of.price, basis)

    def _basis(self, exchange: Exchange, sent: Departure) -> Basis:
        outcome, received = sent.outcome, sent.outcome.received
        if received is None or not exchange.body.units:
            return Basis()
        key, now = exchange.conversation, self._clock()
        last, checkpoints = self._seen.get(key, (-CACHE_SECONDS, 0))
        self._seen[key] = now, max(checkpoints, outcome.checkpoints)
        return Basis(
            received.tokens,
            sent.after,
            received.shared,
            outcome.forecast,
            now - last < CACHE_SECONDS,
            outcome.checkpoints > checkpoints,
            exchange.record.fits,
        )

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        return drop(self._seen, forgotten)


def price_for(configuration: ConfigSnapshot, route: Route, profile: Profile) -> Price | None:
    """Return the current price of a route's model: the operator's, or else that of the table."""
    price = price_of(configuration.settings.prices, route.model, profile.price)
    return None if price is None else price.at(time.time())


def price_step(exchange: Exchange, factor: float) -> int | None:
    """Return the tokens just below the step in the price of a request's model, as counted here.

    ``factor`` is the upstream's tokens per counted token.
    """
    return below_step(price_for(exchange.configuration, exchange.route, exchange.profile), factor)


class Pricing(msgspec.Struct, frozen=True):
    """How to price the calls of a request. ``basis`` is that of the call whose answer the client gets.

    ``others`` are the prices of models that the provider called for an answer. ``None``: unknown, so as ``price``.
    """

    price: Price
    basis: Basis = NO_BASIS
    others: Mapping[str, Price | None] = {}

    def __call__(self, usage: Usage, answers: bool) -> Cost:
        """Return the price of a call. ``answers`` is true if the client gets its answer."""
        if answers:
            return cost_of(self.price, usage, self.basis, self.others)
        # Without the proxy there would have been no other call.
        return replace(cost_of(self.price, usage, NO_BASIS, self.others), as_received=0)


def pricing(price: Price | None, basis: Basis = NO_BASIS) -> Pricing | None:
    """Return how to price a request; ``None`` without a price."""
    return None if price is None else Pricing(price, basis)


def dearer(price: Price, other: Price | None) -> bool:
    """Return whether a price is higher than another one."""
    return other is None or price.base.input + price.base.output > other.base.input + other.base.output


async def reserve(runtime: Runtime, exchange: Exchange, sent: Departure, factor: float) -> None:
    """Reserve what a request will probably cost its team. Raises ``SpendingExceeded``.

    ``factor`` is the upstream's tokens per counted token.
    """
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
        if isinstance(bill.price_of, Pricing) and (models := bill.models):
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
    """With a spending limit in US dollars, let the dearer model count: that of the request, or that of its answer.

    A body may name several models, of which the upstream takes one, or none.
    """
    meter, known = exchange.bill.last, exchange.bill.price_of
    if meter is None:
        return
    if not meter.model or meter.model == exchange.route.model:
        return
    price = await _price_of(runtime, exchange, meter.model)
    own = known if isinstance(known, Pricing) else None
    if price is not None and dearer(price, None if own is None else own.price):
        exchange.bill.price_of = Pricing(price, NO_BASIS if own is None else own.basis)


async def _price_of(runtime: Runtime, exchange: Exchange, model: str) -> Price | None:
    """Return the price of another model at the upstream of a request."""
    route = Route(exchange.route.upstream, model, None)
    return price_for(exchange.configuration, route, await runtime.limits.profile(route, exchange.configuration))


def cost_of(price: Price, usage: Usage, basis: Basis, others: Mapping[str, Price | None] = NO_OTHERS) -> Cost:
    """Return the price of a request by its reported usage, and the estimates. For ``others`` see ``Price.cost``."""
    answer = usage.without_compactions
    sent = price.cost(usage, others)
    extra = sent - price.cost(answer) if usage.compactions else 0
    # The use of a cache matters only if it has a price of its own.
    estimated = usage.estimated or (usage.cache_read is None and price.rates(usage.input or 0).cache_read is not None)
    if basis.before is None or basis.sent is None or not basis.sent:
        return Cost(sent, sent, estimated=estimated)
    ratio = (answer.input or 0) / basis.sent
    as_received = sent
    if basis.before != basis.sent and basis.fits:
        shared = (basis.shared or 0) * ratio
        as_received = _prompt_cost(price, answer, basis, round(basis.before * ratio), shared) + extra
    forecast = None
    if basis.forecast is not None:
        forecast = _forecast_cost(price, answer, basis, basis.forecast, ratio) + extra
    return Cost(sent, as_received, forecast, estimated)


def _prompt_cost(price: Price, usage: Usage, basis: Basis, prompt: int, shared: float) -> int:
    """Return the price of the same answer to another prompt, of which the cache would have served ``shared`` tokens."""
    caches = usage.cache_read is not None and (basis.recent or bool(usage.cache_read))
    read = min(prompt, round(shared)) if caches else 0
    written = prompt - read if usage.cache_write else 0
    lasting = round(written * (usage.cache_write_1h or 0) / usage.cache_write) if usage.cache_write else 0
    return price.cost(replace(usage, input=prompt, cache_read=read, cache_write=written, cache_write_1h=lasting))


def _forecast_cost(price: Price, usage: Usage, basis: Basis, forecast: Forecast, ratio: float) -> int:
    """Return the price of a request in shadow mode if the policy enforced compaction, with a new summary's price."""
    added = (basis.before or 0) - (basis.shared or 0)
    shared = 0 if basis.new_checkpoint else max(0, forecast.after - added)
    cost = _prompt_cost(price, usage, basis, round(forecast.after * ratio), shared * ratio)
    if basis.new_checkpoint and forecast.summarized:
        asked = round(forecast.summarized * ratio)
        cost += price.cost(Usage(asked, round(forecast.written * ratio), tier=usage.tier, region=usage.region))
    return cost
