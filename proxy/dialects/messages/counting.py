"""Count the tokens of messages and requests of Anthropic's Messages API.

Anthropic publishes no tokenizer. The profile's ratio scales the counts of another one, and reported usage calibrates
the result. The frames below are estimates: "Hello" alone is reported as 8 tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from proxy.dialects.counting import TokenCounter
from proxy.dialects.messages.units import THINKING, MessagesUnits, canonical, nested, text_in, type_of
from proxy.limits.profiles.profile import Profile
from proxy.tokens import tools
from proxy.tokens.media import MEDIA
from proxy.tokens.text import count, dump

MESSAGE = 4
REPLY = 3
CALL = 8
RESULT = 8
TOOL = 8
"""Tokens of frames."""

TOKENS_PER_SEALED_BYTE = 3 / 16
"""Sealed data is base64, and has about four bytes per token."""

_SEALED = ("data", "encrypted_content", "encrypted_index")
_SILENT = frozenset({"type", "id", "tool_use_id", "cache_control", "signature", "is_error", "citations", "caller"})
"""Fields that don't reach the model, or that the frame already counts."""

_DELIVERY = "eager_input_streaming"
"""How the provider delivers the calls of a tool. Some clients set it only if they stream.

https://platform.claude.com/docs/en/agents-and-tools/tool-use/fine-grained-tool-streaming
"""


def key_of(profile: Profile) -> Hashable:
    """Return the parts of a profile that decide how to count, and the format of units."""
    name = profile.model
    return ("messages", profile.tokenizer, profile.token_ratio, profile.images, profile.tools, name)


class Counter(TokenCounter):
    """Counts tokens as one model's provider does. See ``dialects.dialect.Counter``."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self.format = MessagesUnits(self.message, self.text, profile.model)

    @property
    def key(self) -> Hashable:
        return key_of(self.profile)

    def message(self, message: Mapping[str, Any]) -> int:
        """Return the tokens of one message with its frame."""
        text, media = self._blocks(message.get("content"))
        others = {key: value for key, value in message.items() if key not in ("role", "content", "cache_control")}
        return self._scaled(MESSAGE + text + (self._json(others) if others else 0)) + media

    def at_most(self, raw: bytes) -> float:
        """Return an upper bound for a body's tokens: one per byte, and the prompt of tools. This doesn't tokenize."""
        return (len(raw) + tools.PROMPT["claude"]) * self.profile.token_ratio

    def overhead(self, fields: Mapping[str, Any]) -> int:
        """Return a request's tokens outside its units: the system prompt, the tools, and a compacted beginning."""
        tokens, media = REPLY, 0
        for name, value in fields.items():
            if name == "tools":
                tokens += self._defined(value)
            elif name in ("system", "prefix"):
                held = [{"content": value}] if name == "system" else value
                for message in held if isinstance(held, list) else ():
                    text, inside = self._blocks(message.get("content") if isinstance(message, Mapping) else message)
                    tokens, media = tokens + MESSAGE + text, media + inside
            else:
                tokens += self._json(value)
        return self._scaled(tokens) + media

    def _plain(self, text: str) -> int:
        return count(self._encoding, text)

    def _json(self, value: object) -> int:
        return self._plain(dump(canonical(value)))

    def _defined(self, value: object) -> int:
        listed = value if isinstance(value, list) else [value]
        each = sum(self._json(_without_delivery(tool)) + TOOL for tool in listed)
        return each + tools.PROMPT["claude" if self.profile.tools == "claude" else "json"] if listed else 0

    def _blocks(self, content: object) -> tuple[int, int]:
        """Return the tokens of the content's text, and those of its images and documents."""
        if content is None:
            return 0, 0
        tokens = media = 0
        counts: dict[str, int] = {}
        for block in content if isinstance(content, list) else [content]:
            plain = block if isinstance(block, str) else text_in(block)
            if plain is None:
                text, inside = self._block(block)
                tokens, media = tokens + text, media + inside
                continue
            if (found := counts.get(plain)) is None:
                # An attack may repeat one short part very often.
                found = counts[plain] = self._plain(plain)
            tokens += found
        return tokens, media

    def _block(self, block: object) -> tuple[int, int]:
        kind = type_of(block)
        if not isinstance(block, Mapping):
            return self._plain(dump(block)), 0
        if kind in MEDIA:
            return self._media_block(kind, block)
        if kind == "tool_result":
            text, media = self._blocks(nested(block) or block.get("content"))
            return text + RESULT, media
        if kind in THINKING:
            return self._plain(dump(block.get("thinking", ""))) + self._sealed(block), 0
        return CALL + self._fields(block), 0

    def _media_block(self, kind: str, block: Mapping[str, Any]) -> tuple[int, int]:
        source = block.get("source")
        if isinstance(source, Mapping) and source.get("type") == "content":
            return self._blocks(source.get("content"))
        named = [block[key] for key in ("title", "context") if isinstance(block.get(key), str)]
        text = sum(self._plain(name) for name in named)
        return 0, self._scaled(text) + self._media.tokens(kind, block, self.text)

    def _fields(self, block: Mapping[str, Any]) -> int:
        """Return the tokens of a block's fields that the model reads."""
        tokens = self._sealed(block)
        for key, value in block.items():
            if key == "content" and isinstance(value, list):
                tokens += sum(self._fields(item) if isinstance(item, Mapping) else self._json(item) for item in value)
            elif key == "content" and isinstance(value, Mapping):
                tokens += self._fields(value)
            elif key not in _SILENT and key not in _SEALED and value is not None:
                tokens += self._json(value)
        return tokens

    def _sealed(self, block: Mapping[str, Any]) -> int:
        sealed = (block.get(key) for key in _SEALED)
        return int(sum(len(value) for value in sealed if isinstance(value, str)) * TOKENS_PER_SEALED_BYTE)


def _without_delivery(tool: object) -> object:
    if not isinstance(tool, Mapping) or _DELIVERY not in tool:
        return tool
    return {name: value for name, value in tool.items() if name != _DELIVERY}
