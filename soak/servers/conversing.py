"""Conversations that grow over the window, held by the official client."""

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
"""Tokens; an answer that is cut off by then had no room."""

GIVES_UP = 3
"""After so many failures in a row nobody goes on with a conversation."""

USER_WORDS = (20, 110)
RESULT_WORDS = (40, 260)

RESUMED = 0.8
"""Share of a resumed chat that was said before."""

Kind = Literal["chat", "agent", "resumed"]


@dataclass(frozen=True, slots=True)
class Habit:
    """How a client asks: an agent has tools, and sends their results; a resumed chat comes with most of its history at
    once. ``most`` is the answer's limit in tokens."""

    kind: Kind
    stream: bool
    most: int | None


KINDS: tuple[Kind, ...] = ("chat", "agent", "resumed")
HABITS = [Habit(kind, stream, most) for kind in KINDS for stream in (False, True) for most in (None, 128)]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and what came of it.

    ``error`` is empty where there was none. ``verdict`` and ``retries`` are what the proxy says, ``tokens`` those that
    were written, as far as the client sees.
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
    """What a client saw of its turns: errors, answers without content, those cut within ``SHORT`` tokens, and streams
    that ended without a reason. ``told`` are the errors; the slowest turn is in seconds."""

    turns: int = 0
    errors: int = 0
    empty: int = 0
    cut: int = 0
    broken: int = 0
    compacted: int = 0
    retries: int = 0
    slowest: float = 0.0
    told: Shapes = field(default_factory=Shapes)

    def note(self, turn: Turn) -> None:
        """Count a turn."""
        self.turns += 1
        self.retries += turn.retries
        self.compacted += turn.verdict == "compacted"
        self.slowest = max(self.slowest, turn.seconds)
        if turn.error:
            self.errors += 1
            self.told.note(turn.error)
            return
        self.broken += turn.finish_reason is None
        self.empty += not turn.text
        self.cut += bool(turn.text) and turn.finish_reason == "length" and turn.tokens <= SHORT

    @property
    def fine(self) -> bool:
        """Whether each turn was answered."""
        return not (self.errors or self.empty or self.broken)


def converse(client: openai.OpenAI, habit: Habit, seed: int, words: int, tally: Tally) -> None:
    """A conversation, until so many words were said; what fails stays in it, as it does with people who try again."""
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
        tally.note(turn)
        failures = 0 if turn.text else failures + 1
        if turn.text:
            messages.append({"role": "assistant", "content": turn.text})


def _words(messages: list[dict[str, Any]]) -> int:
    return sum(len(str(message["content"]).split()) for message in messages)


def ask(client: openai.OpenAI, habit: Habit, messages: list[dict[str, Any]]) -> Turn:
    """Take one turn."""
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
    except (openai.APIError, httpx.TransportError) as error:  # the client lets the latter through within a stream
        return Turn(f"{type(error).__name__}: {error}"[:400], seconds=time.perf_counter() - start)
    said = answer.headers
    return Turn(
        "",
        text,
        tokens,
        reason,
        said.get("x-compaction", ""),
        int(said.get("x-compaction-retries", "0")),
        time.perf_counter() - start,
    )


def _whole(answer: Any) -> tuple[str, int, str | None]:
    choice = answer.choices[0]
    return choice.message.content or "", answer.usage.completion_tokens, choice.finish_reason


def _streamed(events: Any) -> tuple[str, int, str | None]:
    """Text, pieces of it, which stand for tokens, and the reason for the end."""
    parts, reason = [], None
    for event in events:
        for choice in event.choices:
            if choice.delta.content:
                parts.append(choice.delta.content)
            reason = choice.finish_reason or reason
    return "".join(parts), len(parts), reason
