"""Count the tokens of Responses items and requests, and judge what upstreams count.

OpenAI publishes no figures for items. A message has the frame of a chat message, and other items a similar one. The
reported usage corrects what remains. See ``limits.calibration``.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.counting import CALL, TOKENS_PER_SEALED_CHARACTER, Counter, FieldEvidence
from proxy.dialects.parts import UNCOUNTED
from proxy.dialects.responses.references import REFERENCE, reported_tokens
from proxy.dialects.responses.units import (
    ResponsesUnits,
    answer_of,
    is_message,
    item_row,
    items_of,
    kind_of,
    with_content,
)
from proxy.dialects.units import Message, is_text_part, parts_of
from proxy.limits.profiles import Profile
from proxy.tokens import tools

ITEM = 4  # tokens of an item's frame and role

REPLY = 3

_SILENT = UNCOUNTED | {"role"}
_SILENT_IN_PARTS = UNCOUNTED - {"type"}


class ResponsesCounter(Counter):
    """Counts the tokens of items as one model's provider does.

    The tokens of a request are ``overhead(body)`` plus ``items(unit)`` for each of its units.
    """

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self.format = ResponsesUnits(self.items, self.text)

    @classmethod
    def key_of(cls, profile: Profile) -> Hashable:
        return ("responses", super().key_of(profile))

    def at_most(self, raw: bytes) -> float:
        """Return an upper bound for a body's tokens: one per byte. This doesn't tokenize."""
        return len(raw) * self.profile.token_ratio

    def items(self, items: Sequence[Message]) -> int:
        """Return the tokens of a unit's items with their frames."""
        tokens = media = 0
        for item in items:
            text, inside = self._item(item)
            tokens, media = tokens + ITEM + text, media + inside
        return self._scaled(tokens) + media

    def overhead(self, body: Mapping[str, Any]) -> int:
        """Return a request's tokens without its units.

        They are those of instructions, tools, tool choice, text format, a compaction item, and the reply's start.
        """
        instructions, compaction = body.get("instructions"), body.get("compaction")
        tokens = 0 if instructions is None else ITEM + self._count(instructions)
        if isinstance(compaction, Mapping):
            tokens += ITEM + self._item(compaction)[0]
        return self._scaled(
            REPLY
            + tokens
            + self._tools({"tools": _nested(body.get("tools"))})
            + self._choice(body.get("tool_choice"), tools.CHOICE_TOOL)
            + self._response_format(_schema(body.get("text")))
        )

    def _item(self, item: Message) -> tuple[int, int]:
        """Return the tokens of an item's text, and those of its media."""
        type_ = item.get("type")
        if type_ == REFERENCE:
            return 0, reported_tokens(item)
        if is_message(item) or not type_:
            return self._parts(item.get("content"))
        if kind_of(item) == "result" and ("output" in item or item_row(item).plain):
            return self._output(answer_of(item))
        if type_ == "image_generation_call" and isinstance(item.get("result"), str):
            image = {"type": "input_image", "image_url": item["result"]}
            return 0, self._media.tokens("input_image", image, self.text)
        tokens, media = CALL if "name" in item else 0, 0
        for name, value in item.items():
            if name == "encrypted_content" and isinstance(value, str):
                tokens += int(len(value) * TOKENS_PER_SEALED_CHARACTER)
            elif name in ("summary", "content") and isinstance(value, list):
                tokens += self._parts(value)[0]
            elif name not in _SILENT and value is not None:
                text, inside = self._value(value)
                tokens, media = tokens + text, media + inside
        return tokens, media

    def _output(self, output: object) -> tuple[int, int]:
        if isinstance(output, Mapping) and output.get("type") == "computer_screenshot":
            image = {"type": "input_image", "image_url": output.get("image_url")}
            return 0, self._media.tokens("input_image", image, self.text)
        return self._parts(output)

    def _parts(self, content: object) -> tuple[int, int]:
        if isinstance(content, list):
            content = [_counted(part) for part in content]
        return self._content(content)


def _counted(part: object) -> object:
    """Return a part without the fields that don't reach the model."""
    if not isinstance(part, Mapping) or not _SILENT_IN_PARTS & part.keys():
        return part
    return {name: value for name, value in part.items() if name not in _SILENT_IN_PARTS}


def _nested(given: object) -> object:
    """Return function tools in the form of chat completions: with their fields in ``function``."""
    if not isinstance(given, list):
        return given
    return [_nested_tool(tool) for tool in tools.present(given)]


def _nested_tool(tool: object) -> object:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _schema(text: object) -> object:
    """Return the format of the answer as chat completions have it."""
    wanted = text.get("format") if isinstance(text, Mapping) else None
    if not isinstance(wanted, Mapping) or wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {name: value for name, value in wanted.items() if name != "type"}}


_CALL = re.compile(rb'"call_id"')


class ResponsesEvidence(FieldEvidence):
    """See ``dialects.counting.Evidence``."""

    KNOWN = frozenset(
        {
            *("model", "input", "instructions", "tools", "tool_choice", "text", "stream", "stream_options", "include"),
            *("max_output_tokens", "max_tool_calls", "temperature", "top_p", "top_logprobs", "parallel_tool_calls"),
            *("metadata", "store", "service_tier", "user", "safety_identifier", "prompt_cache_key"),
            *("prompt_cache_retention", "prompt_cache_options", "background", "reasoning", "truncation"),
        }
    )
    FORMAT = "text"

    def has_plain_units(self, fields: Mapping[str, msgspec.Raw]) -> bool:
        return all(map(_is_plain, items_of(bytes(fields["input"]))))

    def has_calls(self, unit: bytes) -> bool:
        return _CALL.search(unit) is not None

    def kept_text(self, unit: bytes, *, tools: bool) -> str:
        texts = []
        for item in items_of(unit):
            if kind_of(item) == "result" and not tools:
                continue
            message = with_content(item)
            content = message.get("content")
            texts += [content] if isinstance(content, str) else []
            texts += [part["text"] for part in parts_of(message) if is_text_part(part)]
        return "\n".join(texts)


def _is_plain(item: Mapping[str, Any]) -> bool:
    """Return whether an item is text only, without reasoning."""
    return item_row(item).alike and all(map(is_text_part, parts_of(with_content(item))))
