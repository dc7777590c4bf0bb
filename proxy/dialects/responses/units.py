"""Read, count, and rewrite the items of the Responses API.

A unit is one item, or a run of the assistant's items as a JSON array: reasoning, messages, and calls of one response.
Reasoning is bound to the items after it, so a run is kept or dropped as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from proxy.compaction.format import Binding, ForeignSummary, Rewrite
from proxy.compaction.turn import Call, Kind, Turn
from proxy.constants import UNDECODABLE
from proxy.dialects.repair import CallKey
from proxy.dialects.units import (
    DEEPEST,
    Message,
    Units,
    decode,
    encode,
    is_media_part,
    labels_of,
    parts_of,
    replace_field,
    replaceable_text,
    summary_in,
    text_of,
    text_without_media,
    with_text,
    without_media,
)

MESSAGE_KINDS: dict[object, Kind] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}

PREFIX_TYPES = frozenset({"compaction", "context_compaction"})
"""Items that replace everything before them."""

_ASSISTANT = frozenset({"reasoning", "item_reference", "program", "agent_message", "image_generation"})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})
_CLIENT_CALLS = frozenset(
    {"function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call", "computer_call"}
)
"""Calls that the client answers with an item of its own."""

_REMOVABLE_IDS = ("message", "function_call", "custom_tool_call", "shell_call", "apply_patch_call")
"""Items of the assistant that the API accepts without an id."""

_NOT_TEXT = frozenset({"id", "type", "status", "encrypted_content", "result", "call_id", "role"})

FUNCTION, CUSTOM = "function_call_output", "custom_tool_call_output"
"""The kinds of results. Clients answer all calls but custom ones with outputs of functions."""


class ResponsesUnits(Units[list[Message]]):
    """See ``dialects.units.Units``. A decoded unit is a list of items."""

    RESULT_KINDS = (FUNCTION, CUSTOM)
    TEXT_PART = "input_text"
    MARKS = ()

    @property
    def binds_reasoning(self) -> Binding:
        return "until_open_round"

    def without_reasoning(self, raw: bytes) -> bytes:
        return without_reasoning(raw)

    def decoded(self, raw: bytes) -> list[Message]:
        return items_of(raw)

    def kind(self, unit: list[Message]) -> Kind:
        return kind_of(unit[0]) if unit and unit[0] else ""

    def role(self, unit: list[Message], kind: Kind) -> str:
        if kind in ("result", "assistant"):
            return "tool" if kind == "result" else "assistant"
        item = unit[0] if unit else {}
        return text_or_none(item.get("role")) or text_or_none(item.get("type")) or ""

    def calls(self, unit: list[Message]) -> tuple[Call, ...]:
        return calls_of(unit)

    def answered(self, unit: list[Message], kind: Kind) -> str | None:
        return text_or_none(unit[0].get("call_id")) or text_or_none(unit[0].get("id")) if kind == "result" else None

    def visible_text(self, unit: list[Message]) -> str:
        return "\n".join(filter(None, map(_text, unit)))

    def media_in(self, unit: list[Message]) -> bool:
        return any(map(_has_media, unit))

    def bare(self, unit: list[Message]) -> list[Message]:
        return list(map(_without_media, unit))

    def is_empty(self, unit: list[Message]) -> bool:
        return all(map(_is_empty, unit))

    def result_content(self, unit: list[Message]) -> object:
        return unit[0].get("output")

    def result_text(self, unit: list[Message]) -> str:
        return text_of(with_content(unit[0]))

    def summary_in(self, unit: list[Message]) -> ForeignSummary | None:
        return summary_in(unit[0]) if len(unit) == 1 and is_message(unit[0]) else None

    def own_texts(self, unit: list[Message]) -> list[tuple[str, str]]:
        return [(text_without_media(message), labels_of(message)) for message in map(with_content, unit)]

    def with_parts(self, raw: bytes, change: Callable[[Any], Any]) -> bytes:
        def rewrite(item: Message, old: bytes) -> bytes:
            if not _has_media(item):
                return old
            changed = [change(part) for part in parts_of(with_content(item))]
            return replace_field(old, content_key(item), [part for part in changed if part is not None])

        return rewritten_items(raw, rewrite)

    def arguments(self, raw: bytes) -> list[tuple[str, str]]:
        return arguments_of(items_of(raw))

    def replaceable_text(self, raw: bytes) -> str | None:
        texts = [text for text in map(_replaceable, items_of(raw)) if text is not None]
        return texts[0] if len(texts) == 1 else None

    def with_text(self, raw: bytes, text: str) -> bytes:
        if bytes(raw)[:1] == b'"':
            return encode(text)

        def rewrite(item: Message, old: bytes) -> bytes:
            if _replaceable(item) is None:
                return old
            key = content_key(item)
            return replace_field(old, key, with_text(item.get(key), text))

        return rewritten_items(raw, rewrite)

    def with_result(self, raw: bytes, text: str) -> bytes:
        return replace_field(raw, "output", text)

    def with_arguments(self, raw: bytes, rewrite: Rewrite) -> bytes:
        return rewritten_items(raw, lambda item, old: _with_arguments(item, old, rewrite))

    def summary(self, role: str, text: str) -> bytes:
        return encode({"type": "message", "role": role, "content": text})

    def call_keys(self, turn: Turn) -> list[CallKey]:
        calls = [item for item in items_of(turn.raw) if is_client_call(item)]
        return [
            (CUSTOM if item["type"] == "custom_tool_call" else FUNCTION, call.id)
            for item, call in zip(calls, turn.facts.calls, strict=True)
        ]

    def result_key(self, turn: Turn) -> CallKey:
        type_ = items_of(turn.raw)[0].get("type")
        return CUSTOM if type_ == CUSTOM else FUNCTION, turn.facts.answers or ""

    def result(self, kind: str, id: str, text: str) -> bytes:
        return encode({"type": kind, "call_id": id, "output": text})

    def answering(self, raw: bytes, kind: str, id: str) -> bytes:
        return replace_field(raw, "call_id", id)

    def note(self, text: str) -> bytes:
        return encode({"type": "message", "role": "assistant", "content": text})

    def without_calls(self, raw: bytes) -> bytes:
        return rewritten_items(raw, lambda item, old: b"" if is_client_call(item) else old)

    def with_call_ids(self, raw: bytes, ids: Sequence[str]) -> bytes:
        left = iter(ids)

        def renamed(item: Message, old: bytes) -> bytes:
            return replace_field(old, "call_id", next(left)) if is_client_call(item) else old

        return rewritten_items(raw, renamed)


def kind_of(item: Message) -> Kind:
    """Return the part that an item plays; empty if it's unknown."""
    return kind_by(item.get("type"), item.get("role"), item.get("call_id"))


def kind_by(type_: object, role: object, call_id: object) -> Kind:
    """Return the kind of an item with these fields."""
    if type_ is None or type_ == "message":
        return MESSAGE_KINDS.get(role, "") if isinstance(role, str) else ""
    if not isinstance(type_, str):
        return ""
    if type_ in _OUTPUTS or (type_.endswith("_output") and isinstance(call_id, str)):
        return "result"
    if type_ in _ASSISTANT or type_.endswith(("_call", "_output")) or type_.startswith("mcp_"):
        return "assistant"
    # Newer items, such as ``additional_tools``, name the role that they have.
    return MESSAGE_KINDS.get(role, "") if isinstance(role, str) else ""


def items_of(raw: bytes) -> list[Message]:
    """Return the items of a unit. A string, as a whole ``input``, is a user message."""
    plain = bytes(raw)  # ``msgspec.Raw`` has no slices
    if plain[:1] == b'"':
        return [{"role": "user", "content": _string(plain)}]
    return [decode(item) for item in raws_of(plain)]


def raws_of(raw: bytes) -> list[bytes]:
    """Return the bytes of the items of a unit."""
    if bytes(raw)[:1] != b"[":
        return [raw]
    try:
        return [bytes(item) for item in _raws.decode(raw)]
    except UNDECODABLE:
        return [raw]


_raws = msgspec.json.Decoder(list[msgspec.Raw])


def _string(raw: bytes) -> str:
    try:
        value = json.loads(raw)
    except ValueError:
        value = None
    return value if isinstance(value, str) else ""


def joined(raws: Sequence[bytes]) -> bytes:
    """Return a unit of these items; no bytes without any."""
    if len(raws) == 1 and bytes(raws[0])[:1] != b"[":
        return raws[0]
    return b"[" + b",".join(raws) + b"]" if raws else b""


def rewritten_items(raw: bytes, rewrite: Callable[[Message, bytes], bytes]) -> bytes:
    """Return a unit with other items; ``raw`` itself if ``rewrite`` returns each item's own bytes.

    Items that become empty are left out.
    """
    before = raws_of(raw)
    after = [rewrite(item, bytes_) for item, bytes_ in zip(items_of(raw), before, strict=True)]
    if all(new is old for new, old in zip(after, before, strict=True)):
        return raw
    return joined([new for new in after if new])


def is_message(item: Message) -> bool:
    """Return whether an item is a message with a role."""
    return item.get("type") in (None, "message") and "role" in item


def content_key(item: Message) -> str:
    """Return the field with the item's text and media."""
    return "output" if kind_of(item) == "result" else "content"


def with_content(item: Message) -> Message:
    """Return an item as a message: its content or its output in ``content``. Other items have no content."""
    if kind_of(item) == "result":
        return {"content": item.get("output")}
    return item if is_message(item) or not item.get("type") else {}


def is_client_call(item: Message) -> bool:
    """Return whether an item is a call that the client answers."""
    type_ = item.get("type")
    return isinstance(type_, str) and type_ in _CLIENT_CALLS


def calls_of(items: Sequence[Message]) -> tuple[Call, ...]:
    """Return the calls that the client answers."""
    return tuple(
        Call(text_or_none(item.get("call_id")) or "", text_or_none(item.get("name")) or str(item["type"])[:40])
        for item in items
        if is_client_call(item)
    )


def is_reasoning(item: Message) -> bool:
    """Return whether an item is reasoning, or refers to reasoning."""
    type_, id_ = item.get("type"), item.get("id")
    return type_ == "reasoning" or (type_ == "item_reference" and isinstance(id_, str) and id_.startswith("rs_"))


def without_reasoning(raw: bytes) -> bytes:
    """Return a unit without its reasoning, and without the ids that the API would look for reasoning by.

    A run with items that can't go without an id, such as references and hosted calls, stays as it is: the API refuses
    them without their reasoning.
    """
    items = items_of(raw)
    rest = [item for item in items if not is_reasoning(item)]
    if any(item.get("type", "message") not in _REMOVABLE_IDS for item in rest):
        return raw
    return rewritten_items(raw, _without_binding)


def _without_binding(item: Message, raw: bytes) -> bytes:
    if is_reasoning(item):
        return b""
    if not item.get("type") or not ("id" in item or "status" in item) or kind_of(item) != "assistant":
        return raw
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except UNDECODABLE:
        return encode({name: value for name, value in item.items() if name not in ("id", "status")})
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in ("id", "status")})


def hosted_text(item: Message) -> str:
    """Return a label for an item that is neither a message nor a call of the client, with its shortest texts."""
    type_ = text_or_none(item.get("type")) or "item"
    if type_ == "item_reference":
        return "[an answer that the proxy has not seen]"
    texts = [f"{name}: {value}" for name, value in _texts(item, 0) if name not in _NOT_TEXT]
    return f"[{' · '.join([type_[:40], *texts])}]"


def _texts(item: Message, depth: int) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in item.items():
        if isinstance(value, str) and value:
            found.append((name, value))
        elif isinstance(value, dict) and depth < DEEPEST and name not in _NOT_TEXT:
            found += _texts(value, depth + 1)
    return found


def is_hosted(item: Message) -> bool:
    """Return whether an item of the assistant is neither a message, reasoning, nor a call of the client."""
    return not is_message(item) and not is_reasoning(item) and not is_client_call(item)


def arguments_of(items: Sequence[Message]) -> list[tuple[str, str]]:
    """Return the name and the arguments of each call of the client, as text."""
    found = []
    for item in items:
        if is_client_call(item):
            given = next((item[key] for key in ("arguments", "input", "action", "operation") if key in item), None)
            found.append((text_or_none(item.get("name")) or str(item["type"]), as_text(given)))
    return found


def text_or_none(value: object) -> str | None:
    """Return a string, or ``None``."""
    return value if isinstance(value, str) else None


def as_text(value: Any) -> str:
    """Return a string unchanged, and other values as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _has_media(item: Message) -> bool:
    return any(map(is_media_part, parts_of(with_content(item))))


def _without_media(item: Message) -> Message:
    if not _has_media(item):
        return item
    return {**item, content_key(item): without_media(with_content(item))["content"]}


def _is_empty(item: Message) -> bool:
    """Return whether an item has nothing without the items after it, such as lone reasoning."""
    if is_message(item):
        return item.get("content") in (None, "", [])
    return item.get("type") == "reasoning"


def _text(item: Message) -> str:
    if is_reasoning(item):
        return ""
    if kind_of(item) == "assistant" and is_hosted(item):
        return hosted_text(item)
    return text_of(with_content(item))


def _replaceable(item: Message) -> str | None:
    return replaceable_text(with_content(item).get("content"))


def _with_arguments(item: Message, raw: bytes, rewrite: Rewrite) -> bytes:
    arguments = item.get("arguments")
    if item.get("type") != "function_call" or not isinstance(arguments, str):
        return raw
    rewritten = rewrite(text_or_none(item.get("name")) or "", arguments)
    return raw if rewritten is None else replace_field(raw, "arguments", rewritten)
