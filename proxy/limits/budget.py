"""Compute the input budget of a request from its model's profile, its reserved output, and learned limits.

Clients often request the maximum output of a model and use little of it. Reserving all of it would leave the
conversation only a part of a window that input and output share. So the proxy may lower the requested output.
"""

from __future__ import annotations

from proxy.compaction.settings import Clause
from proxy.limits.learned import SMALLEST_PART, LearnedLimit
from proxy.limits.profiles import Profile

# If input and output share a window, reserve room for the answer even if the request states no output. Servers accept a
# prompt that fills the window and answer with the one to three tokens that are left. The trigger leaves far more room;
# the reserve matters for the rare request that barely fits.
RESERVE_PART = 32
RESERVE_AT_LEAST = 512

SENSIBLE_PART = 8  # the window divided by this is enough room for an answer, but at least the next number of tokens
SENSIBLE_AT_LEAST = 256  # tokens that an answer needs in any window
THINKING_PART = 4  # thinking keeps its stated budget if it and the answer take at most this part of the window
LEAST_THINKING = 1_024  # the smallest budget for thinking that Anthropic accepts
CAUTION_PART = 100  # the prompt divided by this is the margin next to a lowered output, because counts differ


def reserved_output(
    profile: Profile, asked: int | None, policy: Clause | None, learned: LearnedLimit | None = None
) -> int:
    """Return the tokens of the known or learned window to reserve for the answer."""
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
    """Return the input budget of a request, in tokens as counted here, or ``None`` if unknown.

    ``factor`` is the upstream's tokens per token counted here. Profiles are in the upstream's tokens.
    """
    stated = _bounds(profile.context_window, profile.max_input_tokens, reserved)
    measured = _bounds(learned.total, learned.input, reserved) if learned else []
    return min([int(bound / factor) for bound in stated] + measured, default=None)


def _bounds(total: int | None, most_input: int | None, reserved: int) -> list[int]:
    bounds = [max(total - reserved, total // SMALLEST_PART)] if total else []
    return [*bounds, most_input] if most_input else bounds


def known_window(profile: Profile, learned: LearnedLimit | None, factor: float) -> int | None:
    """Return the smaller of the published and the learned window, in the upstream's tokens."""
    learned_window = int(learned.total * factor) if learned is not None and learned.total else None
    return min((window for window in (profile.context_window, learned_window) if window), default=None)


def may_lower(stated: int | None, setting: str) -> bool:
    """Return whether the proxy may lower the output that a request states. ``setting`` is the policy's ``output``."""
    return setting != "keep" and stated is not None


def output_reserve(
    window: int | None, reserved: int, most: int | None = None, thinking: int = 0, fixed: int = 0
) -> int:
    """Return the tokens that the prompt leaves free for the answer.

    ``window`` is the known one if the proxy may lower the output, else ``None``. ``reserved`` is the output that the
    request reserves, and ``most`` the model's largest output (``None``: unknown). All are in tokens. If the proxy may
    lower the output, the result doesn't depend on ``reserved``: an application that changes ``max_tokens`` from turn to
    turn keeps its checkpoints.

    ``thinking`` is the tokens of the output that the request reserves for thinking. They stay free if the window is
    large enough, because another budget for thinking would break the prompt cache. ``fixed`` always stays free.
    """
    if window is None:
        return reserved
    usable = _usable_output(window, thinking)
    if thinking:
        whole = max(usable, thinking + min(usable, reserved - thinking))
        usable = whole if whole <= window // THINKING_PART else usable
    return _above(fixed, usable, reserved, most)


def clamp_output(
    window: int, asked: int, prompt: int, most: int | None = None, thinking: int = 0, fixed: int = 0
) -> int | None:
    """Return the lowered output for a prompt, both in the upstream's tokens, or ``None`` to keep the stated output.

    The proxy keeps it if prompt and output fit, or if the prompt is so long that too little room is left. ``most``,
    ``thinking``, and ``fixed`` are as in ``output_reserve``.
    """
    usable = _above(fixed, _usable_output(window, thinking), asked, most)
    if prompt + asked <= window or prompt > window - min(asked, usable):
        return None
    return enough(max(1, window - prompt - prompt // CAUTION_PART), thinking, fixed)


def enough(lowered: int, thinking: int, fixed: int) -> int | None:
    """Return a lowered output, or ``None`` if it doesn't exceed the least budget for thinking."""
    return None if lowered <= max(fixed, LEAST_THINKING if thinking else 0) else lowered


def lower_thinking(thinking: int, output: int) -> int:
    """Return the budget for thinking in a lowered output: a power of two, which seldom breaks the prompt cache."""
    if thinking < output:
        return thinking
    return max(LEAST_THINKING, 1 << (max(output // 2, 1).bit_length() - 1))


def _above(fixed: int, usable: int, asked: int, most: int | None) -> int:
    """Return the output that must stay possible: the answer's next to fixed thinking, or the model's largest."""
    if fixed:
        return max(usable, min(asked, fixed + usable))
    return usable if most is None else min(usable, most)


def _usable_output(window: int, thinking: int = 0) -> int:
    return max(window // SENSIBLE_PART, 2 * LEAST_THINKING if thinking else SENSIBLE_AT_LEAST)
