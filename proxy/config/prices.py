"""The section `prices`: prices that differ from LiteLLM's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from proxy.config.fields import Text, no_truth_value, wrong
from proxy.limits.profiles.prices import FIELDS, is_price_field


def _fields(prices: Mapping[str, float]) -> Mapping[str, float]:
    for name in prices:
        if not is_price_field(name):
            raise wrong(
                "isn't a price field of LiteLLM's table that the proxy uses",
                name,
                fix=f"use {', '.join(FIELDS)}, or one of them with _above_200k_tokens or another size",
            )
    if "input_cost_per_token" not in prices:
        raise wrong("needs input_cost_per_token", fix="input_cost_per_token: 0.00000125")
    return prices


PriceValue = Annotated[float, Field(ge=0), BeforeValidator(no_truth_value)]
"""US dollars per token."""

ModelPrices = Annotated[Mapping[Text, PriceValue], AfterValidator(_fields)]
"""The prices of a model in US dollars per token, by the fields of LiteLLM's table."""

Prices = Mapping[Text, ModelPrices]
"""Prices by model: the upstream's name, or a glob. The first match wins."""
