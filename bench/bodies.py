"""The bodies of the requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import msgspec

ORDINARY = "gpt-4o-mini"
"""A model from the built-in tables."""

WINDOWS: Mapping[str, int] = {
    "bench-16k": 16_000,
    "bench-64k": 64_000,
    "bench-128k": 128_000,
    "bench-1m": 1_000_000,
    "bench-4m": 4_000_000,
}
"""Context windows in tokens. Only the benchmark's configuration has these models."""

CONVERSATION_BYTES = 1_100_000
CONVERSATION_MESSAGES = 400
SHORT_BYTES = 110_000
SHORT_MESSAGES = 40
"""A conversation with a tenth of the messages. They are as long as those of the other one."""
COLD_BYTES = 4_000_000

_SENTENCE = (
    "the request of this service reads a file and returns its value when every test has passed because no error "
    "was found in module server config timeout retry connection import return self None async def await list dict "
    "path folder build deploy release version branch commit merge review change added removed fixed broken slow fast "
    "customer order invoice total amount date number table column index query result cache memory thread process"
)
_WORDS = _SENTENCE.split()


Message = dict[str, Any]


def _items(message: Message) -> list[Message]:
    """Return the items of the Responses API for a chat message."""
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]} for call in message.get("tool_calls", ())
    ]
    return [{"role": message["role"], "content": message["content"]}, *calls]


def _blocks(message: Message) -> list[Message]:
    """Return the message of Anthropic's API for a chat message."""
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return [{"role": "user", "content": [result]}]
    uses = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": msgspec.json.decode(call["function"]["arguments"]),
        }
        for call in message.get("tool_calls", ())
    ]
    return [{"role": message["role"], "content": [{"type": "text", "text": message["content"]}, *uses]}]


@dataclass(frozen=True, slots=True)
class Api:
    """The bodies of one API. ``convert`` returns its form of a chat message. ``system`` names the field for the first.

    ``model`` is one from the built-in tables.
    """

    name: str
    path: str
    model: str = ORDINARY
    listed: str = "messages"
    system: str = ""
    convert: Callable[[Message], list[Message]] = lambda message: [message]
    fields: Mapping[str, object] = field(default_factory=dict)

    def small(self, *, user: str | None = None, stream: bool = False) -> bytes:
        """Return a short question of 0.3 kB. ``user`` selects how the benchmark's upstream responds."""
        fields: dict[str, object] = {"stream": stream, **self.fields}
        if user is not None:
            fields["user"] = user
        return self._body(self.model, fields, QUESTION)

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
        return self._body(model, self.fields, messages(size, count, seed=seed, last=last))

    def turns(
        self, model: str, size: int = CONVERSATION_BYTES, count: int = CONVERSATION_MESSAGES, *, conversations: int = 1
    ) -> Iterator[bytes]:
        """Yield bodies of conversations in turn. Each body has a new last message, and all others are as before."""
        place = "0" * 12
        made = [
            self.conversation(model, size, count, seed=1_000 + seed, last=f"Go on with {place}.").partition(
                place.encode()
            )
            for seed in range(conversations)
        ]
        for number, (before, _, after) in enumerate(cycle(made)):
            yield b"%b%012d%b" % (before, number, after)

    def _body(self, model: str, fields: Mapping[str, object], chat: Sequence[Message]) -> bytes:
        head = {self.system: chat[0]["content"]} if self.system else {}
        said = [item for message in chat[len(head) :] for item in self.convert(message)]
        return msgspec.json.encode({"model": model, **fields, **head, self.listed: said})


QUESTION: Sequence[Message] = (
    {"role": "system", "content": "You are a helpful assistant. Answer in one sentence."},
    {"role": "user", "content": "What is the difference between a reverse proxy and a forward proxy?"},
)

APIS: Mapping[str, Api] = {
    "chat": Api("chat", "/v1/chat/completions"),
    "responses": Api("responses", "/v1/responses", listed="input", system="instructions", convert=_items),
    "messages": Api(
        "messages", "/v1/messages", "claude-sonnet-4-5", system="system", convert=_blocks, fields={"max_tokens": 1_000}
    ),
}
CHAT = APIS["chat"]
small, conversation = CHAT.small, CHAT.conversation


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
