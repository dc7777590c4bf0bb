"""Repair a conversation that a strict server would reject.

The proxy repairs only conversations that it compacts: a cut needs groups, and results apart from their calls don't
form groups. If the input is valid, every message is returned as the same object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proxy.compaction.turn import Facts, Turn, head_length

if TYPE_CHECKING:
    from proxy.dialects.units import Units

NO_RESULT = "No result of this call was recorded."  # result that is inserted for a call without one

STRAY_RESULT = "[Result of a tool call that is not part of this conversation]\n"
"""Prefix for the text of a result without a call."""

# Calls are removed from messages of these kinds. Messages with unknown roles are left for the upstream to check.
_CALLLESS = frozenset({"user", "system"})

CallKey = tuple[str, str]
"""The kind of result that answers a call, and the client's id. An invalid id counts as the empty string."""


def needs_repair(messages: Sequence[Facts]) -> bool:
    """Return whether messages may need a repair. ``True`` doesn't mean that they are invalid."""
    # The same as `faults(messages) > 0` with the other conditions, in one pass that ends at the first fault.
    unanswered: set[str | None] = set()
    for facts in messages:
        if facts.kind == "result":
            if facts.answers not in unanswered or facts.calls or facts.role == "function" or facts.rare.empty:
                return True
            unanswered.remove(facts.answers)
        elif unanswered or facts.rare.empty or facts.role == "function":
            return True
        elif facts.calls:
            unanswered = {call.id for call in facts.calls}
            if facts.kind != "assistant" or len(unanswered) < len(facts.calls) or "" in unanswered:
                return True
    return bool(unanswered)


def repaired(turns: Sequence[Turn], units: Units[Any]) -> list[Turn]:
    """Return the messages of a whole request, with the results of each call right after it.

    - Move a result that comes later to its call. Results inside a group keep their order. If an id occurs again in
      later turns, a result belongs to the newest call with that id.
    - Insert ``NO_RESULT`` for a call without a result. The last group is kept if none of its calls has a result,
      because the client may still answer them.
    - Quote a result without a call in an assistant message. It may be the only remainder of messages that the client
      removed. Drop it if it's empty or if its call has another result. It stays in its place if its type is unknown,
      or if it comes right after parts that the proxy can't see, because these may have its call.
    - Replace empty and repeated ids inside one message, and in its results. The new ids are derived from the message's
      content. A result without an id belongs to the first unanswered call of the group before it.
    - Remove calls from user and system messages. Drop assistant messages that are empty.

    The head, values that aren't objects, and messages with unknown roles are kept. The function never raises, takes
    linear time, and is idempotent.
    """
    head = head_length(turns)
    conversation = _Conversation(units)
    for turn in turns[head:]:
        conversation.take(turn)
    return [*turns[:head], *conversation.turns()]


@dataclass(slots=True, eq=False)
class _Asked:
    """A call. ``kind`` is that of its result. ``id`` is the outgoing id.

    ``arrival`` is the position of its result among those right after the call; ``None`` if it was moved or inserted.
    """

    kind: str
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

    def __init__(self, units: Units[Any]) -> None:
        self._units = units
        self._items: list[_Group | Turn | None] = []
        self._open: dict[CallKey, deque[tuple[_Group, _Asked]]] = {}
        # The group that directly precedes the next result, and whether it may have more calls than the proxy sees.
        self._current: _Group | None = None
        self._unseen = False

    def take(self, turn: Turn) -> None:
        """Add the client's next message."""
        facts = turn.facts
        if facts.kind == "result":
            self._take_result(turn)
            return
        self._unseen = facts.rare.links.unseen
        if facts.calls and facts.kind not in _CALLLESS:
            self._take_calls(turn)
        elif not facts.rare.empty:
            self._current = None
            self._items.append(self._rewritten(self._units.without_calls(turn.raw)) if facts.calls else turn)

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
        given = self._units.call_keys(turn)
        ids = (
            _distinct(given, turn.facts.digest, self._units.LAST_RESULTS)
            if turn.facts.kind == "assistant"
            else [id_ for _, id_ in given]
        )
        if ids != [id_ for _, id_ in given]:
            turn = self._rewritten(self._units.with_call_ids(turn.raw, ids))
        asked = [_Asked(kind, id_) for (kind, _), id_ in zip(given, ids, strict=True)]
        group = _Group(turn, asked)
        fresh: dict[CallKey, deque[tuple[_Group, _Asked]]] = {}
        for key, call in zip(given, asked, strict=True):
            fresh.setdefault(key, deque()).append((group, call))
        self._open.update(fresh)
        self._items.append(group)
        self._current = group

    def _take_result(self, turn: Turn) -> None:
        key = self._units.result_key(turn)
        waiting = self._open.get(key)
        if key[0] not in self._units.RESULT_KINDS or (not waiting and self._unseen):
            self._items.append(turn)
        elif waiting:
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
        for kind in self._units.RESULT_KINDS:
            calls = [call for call in group.calls if call.kind == kind and call.result is None]
            results = [(place, turn) for place, turn in group.nameless if self._units.result_key(turn)[0] == kind]
            for call, (place, turn) in zip(calls, results, strict=False):
                self._answer(call, turn)
                self._items[place] = None

    def _with_results(self, group: _Group, *, last: bool) -> list[Turn]:
        """Return a group's messages."""
        awaited = last and all(call.result is None for call in group.calls)
        for call in group.calls:
            if call.result is None and not awaited and self._units.may_answer(group.turn.raw, call.id):
                call.result = self._rewritten(self._units.result(call.kind, call.id, NO_RESULT, group.turn.raw))
        late = len(group.calls)
        ordered = sorted(
            (call for call in group.calls if call.result is not None),
            key=lambda call: (call.kind == self._units.LAST_RESULTS, late if call.arrival is None else call.arrival),
        )
        return [group.turn, *(call.result for call in ordered if call.result is not None)]

    def _answer(self, call: _Asked, turn: Turn) -> None:
        if turn.facts.answers != call.id:
            turn = self._rewritten(self._units.answering(turn.raw, call.kind, call.id))
        call.result = turn

    def _note(self, turn: Turn) -> Turn | None:
        text = self._units.text(turn.raw)
        return self._rewritten(self._units.note(STRAY_RESULT + text)) if text.strip() else None

    def _rewritten(self, raw: bytes) -> Turn:
        return Turn(raw, self._units.read(raw))


def _distinct(given: Sequence[CallKey], digest: bytes, last: str) -> list[str]:
    """Replace empty and repeated ids. Function names are kept.

    A new id can't equal one of the message's own ids, because it contains a digest over them. It has at most 40
    characters, which is OpenAI's limit.
    """
    seen: set[str] = set()
    ids = []
    for place, (kind, id_) in enumerate(given):
        if kind != last and (not id_ or id_ in seen):
            id_ = f"call_{digest.hex()[:16]}_{place}"
        seen.add(id_)
        ids.append(id_)
    return ids
