"""Read, count, and rewrite the units of a Messages conversation for the engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from proxy.compaction.format import Binding, ForeignSummary, Format, Rewrite, TextCounter
from proxy.compaction.render import OutgoingMessage
from proxy.compaction.turn import Facts, Turn
from proxy.dialects.foreign_summaries import find_summary
from proxy.dialects.messages.blocks import (
    THINKING,
    Block,
    arguments_of,
    blocks_of,
    calls_of,
    canonical,
    is_media,
    is_note,
    kind_of,
    labels_of,
    map_blocks,
    media_in,
    nested,
    text_in,
    type_of,
    visible,
)
from proxy.dialects.messages.repair import repaired
from proxy.dialects.messages.thinking import checks_prefix
from proxy.dialects.repair import needs_repair
from proxy.dialects.unit_json import Message, decode, digest, encode, replace_field
from proxy.tokens.media import MEDIA_LABELS

MessageCounter = Callable[[Message], int]
"""Count the tokens of a whole message, including its framing."""


class MessagesFormat(Format):
    """The format of messages, with the tokenizer of one model. See ``compaction.format.Format``."""

    def __init__(self, message: MessageCounter, text: TextCounter, model: str) -> None:
        self._message = message
        self._binding: Binding = "always" if checks_prefix(model) else "never"
        self.text_tokens = text

    @property
    def binds_reasoning(self) -> Binding:
        return self._binding

    def without_reasoning(self, raw: bytes) -> bytes:
        blocks = decode(raw).get("content")
        if not isinstance(blocks, list) or not any(type_of(block) in THINKING for block in blocks):
            return raw
        kept = [block for block in blocks if type_of(block) not in THINKING]
        return replace_field(raw, "content", kept) if kept else b""

    def read(self, raw: bytes) -> Facts:
        message = decode(raw)
        kind, role = kind_of(message), message.get("role")
        blocks = blocks_of(message)
        facts = Facts(
            kind=kind,
            role=role if isinstance(role, str) else "",
            tokens=self._message(message),
            digest=digest(canonical(_without_thinking(message))),
            calls=calls_of(message),
            answers=_answers(blocks) if kind == "result" else None,
            media=media_in(message),
            foreign=kind == "user" and self.foreign_summary(raw) is not None,
            empty=kind == "assistant" and not blocks and message.get("content") in (None, "", []),
        )
        if facts.media:
            facts.apart = max(0, facts.tokens - self._message(_without_media(message)))
        if kind == "result":
            text = visible(blocks)
            facts.length = len(text)
            facts.said = digest(canonical([block.get("content") for block in blocks if isinstance(block, dict)]))
        return facts

    def tokens(self, raw: bytes, facts: Facts | None = None) -> int:
        return self._message(decode(raw))

    def frame_tokens(self, raw: bytes, facts: Facts) -> int:
        return self._message(_without_media(decode(self.with_text(raw, ""))))

    def inner_tokens(self, facts: Facts) -> TextCounter:
        return self.text_tokens

    def text(self, raw: bytes) -> str:
        return visible(blocks_of(decode(raw)))

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
        return raw if all(a is b for a, b in zip(blocks, changed, strict=True)) else _with_content(raw, changed)

    def has_media(self, raw: bytes) -> bool:
        return media_in(decode(raw))

    def without_media(self, raw: bytes) -> bytes:
        return _with_content(raw, map_blocks(blocks_of(decode(raw)), _unless_media))

    def with_labels(self, raw: bytes, label: Callable[[str], str]) -> bytes:
        def labeled(block: Any) -> Any:
            if not is_media(block):
                return block
            marks = {key: block[key] for key in ("cache_control",) if key in block}
            return {"type": "text", "text": label(MEDIA_LABELS[type_of(block)]), **marks}

        return _with_content(raw, map_blocks(blocks_of(decode(raw)), labeled))

    def user_text(self, raw: bytes) -> list[tuple[str, str]]:
        message = decode(raw)
        foreign = self.foreign_summary(raw)
        if foreign is not None:
            return [(text, "") for text in foreign.user_text]
        text = visible([block for block in blocks_of(message) if not is_note(block)], media=False)
        labels = labels_of(message)
        return [(text, labels)] if text or labels else []

    def foreign_summary(self, raw: bytes) -> ForeignSummary | None:
        message = decode(raw)
        role, content = str(message.get("role")), message.get("content")
        texts = [text for block in blocks_of(message) if (text := text_in(block)) is not None and not is_note(block)]
        return find_summary(role, texts, listed=isinstance(content, list))

    def summary(self, role: str, text: str) -> bytes:
        # The first message must be the user's, and the API merges a user's message after it.
        return encode({"role": "user", "content": text})

    def needs_repair(self, messages: Sequence[Facts]) -> bool:
        return needs_repair(messages)

    def repaired(self, turns: Sequence[Turn]) -> list[Turn]:
        return repaired(turns, self)

    def alternating(self, pieces: Sequence[OutgoingMessage]) -> list[OutgoingMessage]:
        return list(pieces)


def _answers(blocks: Sequence[Any]) -> str | None:
    answered = blocks[0].get("tool_use_id")
    return answered if isinstance(answered, str) else None


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


def _with_content(raw: bytes, blocks: Sequence[Any]) -> bytes:
    return replace_field(raw, "content", blocks)


def _without_thinking(message: Message) -> Message:
    """Return a message as it's identified: its thinking may be removed at any time."""
    blocks = message.get("content")
    if not isinstance(blocks, list) or not any(type_of(block) in THINKING for block in blocks):
        return message
    return {**message, "content": [block for block in blocks if type_of(block) not in THINKING]}


def _without_media(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": map_blocks(content, _unless_media)} if isinstance(content, list) else message


def _unless_media(block: Any) -> Any:
    return None if is_media(block) else block
