"""How many of an upstream's tokens one of ours is, as the usage in its responses shows.

Each tenant has ratios of its own: no caller's traffic changes another caller's requests. A tenant starts with the ratio
of the model's profile, which is part of the count. Only usage that the upstream reports counts, never the text of a
conversation.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from proxy.limits.learned import RATIO_BOUNDS
from proxy.store import Store
from proxy.store.replicated_map import ReplicatedMap
from proxy.store.tenants import UNSTORED_TENANT

LEAST_COUNTED = 500
"""Tokens. In smaller requests the framing has too large a part."""

OBSERVATIONS = 16
"""So many of the newest are looked at."""

LEAST_OBSERVATIONS = 3

TRIES = 32
"""Requests of a model that a process counts for their ratio alone."""

PAUSE = 10.0
"""Seconds between two observations of one model once there are enough of them."""

LONGEST_PAUSE = 600.0
"""Seconds between two observations of an upstream whose usage shows no ratio, at most."""

BOUNDS = (0.7, 1.6)

STEPS = 20
"""Steps to a whole: the factor moves by 1/20, as every change moves the checkpoints of all conversations."""

PLACES = 10_000
"""The most tenants and models kept in memory. The least recently used ones are read from the store again."""

KEPT_SECONDS = 30 * 86_400.0
"""Seconds that a ratio is kept after the last observation."""

KIND = "tenant_ratio"
"""The kind of the stored entries. Version 0.1 stored entries of the kind ``ratio`` for all tenants together: these are
ignored, and expire."""


class TokenRatios(msgspec.Struct, frozen=True):
    """The ratios of one model at an upstream for one tenant, oldest first, as they are stored.

    ``steps`` is the factor in force, decided at ``since``; the last ratio came at ``noted`` (seconds since 1970).
    """

    upstream: str
    model: str
    ratios: tuple[float, ...] = ()
    steps: int = STEPS
    since: float = 0.0
    noted: float = 0.0

    @property
    def until(self) -> float:
        """When they are of no more use."""
        return self.noted + KEPT_SECONDS

    @property
    def factor(self) -> float:
        """Return the upstream's tokens per token counted here, within ``BOUNDS``."""
        # Conversations differ from each other by a step. A stored entry may have been damaged, or edited.
        low, high = BOUNDS
        return 1.0 if abs(self.steps - STEPS) <= 1 else min(max(self.steps / STEPS, low), high)

    def merged(self, other: TokenRatios) -> TokenRatios:
        """Those on which the newer decision rests."""
        return other if other.since > self.since else self


Place = tuple[str, str, str]
"""An upstream, the model's name there, and a tenant."""


class Calibration:
    """The factors by upstream, model and tenant. The store keeps them, so a restarted process continues with them."""

    def __init__(
        self,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Use ``now`` for seconds since 1970. Without a store the factors end with the process."""
        self._clock = clock
        self._now = now
        self._known = ReplicatedMap(store, KIND, TokenRatios, PLACES, now)
        self._next: OrderedDict[Place, float] = OrderedDict()  # when another observation is wanted
        self._tries: OrderedDict[Place, int] = OrderedDict()
        self._misses: dict[Place, int] = {}

    def first_read(self, upstream: str, model: str, tenant: str) -> asyncio.Task[None] | None:
        """See ``Shared.first_read``."""
        return self._known.first_read(tenant, upstream, model)

    def wants(self, upstream: str, model: str, tenant: str) -> bool:
        """Return whether another observation would be useful now."""
        return self._clock() >= self._next.get((upstream, model, tenant), 0.0)

    def worth_counting(self, upstream: str, model: str, tenant: str) -> bool:
        """Return whether to count a request only for its ratio: while the tenant has too few ratios for this model.

        After ``TRIES`` times the answer is no, because the upstream reports nothing comparable.
        """
        place = (upstream, model, tenant)
        seen = self._known.get(tenant, upstream, model)
        tries = self._tries.get(place, 0)
        if tenant == UNSTORED_TENANT or (seen is not None and len(seen.ratios) >= LEAST_OBSERVATIONS) or tries >= TRIES:
            return False
        self._tries[place] = tries + 1
        if len(self._tries) > PLACES:
            self._tries.popitem(last=False)
        return True

    def note(self, upstream: str, model: str, tenant: str, counted: int, reported: int) -> None:
        """Add the ratio of one request: the tokens counted here, and those that the upstream reported."""
        if not plausible(counted, reported):
            return
        ratio = reported / counted
        self._misses.pop((upstream, model, tenant), None)
        seen = self._known.get(tenant, upstream, model) or TokenRatios(upstream, model)
        now = self._now()
        ratios = (*seen.ratios, ratio)[-OBSERVATIONS:]
        enough = len(ratios) >= LEAST_OBSERVATIONS
        steps = _stepped(_estimate(ratios), seen.steps) if enough else seen.steps
        decided = enough and (steps != seen.steps or not seen.since)
        observed = TokenRatios(upstream, model, ratios, steps, now if decided else seen.since, now)
        if decided:
            self._known.put(tenant, upstream, model, observed)
        else:
            self._known.hold(tenant, upstream, model, observed)
        if len(ratios) == OBSERVATIONS:
            self._pause((upstream, model, tenant))

    def miss(self, upstream: str, model: str, tenant: str, counted: int) -> None:
        """Note an answer that shows no ratio, to a request of ``counted`` tokens.

        After ``OBSERVATIONS`` of them in a row, the next request is compared ``PAUSE`` seconds later, and after each
        further miss twice as long, up to ``LONGEST_PAUSE``.
        """
        if counted <= LEAST_COUNTED:
            return
        place = (upstream, model, tenant)
        misses = self._misses[place] = min(self._misses.get(place, 0) + 1, 2 * OBSERVATIONS)
        if len(self._misses) > PLACES:
            self._misses.pop(next(iter(self._misses)))
        if misses >= OBSERVATIONS:
            self._pause(place, min(PAUSE * 2.0 ** (misses - OBSERVATIONS), LONGEST_PAUSE))

    def factor(self, upstream: str, model: str, tenant: str) -> float:
        """Return the upstream's tokens per token counted here, rather too high than too low; 1 if nothing is known."""
        seen = self._known.get(tenant, upstream, model)
        return 1.0 if seen is None else seen.factor

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """See ``Shared.forget``."""
        for place in [place for place in {**self._next, **self._tries, **self._misses} if forgotten(place[2])]:
            self._misses.pop(place, None)
            self._next.pop(place, None)
            self._tries.pop(place, None)
        return self._known.forget(forgotten)

    async def aclose(self) -> None:
        """Write the entries that wait to be written."""
        await self._known.aclose()

    def _pause(self, place: Place, seconds: float = PAUSE) -> None:
        self._next[place] = self._clock() + seconds
        self._next.move_to_end(place)
        if len(self._next) > PLACES:
            self._next.popitem(last=False)


def plausible(counted: int, reported: int) -> bool:
    """Return whether both may be counts of the same prompt, which is large enough to show a ratio.

    Some upstreams leave out cached tokens, and some report nothing.
    """
    return counted > LEAST_COUNTED and RATIO_BOUNDS[0] <= reported / counted <= RATIO_BOUNDS[1]


def _estimate(ratios: Sequence[float]) -> float:
    """The 75th percentile, so that a few odd ones do not matter."""
    return sorted(ratios)[int(0.75 * (len(ratios) - 1))]


def _stepped(estimate: float, steps: int) -> int:
    """The step nearest to an estimate, or the one in force unless the estimate is half a step outside of it."""
    low, high = BOUNDS
    wanted = min(max(estimate, low), high) * STEPS
    return steps if abs(wanted - steps) <= 1 else round(wanted)
