"""Measure the tokens that the cheap stages remove from a conversation without a summary."""

from __future__ import annotations

from dataclasses import dataclass

from bench.quality.conversations import Conversation
from bench.quality.engine import Engine
from proxy.config import Policy

WINDOW = 262_144
"""Recorded sessions fit this window, so only the stages act."""

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
"""The default stages, for all tools and at any size, without summaries."""


@dataclass(frozen=True)
class Alone:
    """Tokens of a whole conversation: original, sent, and with every message reduced."""

    case: str
    before: int
    after: int
    least: int


async def alone(engine: Engine, conversation: Conversation) -> Alone:
    """Measure a whole conversation under ``POLICY``."""
    explained = await engine.explain(conversation, WINDOW, POLICY)
    if not {*explained.steps} <= {"duplicates", "truncate_args", "evict_results", "media"}:
        raise ValueError(f"the engine did more than the stages: {', '.join(explained.steps)}")
    least = await engine.reduced(conversation, WINDOW, POLICY)
    return Alone(conversation.name, explained.before, explained.after, least)
