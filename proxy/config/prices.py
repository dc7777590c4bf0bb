"""The section `prices`: prices that differ from LiteLLM's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from proxy.config.fields import Text, no_truth_value, wrong
from proxy.limits.profiles.prices import FACTORS, FIELDS, SEARCHES, is_price_field
from proxy.telemetry.record import TIERS

_PARTS = {
    SEARCHES: "{search_context_size_medium: 0.01}",
    FACTORS: "{us: 1.1}",
}
"""The fields whose value is a section in LiteLLM's table, with an example."""


def _fields(prices: Mapping[str, float | Mapping[str, float]]) -> Mapping[str, float | Mapping[str, float]]:
    for name, value in prices.items():
        if not is_price_field(name) and name not in _PARTS:
            raise wrong(
                "isn't a price field of LiteLLM's table that the proxy uses",
                name,
                fix=f"use {', '.join(FIELDS)}, or one of them with _above_200k_tokens or another size, "
                f"and with _{', _'.join(TIERS)} for a tier; or {', '.join(_PARTS)}",
            )
        if isinstance(value, Mapping) != (name in _PARTS):
            fix = _PARTS.get(name, "0.00000125")
            raise wrong(f"must be {'a mapping' if name in _PARTS else 'a number'}", name, fix=f"{name}: {fix}")
    if "input_cost_per_token" not in prices:
        raise wrong("needs input_cost_per_token", fix="input_cost_per_token: 0.00000125")
    return prices


def _kind(value: object) -> str:
    return "section" if isinstance(value, Mapping) else "number"


PriceValue = Annotated[float, Field(ge=0), BeforeValidator(no_truth_value)]
"""US dollars per token or search, or a factor."""

PriceField = Annotated[
    Annotated[PriceValue, Tag("number")] | Annotated[Mapping[Text, PriceValue], Tag("section")], Discriminator(_kind)
]

ModelPrices = Annotated[Mapping[Text, PriceField], AfterValidator(_fields)]
"""The prices of a model in US dollars per token or search, by the fields of LiteLLM's table."""

Prices = Mapping[Text, ModelPrices]
"""Prices by model: the upstream's name, or a glob. The first match wins."""
