"""Read, count, and rewrite the units of any API: messages, blocks, and items. Decode and encode their JSON."""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from sys import intern
from typing import Any, ClassVar, Generic, TypeVar, cast

import msgspec
import xxhash

from proxy.compaction.effects import counter, sparing, states_plan
from proxy.compaction.format import Binding, ForeignSummary, Format, TextCounter
from proxy.compaction.turn import NOTHING_RARE, Call, Effect, Facts, Kind, Links, OutgoingMessage, Rare, Turn
from proxy.constants import UNDECODABLE
from proxy.dialects.foreign_summaries import find_summary
from proxy.dialects.identity import DEEPEST, digest, meaning, too_deep
from proxy.dialects.parts import Table
from proxy.dialects.repair import CallKey, needs_repair, repaired
from proxy.dialects.walk import (
    Change,
    Swap,
    is_media,
    is_text,
    label_of,
    opening_of,
    part_text,
    rewritten,
    row_of,
    strings,
    without_notes,
)
from proxy.tokens.media import MEDIA_LABELS, has_remote_media
from proxy.tokens.text import TextCount

T = TypeVar("T")

Message = Mapping[str, Any]

MOST_RESULTS = 20_000
"""Results in a cache. A full cache is emptied. A result and its digest take up to a few hundred bytes."""

_NESTED = frozenset({dict, list})

PIECE = 65_536  # bytes of a large unit

# Each process has its own seed, so clients can't construct collisions.
_SEED = secrets.randbits(64)


def decode(raw: bytes) -> Message:
    """Return the message as a mapping, empty if the value isn't an object. Never raise.

    Large numbers and lone surrogates, which strict parsers reject, are read like ``json`` reads them. Some values
    can't be read at all: invalid UTF-8, numbers with thousands of digits, or deep nesting. The result is then a
    message without a role that has the JSON as its content. It's counted but never changed.
    """
    global _newest
    newest, message = _newest
    if newest is not raw:  # a stage asks several questions about one message
        message = _decoded(raw)
        _newest = raw, message
    return message


_newest: tuple[bytes, Message] = b"", {}


def _decoded(raw: bytes) -> Message:
    try:
        try:
            value = msgspec.json.decode(raw)
        except UNDECODABLE:
            value = json.loads(bytes(raw))
    except (ValueError, RecursionError):
        return _unread(raw)
    if not isinstance(value, dict):
        return {}
    if _NESTED.isdisjoint(map(type, value.values())):
        return value
    # Most messages have fewer brackets than the allowed depth.
    plain = bytes(raw)  # ``msgspec.Raw`` has no ``count``
    brackets = plain.count(b"[") + plain.count(b"{")
    return _unread(raw) if brackets > DEEPEST and too_deep(value) else value


def _unread(raw: bytes) -> Message:
    return {"content": bytes(raw).decode("utf-8", "replace")}


def encode(value: object) -> bytes:
    """Encode a value as JSON. Write lone surrogates, which aren't valid UTF-8, as escapes, and integers of any size."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(value).encode("ascii")


def replace_field(raw: bytes, key: str, value: object) -> bytes:
    """Replace one field of a message. The other fields keep their bytes."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return encode({**decode(raw), key: value})  # lone surrogates in other fields
    fields[key] = msgspec.Raw(encode(value))
    return msgspec.json.encode(fields)


class ByDigest(Generic[T]):
    """The results of a function of bytes, by the digests of the bytes. A result may not be ``None``. Thread-safe.

    The turns of a conversation begin with the same bytes. Hashing them takes a tenth of the time of parsing them again.
    """

    def __init__(self, compute: Callable[[bytes], T], most: int = MOST_RESULTS) -> None:
        self._compute = compute
        self._most = most
        self._results: dict[bytes, T] = {}

    def of(self, raws: Iterable[bytes | memoryview]) -> list[T]:
        """Return the result of each value."""
        raws = list(raws)
        keys = list(map(xxhash.xxh3_128_digest, raws, repeat(_SEED)))
        results = list(map(self._results.get, keys))
        if None in results:
            for index, (raw, key) in enumerate(zip(raws, keys, strict=True)):
                result = self._results.get(key)
                results[index] = self._computed(raw, key) if result is None else result
        return cast(list[T], results)

    def one(self, raw: bytes | memoryview) -> T:
        """Return the result of one value."""
        key = xxhash.xxh3_128_digest(raw, _SEED)
        result = self._results.get(key)
        return self._computed(raw, key) if result is None else result

    def _computed(self, raw: bytes | memoryview, key: bytes) -> T:
        if len(self._results) >= self._most:
            self._results.clear()
        result = self._results[key] = self._compute(bytes(raw))
        return result


Unit = TypeVar("Unit")  # a decoded unit: a message, or a run of items


class Units(Format, Generic[Unit]):
    """The format of an API's units, with the tokenizer of one model. Each API implements it once.

    - ``RESULT_KINDS`` are the kinds of results: a result answers a call if both have the same kind and the same id.
      Results of the kind ``LAST_RESULTS`` come after all others.
    - ``TABLE`` has the types of parts. ``TEXT_PART`` is the type of a text in a list of parts, and ``MARKS`` are fields
      that stay if a text takes the place of another part.
    - ``COUNTS_WIDE`` is true if the API counts some results as ASCII, so that ``Facts.wide`` matters.
    """

    RESULT_KINDS: ClassVar[Sequence[str]] = ("result",)
    LAST_RESULTS: ClassVar[str] = ""
    TABLE: ClassVar[Table] = {}
    TEXT_PART: ClassVar[str] = "text"
    MARKS: ClassVar[Sequence[str]] = ("cache_control",)
    COUNTS_WIDE: ClassVar[bool] = False

    def __init__(self, count: Callable[[Unit], int], text: TextCounter) -> None:
        """``count`` counts the tokens of a whole unit with its frames."""
        self._count = count
        self._text_tokens = text

    # What an API's units are.

    @abstractmethod
    def decoded(self, raw: bytes) -> Unit:
        """Return a unit as values."""

    @abstractmethod
    def kind(self, unit: Unit) -> Kind:
        """Return the part that a unit plays."""

    @abstractmethod
    def role(self, unit: Unit, kind: Kind) -> str:
        """Return the API's own word for that part."""

    @abstractmethod
    def calls(self, unit: Unit) -> tuple[Call, ...]:
        """Return the calls that the client answers."""

    @abstractmethod
    def answered(self, unit: Unit, kind: Kind) -> str | None:
        """Return the id of the call that a result answers."""

    @abstractmethod
    def visible_text(self, unit: Unit) -> str:
        """Return the visible text. Parts that aren't text become a label, for example ``[image]``."""

    @abstractmethod
    def walked(self, unit: Unit, change: Change | None, swap: Swap | None) -> Unit:
        """Return a unit with other texts and other parts. See ``dialects.walk.rewritten``."""

    @abstractmethod
    def written(self, raw: bytes, unit: Unit, new: Unit) -> bytes:
        """Return the bytes of ``new``, which ``walked`` made from ``unit``. Unchanged fields keep their bytes."""

    @abstractmethod
    def is_empty(self, unit: Unit) -> bool:
        """Return whether an assistant's unit has neither content nor calls."""

    @abstractmethod
    def result_content(self, unit: Unit) -> object:
        """Return the content of a result, by which repeated results are found."""

    def result_text(self, unit: Unit) -> str:
        """Return the visible text of a result."""
        return self.visible_text(unit)

    @abstractmethod
    def summary_in(self, unit: Unit) -> ForeignSummary | None:
        """Return the summary that another tool wrote into a unit; ``None`` if there is none."""

    @abstractmethod
    def own_texts(self, unit: Unit) -> list[tuple[str, str]]:
        """Return the user's own texts in a unit without such a summary, each with a label for its media."""

    @abstractmethod
    def links(self, unit: Unit) -> Links:
        """Return how a unit belongs to others, besides calls and results of the client."""

    @abstractmethod
    def effects(self, unit: Unit) -> tuple[Effect, ...]:
        """Return what a unit puts into effect for the rest of the conversation."""

    @abstractmethod
    def opening(self, unit: Unit) -> str:
        """Return how a user's unit begins; empty if it has anything but texts."""

    # How its calls and results are written.

    @abstractmethod
    def call_keys(self, turn: Turn) -> list[CallKey]:
        """Return the key of each call in a unit."""

    @abstractmethod
    def result_key(self, turn: Turn) -> CallKey:
        """Return the key of the call that a result answers."""

    @abstractmethod
    def result(self, kind: str, id: str, text: str, of: bytes = b"") -> bytes:
        """Return a result. ``of`` is the unit with its call."""

    def may_answer(self, raw: bytes, id: str) -> bool:
        """Return whether ``result`` makes a valid result of a call in a unit."""
        return True

    @abstractmethod
    def answering(self, raw: bytes, kind: str, id: str) -> bytes:
        """Return a result with another id."""

    @abstractmethod
    def note(self, text: str) -> bytes:
        """Return a message that the proxy inserts, the assistant's if possible."""

    @abstractmethod
    def without_calls(self, raw: bytes) -> bytes:
        """Return a unit without its calls."""

    @abstractmethod
    def with_call_ids(self, raw: bytes, ids: Sequence[str]) -> bytes:
        """Return a unit with other ids of its calls."""

    # What follows for every API.

    @property
    def binds_reasoning(self) -> Binding:
        return "never"

    def without_reasoning(self, raw: bytes) -> bytes:
        return raw

    def read(self, raw: bytes) -> Facts:
        unit, large, estimated = self.decoded(raw), len(raw) > PIECE, has_remote_media(raw)
        kind, wide = self.kind(unit), False
        begins = self.opening(unit) if kind == "user" else ""
        facts = Facts(
            kind=kind,
            role=intern(self.role(unit, kind)),
            tokens=self._count(unit),
            digest=digest(meaning(unit, self.TABLE), large=large),
            calls=self.calls(unit),
            answers=self.answered(unit, kind),
            media=self.media_in(unit) if estimated else (),
            opening=counter(self.visible_text(unit)) if kind == "system" else begins,
        )
        if facts.media:
            facts.apart = max(0, facts.tokens - self._count(self.bare(unit)))
        if kind == "result":
            text = self.result_text(unit)
            facts.length = len(text)
            wide = self.COUNTS_WIDE and not text.isascii()
            content = self.result_content(unit)
            if isinstance(content, str):
                facts.said = xxhash.xxh3_128_digest(content.encode("utf-8", "surrogatepass"), _SEED)
            else:
                facts.said = digest(content, large=large)[:16]
        rare = Rare(
            estimated=estimated,
            foreign=kind == "user" and self.summary_in(unit) is not None,
            empty=kind == "assistant" and self.is_empty(unit),
            plan=kind == "assistant" and states_plan(raw, facts, self),
            links=self.links(unit),
            effects=self.effects(unit),
            wide=wide,
        )
        facts.rare = NOTHING_RARE if rare == NOTHING_RARE else rare
        return facts

    def tokens(self, raw: bytes, facts: Facts | None = None) -> int:
        return self._counter(facts)(self.decoded(raw))

    def text_tokens(self, text: str) -> int:
        return self._text_tokens(text)

    def counted(self, turn: Turn, text: str, count: TextCounter) -> int:
        facts, own, said = turn.facts, self._text_tokens, list[str]()
        if not isinstance(own, TextCount) or not isinstance(count, TextCount) or own.tokenizer != count.tokenizer:
            return count(text)
        # If most of a unit isn't text, counting the text is faster.
        if own.ratio < 1 or facts.media or facts.apart or facts.rare.parallel or 2 * len(text) < len(turn.raw):
            return count(text)

        def taken(text: str) -> str:
            said.append(text)
            return ""

        bare = self.walked(self.decoded(turn.raw), taken, None)
        if len(said) != 1 or not text.endswith(said[0]) or 2 * len(said[0]) < len(turn.raw):
            return count(text)
        return count.ending(text, said[0], own.unscaled(facts.tokens) - own.unscaled(self._count(bare)))

    def media_in(self, unit: Unit) -> tuple[str, ...]:
        """Return the kind of each image, audio, video, and file in a unit."""
        found: list[str] = []

        def look(part: Any) -> Any:
            if is_media(part, self.TABLE):
                found.append(label_of(part))
            return part

        self.walked(unit, None, look)
        return tuple(found)

    def bare(self, unit: Unit) -> Unit:
        """Return a unit without its media."""
        return self.walked(unit, None, self._unless_media)

    def frame_tokens(self, raw: bytes, facts: Facts) -> int:
        return self._counter(facts)(self.bare(self.decoded(self.with_texts(raw, []))))

    def inner_tokens(self, facts: Facts) -> TextCounter:
        return self._text_tokens

    def text(self, raw: bytes) -> str:
        return self.visible_text(self.decoded(raw))

    def clients_text(self, raw: bytes) -> str | None:
        unit = self.decoded(raw)
        return None if self.kind(unit) == "assistant" else self.visible_text(unit)

    def media_kinds(self, raw: bytes) -> tuple[str, ...]:
        return self.media_in(self.decoded(raw))

    def texts(self, raw: bytes) -> list[str]:
        found: list[str] = []

        def keep(text: str) -> str:
            found.append(text)
            return text

        self._mapped(raw, keep, None)
        return found

    def with_texts(self, raw: bytes, texts: Sequence[str]) -> bytes:
        left = iter(texts)
        return self._mapped(raw, lambda _: next(left, ""), None)

    def without_media(self, raw: bytes) -> bytes:
        return self._mapped(raw, None, self._unless_media)

    def with_labels(self, raw: bytes, label: Callable[[str], str | None]) -> bytes:
        def labeled(part: Any) -> Any:
            if not is_media(part, self.TABLE) or (note := label(label_of(part))) is None:
                return part
            marks = {key: part[key] for key in self.MARKS if key in part}
            named = [text for name, text in strings(part, self.TABLE) if name]
            return {"type": self.TEXT_PART, "text": "\n".join([note, *named]), **marks}

        return self._mapped(raw, None, labeled)

    def _mapped(self, raw: bytes, change: Change | None, swap: Swap | None) -> bytes:
        unit = self.decoded(raw)
        change = sparing(change) if change is not None and self.kind(unit) == "result" else change
        new = self.walked(unit, change, swap)
        return raw if new is unit else self.written(raw, unit, new)

    def _unless_media(self, part: Any) -> Any:
        return None if is_media(part, self.TABLE) else part

    def user_text(self, raw: bytes) -> list[tuple[str, str]]:
        unit = self.decoded(raw)
        summary = self.summary_in(unit)
        return self.own_texts(unit) if summary is None else [(text, "") for text in summary.user_text]

    def foreign_summary(self, raw: bytes) -> ForeignSummary | None:
        return self.summary_in(self.decoded(raw))

    def needs_repair(self, messages: Sequence[Facts]) -> bool:
        return needs_repair(messages)

    def repaired(self, turns: Sequence[Turn]) -> list[Turn]:
        return repaired(turns, self)

    def alternating(self, pieces: Sequence[OutgoingMessage]) -> list[OutgoingMessage]:
        made: list[OutgoingMessage] = []
        for piece in pieces:
            parts = self._user_parts(piece.raw)
            if made and parts and (before := self._user_parts(made[-1].raw)):
                first = made.pop()
                raw = replace_field(first.raw, "content", [*before, *parts])
                piece = OutgoingMessage(raw, self.tokens(raw), piece.turn or first.turn)
            made.append(piece)
        return made

    def _user_parts(self, raw: bytes) -> list[Any]:
        """Return the content of a user's message as parts; empty for results and other units."""
        message = decode(raw)
        content = message.get("content")
        if message.get("role") != "user" or not isinstance(content, str | list):
            return []
        if isinstance(content, str):
            return [{"type": self.TEXT_PART, "text": content}]
        return [] if any(isinstance(part, dict) and part.get("type") == "tool_result" for part in content) else content

    def _counter(self, facts: Facts | None) -> Callable[[Unit], int]:
        """Return the counter for a unit with these facts."""
        return self._count


class MessageUnits(Units[Message]):
    """The format of an API whose units are messages with a role and a content."""

    def decoded(self, raw: bytes) -> Message:
        return decode(raw)

    def role(self, unit: Message, kind: Kind) -> str:
        return string(unit.get("role"))

    def walked(self, unit: Message, change: Change | None, swap: Swap | None) -> Message:
        new: Message = rewritten(unit, self.TABLE, change, swap, self.TABLE["message"])
        return new

    def written(self, raw: bytes, unit: Message, new: Message) -> bytes:
        return changed_fields(raw, unit, new)

    def opening(self, unit: Message) -> str:
        return opening_of(unit.get("content"), self.TABLE)


def string(value: object) -> str:
    """Return a string unchanged; an empty one for other values."""
    return value if isinstance(value, str) else ""


def type_of(block: object) -> str:
    """Return the type of a block; empty if it has none."""
    found = block.get("type") if isinstance(block, dict) else None
    return found if isinstance(found, str) else ""


def argument_text(value: Any) -> str:
    """Return a string unchanged, and other values as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def summary_in(message: Message) -> ForeignSummary | None:
    """Return the summary that another tool wrote into a message; ``None`` if there is none."""
    content = message.get("content")
    if isinstance(content, str):
        return find_summary(str(message.get("role")), [content], listed=False)
    texts = [part["text"] for part in parts_of(message) if is_text_part(part)]
    return find_summary(str(message.get("role")), texts, listed=True)


def changed_fields(raw: bytes, message: Message, new: Message) -> bytes:
    """Return a message with the fields of ``new`` that aren't the same objects. The others keep their bytes."""
    for name, value in new.items():
        if value is not message.get(name):
            raw = replace_field(raw, name, value)
    return raw


def content_text(content: object, table: Table) -> str:
    """Return the visible text of a content. Parts without text become a label, for example ``[image]``."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(filter(None, [part_text(part, table) for part in parts]))


def own_text(content: object, table: Table) -> tuple[str, str]:
    """Return the text that a user wrote, and a label for what was attached, such as ``[3 × image: no longer shown]``.

    Reminders of a program aren't the user's. The label names at most four kinds of parts, so its length is bounded.
    """
    if isinstance(content, str):
        return without_notes(content), ""
    parts = content if isinstance(content, list) else []
    said, attached = list[str](), list[Any]()
    for part in parts:
        if isinstance(part, str) or is_text(part, table) or row_of(part, table).plays == "said":
            said.append(without_notes(part_text(part, table)))
        elif isinstance(part, dict):
            attached.append(part)
    counts = Counter(label_of(part)[:20] for part in attached)
    kinds = [f"{number} × {kind}" if number > 1 else kind for kind, number in counts.most_common(4)]
    if len(counts) > len(kinds):
        kinds.append("other parts")
    return "\n".join(filter(None, said)), f"[{', '.join(kinds)}: no longer shown]" if kinds else ""


def parts_of(message: Message) -> list[Any]:
    """Return the parts of the content; empty if the content isn't a list."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def is_text_part(part: object) -> bool:
    """Return whether a content part has a text. A media part with a ``text`` field doesn't count."""
    return isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type") not in MEDIA_LABELS
