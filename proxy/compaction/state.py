"""What is in effect: tools that were loaded, added, or removed, settings, and a client's standing reminders.

These parts aren't old talk, so they outlive the summary of the messages around them. They follow it as units of their
own, reduced to what puts something into effect. Of several parts with the same key, the newest one counts, so what is
live at a cut depends on the messages before it alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from proxy.compaction import keeps
from proxy.compaction.effects import COUNTER, NOTE
from proxy.compaction.format import Format
from proxy.compaction.stages.evict_results import common_level, shortened
from proxy.compaction.turn import Effect, Facts, Rare, Turn

_MARKER = "\n[The compaction proxy left out {tokens} tokens of this note here.]\n"
_UNLOADED = (
    "[The compaction proxy left out the messages that loaded or changed these tools: {names}. Load a tool again before "
    "you call it.]"
)
_NAMED = 20


@dataclass(frozen=True, slots=True)
class Live:
    """What is in effect at a cut: the units to send, each with the index of its message.

    ``unloaded`` are the keys of tools for which there was no room.
    """

    units: tuple[tuple[int, Turn], ...] = ()
    unloaded: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum([turn.facts.tokens for _, turn in self.units])

    @property
    def bytes(self) -> int:
        return sum([len(turn.raw) for _, turn in self.units])


NOTHING = Live()


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A part that puts something into effect: the index of its message, and its units."""

    index: int
    keys: Effect
    units: tuple[tuple[int, Turn], ...]

    @property
    def is_note(self) -> bool:
        return self.keys[0].startswith(NOTE)

    @property
    def tokens(self) -> int:
        return sum([turn.facts.tokens for _, turn in self.units])


class State:
    """What is in effect at every cut."""

    def __init__(self) -> None:
        self._cuts = [0]
        self._live = [NOTHING]

    def add(self, cut: int, live: Live) -> None:
        """Add what is in effect from a later cut on."""
        self._cuts.append(cut)
        self._live.append(live)

    def at(self, cut: int) -> Live:
        """Return what is in effect before the group ``cut``."""
        return self._live[bisect_right(self._cuts, cut) - 1]


def state_of(body: Sequence[Turn], starts: Sequence[int], most: int | None, format: Format) -> State:
    """Return what is in effect at every cut. ``starts`` are the first messages of groups, and ``most`` is in tokens."""
    state = State()
    if not any(turn.facts.rare.effects for turn in body):
        return state
    first = next((index for index, turn in enumerate(body) if turn.facts.kind != "system"), 0)
    newest: dict[str, _Part] = {}
    parts = _Parts(body, format)
    for group, (start, end) in enumerate(zip(starts, [*starts[1:], len(body)], strict=True)):
        found = [part for index in range(start, end) for part in parts.of(start, index)]
        found = [part for part in found if part.index == first or not part.keys[0].startswith(COUNTER)]
        for part in found:
            for key in part.keys:
                newest.pop(key, None)
                newest[key] = part
        while len(newest) > keeps.MOST_STATE_PARTS:
            del newest[next(iter(newest))]
        if found:
            state.add(group + 1, _fitted(list(dict.fromkeys(newest.values())), most, format))
    return state


class _Parts:
    """Reads the parts of messages in order. Finds each call and decodes each unit once."""

    def __init__(self, body: Sequence[Turn], format: Format) -> None:
        self._body, self._format = body, format
        self._called: dict[str, int] = {}
        self._effects = cache(lambda index: format.in_effect(body[index].raw))
        self._calls = cache(lambda index: format.single_calls(body[index].raw))

    def of(self, start: int, index: int) -> list[_Part]:
        """Return what a message of a group puts into effect. A result comes with its call."""
        facts = self._body[index].facts
        place = -1 if facts.answers is None else self._called.get(facts.answers, -1)
        parts = []
        for number, keys in enumerate(facts.rare.effects if facts.answers is None or place >= start else ()):
            units = [(index, self._reduced(index, ("effect", number)))]
            if facts.answers is not None:
                units.insert(0, (index, self._reduced(place, ("call", facts.answers))))
            parts.append(_Part(index, keys, tuple(units)))
        self._called.update((call.id, index) for call in facts.calls)
        return parts

    def _reduced(self, index: int, key: tuple[str, int | str]) -> Turn:
        """Return a unit with one of its effects, or with one of its calls. Cached in its facts."""
        turn = self._body[index]
        form = turn.facts.forms.get(key)
        if form is None:
            which = key[1]
            raw = self._effects(index)[which] if isinstance(which, int) else self._calls(index).get(which, turn.raw)
            form = turn.facts.forms[key] = Turn(raw, Facts("user", "", self._format.tokens(raw), b""))
        if more := turn.facts.rare.loads:
            return Turn(form.raw, replace(form.facts, tokens=form.facts.tokens + more, rare=Rare(loads=more)))
        return form


def _fitted(parts: Sequence[_Part], most: int | None, format: Format) -> Live:
    """Return the parts that fit, oldest first. Reminders shrink to one common size. Of the others, the newest stay."""
    ordered = sorted(parts, key=lambda part: part.index)
    if most is None or sum([part.tokens for part in ordered]) <= most:
        return Live(tuple([unit for part in ordered for unit in part.units]))
    room = max(most - sum([part.tokens for part in ordered if not part.is_note]), int(most * keeps.NOTES_PART))
    staying = _staying([part for part in ordered if part.is_note], room)
    notes = [part.tokens for part in staying]
    level = common_level(notes, room)
    left = most - min(sum(notes), room)
    kept: dict[_Part, tuple[tuple[int, Turn], ...]] = {}
    for part in reversed(ordered):
        if part in staying:
            kept[part] = tuple([(index, _cut(turn, level, format)) for index, turn in part.units])
        elif not part.is_note and part.tokens <= left:
            kept[part] = part.units
            left -= part.tokens
    gone = [key for part in ordered if part not in kept for key in part.keys if not key.startswith(NOTE)]
    return Live(tuple([unit for part in ordered for unit in kept.get(part, ())]), tuple(dict.fromkeys(gone)))


def _staying(notes: Sequence[_Part], room: int) -> set[_Part]:
    """Return the newest reminders of which at least a little fits. A reminder may end an older one only."""
    kept: set[_Part] = set()
    for part in reversed(notes):
        room -= min(part.tokens, keeps.LEAST_NOTE)
        if room < 0:
            break
        kept.add(part)
    return kept


def _cut(turn: Turn, level: int, format: Format) -> Turn:
    if turn.facts.tokens <= level:
        return turn
    forms, key = turn.facts.forms, ("cut", level)
    if key not in forms:
        forms[key] = shortened(turn, level, format, _MARKER)
    return forms[key] or turn


def unloaded_tools(live: Live) -> tuple[str, ...]:
    """Return the names of the tools for which there was no room."""
    return tuple([key.partition(" ")[2] for key in live.unloaded if key.startswith("tool ")])


def unloaded(live: Live, role: str, format: Format) -> Turn | None:
    """Return the message that names the tools for which there was no room; ``None`` if there are none."""
    names = unloaded_tools(live)
    if not names:
        return None
    listed = ", ".join(names[:_NAMED]) + (f", and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    raw = format.summary(role, _UNLOADED.format(names=listed))
    return Turn(raw, Facts("user", "", format.tokens(raw), b""))
