"""Count the tokens of texts, content parts, and tools, as all APIs have them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Set
from typing import Any

import tiktoken

from proxy.limits.profiles.lookup import Profile
from proxy.tokens import tools
from proxy.tokens.media import MEDIA, Media
from proxy.tokens.text import check, count, dump, encoding, escaped, loaded

CALL = 3
"""Tokens of a call's frame, and of a tool's."""


def key_of(profile: Profile) -> Hashable:
    """Return the parts of a profile that decide how to count."""
    return (profile.tokenizer, profile.token_ratio, profile.images, profile.tools, profile.escapes)


class TokenCounter:
    """Counts tokens as one model's provider does, in any API. Thread-safe.

    No method raises for unusual input: a body is any JSON. The first count loads the encoding (0.2 to 0.4 s).

    Raises ``ConfigurationError`` if the profile names an encoding that isn't installed, or an unknown rule for images.
    """

    def __init__(self, profile: Profile) -> None:
        if not loaded(profile.tokenizer):
            check(profile.tokenizer)
        self.profile = profile
        self._media = Media(profile.images)

    @property
    def key(self) -> Hashable:
        """Return the key. Counters with the same key count alike."""
        return key_of(self.profile)

    @property
    def ready(self) -> bool:
        """Return whether the encoding is loaded, so that a count starts immediately."""
        return loaded(self.profile.tokenizer)

    @property
    def _encoding(self) -> tiktoken.Encoding:
        return encoding(self.profile.tokenizer)

    def text(self, text: str) -> int:
        """Return the tokens of text without a frame."""
        return self._scaled(count(self._encoding, text))

    def _scaled(self, tokens: int) -> int:
        # Subtract a billionth so that 1.1 times 10 is 11 and not 12.
        return max(0, math.ceil(tokens * self.profile.token_ratio - 1e-9))

    def _count(self, value: object) -> int:
        return count(self._encoding, dump(value))

    def _content(self, content: object, *, parallel: bool = False) -> tuple[int, int]:
        """Return the tokens of the content's text, and those of its images, audio, and files."""
        if content is None:
            return 0, 0
        tokens = media = 0
        counts: dict[str, int] = {}
        for part in content if isinstance(content, list) else [content]:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind in MEDIA and isinstance(part, Mapping):
                media += self._media.tokens(kind, part, self.text)
                continue
            text = _part_text(part)
            if (found := counts.get(text)) is None:
                # An attack may repeat one short part very often.
                found = counts[text] = count(self._encoding, escaped(text) if parallel else text)
            tokens += found
        return tokens, media

    def _tools(self, body: Mapping[str, Any]) -> int:
        functions, others = tools.functions(body)
        tokens = sum(self._count(other) for other in others)
        if self.profile.tools != "typescript":
            tokens += sum(self._count(function) + CALL for function in functions)
            return tokens + tools.PROMPT[self.profile.tools] if functions or others else 0
        if functions:
            tokens += self._count(tools.typescript(functions)) + tools.DECLARATIONS
        return tokens

    def _choice(self, choice: object, named: int) -> int:
        if choice is None or choice == "auto":
            return 0
        if isinstance(choice, Mapping):
            function = choice.get("function", choice)
            name = function.get("name") if isinstance(function, Mapping) else None
            return named + self._count(name if isinstance(name, str) else choice)
        return tools.CHOICE_NONE if choice == "none" else named

    def _response_format(self, wanted: object) -> int:
        if not isinstance(wanted, Mapping) or wanted.get("type") in ("text", "json_object"):
            return 0
        schema = wanted.get("json_schema")
        return tools.RESPONSE_FORMAT + self._count(schema if isinstance(schema, Mapping) else wanted)


_TEXT_FIELDS = ("text", "refusal", "input_text", "output_text", "thinking", "content")


def _part_text(part: object) -> str:
    """Return the text of a content part, or its JSON if its form is unknown."""
    if isinstance(part, Mapping):
        texts = [part[field] for field in _TEXT_FIELDS if isinstance(part.get(field), str)]
        known = part.keys() <= _KNOWN_PART
        if len(texts) == 1 and known:
            return str(texts[0])
    return dump(part)


_KNOWN_PART: Set[str] = {"type", "cache_control", *_TEXT_FIELDS}
