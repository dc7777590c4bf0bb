"""Generate conversations with a fact in every message. They're the same in every run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

_LETTERS, _DIGITS = "ABCDEFGHJKLMNPQRSTUVWXYZ", "23456789"
_TEXT = (
    "the build failed again because a comma was missing in the file that we changed before lunch while nobody looked "
    "at the log and so the next step would be to open it read what it says compare both sides ask whoever wrote them "
    "then decide whether to keep this or return to an older way of doing things without breaking what works today"
)
_WORDS = _TEXT.split()
_TOOLS = ("read_file", "run", "search", "write_file")


@dataclass(frozen=True)
class Conversation:
    """The conversation of an application. ``facts`` has the index of the message that contains each fact."""

    name: str
    messages: list[Message]
    facts: dict[str, int] = field(default_factory=dict)

    def requests(self) -> list[int]:
        """Return the number of messages of each request: all before an answer of the assistant, and finally all.

        If two answers follow each other, no request ends between them.
        """
        roles = [message["role"] for message in self.messages]
        ends = [i for i in range(1, len(roles)) if roles[i] == "assistant" != roles[i - 1]]
        return ends if roles[-1] == "assistant" else [*ends, len(roles)]


@dataclass
class Outcome:
    """The prompts as indexes into ``messages``, which has every message once.

    ``reads`` has the tokens of each request for a summary. ``archived`` has the archived messages of each id that a
    prompt names, or is ``None`` if the engine has no archive.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    archived: dict[str, list[dict[str, Any]]] | None = None


class _Writer:
    """Write messages and store the facts in them."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.messages: list[Message] = []
        self.facts: dict[str, int] = {}

    def text(self, low: int, high: int, *, line: int = 12) -> str:
        """Return ``low`` to ``high`` words in lines, with a fact among them. Low numbers are more frequent."""
        number = int(low * (high / low) ** self.random.random())
        words = self.random.choices(_WORDS, k=number)
        words.insert(self.random.randrange(number + 1), self._fact())
        return "\n".join(" ".join(words[i : i + line]) for i in range(0, len(words), line))

    def add(self, role: str, content: str | None, **more: Any) -> None:
        self.messages.append({"role": role, "content": content, **more})

    def exchange(self, most_calls: int, low: int, high: int) -> None:
        """Add a message with tool calls and the results, with ``low`` to ``high`` words each."""
        calls: list[tuple[str, str, dict[str, str]]] = []
        content = self.text(8, 30)
        for _ in range(self.random.randint(1, most_calls)):
            name = self.random.choice(_TOOLS)
            arguments = {"path": f"src/{self.random.choice(_WORDS)}/{self.random.choice(_WORDS)}.py"}
            if name == "write_file":
                arguments["content"] = " ".join(self.random.choices(_WORDS, k=self.random.randint(50, 500)))
            calls.append((f"call_{len(self.messages)}_{len(calls)}", name, arguments))
        self.add("assistant", content, tool_calls=[_call(*call) for call in calls])
        for id_, name, _ in calls:
            text = self.text(3, 6) if name == "write_file" else self.text(low, high)
            self.add("tool", text, tool_call_id=id_)

    def _fact(self) -> str:
        letters = [self.random.choice(_LETTERS) for _ in range(3)] + [self.random.choice(_DIGITS) for _ in range(2)]
        self.random.shuffle(letters)
        fact = "FACT-" + "".join(letters)
        if fact in self.facts:
            return self._fact()
        self.facts[fact] = len(self.messages)
        return fact


def _call(id_: str, name: str, arguments: dict[str, str]) -> Message:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def tool_loop(seed: int, words: int) -> Conversation:
    """Return a conversation of about ``words`` words: one user message, then tool calls."""
    writer = _Writer(f"tool loop {seed}")
    writer.add("system", "You are an agent that repairs software. Work until it is done.")
    writer.add("user", writer.text(60, 150))
    _fill(writer, words, lambda: writer.exchange(3, 40, 1500))
    return Conversation(f"tool loop {seed}", writer.messages, writer.facts)


def multi_turn(seed: int, words: int) -> Conversation:
    """Return a conversation of about ``words`` words: user and assistant, with a tool call every few turns."""
    writer = _Writer(f"multi-turn {seed}")
    writer.add("system", "You are a helpful assistant.")

    def turn() -> None:
        writer.add("user", writer.text(8, 80))
        if writer.random.random() < 0.2:
            writer.exchange(1, 40, 300)
        writer.add("assistant", writer.text(40, 300))

    _fill(writer, words, turn)
    writer.add("user", writer.text(8, 80))
    return Conversation(f"multi-turn {seed}", writer.messages, writer.facts)


def _fill(writer: _Writer, words: int, step: Callable[[], None]) -> None:
    written = 0
    while written < words:
        start = len(writer.messages)
        step()
        written += sum(len(str(message).split()) for message in writer.messages[start:])


SHAPES: dict[str, Callable[[int, int], Conversation]] = {"tool loop": tool_loop, "multi-turn": multi_turn}
