"""Structural repair of a conversation that a strict server would refuse.

For what is being compacted only: a cut between groups needs groups, and results that lie apart from their calls have
none. Where input is sound every message comes back as the object it came in as.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.compaction.groups import head_length
from proxy.compaction.message import (
    RESULT_ROLES,
    Call,
    Message,
    MessageCounter,
    Turn,
    decode,
    encode,
    read,
    replace_field,
    text_of,
)

NO_RESULT = "No result of this call was recorded."
"""What stands for the result of a call that was never answered."""

STRAY_RESULT = "[Result of a tool call that is not part of this conversation]\n"
"""Stands before the text of a result whose call is not there."""

ID_FIELDS = {"tool": "tool_call_id", "function": "name"}
"""Where a result names its call, by its role. ``function`` is the legacy pair: its id is its function's name."""

# Roles whose messages call nothing: calls found in one are taken out. Roles nobody knows are the upstream's to judge.
_CALLLESS = frozenset({"user", "system", "developer"})

_Key = tuple[str, str]
"""The role that answers a call, and the id as the client wrote it; what is no id counts as the empty one."""


def repaired(turns: Sequence[Turn], count: MessageCounter) -> list[Turn]:
    """The messages of a whole request, every call with its results right behind it and every result behind its call.

    - A result that lies further on is moved behind its call; the order of results inside a group is left as it is.
      An id may come again in later turns: a result belongs to the newest call of its id.
    - A call without a result gets one that says so. Only a group that nothing follows and of which no call has a result
      stays as it is: the client may yet answer it. Where some have one, an answer is asked for now.
    - A result without a call becomes an assistant's note that quotes it, for it may be all that is left of what the
      client cut away, and neither the user nor a call that nobody made should carry it. It is dropped where it is
      empty, or where its call has another answer.
    - Empty and repeated ids inside one message are replaced, in its results too; the new ones come of the message's
      content. A result without an id belongs to the call of the group before it that nothing else answers.
    - Calls are taken out of messages of the user or the system. An assistant's message with nothing in it is dropped.

    The head, values that are no objects and messages of unknown roles stay as they are. Never raises; takes time in
    proportion to the messages. Repairing twice is repairing once.
    """
    head = head_length(turns)
    conversation = _Conversation(count)
    for turn in turns[head:]:
        conversation.take(turn)
    return [*turns[:head], *conversation.turns()]


@dataclass(slots=True, eq=False)
class _Asked:
    """A call. ``role`` is the one that answers it, ``id`` the one it will be sent with.

    ``arrival`` is the place of its result among those right behind the call; ``None`` where it was moved or made.
    """

    role: str
    id: str
    result: Turn | None = None
    arrival: int | None = None


@dataclass(slots=True, eq=False)
class _Group:
    """A message with calls. ``nameless`` are results without an id behind it, with their places in the conversation."""

    turn: Turn
    calls: list[_Asked]
    arrived: int = 0
    nameless: list[tuple[int, Turn]] = field(default_factory=list)


class _Conversation:
    """The body on its way to order. ``items`` are its messages but for the results that have found their calls."""

    def __init__(self, count: MessageCounter) -> None:
        self._count = count
        self._items: list[_Group | Turn | None] = []
        self._open: dict[_Key, deque[tuple[_Group, _Asked]]] = {}
        # The group that a result at this place lies right behind.
        self._current: _Group | None = None

    def take(self, turn: Turn) -> None:
        """One more message of the client's."""
        facts = turn.facts
        if facts.role in RESULT_ROLES:
            self._take_result(turn)
        elif facts.calls and facts.role not in _CALLLESS:
            self._take_calls(turn)
        elif not facts.empty:
            self._current = None
            self._items.append(self._without_calls(turn) if facts.calls else turn)

    def turns(self) -> list[Turn]:
        """The messages in order, once all were taken."""
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
        """Give results without an id to the calls that nothing else answered, in order; their notes go."""
        for role in ID_FIELDS:
            calls = [call for call in group.calls if call.role == role and call.result is None]
            results = [(place, turn) for place, turn in group.nameless if turn.facts.role == role]
            for call, (place, turn) in zip(calls, results, strict=False):
                self._answer(call, turn)
                self._items[place] = None

    def _with_results(self, group: _Group, *, last: bool) -> list[Turn]:
        """A group's messages. Results of ``tool_calls`` come before that of a ``function_call``, which ends them."""
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
        return Turn(raw, read(decode(raw), self._count))


def _keys(turn: Turn) -> list[_Key]:
    """The calls of a message, with the role that answers each."""
    calls = turn.facts.calls
    keys = [("tool", call.id) for call in calls]
    last = calls[-1]
    # Only a legacy call has its name for its id, as a rule, so most messages need not be decoded.
    if last == Call(last.name, last.name) and isinstance(decode(turn.raw).get("function_call"), dict):
        keys[-1] = ("function", last.id)
    return keys


def _distinct(given: Sequence[_Key], digest: bytes) -> list[str]:
    """The ids with empty and repeated ones replaced; a function's name stays.

    A new id cannot meet one of the message's own: it is made of a digest over them. It stays within 40 characters,
    OpenAI's limit.
    """
    seen: set[str] = set()
    ids = []
    for place, (role, id_) in enumerate(given):
        if role == "tool" and (not id_ or id_ in seen):
            id_ = f"call_{digest.hex()[:16]}_{place}"
        seen.add(id_)
        ids.append(id_)
    return ids
