"""Calibrate token counts: upstream tokens per token counted here, from the usage in responses.

Each tenant has its own ratios, so one caller's traffic doesn't change another caller's requests. A tenant starts with
the ratio of the model's profile, which is part of the count. Calibration uses only the reported usage, never the text
of a conversation.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from cachetools import LRUCache

from proxy.constants import DAY
from proxy.limits.learned import RATIO_BOUNDS, Place
from proxy.store import Store
from proxy.store.interface import UNSTORED_TENANT
from proxy.store.replicated_map import ReplicatedFigures, ReplicatedMap, SharedValue

LEAST_COUNTED = 500  # Smallest request to compare, in tokens. In smaller ones the framing distorts the ratio.
OBSERVATIONS = 16  # newest observations that determine the factor

LEAST_OBSERVATIONS = 3

TRIES = 32  # requests that a process counts only for their ratio, per upstream, model, and tenant
PAUSE = 10.0  # seconds between two observations of one model once there are enough of them
LONGEST_PAUSE = 600.0  # seconds between two observations of an upstream whose usage shows no ratio, at most

BOUNDS = (0.7, 1.6)

STEPS = 20  # the factor moves in steps of 1/20, because each change moves the checkpoints of all conversations
PLACES = 10_000  # Tenants and models in memory. The least recently used ones are read from the store again.
KEPT_SECONDS = 30 * DAY  # seconds that a ratio is kept after the last observation

KIND = "tenant_ratio"
"""The kind of the stored entries. The proxy ignores entries of the kind ``ratio``, which version 0.1 stored for all
tenants together, until they expire."""


class TokenRatios(SharedValue, frozen=True):
    """The stored ratios of one model at an upstream for one tenant. Times are seconds since 1970."""

    upstream: str
    model: str
    ratios: tuple[float, ...] = ()  # oldest first
    quantized_factor: int = msgspec.field(default=STEPS, name="steps")  # the factor in force, in steps of 1/20
    since: float = 0.0  # when the factor was decided
    noted: float = 0.0  # when the last ratio came

    @property
    def until(self) -> float:
        """Return when the ratios expire, in seconds since 1970."""
        return self.noted + KEPT_SECONDS

    @property
    def factor(self) -> float:
        """Return the upstream's tokens per token counted here, within ``BOUNDS``."""
        # Conversations naturally differ by a step. The bounds also cover a damaged or edited entry.
        low, high = BOUNDS
        return 1.0 if abs(self.quantized_factor - STEPS) <= 1 else min(max(self.quantized_factor / STEPS, low), high)

    def merged(self, other: TokenRatios) -> TokenRatios:
        """Return the ratios with the newer decision."""
        return other if other.since > self.since else self


class Calibration(ReplicatedFigures[TokenRatios]):
    """Factors by upstream, model, and tenant. The store keeps them across restarts."""

    def __init__(
        self,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Use ``now`` for seconds since 1970. Without a store the factors end with the process."""
        self._clock = clock
        self._now = now
        super().__init__(ReplicatedMap(store, KIND, TokenRatios, PLACES, now))
        self._next: LRUCache[Place, float] = LRUCache(PLACES)  # the time of the next observation
        self._tries: LRUCache[Place, int] = LRUCache(PLACES)
        self._misses: LRUCache[Place, int] = LRUCache(PLACES)

    def wants(self, upstream: str, model: str, tenant: str) -> bool:
        """Return whether another observation would be useful now."""
        return self._clock() >= self._next.get((upstream, model, tenant), 0.0)

    def worth_counting(self, upstream: str, model: str, tenant: str) -> bool:
        """Return whether to count a request only for its ratio: while the tenant has few ratios, ``TRIES`` times."""
        place = (upstream, model, tenant)
        seen = self._values.get(tenant, upstream, model)
        tries = self._tries.get(place, 0)
        if tenant == UNSTORED_TENANT or (seen is not None and len(seen.ratios) >= LEAST_OBSERVATIONS) or tries >= TRIES:
            return False
        self._tries[place] = tries + 1
        return True

    def note(self, upstream: str, model: str, tenant: str, counted: int, reported: int) -> None:
        """Add the ratio of one request: the tokens counted here, and those that the upstream reported."""
        if not plausible(counted, reported):
            return
        ratio = reported / counted
        self._misses.pop((upstream, model, tenant), None)
        seen = self._values.get(tenant, upstream, model) or TokenRatios(upstream, model)
        now = self._now()
        ratios = (*seen.ratios, ratio)[-OBSERVATIONS:]
        enough = len(ratios) >= LEAST_OBSERVATIONS
        estimate = sorted(ratios)[int(0.75 * (len(ratios) - 1))]  # so that outliers don't matter
        steps = _stepped(estimate, seen.quantized_factor) if enough else seen.quantized_factor
        decided = enough and (steps != seen.quantized_factor or not seen.since)
        observed = TokenRatios(upstream, model, ratios, steps, now if decided else seen.since, now)
        if decided:
            self._values.put(tenant, upstream, model, observed)
        else:
            self._values.set_local(tenant, upstream, model, observed)
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
        if misses >= OBSERVATIONS:
            self._pause(place, min(PAUSE * 2.0 ** (misses - OBSERVATIONS), LONGEST_PAUSE))

    def factor(self, upstream: str, model: str, tenant: str) -> float:
        """Return the upstream's tokens per token counted here, rounded toward too high, or 1 if unknown."""
        seen = self._values.get(tenant, upstream, model)
        return 1.0 if seen is None else seen.factor

    def forget(self, forgotten: Callable[[str], bool]) -> set[str]:
        """Drop the ratios of forgotten tenants, and return those tenants."""
        for place in [place for place in {**self._next, **self._tries, **self._misses} if forgotten(place[2])]:
            self._misses.pop(place, None)
            self._next.pop(place, None)
            self._tries.pop(place, None)
        return self._values.forget(forgotten)

    def _pause(self, place: Place, seconds: float = PAUSE) -> None:
        self._next[place] = self._clock() + seconds


def plausible(counted: int, reported: int) -> bool:
    """Return whether both can be counts of the same prompt, and it's large enough to compare."""
    return counted > LEAST_COUNTED and RATIO_BOUNDS[0] <= reported / counted <= RATIO_BOUNDS[1]


def _stepped(estimate: float, steps: int) -> int:
    """Return the step nearest to an estimate. Keep the current step if the estimate is within one step of it."""
    low, high = BOUNDS
    wanted = min(max(estimate, low), high) * STEPS
    return steps if abs(wanted - steps) <= 1 else round(wanted)
