"""A unit of a conversation, such as a chat message, with what the engine knows about it; and groups of units.

The engine never reads the JSON of a unit. It works with ``Facts``, and asks a ``Format`` for anything else.

A group is kept or removed as a whole. It's a user message, a system message inside the conversation, or an assistant
message with all results of its tool calls. A tool message never starts a group, so a cut between groups never separates
a result from its call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import structs

if TYPE_CHECKING:
    from proxy.compaction.format import Format
    from proxy.compaction.identifiers import Names


Kind = Literal["system", "user", "assistant", "result", ""]
"""The part that a unit plays in a conversation; empty if it's unknown."""


class Call(msgspec.Struct, frozen=True, gc=False):
    """A tool call."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Links:
    """How a unit belongs to others, besides calls and results of the client.

    ``names`` are the ids of its parts that others may refer to, and ``refers`` the ids that it refers to. ``unseen``:
    it may have calls that the proxy can't see.
    """

    names: tuple[str, ...] = ()
    refers: tuple[str, ...] = ()
    unseen: bool = False


NO_LINKS = Links()

Effect = tuple[str, ...]
"""The keys of something that a part puts into effect, such as ``tool NAME``. It ends when all keys have a newer one."""

OPENING = 16  # characters of a text by which texts of a program are recognized
SHORT = " short"  # the end of `Facts.opening` if the texts have fewer characters than that


@dataclass(frozen=True, slots=True)
class FileUse:
    """A file that a call reads or writes.

    A read has the lines from ``start`` to ``end`` (exclusive). ``form`` has the tool and its other arguments.
    """

    path: str
    writes: bool = False
    start: float = 0
    end: float = 0
    form: str = ""


class Rare(msgspec.Struct, frozen=True):
    """What few units have.

    - ``estimated`` means that the tokens of some media can't be derived from their bytes.
    - ``foreign`` means that a user's unit contains another tool's summary.
    - ``empty`` means that the unit is an assistant's and has neither content nor calls.
    - ``plan`` means that the unit states or changes an agent's plan.
    - ``links`` are its relations to other units, and ``effects`` what it puts into effect for the rest of the
      conversation.
    - ``loads`` are the tokens of the tools that the unit loads. ``Facts.tokens`` and ``apart`` include them.
    - ``wide`` means that a result's text contains non-ASCII characters. Some providers count those differently if the
      result answers one of several calls, in which case ``parallel`` is true.
    """

    estimated: bool = False
    foreign: bool = False
    empty: bool = False
    plan: bool = False
    links: Links = NO_LINKS
    effects: tuple[Effect, ...] = ()
    loads: int = 0
    wide: bool = False
    parallel: bool = False


NOTHING_RARE = Rare()

FACTS_BYTES = 480  # about the bytes of a unit's facts and their place in a cache, without the parts of few units
PART_BYTES = 100  # about the bytes of a call, of the properties that only results have, or of an opening, without ids

ITEM_BYTES = 200
"""About the bytes of rare parts, a name, a file that a call uses, or the key of a form, without long texts."""


class SharedForms:
    """What a unit and its forms share: the bytes that a cache is charged for the forms, and names in the unit.

    ``cache`` is charged for whatever is made. It's ``None`` if no cache has the unit.
    """

    __slots__ = ("bytes", "cache", "names")

    def __init__(self, cache: Charge | None) -> None:
        self.bytes = 0
        self.cache = cache
        self.names: Names | None = None

    def charge(self, size: int) -> None:
        if self.cache is not None:
            self.cache(self, size)


Charge = Callable[[SharedForms, int], None]


class Forms(dict[tuple[str, object], "Turn | None"]):
    """The output of the stages for a unit, by stage and settings; ``None`` means unchanged.

    ``account`` is charged for the bytes of each form when it's made.
    """

    __slots__ = ("account",)

    def __init__(self, account: SharedForms) -> None:
        super().__init__()
        self.account = account

    def __setitem__(self, key: tuple[str, object], form: Turn | None) -> None:
        super().__setitem__(key, form)
        self.account.charge(ITEM_BYTES + (0 if form is None else FACTS_BYTES + len(form.raw)))


@dataclass(slots=True)
class Facts:
    """Cached properties of a unit, so that it's read and counted only once.

    - ``kind`` is what the engine distinguishes; ``role`` is the API's own word for it.
    - ``digest`` identifies the content. It doesn't depend on how the JSON is written.
    - ``calls`` are the tool calls in the unit. ``answers`` is the id of the call that a result answers.
    - ``length`` is the length of a result's text in characters. ``said`` is a digest of its content only.
    - ``media`` is the kind of each media part, in order; ``apart`` is their share of ``tokens``.
    - ``opening`` is a digest of how the texts of a user's unit begin, if it has nothing else. That of a system message
      that only counts something is its text without numbers.
    - ``pinned`` caches whether the unit matches a policy's pin patterns.
    - ``uses`` caches the ids of calls with the files that they use, and ``failed`` whether a result reports a failure.
    - ``cache`` charges the cache that has the facts. ``made`` are the ``forms``, if there are any.
    """

    kind: Kind
    role: str
    tokens: int
    digest: bytes
    calls: tuple[Call, ...] = ()
    answers: str | None = None
    length: int = 0
    said: bytes = b""
    media: tuple[str, ...] = ()
    apart: int = 0
    opening: str = ""
    rare: Rare = NOTHING_RARE
    pinned: dict[tuple[str, ...], bool] | None = None
    uses: tuple[tuple[str, tuple[FileUse, ...]], ...] | None = None
    failed: bool | None = None
    cache: Charge | None = None
    made: Forms | None = None

    @property
    def said_alike(self) -> bytes | str:
        """Return what system messages of which only the newest counts have in common."""
        return self.opening or self.digest

    @property
    def bytes(self) -> int:
        """Return about how many bytes of memory the facts take."""
        own = FACTS_BYTES + sum([PART_BYTES + len(call.id) + len(call.name) for call in self.calls])
        own += PART_BYTES * ((self.answers is not None) + (self.opening != "")) + len(self.answers or "")
        own += 0 if self.rare is NOTHING_RARE else ITEM_BYTES
        return own + (0 if self.made is None else self.made.account.bytes)

    @property
    def forms(self) -> Forms:
        """Return the cache of the stages' output. Creating it for every unit would take much memory."""
        if self.made is None:
            self.made = Forms(SharedForms(self.cache))
        return self.made

    @property
    def names(self) -> Names:
        """Return the likeliest names in a result that was shortened. Its shorter forms share them."""
        return {} if self.made is None else self.made.account.names or {}

    def changed(self, **fields: Any) -> Facts:
        """Return the facts of another form of the unit."""
        return replace(self, made=Forms(self.forms.account), **fields)

    def forgotten(self) -> int:
        """Return the bytes that the cache was charged. It's charged for nothing that is made later."""
        self.cache = None
        if self.made is not None:
            self.made.account.cache = None
        return self.bytes

    @property
    def text_tokens(self) -> int:
        """Return the tokens of the unit without its media parts. Limits on texts apply to these."""
        return self.tokens - self.apart

    @property
    def id(self) -> str:
        """Return the unit's id in the archive: 20 hexadecimal digits."""
        return self.digest.hex()[:20]


class Turn(msgspec.Struct, frozen=True):
    """A unit of a conversation, with its facts.

    ``raw`` contains the bytes from the client or from the stage that rewrote them.
    """

    raw: bytes
    facts: Facts

    def rewritten(self, raw: bytes, format: Format) -> Turn | None:
        """Return the unit with new bytes and the same identity; ``None`` if it isn't shorter."""
        if len(raw) >= len(self.raw):
            return None
        tokens = format.tokens(raw, self.facts)
        if tokens >= self.facts.tokens:
            return None
        media = format.media_kinds(raw) if self.facts.media else ()
        return Turn(raw, self.facts.changed(tokens=tokens, media=media, apart=self.facts.apart if media else 0))


class OutgoingMessage(msgspec.Struct, frozen=True):
    """A message to send.

    ``turn`` is the client's message that it was made from; ``None`` for the summary and for ``state``, which was put
    into effect before it. ``pinned`` messages don't change.
    """

    raw: bytes
    tokens: int
    turn: Turn | None
    pinned: bool = False
    state: bool = False

    @property
    def changed(self) -> bool:
        """Return whether the bytes differ from the client's message."""
        return self.turn is not None and self.raw is not self.turn.raw


def head_length(turns: Sequence[Turn]) -> int:
    """Return the number of ``system`` and ``developer`` messages at the start. The proxy never changes them."""
    for index, turn in enumerate(turns):
        if turn.facts.kind != "system":
            return index
    return len(turns)


def group_starts(body: Sequence[Turn], most: int | None = None, *, alone: bool = False) -> list[int]:
    """Return the index of the first message of each group, in order. The first index is 0.

    Units that refer to each other are in one group, with everything between them. What only goes on with the
    assistant's turn after an answer of the provider is, too, unless the group has more than half of ``most`` tokens.
    With ``alone``, each result begins a group.
    """
    starts: list[int] = []
    places: dict[str, int] = {}
    before = [0, *accumulate(turn.facts.tokens for turn in body)]
    for index, turn in enumerate(body):
        facts, links = turn.facts, turn.facts.rare.links
        joined = [places[id] for id in links.refers if id in places]
        if joined:
            del starts[bisect_right(starts, min(joined)) :]
        elif not starts or (
            (alone or facts.kind != "result") and not _continues(body, index, before[index] - before[starts[-1]], most)
        ):
            starts.append(index)
        for id in links.names:
            places[id] = index
    return starts


def _continues(body: Sequence[Turn], index: int, size: int, most: int | None) -> bool:
    """Return whether a unit goes on with the assistant's turn, in a group that has room for it."""
    before = body[index - 1].facts
    if before.kind != "assistant" or not before.rare.links.refers or body[index].facts.kind != "assistant":
        return False
    return most is None or size + body[index].facts.tokens <= most // 2


def loading(turns: list[Turn], sizes: Mapping[str, int]) -> list[Turn]:
    """Return the turns with the tokens of the tools that they load. ``sizes`` are by name."""
    return [turn if not (more := _loads(turn.facts, sizes)) else _heavier(turn, more) for turn in turns]


def _loads(facts: Facts, sizes: Mapping[str, int]) -> int:
    if not facts.rare.effects or facts.kind == "system":
        return 0
    return sum([sizes.get(key.partition(" ")[2], 0) for keys in facts.rare.effects for key in keys])


def _heavier(turn: Turn, more: int) -> Turn:
    facts, rare = turn.facts, structs.replace(turn.facts.rare, loads=more)
    made, tokens, apart = facts.forms, facts.tokens + more, facts.apart + more
    return Turn(turn.raw, replace(facts, tokens=tokens, apart=apart, rare=rare, made=made))


def attributed(turns: list[Turn]) -> list[Turn]:
    """Return the turns with the texts that a program adds after results as its notes, not as the user's messages.

    Such texts come directly after results, begin alike, and there are at least three, after at least four in five of
    the results since the first one. A short text right after a result that loads tools is one, too, as Claude Code
    sends "Tool loaded." Once that was so, it stays so: whose words a text is depends only on the messages
    before the next one.
    """
    rounds, after = 0, False
    counts: dict[str, tuple[int, int]] = {}  # the number of texts, and the round of the first one
    known: set[str] = set()
    places: list[int] = []
    for index, turn in enumerate(turns):
        facts = turn.facts
        if facts.kind == "result":
            rounds, after = rounds + (not after), True
        elif facts.kind != "user" or not after:
            after = after and facts.kind == ""
        elif facts.opening:
            before = turns[index - 1].facts
            number, first = counts.get(facts.opening, (0, rounds))
            counts[facts.opening] = number + 1, first
            loaded = before.kind == "result" and before.rare.effects and facts.opening.endswith(SHORT)
            if loaded or (number + 1 >= 3 and 5 * (number + 1) >= 4 * (rounds - first + 1)):
                known.add(facts.opening)
            places.append(index)
    if not known:
        return turns
    made = list(turns)
    for index in places:
        if (facts := turns[index].facts).opening in known:
            form = facts.forms.get((PROGRAM, None))
            if form is None:
                form = facts.forms[PROGRAM, None] = Turn(b"", facts.changed(kind="", role=PROGRAM))
            made[index] = Turn(turns[index].raw, form.facts)
    return made


PROGRAM = "program"  # the role of a program's note


def faults(messages: Sequence[Facts]) -> int:
    """Count the results without a call in the assistant message before them, and the calls without a result.

    The client may not have answered the calls of the last group yet. They count too, so callers compare the number
    with the number for the input.
    """
    found = left = 0
    open_calls: dict[str | None, int] = {}
    for facts in messages:
        if facts.kind == "result":
            waiting = open_calls.get(facts.answers, 0)
            if waiting:
                open_calls[facts.answers] = waiting - 1
                left -= 1
            else:
                found += 1
            continue
        found += left
        left = len(facts.calls)
        open_calls = {}
        for call in facts.calls:
            open_calls[call.id] = open_calls.get(call.id, 0) + 1
    return found + left


def digests_in_order(turns: Sequence[Turn]) -> list[bytes]:
    """Return the digest of each turn. That of a result has the place of its call if results aren't in their order.

    The digests alone don't depend on the ids of calls, which some clients make anew in each request.
    """
    found = []
    ids: list[str | None] = []
    after = 0
    for facts in [turn.facts for turn in turns]:
        digest = facts.digest
        if facts.kind != "result":
            ids, after = [call.id for call in facts.calls] if facts.calls else [], 0
        else:
            if after >= len(ids) or ids[after] != facts.answers:
                digest += b"%d" % (ids.index(facts.answers) if facts.answers in ids else -1)
            after += 1
        found.append(digest)
    return found
