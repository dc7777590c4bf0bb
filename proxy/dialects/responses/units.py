"""Read, count, and rewrite the items of the Responses API.

A unit is one item, or a run of the assistant's items as a JSON array: reasoning, messages, and calls of one response.
Reasoning is bound to the items after it, so a run is kept or dropped as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from sys import intern

import msgspec

from proxy.compaction.effects import note_key
from proxy.compaction.format import Binding, ForeignSummary, Rewrite
from proxy.compaction.turn import NO_LINKS, Call, Effect, Kind, Links, Turn
from proxy.constants import UNDECODABLE
from proxy.dialects.identity import meaning
from proxy.dialects.parts import OPAQUE, RESPONSES, Part
from proxy.dialects.repair import CallKey
from proxy.dialects.units import (
    Message,
    Units,
    argument_text,
    changed_fields,
    content_text,
    decode,
    encode,
    own_text,
    parts_of,
    replace_field,
    string,
    summary_in,
)
from proxy.dialects.walk import (
    Change,
    Swap,
    identities,
    is_noted,
    linked,
    links_in,
    notes_of,
    opening_of,
    rewritten,
    row_of,
    strings,
    value_at,
)

MESSAGE_KINDS: dict[object, Kind] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}

_KINDS: dict[str, Kind] = {"answer": "result", "system": "system"}

# A rule about ids, not about parts: the API accepts these items of the assistant without one.
_REMOVABLE_IDS = ("message", "function_call", "custom_tool_call", "shell_call", "apply_patch_call", "tool_search_call")

# These prefixes are OpenAI's, except that of bridges. A reference without one may be a call.
_REASONING_ID, _BRIDGED_ID, _MESSAGE_ID = "rs_", "rs_proxy", "msg_"

FUNCTION, CUSTOM = "function_call_output", "custom_tool_call_output"
"""The kinds of results. Some clients answer a call with the output of another type, but never a custom one."""

_BOUND = ("id", "caller", "encrypted_content")  # fields of an item in effect that lead to items which aren't there


class ResponsesUnits(Units[list[Message]]):
    """See ``dialects.units.Units``. A decoded unit is a list of items."""

    TABLE = RESPONSES
    RESULT_KINDS = (FUNCTION, CUSTOM)
    TEXT_PART = "input_text"
    MARKS = ()

    @property
    def binds_reasoning(self) -> Binding:
        return "until_open_round"

    def without_reasoning(self, raw: bytes) -> bytes:
        rest = [item for item in items_of(raw) if not is_reasoning(item)]
        # The API refuses references and hosted calls without their reasoning, so such a run stays as it is.
        if any(item.get("type", "message") not in _REMOVABLE_IDS for item in rest):
            return raw
        return rewritten_items(raw, _without_binding)

    def decoded(self, raw: bytes) -> list[Message]:
        return items_of(raw)

    def kind(self, unit: list[Message]) -> Kind:
        kind = kind_of(unit[0]) if unit and unit[0] else ""
        if kind != "user":
            return kind
        # A result in the form of another API isn't the user's message.
        foreign = any(isinstance(part, dict) and "tool_use_id" in part for part in parts_of(unit[0]))
        return "" if foreign or is_noted(unit[0].get("content"), RESPONSES) else kind

    def role(self, unit: list[Message], kind: Kind) -> str:
        if kind in ("result", "assistant"):
            return "tool" if kind == "result" else "assistant"
        item = unit[0] if unit else {}
        return string(item.get("role")) or string(item.get("type"))

    def calls(self, unit: list[Message]) -> tuple[Call, ...]:
        return calls_of(unit)

    def answered(self, unit: list[Message], kind: Kind) -> str | None:
        return string(unit[0].get("call_id")) or string(unit[0].get("id")) or None if kind == "result" else None

    def links(self, unit: list[Message]) -> Links:
        return NO_LINKS if all(map(_is_usual, unit)) else links_of(unit)

    def effects(self, unit: list[Message]) -> tuple[Effect, ...]:
        return tuple(keys for keys, _ in in_effect(unit))

    def in_effect(self, raw: bytes) -> list[bytes]:
        return [joined(list(map(_unbound, items))) for _, items in in_effect(items_of(raw))]

    def single_calls(self, raw: bytes) -> dict[str, bytes]:
        items = items_of(raw)
        thoughts = list(map(_unbound, filter(is_readable, items)))
        calls: dict[str, list[bytes]] = {}
        for item in filter(is_client_call, items):
            calls.setdefault(str(item.get("call_id")), [*thoughts]).append(_unbound(item))
        return {id: joined(same) for id, same in calls.items()}

    def opening(self, unit: list[Message]) -> str:
        return opening_of(unit[0].get("content"), RESPONSES) if len(unit) == 1 else ""

    def visible_text(self, unit: list[Message]) -> str:
        return "\n".join(filter(None, map(_text, unit)))

    def walked(self, unit: list[Message], change: Change | None, swap: Swap | None) -> list[Message]:
        new = [rewritten(item, RESPONSES, change, swap, item_row(item)) for item in unit]
        return unit if all(one is item for one, item in zip(new, unit, strict=True)) else new

    def written(self, raw: bytes, unit: list[Message], new: list[Message]) -> bytes:
        if bytes(raw)[:1] == b'"':
            return encode(new[0]["content"])
        return joined(list(map(changed_fields, raws_of(raw), unit, new)))

    def is_empty(self, unit: list[Message]) -> bool:
        return all(map(_is_empty, unit))

    def result_content(self, unit: list[Message]) -> object:
        found = answer_of(unit[0])
        return meaning(unit[0], RESPONSES) if found is None else found

    def result_text(self, unit: list[Message]) -> str:
        return visible(unit[0])

    def summary_in(self, unit: list[Message]) -> ForeignSummary | None:
        return summary_in(unit[0]) if len(unit) == 1 and is_message(unit[0]) else None

    def own_texts(self, unit: list[Message]) -> list[tuple[str, str]]:
        return [own_text(item.get("content"), RESPONSES) for item in unit]

    def arguments(self, raw: bytes) -> list[tuple[str, str]]:
        calls = filter(is_client_call, items_of(raw))
        return [(string(c.get("name")) or str(c["type"]), argument_text(c.get(item_row(c).arguments))) for c in calls]

    def with_result(self, raw: bytes, text: str) -> bytes:
        if item_row(item := items_of(raw)[0]).plain and "." not in answer_path(item):
            return replace_field(raw, answer_path(item), text)
        return self.with_texts(raw, [text])

    def with_arguments(self, raw: bytes, rewrite: Rewrite) -> bytes:
        return rewritten_items(raw, lambda item, old: _with_arguments(item, old, rewrite))

    def summary(self, role: str, text: str) -> bytes:
        return encode({"type": "message", "role": role, "content": text})

    def call_keys(self, turn: Turn) -> list[CallKey]:
        calls = [item for item in items_of(turn.raw) if is_client_call(item)]
        kinds = (CUSTOM if item_row(item).answer == CUSTOM else FUNCTION for item in calls)
        return [(kind, call.id) for kind, call in zip(kinds, turn.facts.calls, strict=True)]

    def result_key(self, turn: Turn) -> CallKey:
        type_ = str(items_of(turn.raw)[0].get("type"))
        kind = type_ if type_ == CUSTOM or type_ not in RESPONSES else FUNCTION
        return kind, turn.facts.answers or ""

    def result(self, kind: str, id: str, text: str, of: bytes = b"") -> bytes:
        return encode({"type": kind, "call_id": id, "output": text})

    def may_answer(self, raw: bytes, id: str) -> bool:
        calls = (item for item in items_of(raw) if is_client_call(item) and item.get("call_id") == id)
        return all(RESPONSES[item_row(call).answer].plain for call in calls)

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
    fields = (item.get(name) for name in ("type", "role", "call_id", "execution", "name"))
    return kind_by(*fields)


def kind_by(type_: object, role: object, call_id: object, execution: object, name: object = None) -> Kind:
    """Return the kind of an item with these fields. An output with a name in place of a call is a program's note."""
    if type_ is None or type_ == "message":
        return MESSAGE_KINDS.get(role, "") if isinstance(role, str) else ""
    if not isinstance(type_, str):
        return ""
    if isinstance(name, str) and not call_id and type_.endswith("_output"):
        return ""
    row = row_of({"type": type_, "execution": execution}, RESPONSES)
    if row is OPAQUE:
        # New types end like the known ones, or name the role that they have.
        if type_.endswith("_output") and isinstance(call_id, str):
            return "result"
        return MESSAGE_KINDS.get(role, "assistant") if isinstance(role, str) else "assistant"
    return _KINDS.get(row.plays, "assistant")


def item_row(item: Message) -> Part:
    """Return the row of an item. One without a type is a message."""
    return RESPONSES["message"] if item.get("type") in (None, "message") else row_of(item, RESPONSES)


def _is_usual(item: Message) -> bool:
    """Return whether an item is a message, or a function's call or output, which has no other relations."""
    usual = item_row(item).alike and "caller" not in item
    return usual and (
        item.get("type") not in (None, "message") or not links_in(item, RESPONSES, whole=is_foreign(item))
    )


def links_of(items: Sequence[Message]) -> Links:
    """Return how items belong to those of other units."""
    parts, unseen = [], False
    for item in items:
        row = item_row(item)
        if row.plays in ("hosted", "call", "answer"):
            names, refers = identities(item)
            paired = (item.get("call_id"), item.get("id"))  # by the engine
            parts.append((names, refers) if row.plays == "hosted" else ([], [id for id in refers if id not in paired]))
        elif row.plays == "message":
            parts += links_in(item, RESPONSES, whole=is_foreign(item))
        elif row.plays == "reference":
            unseen = unseen or not str(item.get("id")).startswith((_REASONING_ID, _MESSAGE_ID))
    return linked(parts, unseen=unseen) if parts or unseen else NO_LINKS


def is_foreign(message: Message) -> bool:
    """Return whether a message has a role of another API, such as ``tool``."""
    return string(message.get("role")) not in MESSAGE_KINDS


def _unbound(item: Message) -> bytes:
    return encode({name: item[name] for name in item if name not in _BOUND})


def in_effect(items: Sequence[Message]) -> Iterator[tuple[Effect, list[Message]]]:
    """Yield the keys of what items put into effect, with the items that do so."""
    calls: dict[object, Message] = {}
    for item in items:
        row, kind = item_row(item), kind_of(item)
        field = {"user": "content", "result": "output"}.get(kind, "")
        for note in notes_of(item.get(field), RESPONSES, elements=kind == "user"):
            yield (note_key(note),), [{**item, field: [{"type": "input_text", "text": note}]}]
        if not kind and "output" in item:
            yield (f"output {item.get('namespace')}.{item.get('name')}",), [item]
        elif row.answer:
            calls[row.answer] = item
        elif row.effect == "sets":
            keys = [f"configuration {name}" for name in item if name in (row.reads or ())]
            if keys:
                yield tuple(keys), [item]
        elif row.effect == "loads" and (names := list(_tools_in(item.get("tools"), ""))):
            # The call of a search that the provider ran comes before its output.
            call = calls.get(item["type"]) if row.plays == "hosted" else None
            if call is not None or row.plays != "hosted":
                yield tuple(f"tool {name}" for name in names), [item] if call is None else [call, item]


def _tools_in(tools: object, prefix: str) -> Iterator[str]:
    """Yield the names of tools, also of those in namespaces."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            name = prefix + str(tool.get("name") or tool.get("server_label") or tool.get("type"))
            inside = tool.get("tools")
            yield from _tools_in(inside, f"{name}.") if isinstance(inside, list) else [name]


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


def with_content(item: Message) -> Message:
    """Return an item as a message: its content or its output in ``content``. Other items have no content."""
    if kind_of(item) == "result":
        return {"content": answer_of(item)}
    return item if is_message(item) or not item.get("type") else {}


def answer_path(item: Message) -> str:
    """Return the path of an answer's content: the first that its row reads."""
    row = item_row(item)
    return row.reads[0] if row.plays == "answer" and row.reads else "output"


def answer_of(item: Message) -> object:
    """Return an answer's content; ``None`` if it has none."""
    return value_at(item, answer_path(item))


def is_client_call(item: Message) -> bool:
    """Return whether an item is a call that the client answers."""
    return item_row(item).plays == "call"


def calls_of(items: Sequence[Message]) -> tuple[Call, ...]:
    """Return the calls that the client answers."""
    return tuple(
        Call(string(item.get("call_id")), intern(string(item.get("name")) or str(item["type"])[:40]))
        for item in items
        if is_client_call(item)
    )


def is_reasoning(item: Message) -> bool:
    """Return whether an item is reasoning, or refers to reasoning."""
    plays = item_row(item).plays
    return plays == "reasoning" or (plays == "reference" and str(item.get("id")).startswith(_REASONING_ID))


def is_readable(item: Message) -> bool:
    """Return whether an item is reasoning that is a text, rather than sealed or stored at the server.

    OpenAI's reasoning has no text besides its summary. Servers such as DeepSeek's demand the text with later calls.
    """
    id_ = str(item.get("id") or "")
    sealed = item.get("encrypted_content") or (id_.startswith(_REASONING_ID) and not id_.startswith(_BRIDGED_ID))
    fields = ("content",) if sealed else ("content", "summary")
    return item.get("type") == "reasoning" and any(content_text(item.get(name), RESPONSES) for name in fields)


def _without_binding(item: Message, raw: bytes) -> bytes:
    if is_reasoning(item) and not is_readable(item):
        return b""
    bound = ("encrypted_content",) if is_reasoning(item) else ("id", "status")
    if not item.get("type") or item.keys().isdisjoint(bound) or kind_of(item) != "assistant":
        return raw
    try:
        fields: Message = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except UNDECODABLE:
        fields = item
    return encode({name: value for name, value in fields.items() if name not in bound})


def visible(item: Message) -> str:
    """Return the visible text of an item: its content or output, or a label with the texts of another item."""
    row = item_row(item)
    if row.plays == "message":
        return content_text(item.get("content"), RESPONSES)
    if row.plays == "answer" and isinstance(output := answer_of(item), str | list):
        return content_text(output, RESPONSES)
    texts: dict[str, str] = {}
    for name, text in strings(item, RESPONSES, row):
        texts.setdefault(text, name)
    if row.plays == "answer":
        return "\n".join(texts)
    type_ = string(item.get("type")) or "item"
    return f"[{' · '.join([type_[:40], *(f'{name}: {text}' if name else text for text, name in texts.items())])}]"


def _is_empty(item: Message) -> bool:
    """Return whether an item has nothing without the items after it, such as lone reasoning."""
    if is_message(item):
        return item.get("content") in (None, "", []) and not item.get("tool_calls")
    return item.get("type") == "reasoning"


def _text(item: Message) -> str:
    row = item_row(item)
    if row.plays == "prefix" or is_reasoning(item) or (row.plays == "call" and not any(strings(item, RESPONSES, row))):
        return ""
    return "[an answer that the proxy has not seen]" if row.plays == "reference" else visible(item)


def _with_arguments(item: Message, raw: bytes, rewrite: Rewrite) -> bytes:
    arguments = item.get("arguments")
    if item_row(item).arguments != "arguments" or not isinstance(arguments, str):
        return raw
    rewritten = rewrite(string(item.get("name")), arguments)
    return raw if rewritten is None else replace_field(raw, "arguments", rewritten)
