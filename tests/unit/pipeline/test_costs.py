"""Test the price of requests, and the estimates of what they would cost otherwise."""

import pytest

from proxy.limits.prices import Price, Rates
from proxy.pipeline.billing import Basis, cost_of
from proxy.pipeline.job import Forecast
from proxy.telemetry.record import Cost, Usage

RATES = Rates(10, 50, 1, 12)
PRICE = Price(RATES)
STEPPED = Price(RATES, ((5_000, Rates(20, 100, 2, 24)),))


@pytest.mark.parametrize(
    ("price", "usage", "basis", "cost"),
    [
        # Without a count: as sent. The upstream reports no cache.
        (PRICE, Usage(100, 10), Basis(), Cost(1_500, 1_500, estimated=True)),
        (PRICE, Usage(100, 10, 60, 30), Basis(), Cost(10 * 10 + 60 + 30 * 12 + 500, 980 + 40)),
        # Unchanged.
        (PRICE, Usage(100, 0, 0), Basis(100, 100), Cost(1_000, 1_000)),
        # Compacted from 1,000 to 100 tokens. The cache would have served 900, because the last request was recent.
        (PRICE, Usage(100, 0, 0), Basis(1_000, 100, 900, recent=True), Cost(1_000, 900 + 1_000)),
        # It wasn't recent.
        (PRICE, Usage(100, 0, 0), Basis(1_000, 100, 900), Cost(1_000, 10_000)),
        # This upstream reports no cache, so the estimate has none.
        (PRICE, Usage(100, 0), Basis(1_000, 100, 900, recent=True), Cost(1_000, 10_000, estimated=True)),
        # The client writes to the cache.
        (PRICE, Usage(100, 0, 40, 10), Basis(1_000, 100, 900), Cost(500 + 40 + 120, 900 + 100 * 12)),
        # The upstream counts twice as many tokens as the proxy.
        (PRICE, Usage(200, 0, 0), Basis(1_000, 100, 900), Cost(2_000, 20_000)),
        # It wouldn't have fit, so it would have cost nothing and returned nothing.
        (PRICE, Usage(100, 0, 0), Basis(1_000, 100, 900, fits=False), Cost(1_000, 1_000)),
        # The step's rates apply to the whole prompt.
        (STEPPED, Usage(100, 1, 0), Basis(6_000, 100, 0), Cost(1_050, 120_000 + 100)),
        # A saving below zero: after the checkpoint nothing is cached.
        (PRICE, Usage(500, 0, 0), Basis(1_000, 500, 990, recent=True), Cost(5_000, 990 + 100)),
    ],
)
def test_cost(price: Price, usage: Usage, basis: Basis, cost: Cost) -> None:
    found = cost_of(price, usage, basis)
    if basis == Basis():
        assert found.sent == found.as_received
        assert found.estimated == (usage.cache_read is None)
        assert usage.cache_read is None or found.sent == 10 * 10 + 60 + 30 * 12 + 500
    else:
        assert found == cost


def test_shadow_mode_estimates_enforce() -> None:
    usage, forecast = Usage(1_000, 0, 900), Forecast(300, ("summary",), 700, 50)
    first = cost_of(PRICE, usage, Basis(1_000, 1_000, 900, forecast, recent=True, new_checkpoint=True))
    assert first == Cost(100 * 10 + 900, 1_900, 300 * 10 + 700 * 10 + 50 * 50)
    # Later, the cache serves all but the 100 new tokens.
    later = cost_of(PRICE, usage, Basis(1_000, 1_000, 900, forecast, recent=True))
    assert later.forecast == 200 + 100 * 10
