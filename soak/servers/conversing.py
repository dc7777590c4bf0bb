"""Have conversations that grow over the window, with the official client."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import openai

from soak.servers.engines import MODEL
from soak.servers.shapes import Shapes
from soak.servers.talk import TOOL, Speaker

SHORT = 3
"""Tokens. A response that is cut at this length or earlier had no space in the window."""

GIVES_UP = 3
"""Consecutive failures after which a conversation ends."""

USER_WORDS = (20, 110)
RESULT_WORDS = (40, 260)

RESUMED = 0.8
"""Share of a resumed chat that its first request already has."""

Kind = Literal["chat", "agent", "resumed"]


@dataclass(frozen=True, slots=True)
class Habit:
    """The behavior of a client.

    An agent has tools and sends their results. A resumed chat begins with most of its history. ``most`` is the
    response's limit in tokens.
    """

    kind: Kind
    stream: bool
    most: int | None


KINDS: tuple[Kind, ...] = ("chat", "agent", "resumed")
HABITS = [Habit(kind, stream, most) for kind in KINDS for stream in (False, True) for most in (None, 128)]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request and its response.

    ``error`` is empty without an error. ``verdict`` and ``retries`` are from the proxy's headers. ``tokens`` is the
    length of the response that the client can see.
    """

    error: str
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    verdict: str = ""
    retries: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Tally:
    """The counts of a client.

    ``empty`` counts responses without content, ``cut`` those cut within ``SHORT`` tokens, and ``broken`` streams
    without a finish reason. ``messages`` has the errors. ``slowest`` is in seconds.
    """

    turns: int = 0
    errors: int = 0
    empty: int = 0
    cut: int = 0
    broken: int = 0
    compacted: int = 0
    retries: int = 0
    slowest: float = 0.0
    messages: Shapes = field(default_factory=Shapes)

    def add(self, turn: Turn) -> None:
        """Count a turn."""
        self.turns += 1
        self.retries += turn.retries
        self.compacted += turn.verdict == "compacted"
        self.slowest = max(self.slowest, turn.seconds)
        if turn.error:
            self.errors += 1
            self.messages.add(turn.error)
            return
        self.broken += turn.finish_reason is None
        self.empty += not turn.text
        self.cut += bool(turn.text) and turn.finish_reason == "length" and turn.tokens <= SHORT

    @property
    def fine(self) -> bool:
        """Return whether every turn got a complete response."""
        return not (self.errors or self.empty or self.broken)


def converse(client: openai.OpenAI, habit: Habit, seed: int, words: int, tally: Tally) -> None:
    """Have a conversation of at least ``words`` words. Messages of failed turns stay in it."""
    speaker = Speaker(seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are helpful and brief."}]
    while habit.kind == "resumed" and _words(messages) < RESUMED * words:
        messages.append({"role": "user", "content": speaker.prose(speaker.length(*USER_WORDS))})
        messages.append({"role": "assistant", "content": speaker.prose(speaker.length(*USER_WORDS))})
    failures = 0
    while _words(messages) < words and failures < GIVES_UP:
        if habit.kind != "agent" or len(messages) == 1 or (seed + len(messages)) % 5 == 0:
            messages.append({"role": "user", "content": speaker.prose(speaker.length(*USER_WORDS))})
        else:
            messages += speaker.exchange(speaker.length(*RESULT_WORDS))
        turn = ask(client, habit, messages)
        tally.add(turn)
        failures = 0 if turn.text else failures + 1
        if turn.text:
            messages.append({"role": "assistant", "content": turn.text})


def _words(messages: list[dict[str, Any]]) -> int:
    return sum(len(str(message["content"]).split()) for message in messages)


def ask(client: openai.OpenAI, habit: Habit, messages: list[dict[str, Any]]) -> Turn:
    """Send a turn."""
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "stream": habit.stream}
    if habit.most is not None:
        body["max_tokens"] = habit.most
    if habit.kind == "agent":
        body["tools"] = [TOOL]
    start = time.perf_counter()
    try:
        answer = client.chat.completions.with_raw_response.create(**body)
        parsed = answer.parse()
        text, tokens, reason = _streamed(parsed) if habit.stream else _whole(parsed)
    except (openai.APIError, httpx.TransportError) as error:  # The client doesn't wrap the latter during a stream.
        return Turn(f"{type(error).__name__}: {error}"[:400], seconds=time.perf_counter() - start)
    return Turn(
        "",
        text,
        tokens,
        reason,
        answer.headers.get("x-compaction", ""),
        int(answer.headers.get("x-compaction-retries", "0")),
        time.perf_counter() - start,
    )


def _whole(answer: Any) -> tuple[str, int, str | None]:
    choice = answer.choices[0]
    return choice.message.content or "", answer.usage.completion_tokens, choice.finish_reason


def _streamed(events: Any) -> tuple[str, int, str | None]:
    """Return the text, the number of its chunks (about one per token), and the finish reason."""
    parts, reason = [], None
    for event in events:
        for choice in event.choices:
            if choice.delta.content:
                parts.append(choice.delta.content)
            reason = choice.finish_reason or reason
    return "".join(parts), len(parts), reason
