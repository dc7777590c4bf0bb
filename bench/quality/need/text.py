"""Read the text of messages, and find names in it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench.quality.conversations import Message
from bench.quality.engine import TOKENIZER
from proxy.dialects.chat.units import arguments_of, text_of
from proxy.tokens.text import encoding

_INSTRUCTIONS = ("system", "developer")


@dataclass(frozen=True)
class Case:
    """A history, and the names in later calls that also occur in it.

    ``scale`` multiplies windows. It's less than 1 if the history is shorter than the usual cut of its source.
    """

    id: str
    messages: list[Message]
    paths: list[str]
    idents: list[str]
    scale: float = 1.0

    def names(self, kind: str) -> set[str]:
        """Return the different names of a kind. The name of a file is the last part of its path."""
        return {path.rsplit("/", 1)[-1] for path in self.paths} if kind == "paths" else set(self.idents)


def text(messages: Iterable[Message], *, readable: bool = False) -> str:
    """Return the text of messages and the arguments of their calls, as JSON or ``readable``, without its escapes."""
    parts = []
    for message in messages:
        parts.append(text_of(message))
        for _, arguments in arguments_of(message):
            parts += [f"{key}: {value}" for key, value in values(arguments)] if readable else [arguments]
    return "\n".join(filter(None, parts))


def tokens(messages: Iterable[Message]) -> int:
    """Return the tokens of the text of messages."""
    return len(encoding(TOKENIZER).encode_ordinary(text(messages)))


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


def occurring(names: Iterable[str], history: Iterable[Message]) -> list[str]:
    """Return the different names that occur in a history, but not in its instructions."""
    instructions, said = (text(part, readable=True) for part in divided(history))
    return sorted({name for name in names if name in said and name not in instructions})
