"""The bodies of the requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import msgspec

from tests.kit.three_apis import PATHS, request

ORDINARY = "gpt-4o-mini"
"""A model from the built-in tables."""

WINDOWS: Mapping[str, int] = {
    "bench-16k": 16_000,
    "bench-64k": 64_000,
    "bench-128k": 128_000,
    "bench-1m": 1_000_000,
}
"""Context windows in tokens. Only the benchmark's configuration has these models."""

CONVERSATION_BYTES = 1_100_000
CONVERSATION_MESSAGES = 400
SHORT_BYTES = 110_000
SHORT_MESSAGES = 40
"""A conversation with a tenth of the messages. They are as long as those of the other one."""

_SENTENCE = (
    "the request of this service reads a file and returns its value when every test has passed because no error "
    "was found in module server config timeout retry connection import return self None async def await list dict "
    "path folder build deploy release version branch commit merge review change added removed fixed broken slow fast "
    "customer order invoice total amount date number table column index query result cache memory thread process"
)
_WORDS = _SENTENCE.split()


Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Api:
    """The bodies of one API. ``model`` is one from the built-in tables."""

    name: str
    model: str = ORDINARY

    @property
    def path(self) -> str:
        """The path of the API."""
        return PATHS[self.name]

    def small(self) -> bytes:
        """Return a short question of 0.3 kB."""
        return self._body(self.model, QUESTION)

    def conversation(
        self,
        model: str,
        size: int = CONVERSATION_BYTES,
        count: int = CONVERSATION_MESSAGES,
        *,
        seed: int = 1,
        last: str = "Go on.",
    ) -> bytes:
        """Return an agent's conversation of about ``size`` bytes, with a task every 40 messages and tool calls between.

        The same ``seed`` gives the same bytes. Conversations with different seeds have only the last message in common.
        """
        return self._body(model, messages(size, count, seed=seed, last=last))

    def turns(
        self, model: str, size: int = CONVERSATION_BYTES, count: int = CONVERSATION_MESSAGES, *, conversations: int = 1
    ) -> Iterator[bytes]:
        """Yield bodies of conversations in turn. Each body has a new last message, and all others are as before."""
        place, seeds = "0" * 12, range(1_000, 1_000 + conversations)
        whole = (self.conversation(model, size, count, seed=seed, last=f"Go on with {place}.") for seed in seeds)
        made = [body.partition(place.encode()) for body in whole]
        for number, (before, _, after) in enumerate(cycle(made)):
            yield b"%b%012d%b" % (before, number, after)

    def _body(self, model: str, chat: Sequence[Message]) -> bytes:
        # A client's library writes JSON without the untidy spaces of the tests' requests.
        return msgspec.json.encode(msgspec.json.decode(request(self.name, model, chat, stream=False)))


QUESTION: Sequence[Message] = (
    {"role": "system", "content": "You are a helpful assistant. Answer in one sentence."},
    {"role": "user", "content": "What is the difference between a reverse proxy and a forward proxy?"},
)

APIS: Mapping[str, Api] = {
    "chat": Api("chat"),
    "responses": Api("responses"),
    "messages": Api("messages", "claude-sonnet-4-5"),
}
CHAT = APIS["chat"]


def messages(size: int, count: int = CONVERSATION_MESSAGES, *, seed: int = 1, last: str = "Go on.") -> list[Message]:
    """Return the chat messages of ``conversation``."""
    rng = random.Random(seed)
    # A result takes most of each pair of messages. The rest of a pair is about 400 bytes.
    length = max(100, size * 2 // count - 400)
    text = prose(rng, 4 * length)
    made: list[Message] = [{"role": "system", "content": f"You work on a code base. Session {seed}."}]
    for number in range(0, count - 2, 2):
        if number % 40 == 0:
            made.append({"role": "user", "content": f"Task {seed}.{number}: {prose(rng, 300)}"})
        call = f"call_{seed}_{number}"
        path = f"src/{rng.choice(_WORDS)}/{rng.choice(_WORDS)}_{number}.py"
        function = {"name": "read_file", "arguments": msgspec.json.encode({"path": path}).decode()}
        calls = [{"id": call, "type": "function", "function": function}]
        made.append({"role": "assistant", "content": f"I read {path}.", "tool_calls": calls})
        start = rng.randrange(3 * length)
        result = f"{seed}.{number}\n{text[start : start + length]}"
        made.append({"role": "tool", "tool_call_id": call, "content": result})
    return [*made, {"role": "user", "content": last}]


def prose(rng: random.Random, length: int) -> str:
    """Return ``length`` characters of words that developers use."""
    words: list[str] = []
    size = 0
    while size < length:
        word = rng.choice(_WORDS) if rng.random() < 0.9 else f"{rng.choice(_WORDS)}_{rng.randrange(1000)}()"
        words.append(word + ("\n" if rng.random() < 0.08 else ""))
        size += len(words[-1]) + 1
    return " ".join(words)[:length]
