"""The section `models`: which models go to which upstream, and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import field_validator, model_validator

from proxy.config.faults import near
from proxy.config.fields import Count, Name, Section, Size, Text, wrong


class ProfileSettings(Section):
    """What is known of a model, where the built-in tables are wrong or silent. Limits are in tokens."""

    context_window: Count | None = None
    """Input and output together."""
    max_input_tokens: Count | None = None
    """The input alone."""
    max_output_tokens: Count | None = None
    """The output alone."""
    max_bytes: Size | None = None
    """What the upstream takes as the body of a request, in bytes or as text such as 32MB."""
    max_messages: Count | None = None
    """How many messages it takes in a request."""
    # The encodings that can be had without a download.
    tokenizer: Literal["o200k_base", "o200k_harmony", "cl100k_base", "p50k_base", "p50k_edit"] | None = None
    """The tokenizer, or the one that comes nearest."""
    images: Text | None = None
    """The rule by which images are counted."""
    strict_alternation: bool | None = None
    """Whether the upstream wants the user and the assistant to speak in turn, the user first."""

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
    """Which models go where. The first match wins."""

    match: Text
    """The model a request names; *, ? and [seq] as in file names; case matters."""
    upstream: Name
    """The name of the upstream."""
    model: Text | None = None
    """The name the upstream knows. Left out: as requested."""
    profile: ProfileSettings | None = None
    """The model's limits. Left out: from the built-in tables, or as the upstream tells."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a model goes: the upstream's name, the model's name there, and what the file says of its limits."""

    upstream: str
    model: str
    profile: ProfileSettings | None
