"""What the cheap stages take off a conversation where no summary is made."""

from __future__ import annotations

from dataclasses import dataclass

from bench.quality.conversations import Conversation
from bench.quality.engine import Engine
from proxy.config import Policy

WINDOW = 262_144
"""Recorded sessions fit this window whole, so that nothing but the stages acts."""

_ANYTIME = {"trigger": {"tokens": 1}}

POLICY = Policy.build(
    "stages alone",
    {
        "trigger": [],
        "duplicates": _ANYTIME,
        "truncate_args": {**_ANYTIME, "tools": ["*"]},
        "evict_results": _ANYTIME,
        "media": _ANYTIME,
    },
)
"""The stages as they are by default, but for all tools, and whenever it is worth it; never a summary."""


@dataclass(frozen=True)
class Alone:
    """Tokens of a conversation at its end: as it came, as it is sent, and were every message of it reduced."""

    case: str
    before: int
    after: int
    least: int


async def alone(engine: Engine, conversation: Conversation) -> Alone:
    """Send a conversation whole under ``POLICY``."""
    explained = await engine.explain(conversation, WINDOW, POLICY)
    if not {*explained.steps} <= {"duplicates", "arguments", "results", "media"}:
        raise ValueError(f"more than the stages acted: {', '.join(explained.steps)}")
    least = await engine.reduced(conversation, WINDOW, POLICY)
    return Alone(conversation.name, explained.before, explained.after, least)
