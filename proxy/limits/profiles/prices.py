"""Prices of models, by the fields of LiteLLM's table.

https://github.com/BerriAI/litellm/blob/main/model_prices_and_context_window.json
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import msgspec

PICO = 10**12
"""Parts of a US dollar in which prices are stated. Sums of integers are exact."""

FIELDS = {
    "input_cost_per_token": "input",
    "output_cost_per_token": "output",
    "cache_read_input_token_cost": "cache_read",
    "cache_creation_input_token_cost": "cache_write",
}

_STEP = re.compile(rf"({'|'.join(FIELDS)})_above_(\d+)k_tokens")


class Rates(msgspec.Struct, frozen=True, gc=False):
    """The price of one token of each kind, in US dollars times 10^12. ``None``: as ``input``."""

    input: int
    output: int
    cache_read: int | None = None
    cache_write: int | None = None

    def cost(self, fresh: int, read: int, written: int, output: int) -> int:
        """Return the price of a prompt with fresh, cached, and newly cached tokens, and of its answer."""
        reading = self.input if self.cache_read is None else self.cache_read
        writing = self.input if self.cache_write is None else self.cache_write
        return fresh * self.input + read * reading + written * writing + output * self.output


class Price(msgspec.Struct, frozen=True, gc=False):
    """The price of a model. A prompt of more tokens than a step's threshold is charged at that step's rates, whole."""

    base: Rates
    steps: tuple[tuple[int, Rates], ...] = ()

    def rates(self, prompt: int) -> Rates:
        """Return the rates for a prompt of this many tokens."""
        found = self.base
        for threshold, rates in self.steps:
            if prompt > threshold:
                found = rates
        return found


def price_of(prices: Mapping[str, Mapping[str, object]], model: str, listed: Price | None) -> Price | None:
    """Return an operator's price for a model, by its name or a glob, or else the price that the table lists."""
    for name, fields in prices.items():
        if name == model or fnmatchcase(model, name):
            return price_from(fields)
    return listed


STEP_CAUTION = 0.97
"""Share of a step's threshold at which the proxy compacts, because its counts may be slightly too low."""


def step_of(price: Price | None) -> int | None:
    """Return the lowest threshold over which input costs more, or ``None`` if there is none."""
    if price is None:
        return None
    return next((threshold for threshold, rates in price.steps if rates.input > price.base.input), None)


def below_step(price: Price | None, factor: float = 1.0) -> int | None:
    """Return the tokens just below the step, as counted here. ``factor`` is the upstream's tokens per token here."""
    step = step_of(price)
    return None if step is None else int(step * STEP_CAUTION / factor)


def price_from(entry: Mapping[str, object]) -> Price | None:
    """Return the price in an entry of the table, or ``None`` if it has no price for input tokens."""
    base = _rates(dict(_stated(entry, None)))
    if base is None:
        return None
    thresholds = {int(match[2]) for name in entry if (match := _STEP.fullmatch(name))}
    plain = dict(_stated(entry, None))
    steps = [(1_000 * size, _rates({**plain, **dict(_stated(entry, size))})) for size in sorted(thresholds)]
    return Price(base, tuple((size, rates) for size, rates in steps if rates is not None))


def is_price_field(name: str) -> bool:
    """Return whether the proxy uses a field of LiteLLM's table."""
    return name in FIELDS or _STEP.fullmatch(name) is not None


def _stated(entry: Mapping[str, object], thousands: int | None) -> Iterator[tuple[str, int]]:
    suffix = "" if thousands is None else f"_above_{thousands}k_tokens"
    for field, name in FIELDS.items():
        value = entry.get(field + suffix)
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            yield name, round(value * PICO)


def _rates(values: Mapping[str, int]) -> Rates | None:
    if "input" not in values:
        return None
    # Some entries state 0 for a price that doesn't exist, such as a cache write at an automatic cache.
    written = values.get("cache_write") or None
    return Rates(values["input"], values.get("output", 0), values.get("cache_read"), written)
