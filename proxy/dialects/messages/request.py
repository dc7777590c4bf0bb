"""Parse the body of a Messages request, and rewrite it with the fewest changes.

An assistant's message is one unit, and so is a user's message without tool results. A user's message with tool results
is split into one unit for each result and one for the other blocks, because a part of it may be kept. Units are joined
to messages again: the API requires that the results of an assistant's calls come in the next user message, before its
other blocks. If an assistant's message begins with results of the message before it, which the provider's tools
returned after a pause, these are a unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import msgspec

from proxy.constants import UNDECODABLE
from proxy.dialects.messages.units import answers_before, blocks_of, kind_of
from proxy.dialects.request import (
    NOTHING,
    BlocksRequest,
    Split,
    Wire,
    encoded,
    listed,
    positive,
    value_of,
)
from proxy.dialects.units import ByDigest, decode, encode, type_of
from proxy.limits.budget import LEAST_THINKING, lower_thinking

_FIELDS = ("system", "tools", "tool_choice", "output_config", "output_format", "mcp_servers")


class _Wire(Wire):
    messages: list[msgspec.Raw] | None = None
    max_tokens: msgspec.Raw = NOTHING
    system: msgspec.Raw = NOTHING
    tools: msgspec.Raw = NOTHING
    tool_choice: msgspec.Raw = NOTHING
    output_config: msgspec.Raw = NOTHING
    output_format: msgspec.Raw = NOTHING
    mcp_servers: msgspec.Raw = NOTHING
    thinking: msgspec.Raw = NOTHING
    thread: msgspec.Raw = NOTHING


_decoder = msgspec.json.Decoder(_Wire)

_RESULT = re.compile(rb'"tool_result"')
_REFERENCE, _DEFERRED = b'"tool_reference"', b'"defer_loading"'
_HOSTED_RESULT = b'_tool_result"'
_SYSTEM = re.compile(rb'"role"\s*:\s*"system"')
_COMPACTION = re.compile(rb'"type"\s*:\s*"compaction"')


class _Outer(msgspec.Struct):
    role: str = ""
    content: list[msgspec.Raw] | None = None


class _Typed(msgspec.Struct):
    type: str = ""


_outer = msgspec.json.Decoder(_Outer)
_typed = msgspec.json.Decoder(_Typed)


class Layout(NamedTuple):
    """The places in a message that decide how it's split.

    ``replaced`` is 0 without a compaction block. Otherwise it's the number of messages that belong to the block: 2 if
    the message also has calls, whose results come in the next one. ``results`` and ``others`` are the places of the
    blocks of a message with results. ``single`` is true if the unit of a lone result has the message's bytes.
    """

    replaced: int = 0
    results: tuple[slice, ...] = ()
    others: tuple[slice, ...] = ()
    single: bool = False
    role: bytes = b"user"


_PLAIN = Layout()


class MessagesRequest(BlocksRequest, eq=False):
    """A request as the client sent it. See ``dialects.request.Request``.

    ``prefix`` are the messages up to the newest compaction block. The upstream ignores those before the block, so they
    aren't units and stay unchanged.
    """

    OVERHEAD = (*_FIELDS, "prefix")

    prefix: Sequence[bytes] = []
    continues: bool = False
    thinking: int = 0
    stated_thinking: int = 0

    @classmethod
    def _read(cls, raw: bytes) -> Self | None:
        try:
            wire = _decoder.decode(raw)
        except UNDECODABLE:
            return None
        messages: Sequence[bytes] = wire.messages or []
        layouts = layouts_of(messages)
        block, start = prefix_of(layouts)
        units, splits = split(messages[start:], layouts[start:])
        fields = [bytes(getattr(wire, name)) for name in _FIELDS]
        most, thinking = positive(wire.max_tokens), thinking_tokens(wire.thinking)
        return cls(
            raw=raw,
            **wire.shared,
            units=units,
            max_output=most,
            overhead=(*fields, bytes(listed(messages[block:start])) if start else b""),
            received=messages,
            prefix=messages[:start],
            splits=splits,
            continues=_continues(value_of(wire.thread)),
            # Only with interleaved thinking, its budget may be larger. It's then for all of a turn's requests.
            thinking=thinking if thinking < (most or 0) else 0,
            stated_thinking=thinking,
        )

    @property
    def compacted(self) -> bool:
        return bool(self.prefix)

    @property
    def fixed_thinking(self) -> int:
        found = super().fixed_thinking
        return found if found > self.stated_thinking else 0

    @property
    def loads_tools(self) -> bool:
        return _DEFERRED in self.overhead[_FIELDS.index("tools")] and _REFERENCE in self.raw

    def release(self) -> None:
        super().release()
        self.prefix = []

    def _replace_units(self, fields: dict[str, msgspec.Raw], units: Sequence[bytes]) -> None:
        fields["messages"] = listed([*self.prefix, *joined(units, self.splits)])

    def _lower_output(self, fields: dict[str, msgspec.Raw], most: int) -> None:
        if (positive(fields.get("max_tokens", NOTHING)) or 0) <= most:
            return
        if self.thinking and most <= LEAST_THINKING:
            most = max(most, self.thinking + 1)
        fields["max_tokens"] = encoded(most)
        if (lowered := lower_thinking(self.thinking, most)) < self.thinking:
            fields["thinking"] = encoded({**value_of(fields["thinking"]), "budget_tokens": lowered})


parse = MessagesRequest.parse


def _continues(thread: object) -> bool:
    """Return whether a request continues a thread, whose earlier messages the server keeps."""
    return isinstance(thread, dict) and (thread.get("type") == "continue" or bool(thread.get("previous_message_id")))


def thinking_tokens(raw: msgspec.Raw) -> int:
    """Return the tokens that manual thinking may take. ``max_tokens`` must be larger."""
    thinking = value_of(raw)
    budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
    return budget if isinstance(budget, int) and 0 < budget < 1e12 else 0


def prefix_of(layouts: Sequence[Layout]) -> tuple[int, int]:
    """Return the position of the newest message with a compaction block, and the end of the messages up to it.

    If that message also has calls, their results are included. Both are 0 if there is none.
    """
    for index in range(len(layouts) - 1, -1, -1):
        if layouts[index].replaced:
            return index, min(len(layouts), index + layouts[index].replaced)
    return 0, 0


def split(messages: Sequence[bytes], layouts: Sequence[Layout]) -> tuple[list[bytes], dict[int, Split]]:
    """Return the units of messages, and the split messages by the identity of their first unit."""
    units: list[bytes] = []
    splits: dict[int, Split] = {}
    for message, layout in zip(messages, layouts, strict=True):
        if not layout.results:
            units.append(message)
            continue
        if layout.single:
            splits[id(message)] = Split(message, (message,))
            units.append(message)
            continue
        plain, role = bytes(message), layout.role
        made = [_message([plain[place]], role) for place in layout.results]
        if layout.others:
            made.append(_message([plain[place] for place in layout.others], role))
        splits[id(made[0])] = Split(message, tuple(made), role)
        units += made
    return units, splits


def _layout(message: bytes) -> Layout:
    replaced = 0
    if _COMPACTION.search(message):
        kinds = [type_of(block) for block in blocks_of(decode(message))]
        replaced = 1 + ("tool_use" in kinds) if "compaction" in kinds else 0
    if _HOSTED_RESULT in message and (results := _hosted_places(message)):
        return Layout(replaced, results[:1], results[1:], role=b"assistant")
    results, others = _places(message) if _RESULT.search(message) else ((), ())
    single = len(results) == 1 and not others and _message([message[results[0]]]) == message
    return Layout(replaced, results, others, single) if replaced or results else _PLAIN


def _places(message: bytes) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the places of the results in a user's message, and of its other blocks; empty without results."""
    try:
        outer = _outer.decode(message)
        if outer.role != "user" or not outer.content:
            return (), ()
        is_result = [_typed.decode(block).type == "tool_result" for block in outer.content]
    except UNDECODABLE:
        return (), ()
    if not any(is_result):
        return (), ()
    places = []
    end = 0
    for block in outer.content:
        start = message.index(bytes(block), end)
        end = start + len(block)
        places.append(slice(start, end))
    pairs = list(zip(places, is_result, strict=True))
    return tuple(place for place, is_ in pairs if is_), tuple(place for place, is_ in pairs if not is_)


def _hosted_places(message: bytes) -> tuple[slice, ...]:
    """Return the places of the results that an assistant's message begins with and of the rest; empty without both."""
    leading = answers_before(decode(message))
    try:
        blocks = _outer.decode(message).content or []
    except UNDECODABLE:
        return ()
    if not 0 < leading < len(blocks):
        return ()
    ends = [0]
    for block in blocks:
        ends.append(message.index(bytes(block), ends[-1]) + len(block))
    start, last = (ends[at + 1] - len(blocks[at]) for at in (0, leading))
    return slice(start, ends[leading]), slice(last, ends[-1])


_layouts = ByDigest(_layout)
layouts_of = _layouts.of


def _message(blocks: Sequence[bytes], role: bytes = b"user") -> bytes:
    return b'{"role":"' + role + b'","content":[' + b",".join(blocks) + b"]}"


def joined(units: Sequence[bytes], splits: Mapping[int, Split]) -> list[bytes]:
    """Return the messages of units. See ``regrouped``.

    A system message must come before an assistant's or last, and may not follow another one. Those that lost their
    place move behind the next user messages, and several of them become one.
    """
    return _placed(regrouped(units, splits))


def regrouped(units: Sequence[bytes], splits: Mapping[int, Split]) -> list[bytes]:
    """Return the messages of units.

    - If all units of a message are unchanged and together, the message has its original bytes.
    - Other results in a row become one message, with the blocks that came with them at its end.
    """
    kinds = _kinds(splits)
    messages: list[bytes] = []
    index = 0
    while index < len(units):
        part = splits.get(id(units[index]))
        end = index + len(part.units) if part is not None and part.role == b"assistant" else index
        if part is not None and end > index and list(map(id, units[index:end])) == list(map(id, part.units)):
            messages.append(part.message)
            index = end
            continue
        end = _end_of_results(units, index, kinds)
        if end == index:
            messages.append(units[index])
            index += 1
            continue
        messages += _originals(units[index:end], splits) or [_merged(units[index:end])]
        index = end
    return messages


def _kinds(splits: Mapping[int, Split]) -> dict[int, bool]:
    """Return whether each made unit is a result, by its identity. Only the last unit of a message may not be one."""
    kinds: dict[int, bool] = {}
    for part in splits.values():
        if part.role == b"assistant":
            continue
        *others, last = part.units
        kinds.update((id(unit), True) for unit in others)
        kinds[id(last)] = not others or is_result(last)
    return kinds


def _end_of_results(units: Sequence[bytes], start: int, kinds: Mapping[int, bool]) -> int:
    """Return the end of the results in a row that begin at ``start``, with the other blocks of their messages."""
    end = start
    while end < len(units):
        known = kinds.get(id(units[end]))
        if not (is_result(units[end]) if known is None else known or end > start):
            break
        end += 1
    return end


def is_result(unit: bytes) -> bool:
    """Return whether a unit is a user's message that begins with a result."""
    return _RESULT.search(unit) is not None and kind_of(decode(unit)) == "result"


def _originals(run: Sequence[bytes], splits: Mapping[int, Split]) -> list[bytes]:
    """Return the original messages if the units are all of theirs; otherwise nothing."""
    found: list[bytes] = []
    index = 0
    while index < len(run):
        part = splits.get(id(run[index]))
        end = index + (len(part.units) if part else 1)
        if part is None or [id(unit) for unit in run[index:end]] != [id(unit) for unit in part.units]:
            return []
        found.append(part.message)
        index = end
    return found


def _merged(run: Sequence[bytes]) -> bytes:
    """Return one message with the blocks of all units, results first."""
    if len(run) == 1:
        return run[0]
    try:
        blocks: list[bytes] = [block for unit in run for block in _outer.decode(unit).content or ()]
    except UNDECODABLE:  # lone surrogates
        blocks = [encode(block) for unit in run for block in blocks_of(decode(unit))]
    results = [type_of(decode(block)) == "tool_result" for block in blocks]
    ordered = [block for wanted in (True, False) for block, is_ in zip(blocks, results, strict=True) if is_ is wanted]
    return _message(ordered)


def _placed(messages: Sequence[bytes]) -> list[bytes]:
    if not any(_SYSTEM.search(message) for message in messages):
        return list(messages)
    return list(_in_place(messages))


def _in_place(messages: Sequence[bytes]) -> Iterator[bytes]:
    waiting: list[bytes] = []
    for message in messages:
        fields = decode(message) if _SYSTEM.search(message) or waiting else {}
        if fields.get("role") == "system":
            waiting.append(message)
            continue
        if waiting and fields.get("role") != "user":
            yield _one_system(waiting)
            waiting = []
        yield message
    if waiting:
        yield _one_system(waiting)


def _one_system(waiting: Sequence[bytes]) -> bytes:
    """Return one system message. The fields outside the content are those of the newest one."""
    if len(waiting) == 1:
        return waiting[0]
    blocks = [block for message in waiting for block in blocks_of(decode(message))]
    return encode({**decode(waiting[-1]), "content": blocks})
