"""Learn the limits of upstreams from refusals and from reported usage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import structlog
from cachetools import LRUCache

from proxy.constants import DAY
from proxy.limits.profiles import Profile, smaller
from proxy.overflow import Overflow
from proxy.store import Store
from proxy.store.replicated_map import ReplicatedFigures, ReplicatedMap, SharedValue

log = structlog.get_logger(__name__)

SMALLEST_PART = 8  # the budget is at least the window divided by this, regardless of the reserved output
CAUTION = 0.97  # share of a limit that the proxy aims at after a refusal that names it
BLIND_FACTOR = 0.7  # share of the refused size that the proxy aims at after a refusal that names no limit
LEAST_BLIND = 1_024  # Tokens that every model accepts. A refusal of less that names no limit has another reason.
LEAST_LIMIT = 256  # Tokens. A smaller number in a refusal isn't a token limit.
NAMED_SECONDS = DAY  # Seconds that a limit named by an upstream holds. Then the proxy tries the profile's limit again.
GUESS_SECONDS = 3_600.0  # seconds that a guessed limit holds, and in which a doubtful one must occur again
DISPROVED = 1 / BLIND_FACTOR  # an answered request that is larger than a limit by this factor disproves the limit
COUNTS_DIFFER = 1.05  # A reported usage above a named limit by this factor disproves it. The upstream counts both.
CONTRADICTED = 0.5  # Share of a recently answered size. A lower named limit needs a second refusal to apply to others.

LEARNED_ENTRIES = 10_000

PERIOD = 3_600.0  # Seconds. An answer counts as recent for at least this time, and at most twice as long.

KIND = "limit"

Place = tuple[str, str, str]  # an upstream, the model's name there, and a tenant

# A count in a refusal can differ from the proxy's by these factors. Beyond them it isn't a count of the same prompt.
RATIO_BOUNDS = (0.5, 3.0)


Source = Literal["refusal", "guess", "usage"]
"""The source of a limit: a refusal that names it, a guess, or the usage of an answer.

A guess follows from a refusal without a number, or with a number by which the request should have fit.
"""


@dataclass(frozen=True, slots=True)
class LearnedLimit:
    """A limit learned from an upstream, in tokens as counted here."""

    input: int | None = None
    total: int | None = None  # with the output
    source: Source = field(default="refusal", compare=False)
    named: int | None = field(default=None, compare=False)  # the refusal's number, in the upstream's tokens

    @property
    def blind(self) -> bool:
        """Return whether the limit is a guess from a refusal without a number."""
        return self.source == "guess" and self.named is None


def limit_from_overflow(overflow: Overflow, counted_here: int, reserved: int, factor: float = 1.0) -> LearnedLimit:
    """Return the limit that follows from a refusal of a request of ``counted_here`` tokens.

    ``factor`` is the upstream's tokens per token counted here, for refusals that don't include a count.
    """
    blind = LearnedLimit(input=int(counted_here * BLIND_FACTOR), source="guess")
    if overflow.limit is None or overflow.limit < LEAST_LIMIT:
        return blind
    ratio = _ratio(overflow.counted, counted_here, factor)
    here = int(overflow.limit / ratio * CAUTION)
    silent = overflow.kind == "silent"
    source: Source = "usage" if silent else "refusal"
    named = 0 if silent else overflow.output or 0  # for a silent overflow, this is the size of the answer
    output = 0 if overflow.scope == "input" else max(reserved, named)
    if overflow.kind == "input_plus_output":
        output = int(output / ratio)
    elif here - output >= counted_here:
        # By the proxy's count the request fits, and the refusal doesn't show the error of that count.
        return replace(blind, named=overflow.limit)
    if overflow.scope == "input":
        return LearnedLimit(input=here, source=source, named=overflow.limit)
    if named > reserved:
        # The upstream adds a default output to requests that state none.
        return LearnedLimit(input=max(here - output, here // SMALLEST_PART), source=source, named=overflow.limit)
    return LearnedLimit(total=here, source=source, named=overflow.limit)


def limit_from_usage(overflow: Overflow, counted_here: int, factor: float) -> LearnedLimit | None:
    """Return the limit that follows from an answer to a request of ``counted_here`` tokens, or ``None``."""
    if overflow.limit is None:
        return None
    total = int(overflow.limit / _ratio(overflow.counted, counted_here, factor) * CAUTION)
    return LearnedLimit(total=total, source="usage", named=overflow.limit)


def _ratio(counted: int | None, counted_here: int, factor: float) -> float:
    """Return the upstream's tokens for each token counted here."""
    if not counted:
        return factor
    low, high = RATIO_BOUNDS
    return min(max(counted / max(counted_here, 1), low), high)


def for_others(guess: LearnedLimit) -> LearnedLimit:
    """Return the limit to use for other requests after a guess worked for one request."""
    return replace(guess, input=None if guess.input is None else max(guess.input, LEAST_BLIND))


def published(profile: Profile, factor: float = 1.0) -> LearnedLimit:
    """Return the limits of a profile in tokens as counted here. ``factor`` is as in ``budget``."""
    window, cap = profile.context_window, profile.max_input_tokens
    most = smaller(window or None, cap or None)
    return LearnedLimit(most and int(most / factor), window and int(window / factor))


class LimitRecord(msgspec.Struct, frozen=True):
    """A limit of ``tokens`` as counted here. Times are seconds since 1970."""

    tokens: int
    source: Source
    since: float
    until: float
    named: int | None = None  # the number in the refusal, in the upstream's own tokens
    disproved: bool = False  # stays as long as other processes may have the limit
    refused: int | None = None  # the refused size, for a guess

    def holds(self, now: float) -> bool:
        return not self.disproved and now <= self.until

    @property
    def blind(self) -> bool:
        """Return whether the limit is a guess from a refusal without a number."""
        return self.source == "guess" and self.named is None

    @property
    def is_named(self) -> bool:
        """Return whether an upstream named the limit and no answer has disproved it."""
        return not self.disproved and (self.source == "refusal" or (self.source == "usage" and self.named is not None))


class Limits(SharedValue, frozen=True):
    """The stored limits of a model at an upstream for one tenant."""

    upstream: str
    model: str
    input: LimitRecord | None = None
    total: LimitRecord | None = None

    @property
    def until(self) -> float:
        """Return when the last of the records expires, in seconds since 1970."""
        return max((record.until for record in (self.input, self.total) if record is not None), default=0.0)

    def valid(self, now: float) -> LearnedLimit | None:
        """Return the limits that are valid at a time in seconds since 1970, or ``None`` if there are none."""
        most_input, total = _tokens(self.input, now), _tokens(self.total, now)
        return None if most_input is None and total is None else LearnedLimit(most_input, total)

    def merged(self, other: Limits) -> Limits:
        """Return the newer record of each kind. A named limit takes precedence over a guess without a number."""
        return Limits(self.upstream, self.model, _newer(self.input, other.input), _newer(self.total, other.total))


class _AnsweredSizes:
    """The largest recently answered sizes, in tokens as counted here. A guessed limit must not be below them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._largest: LRUCache[Place, tuple[float, int, int]] = LRUCache(LEARNED_ENTRIES)

    def note(self, place: Place, tokens: int) -> None:
        """Record that the upstream answered a request of this size."""
        began, now, before = self._periods(place)
        if tokens <= now:
            return
        self._largest[place] = (began, tokens, before)

    def forget(self, place: Place) -> None:
        self._largest.pop(place, None)

    def largest(self, place: Place) -> int:
        """Return the largest recently answered size, or 0 if there is none."""
        return max(self._periods(place)[1:])

    def _periods(self, place: Place) -> tuple[float, int, int]:
        """Return when the current period began, and the largest sizes of this period and the one before."""
        time = self._clock()
        began, now, before = self._largest.get(place, (time, 0, 0))
        if time - began < PERIOD:
            return began, now, before
        return time, 0, (now if time - began < 2 * PERIOD else 0)


class LearnedLimits(ReplicatedFigures[Limits]):
    """Learned limits by upstream, model, and tenant, shared with other processes through the store.

    Refusals, guesses, and reported usage lower a limit. Answers to larger requests raise or drop it.
    """

    def __init__(self, store: Store | None = None, clock: Callable[[], float] = time.time) -> None:
        """Use ``clock`` for seconds since 1970. Without a store, the limits end with the process."""
        self._clock = clock
        super().__init__(ReplicatedMap(store, KIND, Limits, LEARNED_ENTRIES, clock))
        self._answered = _AnsweredSizes(clock)

    def get(self, upstream: str, model: str, tenant: str) -> LearnedLimit | None:
        known = self._values.get(tenant, upstream, model)
        return None if known is None else known.valid(self._clock())

    def learn(
        self, upstream: str, model: str, tenant: str, limit: LearnedLimit, most: LearnedLimit | None = None
    ) -> None:
        """Record a limit. The lower of two valid limits of the same kind applies.

        A named limit takes precedence over a guess from a refusal without a number, even if the guess is lower.

        ``most`` are the limits from other sources. The proxy ignores a limit that isn't below them, or is below
        ``LEAST_LIMIT``. It raises a limit that no refusal named to the largest recently answered size.
        """
        now = self._clock()
        known = self._values.get(tenant, upstream, model) or Limits(upstream, model)
        least = 0 if limit.source == "refusal" else self._answered.largest((upstream, model, tenant))
        bound = most or LearnedLimit()
        changed = Limits(
            upstream,
            model,
            _learned(known.input, limit.input, least, bound.input, limit, now),
            _learned(known.total, limit.total, least, bound.total, limit, now),
        )
        if changed != known:
            self._values.put(tenant, upstream, model, changed)
            _log_changes(known, changed)

    def answered(self, upstream: str, model: str, tenant: str, tokens: int) -> None:
        """Record that the upstream answered a request of this size, in tokens as counted here."""
        self._answered.note((upstream, model, tenant), tokens)

    def contradicts(self, upstream: str, model: str, tenant: str, limit: LearnedLimit, refused: int) -> bool:
        """Return whether a recent answer contradicts the limit from a refusal of ``refused`` tokens."""
        answered = self._answered.largest((upstream, model, tenant))
        if limit.blind:
            return refused < answered
        return any(size is not None and size < CONTRADICTED * answered for size in (limit.input, limit.total))

    def outdate(self, upstream: str, model: str, tenant: str) -> None:
        """Forget the answered sizes, because repeated refusals show that the upstream now accepts less."""
        self._answered.forget((upstream, model, tenant))

    def below(self, upstream: str, model: str, tenant: str, tokens: int) -> bool:
        """Return whether a learned limit is lower than ``tokens``."""
        known = self.get(upstream, model, tenant)
        return known is not None and any(size is not None and size < tokens for size in (known.input, known.total))

    def confirm(self, upstream: str, model: str, tenant: str, sent: int, reported: int | None, factor: float) -> None:
        """Raise or drop lower limits after an answer to a request of ``sent`` tokens, as counted here.

        ``reported`` is the prompt size that the upstream reports, if any. ``factor`` is the upstream's tokens per token
        counted here. An upstream that truncated the prompt reports less than the proxy sent.
        """
        known = self._values.get(tenant, upstream, model)
        if known is None:
            return
        now = self._clock()
        size = sent if reported is None else min(sent, int(reported / factor))
        records = [_confirmed(record, size, reported, now) for record in (known.input, known.total)]
        changed = Limits(upstream, model, *records)
        if changed != known:
            self._values.put(tenant, upstream, model, changed)
            _log_changes(known, changed)


def _log_changes(before: Limits, after: Limits) -> None:
    """Log new and disproved limits. A limit that is only renewed or raised isn't new."""
    for kind, old, new in (("input", before.input, after.input), ("total", before.total, after.total)):
        if new is None or new is old:
            continue
        upstream, model, limit, source = after.upstream, after.model, new.tokens, new.source
        if new.disproved:
            log.info("limit.dropped", upstream=upstream, model=model, kind=kind, limit=limit, source=source)
        elif old is None or old.disproved or new.tokens < old.tokens:
            log.info("limit.learned", upstream=upstream, model=model, kind=kind, limit=limit, source=source)


def _newer(ours: LimitRecord | None, theirs: LimitRecord | None) -> LimitRecord | None:
    if ours is None or theirs is None:
        return ours or theirs
    new, old = (theirs, ours) if theirs.since > ours.since else (ours, theirs)
    # Ignore a guess from a process that hadn't read the named limit yet.
    return old if new.blind and not new.disproved and old.is_named and new.since <= old.until else new


def _tokens(record: LimitRecord | None, now: float) -> int | None:
    return record.tokens if record is not None and record.holds(now) else None


def _learned(
    known: LimitRecord | None, tokens: int | None, least: int, most: int | None, limit: LearnedLimit, now: float
) -> LimitRecord | None:
    """Return the record that applies after a limit was learned: ``tokens``, but at least ``least``."""
    if tokens is None or tokens < LEAST_LIMIT:
        return known
    guessed, tokens = tokens, max(tokens, least)
    if most is not None and tokens >= most:
        return known
    if limit.blind and known is not None and known.is_named and known.holds(now):
        return known
    until = now + (GUESS_SECONDS if limit.source == "guess" else NAMED_SECONDS)
    refused = int(guessed / BLIND_FACTOR) if limit.source == "guess" else None
    new = LimitRecord(tokens, limit.source, now, until, limit.named, refused=refused)
    if known is None or not known.holds(now) or tokens <= known.tokens or (known.blind and limit.source != "guess"):
        return new
    # A repeated limit is valid from now on. A guess doesn't renew a named limit.
    return msgspec.structs.replace(known, since=now, until=until) if known.source == limit.source else known


def _confirmed(record: LimitRecord | None, size: int, reported: int | None, now: float) -> LimitRecord | None:
    """Return the record that applies after an answer to a request of ``size`` tokens."""
    if record is None or not record.holds(now):
        return record
    if reported is None and record.source == "usage":
        return record  # an upstream that silently truncates prompts accepts requests of any size
    beyond = record.named is not None and reported is not None and reported > record.named * COUNTS_DIFFER
    if beyond or size >= (record.refused or record.tokens * DISPROVED):
        return msgspec.structs.replace(record, source="usage", since=now, disproved=True)
    return msgspec.structs.replace(record, tokens=size, source="usage", since=now) if size > record.tokens else record


def lower(a: LearnedLimit | None, b: LearnedLimit | None) -> LearnedLimit:
    known = [limit for limit in (a, b) if limit is not None]
    return LearnedLimit(smaller(*(limit.input for limit in known)), smaller(*(limit.total for limit in known)))
