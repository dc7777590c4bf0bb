"""The bodies of the requests."""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec

ORDINARY = "gpt-4o-mini"
"""A model from the built-in tables."""

WINDOWS: Mapping[str, int] = {"bench-128k": 128_000, "bench-1m": 1_000_000, "bench-4m": 4_000_000}
"""Context windows in tokens. Only the benchmark's configuration has these models."""

CONVERSATION_BYTES = 1_100_000
CONVERSATION_MESSAGES = 400
COLD_BYTES = 4_000_000

_SENTENCE = (
    "the request of this service reads a file and returns its value when every test has passed because no error "
    "was found in module server config timeout retry connection import return self None async def await list dict "
    "path folder build deploy release version branch commit merge review change added removed fixed broken slow fast "
    "customer order invoice total amount date number table column index query result cache memory thread process"
)
_WORDS = _SENTENCE.split()


def small(*, user: str | None = None, stream: bool = False) -> bytes:
    """Return a short question of 0.3 kB. ``user`` selects how the benchmark's upstream responds."""
    body: dict[str, object] = {"model": ORDINARY, "stream": stream}
    if user is not None:
        body["user"] = user
    body["messages"] = [
        {"role": "system", "content": "You are a helpful assistant. Answer in one sentence."},
        {"role": "user", "content": "What is the difference between a reverse proxy and a forward proxy?"},
    ]
    return msgspec.json.encode(body)


def conversation(model: str, size: int = CONVERSATION_BYTES, *, seed: int = 1) -> bytes:
    """Return an agent's conversation of about ``size`` bytes, with a task every 40 messages and tool calls in between.

    The same ``seed`` gives the same bytes. Conversations with different seeds have no message in common.
    """
    return msgspec.json.encode({"model": model, "messages": messages(size, seed=seed)})


def messages(size: int, *, seed: int = 1) -> list[dict[str, object]]:
    """Return the messages of ``conversation``."""
    rng = random.Random(seed)
    # A result takes most of each pair of messages. The rest of a pair is about 400 bytes.
    length = max(100, size * 2 // CONVERSATION_MESSAGES - 400)
    text = prose(rng, 4 * length)
    made: list[dict[str, object]] = [{"role": "system", "content": f"You work on a code base. Session {seed}."}]
    for number in range(0, CONVERSATION_MESSAGES - 2, 2):
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
    return [*made, {"role": "user", "content": "Go on."}]


def prose(rng: random.Random, length: int) -> str:
    """Return ``length`` characters of words that developers use."""
    words: list[str] = []
    size = 0
    while size < length:
        word = rng.choice(_WORDS) if rng.random() < 0.9 else f"{rng.choice(_WORDS)}_{rng.randrange(1000)}()"
        words.append(word + ("\n" if rng.random() < 0.08 else ""))
        size += len(words[-1]) + 1
    return " ".join(words)[:length]
