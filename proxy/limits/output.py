"""Room for the answer: where input and output share a window, asking for less of it spares the conversation.

Clients ask for all the output that a model can give, and use little of it. Taken at their word they would leave the
conversation a part of the window only; so what they ask for is lowered where the conversation needs the room.
"""

from __future__ import annotations

from typing import Protocol

from proxy.limits.learned import LearnedLimit
from proxy.limits.profiles import Profile

SENSIBLE_PART = 8
"""With this part of the window an answer has room enough, ..."""

SENSIBLE_AT_LEAST = 256
"""... and with no fewer tokens than these."""

CAUTION_PART = 100
"""This part of the prompt is left over beside a lowered output: counts differ."""


class StatesOutput(Protocol):
    """A request: its bytes, and the output that it asks for at most, in tokens."""

    @property
    def raw(self) -> bytes: ...

    @property
    def max_output(self) -> int | None: ...


def shared_window(
    profile: Profile, body: StatesOutput, setting: str, learned: LearnedLimit | None, factor: float
) -> int | None:
    """Return the window, in the upstream's tokens, if the proxy may lower the output that a request states.

    ``setting`` is the policy's ``output``, ``factor`` the upstream's tokens per token counted here.
    """
    window = profile.context_window
    if window is None or not may_lower(body, setting):
        return None
    return min(window, int(learned.total * factor)) if learned is not None and learned.total else window


def may_lower(body: StatesOutput, setting: str) -> bool:
    """Return whether a request states an output that the proxy may lower."""
    # Thinking has a budget of its own, which must stay below the stated output.
    return setting != "keep" and body.max_output is not None and b'"budget_tokens"' not in body.raw


def output_reserve(window: int | None, reserved: int, most: int | None = None) -> int:
    """Return the tokens that the prompt leaves free for the answer.

    ``window`` is ``shared_window``, ``reserved`` the output that the request reserves, and ``most`` the largest output
    of the model (``None``: unknown), all in tokens. If the proxy may lower the output, the result doesn't depend on
    ``reserved``: an application that changes ``max_tokens`` from turn to turn keeps its checkpoints.
    """
    if window is None:
        return reserved
    return _usable_output(window) if most is None else min(_usable_output(window), most)


def clamp_output(window: int, asked: int, prompt: int) -> int | None:
    """The output to ask for beside a prompt of so many of the upstream's tokens; ``None`` where it is not lowered.

    That is where both fit, and where the prompt leaves no sensible room: it is the prompt then that is too long.
    """
    if prompt + asked <= window or prompt > window - min(asked, _usable_output(window)):
        return None
    return max(1, window - prompt - prompt // CAUTION_PART)


def _usable_output(window: int) -> int:
    return max(window // SENSIBLE_PART, SENSIBLE_AT_LEAST)
