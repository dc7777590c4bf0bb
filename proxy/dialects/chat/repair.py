"""Repair a conversation that a strict server would reject.

The proxy repairs only conversations that it compacts: a cut needs groups, and results apart from their calls don't
form groups. If the input is valid, every message is returned as the same object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.compaction.format import Format
from proxy.compaction.groups import head_length
from proxy.compaction.turn import Call, Facts, Turn
from proxy.compaction.verify import faults
from proxy.dialects.parts import text_of
from proxy.dialects.unit_json import Message, decode, encode, replace_field

NO_RESULT = "No result of this call was recorded."
"""Result that is inserted for a call without one."""

STRAY_RESULT = "[Result of a tool call that is not part of this conversation]\n"
"""Prefix for the text of a result without a call."""

ID_FIELDS = {"tool": "tool_call_id", "function": "name"}
"""The field with the call's id, by the role of the result. The legacy ``function`` role uses the function's name."""

# Calls are removed from messages with these roles. Messages with unknown roles are left for the upstream to check.
_CALLLESS = frozenset({"user", "system", "developer"})

_Key = tuple[str, str]
"""The role that answers a call, and the client's id. An invalid id counts as the empty string."""


def needs_repair(messages: Sequence[Facts]) -> bool:
    """Return whether messages may need a repair. ``True`` doesn't mean that they are invalid."""
    for facts in messages:
        if facts.calls:
            ids = {call.id for call in facts.calls}
            if facts.role != "assistant" or len(ids) < len(facts.calls) or "" in ids:
                return True
        elif facts.role == "function" or facts.empty:
            return True
    return faults(messages) > 0


def repaired(turns: Sequence[Turn], format: Format) -> list[Turn]:
    """Return the messages of a whole request, with the results of each call right after it.

    - Move a result that comes later to its call. Results inside a group keep their order. If an id occurs again in
      later turns, a result belongs to the newest call with that id.
    - Insert ``NO_RESULT`` for a call without a result. The last group is kept if none of its calls has a result,
      because the client may still answer them.
    - Quote a result without a call in an assistant message. It may be the only remainder of messages that the client
      removed. Drop it if it's empty or if its call has another result.
    - Replace empty and repeated ids inside one message, and in its results. The new ids are derived from the message's
      content. A result without an id belongs to the first unanswered call of the group before it.
    - Remove calls from user and system messages. Drop assistant messages that are empty.

    The head, values that aren't objects, and messages with unknown roles are kept. The function never raises, takes
    linear time, and is idempotent.
    """
    head = head_length(turns)
    conversation = _Conversation(format)
    for turn in turns[head:]:
        conversation.take(turn)
    return [*turns[:head], *conversation.turns()]


@dataclass(slots=True, eq=False)
class _Asked:
    """A call. ``role`` is the role of its result. ``id`` is the outgoing id.

    ``arrival`` is the position of its result among those right after the call; ``None`` if it was moved or inserted.
    """

    role: str
    id: str
    result: Turn | None = None
    arrival: int | None = None


@dataclass(slots=True, eq=False)
class _Group:
    """A message with calls. ``nameless`` are results without an id after it, with their positions."""

    turn: Turn
    calls: list[_Asked]
    arrived: int = 0
    nameless: list[tuple[int, Turn]] = field(default_factory=list)


class _Conversation:
    """Repair the body, one message at a time."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self._items: list[_Group | Turn | None] = []
        self._open: dict[_Key, deque[tuple[_Group, _Asked]]] = {}
        # The group that directly precedes the next result.
        self._current: _Group | None = None

    def take(self, turn: Turn) -> None:
        """Add the client's next message."""
        facts = turn.facts
        if facts.kind == "result":
            self._take_result(turn)
        elif facts.calls and facts.role not in _CALLLESS:
            self._take_calls(turn)
        elif not facts.empty:
            self._current = None
            self._items.append(self._without_calls(turn) if facts.calls else turn)

    def turns(self) -> list[Turn]:
        """Return the repaired messages, after all were added."""
        for group in [item for item in self._items if isinstance(item, _Group)]:
            self._settle_nameless(group)
        self._items = [item for item in self._items if item is not None]
        turns: list[Turn] = []
        for place, item in enumerate(self._items):
            if isinstance(item, _Group):
                turns += self._with_results(item, last=place == len(self._items) - 1)
            elif item is not None:
                turns.append(item)
        return turns

    def _take_calls(self, turn: Turn) -> None:
        given = _keys(turn)
        ids = _distinct(given, turn.facts.digest) if turn.facts.role == "assistant" else [id_ for _, id_ in given]
        if ids != [id_ for _, id_ in given]:
            turn = self._with_ids(turn, ids)
        asked = [_Asked(role, id_) for (role, _), id_ in zip(given, ids, strict=True)]
        group = _Group(turn, asked)
        fresh: dict[_Key, deque[tuple[_Group, _Asked]]] = {}
        for key, call in zip(given, asked, strict=True):
            fresh.setdefault(key, deque()).append((group, call))
        self._open.update(fresh)
        self._items.append(group)
        self._current = group

    def _take_result(self, turn: Turn) -> None:
        key = (turn.facts.role, turn.facts.answers or "")
        waiting = self._open.get(key)
        if waiting:
            group, call = waiting.popleft()
            self._answer(call, turn)
            if group is self._current:
                call.arrival = group.arrived
                group.arrived += 1
        elif waiting is None or not key[1]:
            if self._current is not None and not key[1]:
                self._current.nameless.append((len(self._items), turn))
            self._items.append(self._note(turn))

    def _settle_nameless(self, group: _Group) -> None:
        """Assign results without an id to the unanswered calls, in order. Remove the notes that quote them."""
        for role in ID_FIELDS:
            calls = [call for call in group.calls if call.role == role and call.result is None]
            results = [(place, turn) for place, turn in group.nameless if turn.facts.role == role]
            for call, (place, turn) in zip(calls, results, strict=False):
                self._answer(call, turn)
                self._items[place] = None

    def _with_results(self, group: _Group, *, last: bool) -> list[Turn]:
        """Return a group's messages. Results of ``tool_calls`` come before the result of a ``function_call``."""
        awaited = last and all(call.result is None for call in group.calls)
        for call in group.calls:
            if call.result is None and not awaited:
                call.result = self._fresh({"role": call.role, ID_FIELDS[call.role]: call.id, "content": NO_RESULT})
        late = len(group.calls)
        ordered = sorted(
            (call for call in group.calls if call.result is not None),
            key=lambda call: (call.role == "function", late if call.arrival is None else call.arrival),
        )
        return [group.turn, *(call.result for call in ordered if call.result is not None)]

    def _answer(self, call: _Asked, turn: Turn) -> None:
        if turn.facts.answers != call.id:
            turn = self._rewritten(replace_field(turn.raw, ID_FIELDS[call.role], call.id))
        call.result = turn

    def _note(self, turn: Turn) -> Turn | None:
        text = text_of(decode(turn.raw))
        return self._fresh({"role": "assistant", "content": STRAY_RESULT + text}) if text.strip() else None

    def _without_calls(self, turn: Turn) -> Turn:
        raw = turn.raw
        for key in ("tool_calls", "function_call"):
            if decode(raw).get(key) is not None:
                raw = replace_field(raw, key, None)
        return self._rewritten(raw)

    def _with_ids(self, turn: Turn, ids: Sequence[str]) -> Turn:
        left = iter(ids)
        calls = decode(turn.raw)["tool_calls"]
        fixed = [{**call, "id": next(left)} if isinstance(call, dict) else call for call in calls]
        return self._rewritten(replace_field(turn.raw, "tool_calls", fixed))

    def _fresh(self, message: Message) -> Turn:
        return self._rewritten(encode(message))

    def _rewritten(self, raw: bytes) -> Turn:
        return Turn(raw, self._format.read(raw))


def _keys(turn: Turn) -> list[_Key]:
    """Return the key of each call in a message."""
    calls = turn.facts.calls
    keys = [("tool", call.id) for call in calls]
    last = calls[-1]
    # Usually only a legacy call has its name as its id, so most messages aren't decoded.
    if last == Call(last.name, last.name) and isinstance(decode(turn.raw).get("function_call"), dict):
        keys[-1] = ("function", last.id)
    return keys


def _distinct(given: Sequence[_Key], digest: bytes) -> list[str]:
    """Replace empty and repeated ids. Function names are kept.

    A new id can't equal one of the message's own ids, because it contains a digest over them. It has at most 40
    characters, which is OpenAI's limit.
    """
    seen: set[str] = set()
    ids = []
    for place, (role, id_) in enumerate(given):
        if role == "tool" and (not id_ or id_ in seen):
            id_ = f"call_{digest.hex()[:16]}_{place}"
        seen.add(id_)
        ids.append(id_)
    return ids
