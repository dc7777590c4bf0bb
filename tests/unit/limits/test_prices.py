"""Test that prices are read from LiteLLM's fields and applied to the whole prompt."""

import pytest

from proxy.limits.prices import Price, Rates, below_step, is_price_field, price_from, price_of, step_of
from proxy.limits.profiles import Profiles
from proxy.telemetry.record import Usage

HAIKU = {
    "input_cost_per_token": 1e-7,
    "output_cost_per_token": 5e-7,
    "cache_read_input_token_cost": 1e-8,
    "cache_creation_input_token_cost": 1.25e-7,
    "input_cost_per_token_above_100k_tokens": 5e-7,
    "cache_read_input_token_cost_above_100k_tokens": 5e-8,
    "input_cost_per_token_batches": 1.0,
}


def test_steps_replace_the_rates_that_they_state() -> None:
    price = price_from(HAIKU)
    low = Rates(100_000, 500_000, 10_000, 125_000)
    high = Rates(500_000, 500_000, 50_000, 125_000)
    assert price == Price(low, ((100_000, high),))
    assert price.rates(100_000) == low
    assert price.rates(100_001) == high


def test_the_price_step_is_the_first_one_that_costs_more() -> None:
    entry = {
        "input_cost_per_token": 1e-6,
        "input_cost_per_token_above_100k_tokens": 1e-6,
        "input_cost_per_token_above_200k_tokens": 2e-6,
        "input_cost_per_token_above_400k_tokens": 3e-6,
    }
    price = price_from(entry)
    assert (step_of(price), below_step(price), below_step(price, 1.25)) == (200_000, 194_000, 155_200)
    assert step_of(price_from({"input_cost_per_token": 1e-6})) is None
    assert below_step(None) is None


def test_cache_tokens_without_a_price_cost_as_much_as_others() -> None:
    price = price_from({"input_cost_per_token": 2e-6, "cache_creation_input_token_cost": 0.0})
    assert price is not None
    assert price.cost(Usage(6, 4, 2, 3)) == 6 * 2_000_000


@pytest.mark.parametrize("entry", [{}, {"output_cost_per_token": 1e-6}, {"input_cost_per_token": None}])
def test_no_price(entry: dict[str, object]) -> None:
    assert price_from(entry) is None


def test_an_operators_price_is_the_current_one() -> None:
    """Prices that were read are remembered, and a reload may change them."""
    for dollars in range(1, 3_000):
        assert price_of({"m*": {"input_cost_per_token": dollars}}, "m1", None) == Price(Rates(dollars * 10**12, 0))


def test_the_fields_that_count() -> None:
    for name in (
        "input_cost_per_token_above_272k_tokens",
        "output_cost_per_token_flex",
        "cache_read_input_token_cost_above_272k_tokens_priority",
        "cache_creation_input_token_cost_above_1hr_above_200k_tokens",
        "output_cost_per_reasoning_token",
    ):
        assert is_price_field(name)
    assert not is_price_field("input_cost_per_token_batches")
    assert not is_price_field("input_price")


def test_a_profile_has_the_price_of_its_provider_only() -> None:
    profiles = Profiles()
    assert profiles.find("gpt-5", provider="openai").price is not None
    assert profiles.find("gpt-5", provider="vllm").price is None
    assert profiles.find("anthropic.claude-opus-4-6-v1", provider="bedrock").price is not None
    assert profiles.find("gemini-2.5-flash", provider="vertex_ai").price is not None
