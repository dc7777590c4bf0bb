"""How many of an upstream's tokens one of ours is, as the usage shows that it reports with its answers.

Only what the upstream says of itself counts, never what stands in a conversation.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.limits import RATIO_BOUNDS

LEAST_COUNTED = 500
"""Tokens. In smaller requests the framing has too large a part."""

OBSERVATIONS = 16
"""So many of the newest are looked at."""

LEAST_OBSERVATIONS = 3

PAUSE = 10.0
"""Seconds between two observations of one model once there are enough of them."""

BOUNDS = (0.7, 1.6)

STEPS = 20
"""Steps to a whole: the factor moves by 1/20, as every change moves the checkpoints of all conversations."""

MODELS = 1_000
"""So many are remembered, the latest ones."""

TAIL_BYTES = 4_096
TAIL_CHUNKS = 16

_USAGE = re.compile(r'"usage"\s*:\s*(?=\{)')
# What may follow on the JSON object that an answer or an event is.
_END = re.compile(r"\s*\Z|[\r\n]+(?:data|event|id|retry)?:")
_TRIED = 4
_decoder = json.JSONDecoder()


@dataclass(slots=True)
class _Observed:
    """The ratios of one model, oldest first; ``next`` is when the next one is wanted, ``steps`` the factor in force."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=OBSERVATIONS))
    next: float = 0.0
    steps: int = STEPS


class Calibration:
    """The factors of all models, by upstream and model. Kept in the process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._models: OrderedDict[tuple[str, str], _Observed] = OrderedDict()

    def wants(self, upstream: str, model: str) -> bool:
        """Whether another observation would be of use now."""
        seen = self._models.get((upstream, model))
        return seen is None or self._clock() >= seen.next

    def note(self, upstream: str, model: str, counted: int, reported: int) -> None:
        """Take in what was counted here for a request, and what the upstream reported for it, in tokens each."""
        if counted <= LEAST_COUNTED:
            return
        ratio = reported / counted
        if not RATIO_BOUNDS[0] <= ratio <= RATIO_BOUNDS[1]:
            return  # no count of the same prompt: some report what their cache did not hold, some report nothing
        seen = self._models.setdefault((upstream, model), _Observed())
        self._models.move_to_end((upstream, model))
        if len(self._models) > MODELS:
            self._models.popitem(last=False)
        seen.ratios.append(ratio)
        if len(seen.ratios) == OBSERVATIONS:
            seen.next = self._clock() + PAUSE
        if len(seen.ratios) >= LEAST_OBSERVATIONS:
            seen.steps = _stepped(_estimate(seen.ratios), seen.steps)

    def factor(self, upstream: str, model: str) -> float:
        """The upstream's tokens per token counted here, rather too high than too low; 1 as long as nothing is known."""
        seen = self._models.get((upstream, model))
        # A step beside 1 is within what differs from one conversation to the next.
        return 1.0 if seen is None or abs(seen.steps - STEPS) <= 1 else seen.steps / STEPS


def _estimate(ratios: deque[float]) -> float:
    """The 75th percentile, so that a few odd ones do not matter."""
    return sorted(ratios)[int(0.75 * (len(ratios) - 1))]


def _stepped(estimate: float, steps: int) -> int:
    """The step nearest to an estimate, or the one in force unless the estimate is half a step outside of it."""
    low, high = BOUNDS
    wanted = min(max(estimate, low), high) * STEPS
    return steps if abs(wanted - steps) <= 1 else round(wanted)


class Tail:
    """The last bytes of an answer, for the usage that stands there."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque(maxlen=TAIL_CHUNKS)

    def add(self, chunk: bytes) -> None:
        """Keep a chunk as long as it is among the last ones."""
        if len(chunk) > TAIL_BYTES:
            self._chunks.clear()
            chunk = chunk[-TAIL_BYTES:]
        self._chunks.append(chunk)

    def prompt_tokens(self) -> int | None:
        """The size of the prompt as the upstream reports it; ``None`` where it does not, or not near the end.

        In a string quotation marks are escaped, so ``"usage":`` with bare ones is a field. It is the answer's own only
        if the object it stands in is the outermost one: nothing may follow on it but the next line of a stream.
        """
        text = b"".join(self._chunks).decode("utf-8", "replace")
        for match in list(_USAGE.finditer(text))[: -_TRIED - 1 : -1]:
            rest = '{"usage":' + text[match.end() :]
            try:
                value, end = _decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                continue
            tokens = value["usage"].get("prompt_tokens")
            if _END.match(rest, end) and isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0:
                return tokens
        return None
