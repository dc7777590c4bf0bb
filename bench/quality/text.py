"""Read the text of messages, and cut it to a size."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from bench.quality.conversations import Conversation, Message
from bench.quality.engine import TOKENIZER, Engine
from bench.quality.langchain import MIDDLEWARE, LangChain
from proxy.dialects.chat.units import arguments_of, text_of
from proxy.tokens.text import encoding

OURS, NEWEST, LANGCHAIN = "compaction-proxy", "newest messages only", "LangChain"
"""Methods to make a prompt."""

_INSTRUCTIONS = ("system", "developer")


def text(messages: Iterable[Message], *, readable: bool = False) -> str:
    """Return the text of messages and the arguments of their calls, as JSON or ``readable``, without its escapes."""
    parts = []
    for message in messages:
        parts.append(text_of(message))
        for _, arguments in arguments_of(message):
            parts += [f"{key}: {value}" for key, value in values(arguments)] if readable else [arguments]
    return "\n".join(filter(None, parts))


def size(said: str) -> int:
    """Return the tokens of a text."""
    return len(encoding(TOKENIZER).encode_ordinary(said))


def values(arguments: str) -> list[tuple[str, str]]:
    """Return the scalars in a call's arguments, each with its key. Arguments that aren't JSON are one of them."""
    try:
        return _pairs("", json.loads(arguments))
    except ValueError:
        return [("", arguments)]


def _pairs(key: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for inner, item in value.items() for pair in _pairs(inner, item)]
    if isinstance(value, list):
        return [pair for item in value for pair in _pairs(key, item)]
    return [(key, value if isinstance(value, str) else json.dumps(value))]


def divided(history: Iterable[Message]) -> tuple[list[Message], list[Message]]:
    """Return an application's instructions, which no prompt can do without, and the other messages."""
    messages = list(history)
    instructions = [message for message in messages if message["role"] in _INSTRUCTIONS]
    return instructions, [message for message in messages if message["role"] not in _INSTRUCTIONS]


def newest(history: Sequence[Message], most: int) -> str:
    """Return the control: a history's instructions and its newest text, ``most`` tokens together."""
    instructions, said = (_encoded(text(part)) for part in divided(history))
    left = max(0, most - len(instructions))
    return "\n".join(map(encoding(TOKENIZER).decode, (instructions, said[max(0, len(said) - left) :])))


@lru_cache(64)
def _encoded(said: str) -> list[int]:
    """Cache the tokens of histories, because each of them has a control for several prompts."""
    return encoding(TOKENIZER).encode_ordinary(said)


async def last_prompts(
    engine: Engine, other: LangChain | None, conversation: Conversation, window: int
) -> dict[str, str]:
    """Return the text of the prompt by method. Every method gets the conversation as one request."""
    ours = text(await engine.last_prompt(conversation, window))
    found = {OURS: ours, NEWEST: newest(conversation.messages, size(ours))}
    if other is not None:
        whole = [len(conversation.messages)]
        found[LANGCHAIN] = text(other.last_prompt(conversation, window, MIDDLEWARE, whole))
    return found
