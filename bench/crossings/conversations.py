"""Conversations that grow turn by turn."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Literal

import msgspec

from bench import bodies
from proxy.dialects.chat.counting import ChatCounter
from proxy.limits.profiles import Profile

MODEL = "bench"

_FRAMING = 8
"""Tokens of a message without the text quoted in it."""

Kind = Literal["agent", "chat"]


@dataclass(frozen=True, slots=True)
class Habits:
    """How a kind of conversation proceeds.

    ``growth`` is the share of the window that a turn adds, and ``pause`` the seconds before the next turn. Both are
    ranges.
    """

    growth: tuple[float, float]
    pause: tuple[float, float]


HABITS: dict[Kind, Habits] = {
    "agent": Habits(growth=(0.005, 0.02), pause=(3.0, 8.0)),
    "chat": Habits(growth=(0.01, 0.01), pause=(10.0, 20.0)),
}


class Growing:
    """A conversation of ``turns`` turns for a model with ``window`` tokens.

    It fills the share ``begun`` of the window before its first turn. Equal seeds give equal conversations. Different
    seeds give conversations without a common message.
    """

    def __init__(self, kind: Kind, window: int, *, turns: int, seed: int, begun: float) -> None:
        self.turns = turns
        self._kind = kind
        self._window = window
        self._seed = seed
        self._habits = HABITS[kind]
        self._rng = random.Random(seed)
        self._number = 0
        self._messages: list[bytes] = []
        self._add({"role": "system", "content": f"You help with a code base. Conversation {seed}."})
        self._add({"role": "user", "content": f"Task {seed}: {self._excerpt(100)}"})
        while begun > 0:
            begun -= self.grow()

    @property
    def body(self) -> bytes:
        """The body of the next request."""
        return b'{"model":"%b","messages":[%b]}' % (MODEL.encode(), b",".join(self._messages))

    def pause(self) -> float:
        """Return the seconds until the next turn."""
        return self._rng.uniform(*self._habits.pause)

    def grow(self) -> float:
        """Add the messages of a turn. Return their share of the window."""
        share = self._rng.uniform(*self._habits.growth)
        tokens = share * self._window
        self._number += 1
        if self._kind == "agent":
            self._call(tokens)
        else:
            for role, part in (("assistant", 0.7), ("user", 0.3)):
                text = self._excerpt(tokens * part - _FRAMING)
                self._add({"role": role, "content": f"Turn {self._number}: {text}"})
        return share

    def _call(self, tokens: float) -> None:
        name = f"call_{self._seed}_{self._number}"
        arguments = msgspec.json.encode({"path": f"src/part_{self._number}.py"}).decode()
        calls = [{"id": name, "type": "function", "function": {"name": "read_file", "arguments": arguments}}]
        call = {"role": "assistant", "content": None, "tool_calls": calls}
        self._add(call)
        text = self._excerpt(tokens - _counter().message(call) - _FRAMING)
        self._add({"role": "tool", "tool_call_id": name, "content": text})

    def _add(self, message: object) -> None:
        self._messages.append(msgspec.json.encode(message))

    def _excerpt(self, tokens: float) -> str:
        text, characters = _text()
        length = max(1, int(tokens * characters))
        start = self._rng.randrange(len(text) - length)
        return text[start : start + length]


@cache
def _text() -> tuple[str, float]:
    """Return a text to quote from, and its characters per token."""
    text = bodies.prose(random.Random(0), 200_000)
    return text, len(text) / _counter().text(text)


@cache
def _counter() -> ChatCounter:
    return ChatCounter(Profile(model=MODEL, tokenizer="o200k_base"))
