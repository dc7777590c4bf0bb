"""How many of an upstream's tokens one of ours is, as the usage shows that it reports with its answers.

Only what the upstream says of itself counts, never what stands in a conversation.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from proxy.limits import RATIO_BOUNDS
from proxy.shared import Shared
from proxy.store import Store
from proxy.teams import EVERYBODY

LEAST_COUNTED = 500
"""Tokens. In smaller requests the framing has too large a part."""

OBSERVATIONS = 16
"""So many of the newest are looked at."""

LEAST_OBSERVATIONS = 3

TRIES = 32
"""Requests of a model that a process counts for their ratio alone."""

PAUSE = 10.0
"""Seconds between two observations of one model once there are enough of them."""

BOUNDS = (0.7, 1.6)

STEPS = 20
"""Steps to a whole: the factor moves by 1/20, as every change moves the checkpoints of all conversations."""

MODELS = 1_000
"""So many are remembered, the latest ones."""

KEPT_SECONDS = 30 * 86_400.0
"""So long a factor is kept that nothing confirms."""

KIND = "ratio"


class Ratios(msgspec.Struct, frozen=True):
    """The ratios of one model at an upstream, oldest first, as they are stored.

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
        """The upstream's tokens per token counted here."""
        # A step beside 1 is within what differs from one conversation to the next.
        return 1.0 if abs(self.steps - STEPS) <= 1 else self.steps / STEPS

    def merged(self, other: Ratios) -> Ratios:
        """Those on which the newer decision rests."""
        return other if other.since > self.since else self


class Calibration:
    """The factors of all models, by upstream and model; kept in the store, so that no process begins without them."""

    def __init__(
        self,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``now`` gives seconds since 1970. Without a store nothing outlives the process."""
        self._clock = clock
        self._now = now
        self._known = Shared(store, KIND, Ratios, MODELS, now)
        self._next: OrderedDict[tuple[str, str], float] = OrderedDict()  # when another observation is wanted
        self._tries: OrderedDict[tuple[str, str], int] = OrderedDict()

    def first_read(self, upstream: str, model: str) -> asyncio.Task[None] | None:
        """See ``Shared.first_read``."""
        return self._known.first_read(EVERYBODY, upstream, model)

    def wants(self, upstream: str, model: str) -> bool:
        """Whether another observation would be of use now."""
        return self._clock() >= self._next.get((upstream, model), 0.0)

    def worth_counting(self, upstream: str, model: str) -> bool:
        """Whether a request is to be counted for this alone: as long as there are too few ratios to tell anything.

        After ``TRIES`` times the answer is no: the upstream reports nothing that could be compared.
        """
        key = (upstream, model)
        seen = self._known.get(EVERYBODY, upstream, model)
        tries = self._tries.get(key, 0)
        if (seen is not None and len(seen.ratios) >= LEAST_OBSERVATIONS) or tries >= TRIES:
            return False
        self._tries[key] = tries + 1
        if len(self._tries) > MODELS:
            self._tries.popitem(last=False)
        return True

    def note(self, upstream: str, model: str, counted: int, reported: int) -> None:
        """Take in what was counted here for a request, and what the upstream reported for it, in tokens each."""
        if counted <= LEAST_COUNTED:
            return
        ratio = reported / counted
        if not RATIO_BOUNDS[0] <= ratio <= RATIO_BOUNDS[1]:
            return  # no count of the same prompt: some report what their cache did not hold, some report nothing
        seen = self._known.get(EVERYBODY, upstream, model) or Ratios(upstream, model)
        now = self._now()
        ratios = (*seen.ratios, ratio)[-OBSERVATIONS:]
        enough = len(ratios) >= LEAST_OBSERVATIONS
        steps = _stepped(_estimate(ratios), seen.steps) if enough else seen.steps
        decided = enough and (steps != seen.steps or not seen.since)
        observed = Ratios(upstream, model, ratios, steps, now if decided else seen.since, now)
        if decided:
            self._known.put(EVERYBODY, upstream, model, observed)
        else:
            self._known.hold(EVERYBODY, upstream, model, observed)
        if len(ratios) == OBSERVATIONS:
            self._pause(upstream, model)

    def factor(self, upstream: str, model: str) -> float:
        """The upstream's tokens per token counted here, rather too high than too low; 1 as long as nothing is known."""
        seen = self._known.get(EVERYBODY, upstream, model)
        return 1.0 if seen is None else seen.factor

    async def aclose(self) -> None:
        """Write what waits to be written."""
        await self._known.aclose()

    def _pause(self, upstream: str, model: str) -> None:
        self._next[upstream, model] = self._clock() + PAUSE
        self._next.move_to_end((upstream, model))
        if len(self._next) > MODELS:
            self._next.popitem(last=False)


def _estimate(ratios: Sequence[float]) -> float:
    """The 75th percentile, so that a few odd ones do not matter."""
    return sorted(ratios)[int(0.75 * (len(ratios) - 1))]


def _stepped(estimate: float, steps: int) -> int:
    """The step nearest to an estimate, or the one in force unless the estimate is half a step outside of it."""
    low, high = BOUNDS
    wanted = min(max(estimate, low), high) * STEPS
    return steps if abs(wanted - steps) <= 1 else round(wanted)
