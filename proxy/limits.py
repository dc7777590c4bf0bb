"""How many tokens a request may have: from the model's profile, from what it reserves, from what was learned."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from proxy.compaction.conditions import Clause
from proxy.profiles import Profile
from proxy.upstream.overflow import Overflow

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

LEARNED_SECONDS = 3600.0
LEARNED_ENTRIES = 10_000

# A refusal's own count can differ from ours by this much; figures beyond are not taken for counts of the same prompt.
RATIO_BOUNDS = (0.5, 3.0)


@dataclass(frozen=True, slots=True)
class Learned:
    """A limit that an upstream told by refusing, in tokens as counted here. ``total`` includes the output."""

    input: int | None = None
    total: int | None = None


def reserved_output(profile: Profile, asked: int | None, policy: Clause | None, learned: Learned | None = None) -> int:
    """Tokens of the window, as it is known or was learned, that are kept for the answer."""
    if asked is not None:
        return asked
    window = min((w for w in (profile.context_window, learned and learned.total) if w), default=None)
    if policy is not None and policy.tokens is not None:
        return policy.tokens
    if window is None:
        return 0
    if policy is not None and policy.fraction is not None:
        return int(window * policy.fraction)
    reserve = max(window // RESERVE_PART, min(RESERVE_AT_LEAST, window // SMALLEST_PART))
    return min(reserve, profile.max_output_tokens or reserve)


def budget(profile: Profile, reserved: int, learned: Learned | None, factor: float = 1.0) -> int | None:
    """Tokens, as counted here, that the input of a request may have; ``None`` where nobody knows.

    ``factor`` is how many of the upstream's tokens, in which a profile is written, one of ours is.
    """
    published = _bounds(profile.context_window, profile.max_input_tokens, reserved)
    told = _bounds(learned.total, learned.input, reserved) if learned else []
    return min([*(int(bound / factor) for bound in published), *told], default=None)


def _bounds(total: int | None, most_input: int | None, reserved: int) -> list[int]:
    bounds = [max(total - reserved, total // SMALLEST_PART)] if total else []
    return [*bounds, most_input] if most_input else bounds


def told_by(overflow: Overflow, counted_here: int, reserved: int, factor: float = 1.0) -> Learned:
    """What a refusal of a request of ``counted_here`` tokens says of the limit.

    ``factor`` is how many of the upstream's tokens one of ours is, where the refusal does not say it.
    """
    blind = Learned(input=int(counted_here * BLIND_FACTOR))
    if overflow.limit is None:
        return blind
    ratio = factor
    if overflow.counted:
        low, high = RATIO_BOUNDS
        ratio = min(max(overflow.counted / max(counted_here, 1), low), high)
    here = int(overflow.limit / ratio * CAUTION)
    output = 0 if overflow.scope == "input" else max(reserved, overflow.output or 0)
    if here - output >= counted_here:
        # By our count it would have fitted, and the refusal does not say by how much that is wrong.
        return blind
    if overflow.scope == "input":
        return Learned(input=here)
    if output > reserved:
        # The upstream adds an output of its own to requests that name none.
        return Learned(input=max(here - output, here // SMALLEST_PART))
    return Learned(total=here)


def for_others(guess: Learned) -> Learned:
    """What other requests may take from a guess that got one request through."""
    return Learned(None if guess.input is None else max(guess.input, LEAST_BLIND), guess.total)


class LearnedLimits:
    """What refusals told, by upstream, model and credential; forgotten after an hour."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limits: OrderedDict[tuple[str, str, str], tuple[float, Learned]] = OrderedDict()

    def get(self, upstream: str, model: str, tenant: str) -> Learned | None:
        """What is known, if it is not too old."""
        found = self._limits.get((upstream, model, tenant))
        if found is None or found[0] < self._clock():
            return None
        return found[1]

    def learn(self, upstream: str, model: str, tenant: str, learned: Learned) -> None:
        """Keep a limit; of two for the same thing the lower one holds."""
        key = (upstream, model, tenant)
        lowest = lower(self.get(upstream, model, tenant), learned)
        self._limits[key] = (self._clock() + LEARNED_SECONDS, lowest)
        self._limits.move_to_end(key)
        if len(self._limits) > LEARNED_ENTRIES:
            self._limits.popitem(last=False)


def lower(a: Learned | None, b: Learned | None) -> Learned:
    """Of two limits for the same thing, the lower figures."""
    known = [learned for learned in (a, b) if learned is not None]
    return Learned(
        min((k.input for k in known if k.input is not None), default=None),
        min((k.total for k in known if k.total is not None), default=None),
    )
