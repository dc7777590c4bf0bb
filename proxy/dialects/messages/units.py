"""Read, count, and rewrite messages of Anthropic's Messages API, and their content blocks.

Clients may send any JSON value, so every function here accepts any value and treats unknown shapes as empty.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from proxy.compaction.format import Binding, ForeignSummary, Rewrite, TextCounter
from proxy.compaction.turn import Call, Kind, Turn
from proxy.dialects.foreign_summaries import find_summary
from proxy.dialects.repair import STRAY_RESULT, CallKey
from proxy.dialects.units import Message, Units, decode, encode, is_media_part, replace_field, unless_media
from proxy.limits.profiles.lookup import undated
from proxy.tokens.media import MEDIA_LABELS

Block = dict[str, Any]

THINKING = frozenset({"thinking", "redacted_thinking"})
SERVER_CALLS = frozenset({"server_tool_use", "mcp_tool_use"})
"""Calls of tools that the provider runs. Their results are in the same message."""


_REMINDER = re.compile(r"\s*<system-reminder>.*</system-reminder>\s*\Z", re.DOTALL)
"""Text that Claude Code adds to the user's messages."""

_SHOWN = ("title", "url", "text", "stdout", "stderr", "error_code")
"""Fields with visible text in the results of tools that the provider runs."""
_DEEPEST = 6

_FIRST_CHECKED = (5, 1)
_FIRST_CHECKED_BY_FAMILY = {"mythos": (5, 2)}
"""The first version that checks, by family, if it isn't ``_FIRST_CHECKED``."""

_VERSION = re.compile(r"(?<![\w.])(\d{1,2})(?:\.(\d{1,2}))?(?![\w.])")


class MessagesUnits(Units[Message]):
    """See ``dialects.units.Units``. A unit is a message, and ``model`` decides whether it binds thinking."""

    def __init__(self, message: Callable[[Message], int], text: TextCounter, model: str) -> None:
        super().__init__(message, text)
        self._binding: Binding = "always" if checks_prefix(model) else "never"

    @property
    def binds_reasoning(self) -> Binding:
        return self._binding

    def without_reasoning(self, raw: bytes) -> bytes:
        blocks = decode(raw).get("content")
        if not isinstance(blocks, list) or not any(type_of(block) in THINKING for block in blocks):
            return raw
        kept = [block for block in blocks if type_of(block) not in THINKING]
        return replace_field(raw, "content", kept) if kept else b""

    def decoded(self, raw: bytes) -> Message:
        return decode(raw)

    def kind(self, unit: Message) -> Kind:
        return kind_of(unit)

    def role(self, unit: Message, kind: Kind) -> str:
        return _text(unit.get("role"))

    def identity(self, unit: Message) -> object:
        """Return a message without its thinking, which may be removed at any time."""
        blocks = unit.get("content")
        if isinstance(blocks, list) and any(type_of(block) in THINKING for block in blocks):
            unit = {**unit, "content": [block for block in blocks if type_of(block) not in THINKING]}
        return canonical(unit)

    def calls(self, unit: Message) -> tuple[Call, ...]:
        return calls_of(unit)

    def answered(self, unit: Message, kind: Kind) -> str | None:
        answered = blocks_of(unit)[0].get("tool_use_id") if kind == "result" else None
        return answered if isinstance(answered, str) else None

    def visible_text(self, unit: Message) -> str:
        return visible(blocks_of(unit))

    def media_in(self, unit: Message) -> bool:
        return any(is_media_part(inner) for block in blocks_of(unit) for inner in (block, *nested(block)))

    def bare(self, unit: Message) -> Message:
        content = unit.get("content")
        return {**unit, "content": map_blocks(content, unless_media)} if isinstance(content, list) else unit

    def is_empty(self, unit: Message) -> bool:
        return unit.get("content") in (None, "", [])

    def result_content(self, unit: Message) -> object:
        return canonical([block.get("content") for block in blocks_of(unit) if isinstance(block, dict)])

    def summary_in(self, unit: Message) -> ForeignSummary | None:
        texts = [text for block in blocks_of(unit) if (text := text_in(block)) is not None and not is_note(block)]
        return find_summary(str(unit.get("role")), texts, listed=isinstance(unit.get("content"), list))

    def own_texts(self, unit: Message) -> list[tuple[str, str]]:
        text = visible([block for block in blocks_of(unit) if not is_note(block)], media=False)
        labels = labels_of(unit)
        return [(text, labels)] if text or labels else []

    def with_parts(self, raw: bytes, change: Callable[[Any], Any]) -> bytes:
        return replace_field(raw, "content", map_blocks(blocks_of(decode(raw)), change))

    def arguments(self, raw: bytes) -> list[tuple[str, str]]:
        return arguments_of(decode(raw))

    def replaceable_text(self, raw: bytes) -> str | None:
        texts = [text for block in _text_blocks(decode(raw)) if (text := text_in(block)) is not None]
        return "\n".join(texts) if texts else None

    def with_text(self, raw: bytes, text: str) -> bytes:
        message = decode(raw)
        if isinstance(message.get("content"), str):
            return replace_field(raw, "content", text)
        blocks = blocks_of(message)
        if kind_of(message) == "result":
            first = {**blocks[0], "content": _with_text(blocks[0].get("content"), text)}
            return replace_field(raw, "content", [first, *blocks[1:]])
        return replace_field(raw, "content", _with_text(blocks, text))

    def with_result(self, raw: bytes, text: str) -> bytes:
        blocks = blocks_of(decode(raw))
        listed = isinstance(blocks[0].get("content"), list)
        first = {**blocks[0], "content": [{"type": "text", "text": text}] if listed else text}
        return replace_field(raw, "content", [first, *blocks[1:]])

    def with_arguments(self, raw: bytes, rewrite: Rewrite) -> bytes:
        blocks = blocks_of(decode(raw))
        changed = [_rewritten_call(block, rewrite) for block in blocks]
        return (
            raw if all(a is b for a, b in zip(blocks, changed, strict=True)) else replace_field(raw, "content", changed)
        )

    def summary(self, role: str, text: str) -> bytes:
        # The first message must be the user's, and the API merges a user's message after it.
        return encode({"role": "user", "content": text})

    def call_keys(self, turn: Turn) -> list[CallKey]:
        return [("result", call.id) for call in turn.facts.calls]

    def result_key(self, turn: Turn) -> CallKey:
        return "result", turn.facts.answers or ""

    def result(self, kind: str, id: str, text: str) -> bytes:
        return encode({"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]})

    def answering(self, raw: bytes, kind: str, id: str) -> bytes:
        first, *others = blocks_of(decode(raw))
        return replace_field(raw, "content", [{**first, "tool_use_id": id}, *others])

    def note(self, text: str) -> bytes:
        # Not the assistant's, because thinking may only be at the start of its turn.
        return encode({"role": "user", "content": text})

    def without_calls(self, raw: bytes) -> bytes:
        return replace_field(raw, "content", [b for b in blocks_of(decode(raw)) if type_of(b) != "tool_use"])

    def with_call_ids(self, raw: bytes, ids: Sequence[str]) -> bytes:
        left = iter(ids)
        blocks = [
            {**block, "id": next(left)} if type_of(block) == "tool_use" else block for block in blocks_of(decode(raw))
        ]
        return replace_field(raw, "content", blocks)


def blocks_of(message: Message) -> list[Any]:
    """Return the blocks of the content. A string is one text block."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content if isinstance(content, list) else []


def type_of(block: object) -> str:
    """Return the type of a block; empty if it has none."""
    found = block.get("type") if isinstance(block, dict) else None
    return found if isinstance(found, str) else ""


def kind_of(message: Message) -> Kind:
    """Return the part that a message plays. Notes that a program added to the conversation have no kind."""
    role = message.get("role")
    if role in ("system", "developer"):
        return "system"
    if role == "assistant":
        return "assistant"
    if role != "user":
        return ""
    blocks = blocks_of(message)
    if blocks and type_of(blocks[0]) == "tool_result":
        return "result"
    return "" if blocks and all(map(is_note, blocks)) else "user"


def is_note(block: object) -> bool:
    """Return whether a block is text that a program added, and not the user's."""
    text = text_in(block)
    return text is not None and (text.startswith(STRAY_RESULT) or _REMINDER.match(text) is not None)


def text_in(block: object) -> str | None:
    """Return the text of a text block; ``None`` for other blocks."""
    text = block.get("text") if isinstance(block, dict) and block.get("type", "text") == "text" else None
    return text if isinstance(text, str) else None


def nested(block: object) -> list[Any]:
    """Return the blocks of a tool result's content; empty for other blocks."""
    return blocks_of(block) if isinstance(block, dict) and block.get("type") == "tool_result" else []


def calls_of(message: Message) -> tuple[Call, ...]:
    """Return the calls that the client answers."""
    if message.get("role") != "assistant":
        return ()
    uses = (block for block in blocks_of(message) if type_of(block) == "tool_use")
    return tuple(Call(_text(block.get("id")), _text(block.get("name"))) for block in uses)


def arguments_of(message: Message) -> list[tuple[str, str]]:
    """Return the name and the arguments of each call, as JSON. Calls of the provider's tools are included."""
    uses = [block for block in blocks_of(message) if type_of(block) in ("tool_use", *SERVER_CALLS)]
    return [(_text(block.get("name")), json.dumps(block.get("input", {}), ensure_ascii=False)) for block in uses]


def visible(blocks: Sequence[Any], *, media: bool = True) -> str:
    """Return the visible text. Parts that aren't text become a label, for example ``[image]``."""
    return "\n".join(filter(None, (_block_text(block, media=media) for block in blocks)))


def labels_of(message: Message) -> str:
    """Return a label for the media of a message, such as ``[3 × image, file]``; empty if there are none."""
    counts = Counter(MEDIA_LABELS[type_of(block)] for block in blocks_of(message) if is_media_part(block))
    kinds = [f"{number} × {kind}" if number > 1 else kind for kind, number in counts.most_common(4)]
    return f"[{', '.join(kinds)}]" if kinds else ""


def map_blocks(blocks: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Return the blocks with a function applied to each and to those inside of results. ``None`` removes a block."""
    changed = []
    for block in blocks:
        new = change(block)
        if new is block and isinstance(block, dict) and isinstance(block.get("content"), list) and nested(block):
            new = {**block, "content": map_blocks(block["content"], change)}
        if new is not None:
            changed.append(new)
    return changed


def canonical(value: Any, depth: int = 0) -> Any:
    """Return a value without ``cache_control``. A string as content equals a list of one text block.

    Clients move their cache breakpoints from turn to turn, so the marks aren't part of a message's identity.
    """
    if depth > _DEEPEST:
        return value
    if isinstance(value, list):
        return [canonical(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {key: canonical(item, depth + 1) for key, item in value.items() if key != "cache_control"}
    if isinstance(fields.get("content"), str) and ("role" in fields or fields.get("type") == "tool_result"):
        fields["content"] = [{"type": "text", "text": fields["content"]}]
    return fields


def _block_text(block: object, *, media: bool) -> str:
    kind = type_of(block)
    text = text_in(block)
    if text is not None:
        return text
    if not isinstance(block, dict) or kind in THINKING or kind == "tool_use" or kind in SERVER_CALLS:
        return ""
    if kind in MEDIA_LABELS:
        return f"[{MEDIA_LABELS[kind]}]" if media else ""
    if kind == "tool_result":
        return visible(nested(block), media=media)
    return "\n".join(_strings(block, 0)) or f"[{kind or 'part'}]"


def _strings(value: object, depth: int) -> Iterator[str]:
    if depth > _DEEPEST:
        return
    if isinstance(value, dict):
        yield from (value[key] for key in _SHOWN if isinstance(value.get(key), str) and value[key])
        content = value.get("content")
        yield from [content] if isinstance(content, str) and content else _strings(content, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, depth + 1)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _text_blocks(message: Message) -> list[Any]:
    """Return the blocks with the text of a message, or of the result in it."""
    blocks = blocks_of(message)
    return nested(blocks[0]) if kind_of(message) == "result" else blocks


def _with_text(content: object, text: str) -> object:
    """Replace the text of a content. The first text block gets it, and the other text blocks are removed."""
    if not isinstance(content, list):
        return text
    first = next((i for i, block in enumerate(content) if text_in(block) is not None), None)
    if first is None:
        return content
    # Citations refer to places in the text.
    kept: Block = {key: value for key, value in content[first].items() if key != "citations"}
    rest = [block for block in content[first + 1 :] if text_in(block) is None]
    return [*content[:first], {**kept, "text": text}, *rest]


def _rewritten_call(block: Any, rewrite: Rewrite) -> Any:
    """Return a call with other arguments; the same object if they stay."""
    if type_of(block) != "tool_use" or not isinstance(block.get("input"), dict):
        return block
    name = block.get("name")
    arguments = json.dumps(block["input"], ensure_ascii=False)
    rewritten = rewrite(name if isinstance(name, str) else "", arguments)
    try:
        changed = None if rewritten is None else json.loads(rewritten)
    except (ValueError, RecursionError):
        return block
    return {**block, "input": changed} if isinstance(changed, dict) else block


def checks_prefix(model: str) -> bool:
    """Return whether a model rejects thinking behind a changed prompt.

    From Claude Fable 5.1 on, the signature of a thinking block covers the system prompt, the tools, and all messages
    before it. See platform.claude.com/docs/en/build-with-claude/preserved-thinking, August 2026.

    Unknown Claude models of version 5.1 and later count as checking, and so do names without a version, such as
    ``claude-opus-latest``. If that's wrong, some thinking is lost. The other mistake would cost a refused request.
    """
    name = undated(model)
    if "claude" not in name:
        return False
    version = _VERSION.search(name)
    if version is None:
        return not re.search(r"claude-(?:instant|v\d)", name)
    family = next((family for family in _FIRST_CHECKED_BY_FAMILY if family in name), "")
    return (int(version[1]), int(version[2] or 0)) >= _FIRST_CHECKED_BY_FAMILY.get(family, _FIRST_CHECKED)
