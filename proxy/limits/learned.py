"""How many tokens a request may have: from the model's profile, from what it reserves, from what was learned."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from proxy.compaction.conditions import Clause
from proxy.limits.answered import Answered
from proxy.limits.profiles import Profile
from proxy.overflow import Overflow
from proxy.store import Store
from proxy.store.replicated_map import ReplicatedMap

# Where input and output share a window, an answer needs room even if the request does not say how much: servers
# accept a prompt that fills the window and answer with the one to three tokens that are left. The trigger leaves far
# more than this; the reserve bounds the rare request that can only just be made to fit.
RESERVE_PART = 32
RESERVE_AT_LEAST = 512

SMALLEST_PART = 8
"""The budget is never less than this part of the window, however much output a request reserves."""

CAUTION = 0.97
"""Where a refusal tells the limit, this part of it is aimed at."""

BLIND_FACTOR = 0.7
"""Where a refusal tells nothing, this part of the refused size is aimed at."""

LEAST_BLIND = 1_024
"""Tokens. No model takes less: whoever refuses that and names no limit has another reason."""

LEAST_LIMIT = 256
"""Tokens. Whatever names less as a limit means something else."""

NAMED_SECONDS = 86_400.0
"""A limit that an upstream named holds for a day, then the profile's own is tried again."""

GUESS_SECONDS = 3_600.0
"""So long holds a limit that was guessed from a refusal that named none."""

DISPROVED = 1 / BLIND_FACTOR
"""A request of so many times a limit that was answered shows that there is no such limit any more."""

COUNTS_DIFFER = 1.05
"""A usage of so many times the limit that the upstream named shows the same: it counts both itself."""

CONTRADICTED = 0.5
"""Share of a size answered lately. A named limit below it must be named twice before others are held to it."""

LEARNED_ENTRIES = 10_000

KIND = "limit"

# A refusal's own count can differ from ours by this much; figures beyond are not taken for counts of the same prompt.
RATIO_BOUNDS = (0.5, 3.0)


Source = Literal["refusal", "guess", "usage"]
"""Where a limit comes from: named in a refusal, guessed from one that named none, or shown by what was answered."""


@dataclass(frozen=True, slots=True)
class LearnedLimit:
    """A limit that an upstream told by refusing, in tokens as counted here. ``total`` includes the output.

    ``named`` is the number that the refusal gave, in the upstream's own tokens.
    """

    input: int | None = None
    total: int | None = None
    source: Source = field(default="refusal", compare=False)
    named: int | None = field(default=None, compare=False)

    @property
    def blind(self) -> bool:
        """Whether the refusal gave no number at all."""
        return self.source == "guess" and self.named is None


def reserved_output(
    profile: Profile, asked: int | None, policy: Clause | None, learned: LearnedLimit | None = None
) -> int:
    """Tokens of the window, as it is known or was learned, that are kept for the answer."""
    if asked is not None:
        return asked
    if policy is not None and policy.tokens is not None:
        return policy.tokens
    window = profile.context_window
    if learned is not None and learned.total:
        window = min(window or learned.total, learned.total)
    if window is None:
        return 0
    if policy is not None and policy.fraction is not None:
        return int(window * policy.fraction)
    reserve = max(window // RESERVE_PART, min(RESERVE_AT_LEAST, window // SMALLEST_PART))
    return min(reserve, profile.max_output_tokens or reserve)


def budget(profile: Profile, reserved: int, learned: LearnedLimit | None, factor: float = 1.0) -> int | None:
    """Tokens, as counted here, that the input of a request may have; ``None`` where nobody knows.

    ``factor`` is how many of the upstream's tokens, in which a profile is written, one of ours is.
    """
    stated = _bounds(profile.context_window, profile.max_input_tokens, reserved)
    told = _bounds(learned.total, learned.input, reserved) if learned else []
    return min([int(bound / factor) for bound in stated] + told, default=None)


def _bounds(total: int | None, most_input: int | None, reserved: int) -> list[int]:
    bounds = [max(total - reserved, total // SMALLEST_PART)] if total else []
    return [*bounds, most_input] if most_input else bounds


def limit_from_overflow(overflow: Overflow, counted_here: int, reserved: int, factor: float = 1.0) -> LearnedLimit:
    """What a refusal of a request of ``counted_here`` tokens says of the limit.

    ``factor`` is how many of the upstream's tokens one of ours is, where the refusal does not say it.
    """
    blind = LearnedLimit(input=int(counted_here * BLIND_FACTOR), source="guess")
    if overflow.limit is None or overflow.limit < LEAST_LIMIT:
        return blind
    here = _here(overflow.limit, overflow.counted, counted_here, factor)
    silent = overflow.kind == "silent"
    source: Source = "usage" if silent else "refusal"
    named = 0 if silent else overflow.output or 0  # for a silent overflow it is the size of the answer
    output = 0 if overflow.scope == "input" else max(reserved, named)
    if here - output >= counted_here:
        # By our count it would have fitted, and the refusal does not say by how much that is wrong.
        return replace(blind, named=overflow.limit)
    if overflow.scope == "input":
        return LearnedLimit(input=here, source=source, named=overflow.limit)
    if output > reserved:
        # The upstream adds an output of its own to requests that name none.
        return LearnedLimit(input=max(here - output, here // SMALLEST_PART), source=source, named=overflow.limit)
    return LearnedLimit(total=here, source=source, named=overflow.limit)


def limit_from_usage(overflow: Overflow, counted_here: int, factor: float) -> LearnedLimit | None:
    """What an answer to a request of ``counted_here`` tokens shows of the limit, though nothing was refused."""
    if overflow.limit is None:
        return None
    total = _here(overflow.limit, overflow.counted, counted_here, factor)
    return LearnedLimit(total=total, source="usage", named=overflow.limit)


def _here(limit: int, counted: int | None, counted_here: int, factor: float) -> int:
    """A limit in tokens as counted here, a little below it."""
    ratio = factor
    if counted:
        low, high = RATIO_BOUNDS
        ratio = min(max(counted / max(counted_here, 1), low), high)
    return int(limit / ratio * CAUTION)


def for_others(guess: LearnedLimit) -> LearnedLimit:
    """What other requests may take from a guess that got one request through."""
    return replace(guess, input=None if guess.input is None else max(guess.input, LEAST_BLIND))


def published(profile: Profile, factor: float = 1.0) -> LearnedLimit:
    """The limits of a profile in tokens as counted here; ``factor`` is as in ``budget``."""
    window, cap = profile.context_window, profile.max_input_tokens
    most = min((bound for bound in (window, cap) if bound), default=None)
    return LearnedLimit(most and int(most / factor), window and int(window / factor))


class LimitRecord(msgspec.Struct, frozen=True):
    """A limit of ``tokens`` as counted here, learned at ``since``, which holds until ``until`` (seconds since 1970).

    ``named`` is the number that the refusal gave, in the upstream's own tokens. One that was ``disproved`` is kept as
    long as other processes may have it. ``refused`` is the size that was refused, if the limit was guessed from it.
    """

    tokens: int
    source: Source
    since: float
    until: float
    named: int | None = None
    disproved: bool = False
    refused: int | None = None

    def holds(self, now: float) -> bool:
        """Whether it is in force."""
        return not self.disproved and now <= self.until

    @property
    def blind(self) -> bool:
        """Whether it was guessed from a refusal that gave no number."""
        return self.source == "guess" and self.named is None

    @property
    def told(self) -> bool:
        """Whether it rests on a limit that an upstream named, and nothing has disproved it."""
        return not self.disproved and (self.source == "refusal" or (self.source == "usage" and self.named is not None))


class Limits(msgspec.Struct, frozen=True):
    """What is known of a model at an upstream for one tenant, as it is stored."""

    upstream: str
    model: str
    input: LimitRecord | None = None
    total: LimitRecord | None = None

    @property
    def until(self) -> float:
        """When the last of the figures is over."""
        return max((figure.until for figure in (self.input, self.total) if figure is not None), default=0.0)

    def merged(self, other: Limits) -> Limits:
        """Of each figure the newer one, but that a guess gives way to what was named."""
        return Limits(self.upstream, self.model, _newer(self.input, other.input), _newer(self.total, other.total))


class LearnedLimits:
    """What refusals told, by upstream, model and tenant; kept in the store, where all its processes find it.

    A figure goes down by a refusal alone, and up where an answer shows that more is taken.
    """

    def __init__(self, store: Store | None = None, clock: Callable[[], float] = time.time) -> None:
        """``clock`` gives seconds since 1970. Without a store nothing outlives the process."""
        self._clock = clock
        self._known = ReplicatedMap(store, KIND, Limits, LEARNED_ENTRIES, clock)
        self._answered = Answered(clock)

    def first_read(self, upstream: str, model: str, tenant: str) -> asyncio.Task[None] | None:
        """See ``Shared.first_read``."""
        return self._known.first_read(tenant, upstream, model)

    def get(self, upstream: str, model: str, tenant: str) -> LearnedLimit | None:
        """What is known, if it is not too old."""
        known = self._known.get(tenant, upstream, model)
        if known is None:
            return None
        now = self._clock()
        most_input, total = _tokens(known.input, now), _tokens(known.total, now)
        return None if most_input is None and total is None else LearnedLimit(most_input, total)

    def learn(
        self, upstream: str, model: str, tenant: str, told: LearnedLimit, most: LearnedLimit | None = None
    ) -> None:
        """Keep a limit; of two for the same thing the lower one holds.

        While one that was named holds, a guess for the same thing from a refusal without a number is not kept; and what
        is named takes the place of such a guess, be it higher.

        ``most`` are the limits known otherwise: a limit that isn't below them is ignored, and so is one below
        ``LEAST_LIMIT``. A limit that no refusal named is never below the largest size that was answered lately.
        """
        now = self._clock()
        known = self._known.get(tenant, upstream, model) or Limits(upstream, model)
        least = 0 if told.source == "refusal" else self._answered.largest((upstream, model, tenant))
        changed = Limits(
            upstream,
            model,
            _learned(known.input, told.input, least, None if most is None else most.input, told, now),
            _learned(known.total, told.total, least, None if most is None else most.total, told, now),
        )
        if changed != known:
            self._known.put(tenant, upstream, model, changed)

    def answered(self, upstream: str, model: str, tenant: str, tokens: int) -> None:
        """Remember that a request of this size, in tokens as counted here, was answered."""
        self._answered.note((upstream, model, tenant), tokens)

    def contradicts(self, upstream: str, model: str, tenant: str, told: LearnedLimit, refused: int) -> bool:
        """Return whether an answer contradicts a limit that was told by refusing a request of ``refused`` tokens.

        A named limit is far below a size that was answered lately; without a name, such a size was refused.
        """
        answered = self._answered.largest((upstream, model, tenant))
        if told.blind:
            return refused < answered
        return any(limit is not None and limit < CONTRADICTED * answered for limit in (told.input, told.total))

    def outdate(self, upstream: str, model: str, tenant: str) -> None:
        """Forget the sizes that were answered: repeated refusals show that the upstream takes less now."""
        self._answered.forget((upstream, model, tenant))

    def below(self, upstream: str, model: str, tenant: str, tokens: int) -> bool:
        """Whether a limit is known that is lower than so many tokens."""
        known = self.get(upstream, model, tenant)
        return known is not None and any(limit is not None and limit < tokens for limit in (known.input, known.total))

    def prove(self, upstream: str, model: str, tenant: str, sent: int, reported: int | None, factor: float) -> None:
        """A request of ``sent`` tokens, as counted here, was answered: lower limits are raised to it, or dropped.

        ``reported`` is the size of the prompt as the upstream gives it, where it does; ``factor`` is how many of its
        tokens one of ours is. An upstream that left out a part of the prompt reports less than was sent.
        """
        known = self._known.get(tenant, upstream, model)
        if known is None:
            return
        now = self._clock()
        size = sent if reported is None else min(sent, int(reported / factor))
        figures = [_proved(figure, size, reported, now) for figure in (known.input, known.total)]
        changed = Limits(upstream, model, *figures)
        if changed != known:
            self._known.put(tenant, upstream, model, changed)

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """See ``Shared.forget``."""
        return self._known.forget(forgotten)

    async def aclose(self) -> None:
        """Write what waits to be written."""
        await self._known.aclose()


def _newer(ours: LimitRecord | None, theirs: LimitRecord | None) -> LimitRecord | None:
    if ours is None or theirs is None:
        return ours or theirs
    new, old = (theirs, ours) if theirs.since > ours.since else (ours, theirs)
    # What was guessed by a process that did not know what had been named; what expires first does not bring it back.
    return old if new.blind and not new.disproved and old.told and new.since <= old.until else new


def _tokens(figure: LimitRecord | None, now: float) -> int | None:
    return figure.tokens if figure is not None and figure.holds(now) else None


def _learned(
    known: LimitRecord | None, tokens: int | None, least: int, most: int | None, told: LearnedLimit, now: float
) -> LimitRecord | None:
    """Return the figure that holds after one of this many tokens, but of ``least`` or more, was told."""
    if tokens is None or tokens < LEAST_LIMIT:
        return known
    guessed, tokens = tokens, max(tokens, least)
    if most is not None and tokens >= most:
        return known
    if told.blind and known is not None and known.told and known.holds(now):
        return known
    until = now + (GUESS_SECONDS if told.source == "guess" else NAMED_SECONDS)
    refused = int(guessed / BLIND_FACTOR) if told.source == "guess" else None
    new = LimitRecord(tokens, told.source, now, until, told.named, refused=refused)
    if known is None or not known.holds(now) or tokens <= known.tokens or (known.blind and told.source != "guess"):
        return new
    # Told once more, a limit holds from now on; a guess says nothing of one that was named.
    return msgspec.structs.replace(known, since=now, until=until) if known.source == told.source else known


def _proved(figure: LimitRecord | None, size: int, reported: int | None, now: float) -> LimitRecord | None:
    """The figure that holds after a request of so many tokens was answered."""
    if figure is None or not figure.holds(now):
        return figure
    if reported is None and figure.source == "usage":
        return figure  # an upstream that leaves out what is too long, without a word, takes a request of any size
    beyond = figure.named is not None and reported is not None and reported > figure.named * COUNTS_DIFFER
    if beyond or size >= (figure.refused or figure.tokens * DISPROVED):
        return msgspec.structs.replace(figure, source="usage", since=now, disproved=True)
    return msgspec.structs.replace(figure, tokens=size, source="usage", since=now) if size > figure.tokens else figure


def lower(a: LearnedLimit | None, b: LearnedLimit | None) -> LearnedLimit:
    """Of two limits for the same thing, the lower figures."""
    known = [learned for learned in (a, b) if learned is not None]
    return LearnedLimit(
        min((k.input for k in known if k.input is not None), default=None),
        min((k.total for k in known if k.total is not None), default=None),
    )
