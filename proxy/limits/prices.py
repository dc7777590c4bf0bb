"""Prices of models, by the fields of LiteLLM's table.

https://github.com/BerriAI/litellm/blob/main/model_prices_and_context_window.json
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from fnmatch import fnmatchcase
from functools import cache
from types import MappingProxyType
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from msgspec.structs import replace

from proxy.constants import PICO
from proxy.telemetry.record import TIERS, Usage

FIELDS = {
    "input_cost_per_token": "input",
    "output_cost_per_token": "output",
    "cache_read_input_token_cost": "cache_read",
    "cache_creation_input_token_cost": "cache_write",
    "cache_creation_input_token_cost_above_1hr": "cache_write_1h",
    "output_cost_per_reasoning_token": "reasoning",
    "input_cost_per_audio_token": "audio_input",
    "output_cost_per_audio_token": "audio_output",
    "input_cost_per_image_token": "image_input",
    "output_cost_per_image_token": "image_output",
}
"""Prices of one token, each also ``_above_200k_tokens`` or another size, and ``_flex`` or another tier."""

SEARCHES = "search_context_cost_per_query"
FACTORS = "provider_specific_entry"

_FIELD = re.compile(rf"({'|'.join(FIELDS)})(?:_above_(\d+)k_tokens)?(?:_({'|'.join(TIERS)}))?")
_WINDOW = re.compile(r"(\d\d?):(\d\d)-(\d\d?):(\d\d)")
_FREE_WRITES = ("cache_write", "cache_write_1h")
_FIREWORKS_CACHED = 0.5  # share of the input's price for cached tokens, unless the table has a price

_Stated = dict[str, int]


class Rates(msgspec.Struct, frozen=True, gc=False):
    """The price of one token of each kind, in US dollars times 10^12. ``None``: as ``input`` or ``output``."""

    input: int
    output: int
    cache_read: int | None = None
    cache_write: int | None = None
    cache_write_1h: int | None = None  # `None`: as `cache_write`
    reasoning: int | None = None
    audio_input: int | None = None
    audio_output: int | None = None
    image_input: int | None = None
    image_output: int | None = None

    def cost(self, usage: Usage) -> int:
        """Return the price of the tokens of one prompt and its answer."""
        cached = usage.cache_read or usage.cache_write or usage.reasoning
        media = usage.audio_input or usage.image_input or usage.audio_output or usage.image_output
        if cached or media:
            return self._prompt(usage) + self._answer(usage)
        return (usage.input or 0) * self.input + (usage.output or 0) * self.output

    def _prompt(self, usage: Usage) -> int:
        read, written = usage.cache_read or 0, usage.cache_write or 0
        fresh = max(0, (usage.input or 0) - read - written)
        # A cache may have served audio and images, too.
        audio = min(usage.audio_input or 0, fresh)
        images = min(usage.image_input or 0, fresh - audio)
        price = (fresh - audio - images) * self.input
        if read:
            price += read * _or(self.cache_read, self.input)
        if written:
            lasting = min(usage.cache_write_1h or 0, written)
            writing = _or(self.cache_write, self.input)
            price += (written - lasting) * writing + lasting * _or(self.cache_write_1h, writing)
        if audio or images:
            price += audio * _or(self.audio_input, self.input) + images * _or(self.image_input, self.input)
        return price

    def _answer(self, usage: Usage) -> int:
        output = usage.output or 0
        reasoning = min(usage.reasoning or 0, output)
        audio = min(usage.audio_output or 0, output - reasoning)
        images = min(usage.image_output or 0, output - reasoning - audio)
        price = (output - reasoning - audio - images) * self.output
        if reasoning:
            price += reasoning * _or(self.reasoning, self.output)
        if audio or images:
            price += audio * _or(self.audio_output, self.output) + images * _or(self.image_output, self.output)
        return price


def _or(rate: int | None, other: int) -> int:
    return other if rate is None else rate


NO_OTHERS: Mapping[str, Price] = MappingProxyType({})


class Price(msgspec.Struct, frozen=True, gc=False):
    """The price of a model."""

    base: Rates
    steps: tuple[tuple[int, Rates], ...] = ()  # a prompt of more tokens than a threshold is charged at its rates, whole
    tiers: Mapping[str, Price] = {}  # those of service tiers that cost something else
    search: int = 0  # of one web search, or of all for a prompt if `search_once`
    search_once: bool = False
    factors: Mapping[str, float] = {}  # multiply the price of all tokens in a tier or a region
    off_peak: OffPeak | None = None  # the price at some times of the week

    def at(self, seconds: float) -> Price:
        """Return the price at a time in seconds since 1970."""
        return self.off_peak.price if self.off_peak is not None and self.off_peak.includes(seconds) else self

    def rates(self, prompt: int) -> Rates:
        found = self.base
        for threshold, rates in self.steps:
            if prompt > threshold:
                found = rates
        return found

    def cost(self, usage: Usage, others: Mapping[str, Price | None] = NO_OTHERS) -> int:
        """Return the price of a request. ``others`` are the prices of further models that the provider called."""
        if usage.compactions:
            inner = sum((others.get(one.model or "") or self).cost(one) for one in usage.compactions)
            return self.cost(usage.without_compactions) + inner
        tier = self if usage.tier is None else self.tiers.get(usage.tier, self)
        cost = tier.rates(usage.input or 0).cost(usage)
        if self.factors:
            for name in (usage.tier, usage.region):
                cost = round(cost * self.factors.get(name or "", 1))
        if usage.searches:
            cost += self.search * (1 if self.search_once else usage.searches)
        return cost


class OffPeak(msgspec.Struct, frozen=True, gc=False):
    """The price of a model in some windows: start and end in minutes of the day in UTC, and days from 1, Monday.

    ``zone`` is the time zone of the days.
    """

    price: Price
    windows: tuple[tuple[int, int, tuple[int, ...]], ...]
    zone: tzinfo = UTC

    def includes(self, seconds: float) -> bool:
        """Return whether a time in seconds since 1970 is in a window. One that ends at its start is a whole day."""
        minute = int(seconds // 60) % (24 * 60)
        day = datetime.fromtimestamp(seconds, self.zone).isoweekday()
        return any(
            day in days and (start <= minute < end if start < end else minute >= start or minute < end)
            for start, end, days in self.windows
        )


def provider_of(listed: str) -> str:
    """Return the provider of an entry as `upstreams.NAME.provider` names it. Some entries name a part of one."""
    return "bedrock" if listed == "bedrock_converse" else "vertex_ai" if listed.startswith("vertex_ai") else listed


def price_of(prices: Mapping[str, Mapping[str, object]], model: str, listed: Price | None) -> Price | None:
    """Return an operator's price for a model, by its name or a glob, or else the price that the table lists."""
    for name, fields in prices.items():
        if name == model or fnmatchcase(model, name):
            return _operators_price(fields)
    return listed


_operators: dict[int, tuple[Mapping[str, object], Price | None]] = {}
_MOST_OPERATORS = 1_000


def _operators_price(fields: Mapping[str, object]) -> Price | None:
    """Return an operator's price. Reading it takes longer than all else that a request needs from here."""
    known = _operators.get(id(fields))
    if known is None or known[0] is not fields:
        if len(_operators) >= _MOST_OPERATORS:  # after many reloads
            _operators.clear()
        known = _operators[id(fields)] = fields, price_from(fields)
    return known[1]


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


def price_from(entry: Mapping[str, object], provider: str = "") -> Price | None:
    """Return the price in an entry of the table, or ``None`` if it has no price for input tokens."""
    stated = _stated(entry)
    standard = stated.pop("", {})
    ranges = entry.get("tiered_pricing")
    if isinstance(ranges, list) and (found := _by_range(ranges, standard.get(0, {}))):
        rates, tiers = found, {}
    else:
        if provider == "fireworks_ai" and "input" in (plain := standard.get(0, {})):
            plain.setdefault("cache_read", round(plain["input"] * _FIREWORKS_CACHED))
        # xAI charges more from the threshold on, not over it.
        inclusive = int(provider == "xai")
        rates = _by_size(standard, {}, inclusive)
        tiers = {tier: _by_size(standard, own, inclusive) for tier, own in stated.items()}
    if not rates:
        return None
    price = Price(
        rates[0][1],
        tuple(rates[1:]),
        {tier: Price(own[0][1], tuple(own[1:])) for tier, own in tiers.items() if own},
        _search(entry.get(SEARCHES)),
        # Gemini charges for the prompt unless the entry says otherwise.
        provider.startswith(("gemini", "vertex_ai-language")) and entry.get("web_search_billing_unit") != "per_query",
        _factors(entry.get(FACTORS)),
    )
    off_peak = _off_peak(entry.get("off_peak_pricing"), standard.get(0, {}), price)
    return price if off_peak is None else replace(price, off_peak=off_peak)


@cache
def _place(name: str) -> tuple[str, int, str] | None:
    """Return the tier, the threshold in tokens, and the kind of token that a field has a price for."""
    found = _FIELD.fullmatch(name)
    return found and (found[3] or "", 1_000 * int(found[2] or 0), FIELDS[found[1]])


def is_price_field(name: str) -> bool:
    """Return whether the proxy uses a field of LiteLLM's table as the price of a token."""
    return _place(name) is not None


def _stated(entry: Mapping[str, object]) -> dict[str, dict[int, _Stated]]:
    stated: dict[str, dict[int, _Stated]] = {}
    for name, value in entry.items():
        if (place := _place(name)) is None or (price := _price(value)) is None:
            continue
        tier, threshold, kind = place
        # Some entries state 0 for a price that doesn't exist, such as a cache write at an automatic cache.
        if price or kind not in _FREE_WRITES:
            stated.setdefault(tier, {}).setdefault(threshold, {})[kind] = price
    return stated


def _price(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return None
    return round(value * PICO)


def _by_size(standard: Mapping[int, _Stated], own: Mapping[int, _Stated], inclusive: int) -> list[tuple[int, Rates]]:
    """Return the rates by threshold, ascending from 0. A tier's ``own`` prices take precedence at each threshold."""
    rates: list[tuple[int, Rates]] = []
    values: _Stated = {}
    for threshold in sorted({0, *standard, *own}):
        plain, special = standard.get(threshold, {}), own.get(threshold, {})
        values = {**values, **plain, **special}
        if "output" in special and "reasoning" not in special:
            values.pop("reasoning", None)
        if "input" not in values:
            return []
        # A model that writes only images or audio has no price of text.
        output = values.get("image_output", values.get("audio_output", 0))
        rates.append((max(0, threshold - inclusive), Rates(**{"output": output, **values})))
    return rates


def _by_range(ranges: Sequence[object], plain: _Stated) -> list[tuple[int, Rates]]:
    """Return the rates of ``tiered_pricing``, ascending. Its prices replace all prices of text in the entry."""
    found: dict[int, Rates] = {}
    for one in ranges:
        if not isinstance(one, Mapping) or not isinstance(limits := one.get("range"), list) or len(limits) != 2:
            continue
        own = _stated(one).get("", {}).get(0, {})
        if "input" in own:
            others = {kind: price for kind, price in plain.items() if kind.startswith(("audio", "image"))}
            found[int(limits[0])] = Rates(**{"output": plain.get("output", 0), **others, **own})
    ascending = sorted(found.items())
    return [(0, ascending[0][1]), *ascending[1:]] if ascending else []


def _off_peak(value: object, plain: _Stated, usual: Price) -> OffPeak | None:
    """Return the price at some times. It has no steps and no tiers."""
    if not isinstance(value, Mapping):
        return None
    windows = [*_windows(value), *(window for rule in value.get("windows", ()) for window in _windows(rule))]
    rates = _by_size({0: {**plain, **_stated(value).get("", {}).get(0, {})}}, {}, 0)
    if not rates:
        return None
    price = replace(usual, base=rates[0][1], steps=(), tiers={})
    return OffPeak(price, tuple(windows), _zone(value.get("weekday_timezone")))


def _windows(rule: Mapping[str, Any]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    stated = rule.get("hours_utc", ())
    days = tuple(rule.get("weekdays", range(1, 8)))
    for window in (stated,) if isinstance(stated, str) else stated:
        if found := _WINDOW.fullmatch(str(window)):
            hour, minute, last_hour, last_minute = map(int, found.groups())
            yield 60 * hour + minute, 60 * last_hour + last_minute, days


def _zone(name: object) -> tzinfo:
    try:
        return ZoneInfo(name) if isinstance(name, str) else UTC
    except (ValueError, ZoneInfoNotFoundError):
        return UTC


def _search(value: object) -> int:
    if isinstance(value, Mapping):
        value = value.get("search_context_size_medium")
    return _price(value) or 0


def _factors(value: object) -> dict[str, float]:
    factors = value.items() if isinstance(value, Mapping) else ()
    return {name: factor for name, factor in factors if isinstance(factor, int | float) and factor > 0}
