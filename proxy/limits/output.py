"""Lower the requested output if input and output share a window and the conversation needs the room.

Clients often request the maximum output of a model and use little of it. Reserving all of it would leave the
conversation only a part of the window.
"""

from __future__ import annotations

from typing import Protocol

from proxy.limits.learned import LearnedLimit
from proxy.limits.profiles import Profile

SENSIBLE_PART = 8
"""The window divided by this is enough room for an answer, ..."""

SENSIBLE_AT_LEAST = 256
"""... but at least this many tokens."""

CAUTION_PART = 100
"""The prompt divided by this is the margin next to a lowered output, because counts differ."""


class StatesOutput(Protocol):
    """A request: its bytes, and its maximum output in tokens."""

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
    """Return the lowered output for a prompt, both in the upstream's tokens, or ``None`` to keep the stated output.

    The proxy keeps it if prompt and output fit, or if the prompt is so long that too little room is left.
    """
    if prompt + asked <= window or prompt > window - min(asked, _usable_output(window)):
        return None
    return max(1, window - prompt - prompt // CAUTION_PART)


def _usable_output(window: int) -> int:
    return max(window // SENSIBLE_PART, SENSIBLE_AT_LEAST)
