"""Count the tokens of messages and requests of Anthropic's Messages API, and judge what upstreams count.

Anthropic publishes no tokenizer. The profile's ratio scales the counts of another one, and reported usage calibrates
the result. The frames below are estimates: "Hello" alone is reported as 8 tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from proxy.dialects.counting import PLAIN_VALUE, TOKENS_PER_SEALED_CHARACTER, Counter, Evidence, plain_json
from proxy.dialects.messages.units import (
    THINKING,
    MessagesUnits,
    blocks_of,
    calls_of,
    canonical,
    kind_of,
    nested,
    text_in,
)
from proxy.dialects.parts import MESSAGES, SEALED, UNCOUNTED
from proxy.dialects.units import decode, encode, type_of
from proxy.dialects.walk import file_text, row_of
from proxy.limits.profiles import Profile
from proxy.tokens import tools
from proxy.tokens.media import MEDIA
from proxy.tokens.text import count, dump

# Tokens of frames.
MESSAGE = 4
REPLY = 3
CALL = 8
RESULT = 8
TOOL = 8

_SEALED = (SEALED | {"data"}) - {"signature"}
_SILENT = UNCOUNTED | _SEALED | {"signature", "is_error"}
"""Signatures aren't counted: reasoning of earlier turns doesn't reach the model."""

_DELIVERY = "eager_input_streaming"
"""How the provider delivers the calls of a tool. Some clients set it only if they stream.

https://platform.claude.com/docs/en/agents-and-tools/tool-use/fine-grained-tool-streaming
"""


class MessagesCounter(Counter):
    """Counts tokens as one model's provider does. See ``dialects.counting.Counter``."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self.format = MessagesUnits(self.message, self.text, profile.model)

    @classmethod
    def key_of(cls, profile: Profile) -> Hashable:
        """Return the parts of a profile that decide how to count, and the format of units."""
        name = profile.model
        return ("messages", profile.tokenizer, profile.token_ratio, profile.images, profile.tools, name)

    def message(self, message: Mapping[str, Any]) -> int:
        """Return the tokens of one message with its frame."""
        text, media = self._blocks(message.get("content"))
        others = {key: value for key, value in message.items() if key not in ("role", "content", "cache_control")}
        plain, inside = self._without_media(others)
        return self._scaled(MESSAGE + text + (self._json(plain) if others else 0)) + media + inside

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
        listed = tools.present(value)
        each = sum(map(self._tool, listed))
        return each + tools.PROMPT["claude" if self.profile.tools == "claude" else "json"] if listed else 0

    def _tool(self, tool: object) -> int:
        return self._json(_without_delivery(tool)) + TOOL

    def deferred(self, fields: Mapping[str, Any]) -> dict[str, int]:
        given = fields.get("tools")
        later = filter(tools.is_deferred, given if isinstance(given, list) else ())
        return {str(tool.get("name")): self._scaled(self._tool(tool)) for tool in later}

    def _inner(self, value: object) -> int:
        return self._plain(plain_json(canonical(value)))

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
        if kind == "tool_use":
            return CALL + self._fields(block, self._json), 0
        plain, media = self._without_media(block)
        return CALL + self._fields(plain, self._inner), media

    def _media_block(self, kind: str, block: Mapping[str, Any]) -> tuple[int, int]:
        if (file := file_text(block)) is not None:
            return self._plain(file), 0
        named = [block[key] for key in ("title", "context") if isinstance(block.get(key), str)]
        text = sum(self._plain(name) for name in named)
        if row_of(block, MESSAGES).plays != "media":  # a document with its text, or with blocks
            source = block["source"]
            inside, media = self._blocks(source.get("content", source.get("data")))
            return text + inside, media
        return 0, self._scaled(text) + self._media.tokens(kind, block, self.text)

    def _fields(self, block: Mapping[str, Any], count_value: Callable[[object], int]) -> int:
        """Return the tokens of a block's fields that the model reads."""
        tokens = self._sealed(block)
        for key, value in block.items():
            if key == "content" and isinstance(value, list):
                tokens += sum(
                    self._fields(item, count_value) if isinstance(item, Mapping) else count_value(item)
                    for item in value
                )
            elif key == "content" and isinstance(value, Mapping):
                tokens += self._fields(value, count_value)
            elif key not in _SILENT and value is not None:
                tokens += count_value(value)
        return tokens

    def _sealed(self, block: Mapping[str, Any]) -> int:
        sealed = (block.get(key) for key in _SEALED)
        return int(sum(len(value) for value in sealed if isinstance(value, str)) * TOKENS_PER_SEALED_CHARACTER)


def _without_delivery(tool: object) -> object:
    if not isinstance(tool, Mapping) or _DELIVERY not in tool:
        return tool
    return {name: value for name, value in tool.items() if name != _DELIVERY}


_CLEARS_THINKING = "clear_thinking"  # the start of the types of edits that remove only thinking
_THINKING_PART = 20  # thinking of at most this part of a body changes its size less than a step of the calibration

_EMPTY: tuple[object, ...] = (None, [], {}, "", False)
_CALL = re.compile(rb'"(?:tool_use|tool_result)"')


class MessagesEvidence(Evidence):
    """See ``dialects.counting.Evidence``. Much thinking isn't comparable, because some models drop it."""

    KNOWN = frozenset(
        {
            *("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stream", "stop_sequences"),
            *(
                "temperature",
                "top_p",
                "top_k",
                "metadata",
                "service_tier",
                "cache_control",
                "inference_geo",
                "safeguards",  # what a classifier beside the model reads
                "thinking",
            ),
        }
    )

    def comparable(self, raw: bytes) -> bool:
        fields = decode(raw)
        tools, messages = fields.get("tools") or [], fields.get("messages")
        unknown = {name: value for name, value in fields.items() if name not in self.KNOWN and value not in _EMPTY}
        if not all(_plain_field(name, value) for name, value in unknown.items()):
            return False
        # Tools that the provider runs put their results into the prompt.
        if not isinstance(tools, list) or any(type_of(tool) not in ("", "custom") for tool in tools):
            return False
        if not isinstance(messages, list) or not all(isinstance(one, dict) and _plain(one) for one in messages):
            return False
        thinking = [block for one in messages for block in blocks_of(one) if type_of(block) in THINKING]
        return sum(len(encode(block)) for block in thinking) * _THINKING_PART <= len(raw)

    def adds_text(self, raw: bytes) -> bool:
        unknown = {name: value for name, value in decode(raw).items() if name not in self.KNOWN and value not in _EMPTY}
        return any(isinstance(value, list) or len(str(value)) > PLAIN_VALUE for value in unknown.values())

    def has_calls(self, unit: bytes) -> bool:
        return _CALL.search(unit) is not None and (
            bool(calls_of(decode(unit))) or any(type_of(block) == "tool_result" for block in blocks_of(decode(unit)))
        )

    def kept_text(self, unit: bytes, *, tools: bool) -> str:
        message = decode(unit)
        blocks = blocks_of(message)
        if kind_of(message) == "result":
            blocks = [inner for block in blocks for inner in nested(block)] if tools else []
        return "\n".join(text for block in blocks if (text := text_in(block)) is not None)


def _plain_field(name: str, value: Any) -> bool:
    """Return whether a field adds nothing to the prompt. Claude Code sends both."""
    if name == "output_config":
        return isinstance(value, dict) and set(value) == {"effort"}
    edits = value.get("edits") if name == "context_management" and isinstance(value, dict) else None
    return isinstance(edits, list) and all(type_of(edit).startswith(_CLEARS_THINKING) for edit in edits)


def _plain(message: Mapping[str, Any]) -> bool:
    blocks = [block for block in blocks_of(message) if type_of(block) not in THINKING]
    inner = [part for block in blocks for part in nested(block)]
    return all(row_of(block, MESSAGES).alike for block in [*blocks, *inner])
