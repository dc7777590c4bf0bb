"""The sections `models` and `prices`: which models go to which upstream, their limits, and their prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from proxy.config.fields import Count, Name, Section, Size, Text, no_truth_value, wrong
from proxy.config.issues import near
from proxy.limits.profiles.prices import FACTORS, FIELDS, SEARCHES, is_price_field
from proxy.telemetry.record import TIERS


class ProfileSettings(Section):
    """A model's limits, if the built-in tables are wrong or don't list it. Limits are in tokens."""

    main: ClassVar[str | None] = "context_window"

    like: Text | None = None
    """A listed model with the same limits and tokenizer, for example the one that a deployment serves."""
    context_window: Count | None = None
    """Maximum tokens of input and output together."""
    max_input_tokens: Count | None = None
    """Maximum tokens of the input."""
    max_output_tokens: Count | None = None
    """Maximum tokens of the output."""
    max_bytes: Size | None = None
    """Maximum size of a request body that the upstream accepts: bytes, or text like 32MB."""
    max_messages: Count | None = None
    """Maximum messages in a request that the upstream accepts."""
    # The encodings that need no download.
    tokenizer: Literal["o200k_base", "o200k_harmony", "cl100k_base", "p50k_base", "p50k_edit"] | None = None
    """The model's tokenizer, or the most similar one."""
    images: Text | None = None
    """The rule for counting the tokens of images: the name of a model with the same rule."""
    strict_alternation: bool | None = None
    """Whether the upstream requires user and assistant messages to alternate, starting with the user."""

    native_compaction: bool | None = None
    """Whether the provider compacts conversations of the model on request. Default: by LiteLLM's table for Anthropic,
    and true for OpenAI."""

    @field_validator("images")
    @classmethod
    def _is_a_rule(cls, images: str | None) -> str | None:
        # Imported here: few configurations name a rule, and counting brings the tokenizer with it.
        from proxy.tokens.media import RULES

        if images is not None and images not in RULES:
            raise wrong("isn't a rule for images", fix=near(images, RULES))
        return images

    @model_validator(mode="after")
    def _parts_fit_the_whole(self) -> ProfileSettings:
        window = self.context_window
        for name in ("max_input_tokens", "max_output_tokens"):
            part = getattr(self, name)
            if window is not None and part is not None and part > window:
                raise wrong(f"must be at most context_window, {window}", name, fix=f"{name}: {window}")
        return self


class RouteSettings(Section):
    """Send matching models to an upstream. The first match wins."""

    match: Text
    """The model in the request. *, ?, and [seq] work as in file names. Case-sensitive."""
    upstream: Name
    """The name of the upstream."""
    model: Text | None = None
    """The model's name at the upstream. Default: the name in the request."""
    profile: ProfileSettings | None = None
    """The model's limits. Default: from the upstream or the built-in tables."""


@dataclass(frozen=True, slots=True)
class Route:
    """The upstream of a model, its name there, and its limits in the configuration."""

    upstream: str
    model: str
    profile: ProfileSettings | None


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
