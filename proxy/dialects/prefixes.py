"""Recognize the beginning of a body that an earlier request had, so that a turn costs what is new in it.

A prefix ends behind a message. It has digests, the places of its messages, and what was found in them, but no text. A
body that begins with the same bytes has the same messages there, because JSON is read from left to right. A marker
takes their place, and the usual parser reads the rest. If the marker comes back as the first message, the rest belongs
to the same list. Otherwise, for example if the body has the list twice, the whole body is parsed.

Digests are seeded for each process, tenant, and API. So clients can't construct collisions, and response times don't
reveal the conversations of other tenants.
"""

from __future__ import annotations

import itertools
import re
import secrets
import threading
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast, overload

import msgspec
import xxhash

from proxy.store.cache_budget import CacheBudget

if TYPE_CHECKING:
    from proxy.dialects.request import Request

LEAST_BYTES = 16_384
"""Smaller bodies are parsed as a whole, because that takes only some microseconds."""

LEFT_OUT = (1, 3, 7)
"""The messages at the end that the marks of a prefix leave out. Clients often change some of the newest messages."""

LISTS = 2
"""Fields with the name of the conversation's, in which its messages are searched."""

CANDIDATES = 64
"""Marks that have the first half of their bytes in common. A look-up computes a digest for each."""

SEEN = 500
"""Beginnings of bodies without a known prefix that are remembered for each of ``TENANTS`` tenants."""

TENANTS = 1_000

CONVERSATION_UNITS = 2
"""The first units, which name a conversation."""

_PREFIX_WEIGHT = 3_000
_MESSAGE_WEIGHT = 110

_SEED = secrets.randbits(64)
_MARKER = b'"%b"' % secrets.token_hex(16).encode()
_GAP = re.compile(rb"[ \t\n\r]*,[ \t\n\r]*")
_SPACE = re.compile(rb"[ \t\n\r]*")


class Sums(msgspec.Struct, eq=False):
    """The tokens of the first units of a request, for one counter.

    - ``sizes`` are the tokens of each unit, and ``total`` is their sum.
    - ``estimated`` is the place of the first unit with an estimate, or the number of units.
    - ``head`` is the number of system messages at the start.
    - ``several`` is 1 for each unit behind which a result is one of several calls'.
    - ``digests`` and ``answers`` are the digests of the units and the places of answers, if reasoning is bound to them.
    """

    sizes: array[int]
    total: int
    estimated: int
    head: int
    several: bytearray
    digests: tuple[bytes, ...] = ()
    answers: tuple[int, ...] = ()

    def first(self, count: int) -> Sums:
        """Return the sums of the first units."""
        return Sums(
            self.sizes[:count],
            self.total - sum(self.sizes[count:]),
            min(self.estimated, count),
            min(self.head, count),
            self.several[:count],
            self.digests[:count],
            self.answers[: bisect_left(self.answers, count)],
        )


class Prefix:
    """The beginning of a body.

    - ``start`` is the place behind the bracket of the list. ``starts`` and ``ends`` are those of its messages.
    - ``units`` is the number of units that have begun with each message, and ``shapes`` is what their API found.
    - ``commas`` is an upper bound on the commas up to its end. ``media`` is the end of the first media part, 0 without
      any, and ``None`` if nobody asked.
    - ``sums`` are those for each counter.
    - ``conversations`` are the digests that name its conversation, for each upstream and model. They depend on the
      first two units, so a longer prefix shares them.
    """

    __slots__ = (
        *("commas", "conversations", "ends", "marks", "media", "path", "shapes"),
        *("start", "starts", "sums", "tenant", "units", "used"),
    )

    def __init__(
        self, tenant: str, start: int, starts: array[int], ends: array[int], units: array[int], shapes: Any
    ) -> None:
        self.tenant = tenant
        self.start = start
        self.starts = starts
        self.ends = ends
        self.units = units
        self.shapes = shapes
        self.commas = ends[-1] if ends else 0
        self.media: int | None = None
        self.sums: dict[Hashable, Sums] = {}
        self.conversations: dict[Hashable, str] = {}
        self.marks: list[Mark] = []
        self.path: list[tuple[int, bytes]] = []
        self.used = 0

    def cut(self, messages: int) -> None:
        """Drop all but the first messages."""
        del self.starts[messages:], self.ends[messages:], self.units[messages:]
        if self.shapes is not None:
            del self.shapes[messages:]

    @property
    def weight(self) -> int:
        """Return about how many bytes of memory the prefix takes."""
        return _PREFIX_WEIGHT + _MESSAGE_WEIGHT * max(len(self.ends), self.units[-1])


class Mark(msgspec.Struct, eq=False, frozen=True):
    """A place in a prefix at which another body may differ. ``messages`` and ``units`` come before it."""

    prefix: Prefix
    messages: int
    units: int
    end: int
    digest: bytes

    def spliced(self, raw: bytes) -> bytes:
        """Return a body with the marker in place of the messages that are known."""
        return _spliced(raw, self.prefix.start, self.end)

    def message(self, raw: bytes, index: int) -> msgspec.Raw:
        """Return one of the messages that are known."""
        return msgspec.Raw(memoryview(raw)[self.prefix.starts[index] : self.prefix.ends[index]])

    def several(self, raw: bytes, indexes: Sequence[int]) -> list[bytes]:
        """Return some of the messages that are known."""
        view, starts, ends = memoryview(raw), self.prefix.starts, self.prefix.ends
        return [msgspec.Raw(view[starts[index] : ends[index]]) for index in indexes]


class Spans(msgspec.Struct, eq=False):
    """Where the messages of a request are in its body. ``items`` are those that aren't known.

    ``starts`` and ``ends`` are their places, empty if nobody has looked for them. ``units`` are the numbers of units
    that have begun with each, and ``shapes`` is what their API found.
    """

    items: Sequence[bytes]
    units: Sequence[int]
    shapes: Any = None
    starts: Sequence[int] = ()
    ends: Sequence[int] = ()


class LazyUnits(Sequence[bytes]):
    """The units of a request. Those that are known are cut out of the body when they are needed."""

    __slots__ = ("_left", "_make", "_units")

    def __init__(self, known: int, others: Sequence[bytes], make: Callable[[Sequence[int]], Sequence[bytes]]) -> None:
        """``make`` returns known units by their indexes."""
        self._units: list[bytes | None] = [*([None] * known), *others]
        self._left = known
        self._make = make

    def __len__(self) -> int:
        return len(self._units)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            if self._left and None in self._units[index]:
                self._cut(range(*index.indices(len(self._units))))
        elif self._units[index] is None:
            (self._units[index],) = self._make((range(len(self._units))[index],))
            self._left -= 1
        return cast(bytes | list[bytes], self._units[index])

    def __iter__(self) -> Iterator[bytes]:
        if self._left:
            self._cut(range(len(self._units)))
        return iter(cast(list[bytes], self._units))

    def _cut(self, places: Sequence[int]) -> None:
        units = self._units
        missing = [place for place in places if units[place] is None]
        for place, unit in zip(missing, self._make(missing), strict=True):
            units[place] = unit
        self._left -= len(missing)


def after_marker(mark: Mark, raw: bytes, messages: Sequence[bytes]) -> Spans | None:
    """Return the messages behind those that are known, from a parsed body with a marker; ``None`` if it isn't first."""
    # A body that ends here is a whole conversation, and its last message may say how to read the others.
    if len(messages) < 2 or bytes(messages[0]) != _MARKER:
        return None
    found = _spans(raw, mark.end, messages[1:])
    if found is None:
        return None
    view = memoryview(raw)
    # Cut out of the body itself, so that nothing keeps the one with the marker.
    items = [msgspec.Raw(view[start:end]) for start, end in zip(*found, strict=True)]
    return Spans(items, (), starts=found[0], ends=found[1])


def lazy_units(mark: Mark, raw: bytes, others: Sequence[bytes]) -> Sequence[bytes]:
    """Return the units of a request whose units are messages."""
    return LazyUnits(mark.units, others, partial(mark.several, raw))


def remember(request: Request, memory: Prefixes, tenant: str) -> None:
    """Keep the beginning of a request, or note that it's known."""
    raw, spans, begun = request.raw, request.spans, request.begun
    request.spans = None
    if spans is None or len(raw) >= 1 << 32:
        return
    known = 0 if begun is None else begun.messages
    count = known + len(spans.items)
    if begun is not None and count - LEFT_OUT[0] <= known:
        whole = known == len(begun.prefix.ends)
        request.grown = begun.prefix if whole else None
        return
    if begun is None and not memory.comes_again(type(request).__name__, raw, tenant):
        return
    start = _list_start(request, spans) if begun is None else begun.prefix.start
    if start is None:
        return
    prefix = _prefix(request, spans, start, tenant)
    cuts = list(_cuts(prefix, request.OPEN_SHAPES, raw, count))
    if not cuts or (begun is None and not _is_place(request, spans, prefix, cuts[-1][0])):
        return
    prefix.cut(cuts[-1][0])
    memory.learn(type(request).__name__, raw, tenant, prefix, cuts)
    request.grown = prefix
    if begun is not None and known == len(begun.prefix.ends):
        memory.drop(begun.prefix)


def _list_start(request: Request, spans: Spans) -> int | None:
    """Return the place behind the list's bracket, and find those of its messages; ``None`` if they aren't there."""
    raw = request.raw
    for found in islice(re.finditer(rb'"%b"\s*:\s*\[' % request.CONVERSATION.encode(), raw), LISTS):
        first = _end_of(_SPACE, raw, found.end())
        head = bytes(spans.items[0]) if spans.items else b""
        if head and raw.startswith(head, first):
            others = _spans(raw, first + len(head), spans.items[1:])
            if others is not None:
                spans.starts, spans.ends = [first, *others[0]], [first + len(head), *others[1]]
                return found.end()
    return None


def _is_place(request: Request, spans: Spans, prefix: Prefix, messages: int) -> bool:
    """Return whether the messages that were found are those that the parser reads.

    They are if a marker in their place becomes the first message of the request.
    """
    end = prefix.ends[messages - 1]
    if 2 * (end - prefix.start) < len(request.raw):
        return False
    listed = request.listed(_spliced(request.raw, prefix.start, end))
    return bool(listed) and [*map(bytes, listed)] == [_MARKER, *map(bytes, spans.items[messages:])]


def _prefix(request: Request, spans: Spans, start: int, tenant: str) -> Prefix:
    """Return a prefix with all messages of a request."""
    begun = request.begun
    if begun is None:
        starts, ends, units = (array("I", part) for part in (spans.starts, spans.ends, spans.units))
        return Prefix(tenant, start, starts, ends, units, spans.shapes)
    old, known = begun.prefix, begun.messages
    starts, ends, units = old.starts[:known], old.ends[:known], old.units[:known]
    starts.extend(spans.starts)
    ends.extend(spans.ends)
    units.extend(spans.units)
    shapes = None if spans.shapes is None else old.shapes[:known] + spans.shapes
    prefix = Prefix(tenant, old.start, starts, ends, units, shapes)
    if begun.units >= CONVERSATION_UNITS:
        prefix.conversations = old.conversations
    return prefix


def _cuts(prefix: Prefix, open_shapes: Sequence[Any], raw: bytes, count: int) -> Iterator[tuple[int, int]]:
    """Yield the messages and units at the marks of a prefix, in ascending order."""
    before = 0
    for left_out in reversed(LEFT_OUT):
        messages = count - left_out
        # Only a bracket ends a value for sure: a digit may follow another one.
        while messages > before and (
            raw[prefix.ends[messages - 1] - 1] not in b"}]"
            or (prefix.shapes is not None and prefix.shapes[messages - 1] in open_shapes)
        ):
            messages -= 1
        if messages > before and prefix.ends[messages - 1] >= LEAST_BYTES:
            before = messages
            yield messages, prefix.units[messages - 1]


def _spliced(raw: bytes, start: int, end: int) -> bytes:
    return raw[:start] + _MARKER + raw[end:]


def _spans(raw: bytes, end: int, messages: Sequence[bytes]) -> tuple[list[int], list[int]] | None:
    """Return where messages are that follow each other; ``None`` if they don't."""
    starts, ends = [], []
    for message in messages:
        # Encoders write nothing or one space behind the comma.
        if raw[end : end + 2] == b",{":
            start = end + 1
        elif raw[end : end + 3] == b", {":
            start = end + 2
        else:
            gap = _GAP.match(raw, end)
            if gap is None:
                return None
            start = gap.end()
        end = start + len(message)
        starts.append(start)
        ends.append(end)
    return starts, ends


def _end_of(pattern: re.Pattern[bytes], raw: bytes, start: int) -> int:
    found = pattern.match(raw, start)
    return start if found is None else found.end()


class _Stream:
    """Digests of the beginnings of a body, in ascending order. Its bytes are hashed once."""

    def __init__(self, raw: bytes, seed: int) -> None:
        self._view = memoryview(raw)
        self._hash = xxhash.xxh3_128(seed=seed)
        self._end = 0

    def to(self, end: int) -> bytes:
        if end > self._end:
            self._hash.update(self._view[self._end : end])
            self._end = end
        return self._hash.digest()


class _Node:
    """The marks of prefixes that begin with the same bytes, by end, and the number of prefixes that go on from here."""

    __slots__ = ("marks", "prefixes")

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self.prefixes = 0


class Prefixes:
    """The prefixes of all tenants. Thread-safe."""

    def __init__(self, memory: int = CacheBudget().prefixes) -> None:
        """If the prefixes take more than ``memory`` bytes, the tenant with the most loses its oldest ones."""
        self.memory = memory
        self._nodes: dict[tuple[int, bytes], _Node] = {}
        self._tenants: dict[str, dict[Prefix, None]] = {}
        self._weights: dict[str, int] = {}
        self._seen: dict[str, dict[bytes, None]] = {}
        self._lock = threading.Lock()
        self._clock = itertools.count(1)
        self.weight = 0
        """About how many bytes of memory all prefixes take."""

    def find(self, api: str, raw: bytes, tenant: str) -> Mark | None:
        """Return the longest prefix of a body, if it's most of the body."""
        stream, length, best = _Stream(raw, _seed(api, tenant)), len(raw), None
        with self._lock:
            for level in _levels(length):
                node = self._nodes.get((level, stream.to(level)))
                if node is None:
                    break
                for mark in node.marks:
                    if mark.end >= length:
                        break
                    if stream.to(mark.end) == mark.digest:
                        best = mark
            if best is None or 2 * (best.end - best.prefix.start) < len(raw):
                return None
            order = self._tenants[tenant]
            order[best.prefix] = order.pop(best.prefix)
            best.prefix.used = next(self._clock)
            return best

    def learn(self, api: str, raw: bytes, tenant: str, prefix: Prefix, cuts: Sequence[tuple[int, int]]) -> None:
        """Keep a prefix. ``cuts`` are the messages and units at its marks, in ascending order."""
        stream, level = _Stream(raw, _seed(api, tenant)), LEAST_BYTES
        places: list[tuple[tuple[int, bytes], Mark]] = []
        for messages, units in cuts:
            end = prefix.ends[messages - 1]
            while level <= end:
                prefix.path.append((level, stream.to(level)))
                level *= 2
            mark = Mark(prefix, messages, units, end, stream.to(end))
            prefix.marks.append(mark)
            places.append((prefix.path[-1], mark))
        with self._lock:
            self._tenants.setdefault(tenant, {})[prefix] = None
            self._weights[tenant] = self._weights.get(tenant, 0) + prefix.weight
            self.weight += prefix.weight
            prefix.used = next(self._clock)
            for key in prefix.path:
                self._nodes.setdefault(key, _Node()).prefixes += 1
            for key, mark in places:
                insort(self._nodes[key].marks, mark, key=attrgetter("end"))
            for key, _ in places:
                self._bound(key)
            while self.weight > self.memory:
                largest = max(self._weights, key=self._weights.__getitem__)
                self._drop(next(iter(self._tenants[largest])))

    def comes_again(self, api: str, raw: bytes, tenant: str) -> bool:
        """Return whether a body begins like an earlier one that had no known prefix either, and remember its beginning.

        Finding the places of its messages takes a third as long as parsing it, which is wasted on a new beginning.
        """
        stream, level, again = _Stream(raw, _seed(api, tenant)), LEAST_BYTES, False
        with self._lock:
            seen = self._seen.setdefault(tenant, {})
            while 2 * level <= len(raw):
                level *= 2
            for place in (level // 2, level):
                if place >= LEAST_BYTES:
                    key = stream.to(place)
                    again = again or key in seen
            seen[key] = None
            if len(seen) > SEEN:
                del seen[next(iter(seen))]
            if len(self._seen) > TENANTS:
                del self._seen[next(iter(self._seen))]
        return again

    def drop(self, prefix: Prefix) -> None:
        """Drop a prefix that a longer one replaces."""
        with self._lock:
            if prefix in self._tenants.get(prefix.tenant, ()):
                self._drop(prefix)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the prefixes of forgotten tenants, and return those tenants."""
        with self._lock:
            tenants = set(filter(forgotten, self._tenants.keys() | self._seen))
            for tenant in tenants:
                self._seen.pop(tenant, None)
                for prefix in list(self._tenants.get(tenant, ())):
                    self._drop(prefix)
            return tenants

    def _bound(self, key: tuple[int, bytes]) -> None:
        while (node := self._nodes.get(key)) is not None and len(node.marks) > CANDIDATES:
            self._drop(min((mark.prefix for mark in node.marks), key=attrgetter("used")))

    def _drop(self, prefix: Prefix) -> None:
        order = self._tenants[prefix.tenant]
        del order[prefix]
        self._weights[prefix.tenant] -= prefix.weight
        self.weight -= prefix.weight
        if not order:
            del self._tenants[prefix.tenant], self._weights[prefix.tenant]
        for key in prefix.path:
            node = self._nodes[key]
            node.prefixes -= 1
            node.marks = [mark for mark in node.marks if mark.prefix is not prefix]
            if not node.prefixes:
                del self._nodes[key]
        prefix.marks.clear()  # they refer to the prefix


def _levels(length: int) -> Iterable[int]:
    """Return the levels at which a body is looked up: the first one, and those below the marks that are most of it."""
    top = LEAST_BYTES << max(0, (length // LEAST_BYTES).bit_length() - 1)
    return dict.fromkeys((LEAST_BYTES, max(LEAST_BYTES, top // 2), top))


def _seed(api: str, tenant: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{api}\0{tenant}".encode("utf-8", "surrogatepass"), _SEED)
