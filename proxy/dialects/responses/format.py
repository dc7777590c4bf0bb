"""Read, count, and rewrite the units of a Responses request for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from proxy.compaction.format import Binding, ForeignSummary, Format, Rewrite, TextCounter
from proxy.compaction.render import OutgoingMessage
from proxy.compaction.turn import Facts, Turn
from proxy.dialects.foreign_summaries import find_summary
from proxy.dialects.parts import (
    is_media_part,
    is_text_part,
    labels_of,
    parts_of,
    text_of,
    text_without_media,
    without_media,
)
from proxy.dialects.repair import needs_repair
from proxy.dialects.responses import items as responses
from proxy.dialects.responses.items import content_key, items_of, kind_of, rewritten_items, with_content
from proxy.dialects.responses.repair import repaired
from proxy.dialects.unit_json import Message, digest, encode, replace_field
from proxy.tokens.media import MEDIA_LABELS

ItemCounter = Callable[[Sequence[Message]], int]
"""Count the tokens of a unit's items with their frames."""


class ResponsesFormat(Format):
    """The format of Responses items, with the tokenizer of one model. See ``compaction.format.Format``."""

    def __init__(self, items: ItemCounter, text: TextCounter) -> None:
        self._items = items
        self.text_tokens = text

    @property
    def binds_reasoning(self) -> Binding:
        return "until_open_round"

    def without_reasoning(self, raw: bytes) -> bytes:
        return responses.without_reasoning(raw)

    def read(self, raw: bytes) -> Facts:
        items = items_of(raw)
        first = items[0] if items else {}
        kind = kind_of(first) if first else ""
        facts = Facts(
            kind=kind,
            role=_role(first, kind),
            tokens=self._items(items),
            digest=digest(items),
            calls=responses.calls_of(items),
            answers=responses.answered_call(first) if kind == "result" else None,
            media=any(map(_has_media, items)),
            foreign=kind == "user" and _foreign_summary(items) is not None,
            empty=kind == "assistant" and all(map(_is_empty, items)),
        )
        if facts.media:
            facts.apart = max(0, facts.tokens - self._items(list(map(_without_media, items))))
        if kind == "result":
            facts.length = len(text_of(with_content(first)))
            facts.said = digest(first.get("output"))
        return facts

    def tokens(self, raw: bytes, facts: Facts | None = None) -> int:
        return self._items(items_of(raw))

    def frame_tokens(self, raw: bytes, facts: Facts) -> int:
        return self._items(list(map(_without_media, items_of(self.with_text(raw, "")))))

    def inner_tokens(self, facts: Facts) -> TextCounter:
        return self.text_tokens

    def text(self, raw: bytes) -> str:
        return "\n".join(filter(None, map(_text, items_of(raw))))

    def arguments(self, raw: bytes) -> list[tuple[str, str]]:
        return responses.arguments_of(items_of(raw))

    def replaceable_text(self, raw: bytes) -> str | None:
        holders = [text for text in map(_replaceable, items_of(raw)) if text is not None]
        return holders[0] if len(holders) == 1 else None

    def with_text(self, raw: bytes, text: str) -> bytes:
        if bytes(raw)[:1] == b'"':
            return encode(text)
        return rewritten_items(raw, lambda item, old: old if _replaceable(item) is None else _replace(item, old, text))

    def with_result(self, raw: bytes, text: str) -> bytes:
        return replace_field(raw, "output", text)

    def with_arguments(self, raw: bytes, rewrite: Rewrite) -> bytes:
        return rewritten_items(raw, lambda item, old: _with_arguments(item, old, rewrite))

    def has_media(self, raw: bytes) -> bool:
        return any(map(_has_media, items_of(raw)))

    def without_media(self, raw: bytes) -> bytes:
        return self._with_parts(raw, lambda part: None if is_media_part(part) else part)

    def with_labels(self, raw: bytes, label: Callable[[str], str]) -> bytes:
        return self._with_parts(raw, lambda part: _labeled(part, label))

    def user_text(self, raw: bytes) -> list[tuple[str, str]]:
        items = items_of(raw)
        foreign = _foreign_summary(items)
        if foreign is not None:
            return [(text, "") for text in foreign.user_text]
        return [(text_without_media(message), labels_of(message)) for message in map(with_content, items)]

    def foreign_summary(self, raw: bytes) -> ForeignSummary | None:
        return _foreign_summary(items_of(raw))

    def summary(self, role: str, text: str) -> bytes:
        return encode({"type": "message", "role": role, "content": text})

    def needs_repair(self, messages: Sequence[Facts]) -> bool:
        return needs_repair(messages)

    def repaired(self, turns: Sequence[Turn]) -> list[Turn]:
        return repaired(turns, self)

    def alternating(self, pieces: Sequence[OutgoingMessage]) -> list[OutgoingMessage]:
        return list(pieces)

    def _with_parts(self, raw: bytes, change: Callable[[Any], Any]) -> bytes:
        """Change each part of the items' contents; leave out those that become ``None``."""

        def rewrite(item: Message, old: bytes) -> bytes:
            if not _has_media(item):
                return old
            parts = [changed for part in parts_of(with_content(item)) if (changed := change(part)) is not None]
            return replace_field(old, content_key(item), parts)

        return rewritten_items(raw, rewrite)


def _role(item: Message, kind: str) -> str:
    if kind == "result":
        return "tool"
    if kind == "assistant":
        return "assistant"
    return responses.text_or_none(item.get("role")) or responses.text_or_none(item.get("type")) or ""


def _has_media(item: Message) -> bool:
    return any(map(is_media_part, parts_of(with_content(item))))


def _without_media(item: Message) -> Message:
    if not _has_media(item):
        return item
    return {**item, content_key(item): without_media(with_content(item))["content"]}


def _is_empty(item: Message) -> bool:
    """Return whether an item has nothing without the items after it, such as lone reasoning."""
    if responses.is_message(item):
        return item.get("content") in (None, "", [])
    return item.get("type") == "reasoning"


def _text(item: Message) -> str:
    if responses.is_reasoning(item):
        return ""
    if kind_of(item) == "assistant" and responses.is_hosted(item):
        return responses.hosted_text(item)
    return text_of(with_content(item))


def _foreign_summary(items: Sequence[Message]) -> ForeignSummary | None:
    """Return the summary in a unit of one message; ``None`` if there is none."""
    if len(items) != 1 or not responses.is_message(items[0]):
        return None
    content = items[0].get("content")
    role = str(items[0].get("role"))
    if isinstance(content, str):
        return find_summary(role, [content], listed=False)
    return find_summary(role, [part["text"] for part in parts_of(items[0]) if is_text_part(part)], listed=True)


def _replaceable(item: Message) -> str | None:
    content = with_content(item).get("content")
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in parts_of({"content": content}) if is_text_part(part)]
    return "\n".join(texts) if texts else None


def _replace(item: Message, raw: bytes, text: str) -> bytes:
    content, key = with_content(item).get("content"), content_key(item)
    if not isinstance(content, list):
        return replace_field(raw, key, text)
    first = next(i for i, part in enumerate(content) if is_text_part(part))
    rest = [part for part in content[first + 1 :] if not is_text_part(part)]
    return replace_field(raw, key, [*content[:first], {**content[first], "text": text}, *rest])


def _with_arguments(item: Message, raw: bytes, rewrite: Rewrite) -> bytes:
    arguments = item.get("arguments")
    if item.get("type") != "function_call" or not isinstance(arguments, str):
        return raw
    rewritten = rewrite(responses.text_or_none(item.get("name")) or "", arguments)
    return raw if rewritten is None else replace_field(raw, "arguments", rewritten)


def _labeled(part: Any, label: Callable[[str], str]) -> Any:
    return {"type": "input_text", "text": label(MEDIA_LABELS[part["type"]])} if is_media_part(part) else part
