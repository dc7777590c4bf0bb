"""Read, count, and rewrite messages of Anthropic's Messages API, and their content blocks.

Clients may send any JSON value, so every function here accepts any value and treats unknown shapes as empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from sys import intern
from typing import Any

from proxy.compaction.effects import note_key, split_notes
from proxy.compaction.format import Binding, ForeignSummary, Rewrite, TextCounter
from proxy.compaction.turn import NO_LINKS, Call, Effect, Kind, Links, Turn
from proxy.dialects.foreign_summaries import find_summary
from proxy.dialects.parts import MESSAGES
from proxy.dialects.repair import STRAY_RESULT, CallKey
from proxy.dialects.units import (
    Message,
    MessageUnits,
    content_text,
    decode,
    encode,
    own_text,
    replace_field,
    string,
    type_of,
)
from proxy.dialects.walk import is_noted, linked, links_in, notes_of, row_of
from proxy.limits.profiles import undated

Block = dict[str, Any]

# Not in the table's terms, because only these blocks are bound to the prompt and may be removed.
THINKING = frozenset({"thinking", "redacted_thinking"})

_DEEPEST = 6

_FIRST_CHECKED = (5, 1)
_FIRST_CHECKED_BY_FAMILY = {"mythos": (5, 2)}  # the first version that checks, by family, if it isn't `_FIRST_CHECKED`

_VERSION = re.compile(r"(?<![\w.])(\d{1,2})(?:\.(\d{1,2}))?(?![\w.])")


class MessagesUnits(MessageUnits):
    """See ``dialects.units.Units``. A unit is a message, and ``model`` decides whether it binds thinking."""

    TABLE = MESSAGES

    def __init__(self, message: Callable[[Message], int], text: TextCounter, model: str) -> None:
        super().__init__(message, text)
        self._binding: Binding = "always" if checks_prefix(model) else "never"

    @property
    def binds_reasoning(self) -> Binding:
        return self._binding

    def without_reasoning(self, raw: bytes) -> bytes:
        blocks = decode(raw).get("content")
        if not isinstance(blocks, list) or not any(map(is_sealed, blocks)):
            return raw
        kept = [block for block in blocks if type_of(block) not in THINKING]
        return replace_field(raw, "content", kept) if kept else b""

    def kind(self, unit: Message) -> Kind:
        return kind_of(unit)

    def calls(self, unit: Message) -> tuple[Call, ...]:
        return calls_of(unit)

    def answered(self, unit: Message, kind: Kind) -> str | None:
        answered = blocks_of(unit)[0].get("tool_use_id") if kind == "result" else None
        return answered if isinstance(answered, str) else None

    def visible_text(self, unit: Message) -> str:
        return content_text(blocks_of(unit), MESSAGES)

    def links(self, unit: Message) -> Links:
        known = unit.get("role") in ("user", "system", "developer")
        return NO_LINKS if known else linked(links_in(unit, MESSAGES, whole=unit.get("role") != "assistant"))

    def effects(self, unit: Message) -> tuple[Effect, ...]:
        return tuple(keys for keys, _ in in_effect(unit))

    def in_effect(self, raw: bytes) -> list[bytes]:
        unit = decode(raw)
        return [
            encode({"role": unit.get("role"), "content": list(map(canonical, blocks))}) for _, blocks in in_effect(unit)
        ]

    def single_calls(self, raw: bytes) -> dict[str, bytes]:
        blocks = blocks_of(decode(raw))
        thoughts = [canonical(block) for block in blocks if type_of(block) in THINKING and not is_sealed(block)]
        calls: dict[str, list[Any]] = {}
        for use in blocks:
            if type_of(use) == "tool_use":
                call = {name: value for name, value in canonical(use).items() if name != "caller"}
                calls.setdefault(str(use.get("id")), [*thoughts]).append(call)
        return {id: encode({"role": "assistant", "content": content}) for id, content in calls.items()}

    def is_empty(self, unit: Message) -> bool:
        return unit.get("content") in (None, "", []) and not unit.get("tool_calls")

    def result_content(self, unit: Message) -> object:
        return canonical([block.get("content") for block in blocks_of(unit) if isinstance(block, dict)])

    def summary_in(self, unit: Message) -> ForeignSummary | None:
        texts = [text for block in blocks_of(unit) if (text := text_in(block)) is not None and not is_note(block)]
        return find_summary(str(unit.get("role")), texts, listed=isinstance(unit.get("content"), list))

    def own_texts(self, unit: Message) -> list[tuple[str, str]]:
        text, labels = own_text([block for block in blocks_of(unit) if not is_note(block)], MESSAGES)
        return [(text, labels)] if text or labels else []

    def arguments(self, raw: bytes) -> list[tuple[str, str]]:
        # Calls of the provider's tools are included.
        uses = [block for block in blocks_of(decode(raw)) if row_of(block, MESSAGES).arguments]
        return [(string(use.get("name")), json.dumps(use.get("input", {}), ensure_ascii=False)) for use in uses]

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

    def result(self, kind: str, id: str, text: str, of: bytes = b"") -> bytes:
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


def is_sealed(block: Any) -> bool:
    """Return whether a block is thinking that its server checks. Thinking without a signature is a mere text."""
    return type_of(block) in THINKING and (not block.get("thinking") or bool(block.get("signature")))


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
    return text is not None and (text.startswith(STRAY_RESULT) or is_noted(text, MESSAGES))


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
    return tuple(Call(string(block.get("id")), intern(string(block.get("name")))) for block in uses)


def answers_before(message: Message) -> int:
    """Return the number of blocks at the start of an assistant's message that answer calls of an earlier message."""
    blocks = blocks_of(message) if message.get("role") == "assistant" else []
    made = {block.get("id") for block in blocks if isinstance(block, dict)}
    for place, block in enumerate(blocks):
        answered = block.get("tool_use_id") if isinstance(block, dict) else None
        if not isinstance(answered, str) or answered in made:
            return place
    return len(blocks)


def in_effect(message: Message) -> Iterator[tuple[Effect, list[Any]]]:
    """Yield the keys of what a message puts into effect, with the blocks that do so."""
    calls: dict[object, Any] = {}
    for block in blocks_of(message):
        said = [] if message.get("role") == "assistant" else [text_in(block)]
        for note in [note for text in said for note in split_notes(text, elements=True)[0]]:
            yield (note_key(note),), [{"type": "text", "text": note}]
        row = row_of(block, MESSAGES)
        if row.arguments:
            calls[block.get("id")] = block
        elif row.effect == "changes":
            yield _changed(block), [block]
        elif row.plays == "answer":
            for note in notes_of(block.get("content"), MESSAGES):
                yield (note_key(note),), [{**block, "content": [{"type": "text", "text": note}]}]
            refers = [part for part in nested(block) if row_of(part, MESSAGES).effect == "loads"]
            if refers:
                yield tuple(f"tool {part.get('tool_name')}" for part in refers), [{**block, "content": refers}]
        elif row.effect == "loads" and (call := calls.get(block.get("tool_use_id"))) is not None:
            found = block.get("content")
            loads = found.get("tool_references") if isinstance(found, dict) else None
            if isinstance(loads, list) and loads:
                names = (part.get("tool_name") for part in loads if isinstance(part, dict))
                yield tuple(f"tool {name}" for name in names), [call, block]


def _changed(block: Block) -> Effect:
    """Return the keys of a change of tools. Later changes may refer to a definition, so it has a key of its own."""
    tool = block.get("tool")
    tool = tool if isinstance(tool, dict) else {}
    defined = tool.get("definition")
    named = defined if isinstance(defined, dict) else tool
    server = named.get("server_name") or named.get("mcp_server_name")
    name = "/".join(str(part) for part in (server, named.get("name")) if part)
    return (f"tool {name}", f"definition {name}") if named is defined else (f"tool {name}",)


def canonical(value: Any, depth: int = 0) -> Any:
    """Return a value without ``cache_control``. A string as content equals a list of one text block.

    Clients move their cache breakpoints from turn to turn.
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


def _rewritten_call(block: Any, rewrite: Rewrite) -> Any:
    """Return a call with other arguments; the same object if they stay."""
    if not row_of(block, MESSAGES).arguments or not isinstance(block.get("input"), dict):
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
