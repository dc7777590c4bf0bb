"""The section `models`: which models go to which upstream, and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import field_validator, model_validator

from proxy.config.fields import Count, Name, Section, Size, Text, wrong
from proxy.config.issues import near


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
        from proxy.tokens.images import RULES

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
