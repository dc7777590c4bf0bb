"""The answers of the stand-in upstream: scripted ones, and summaries of the lines that contain facts."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from proxy.demo.counting import PER_TOOL_CALL, first_tokens, text_tokens
from proxy.http import sse

WORDS_PER_CHUNK = 3
ARGUMENT_CHARACTERS_PER_CHUNK = 16


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call. ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str

    def message_part(self) -> dict[str, Any]:
        """Return the call in the format of an assistant message."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply of the stand-in.

    If ``finish_reason`` is omitted, it follows from the content. ``delay`` is the time in seconds before the response
    headers, ``pause`` the time before each chunk of a stream.

    The stand-in sends ``error`` instead of the answer: a mapping as JSON, a text unchanged. With a ``status`` other
    than 200, or without streaming, it is the response body. In a stream with status 200 it is an event after
    ``break_after`` chunks, or the first event if that is omitted.

    ``break_after`` drops the connection after this many chunks of a stream, or in the middle of a plain answer.

    ``cached`` is the reported number of tokens from the prompt cache.

    The reply waits until the event ``go`` is set. A stream waits after its first content, the second chunk.
    """

    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    delay: float = 0.0
    pause: float = 0.0
    status: int = 200
    error: Mapping[str, Any] | str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    break_after: int | None = None
    go: threading.Event | None = None
    cached: int | None = None

    def __post_init__(self) -> None:
        if self.status != 200 and self.error is None:
            raise ValueError(f"A reply with status {self.status} needs an error to send.")

    @property
    def reason(self) -> str:
        """Return the finish reason."""
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")

    @property
    def tokens(self) -> int:
        """Return the size of the answer in tokens."""
        calls = sum(PER_TOOL_CALL + text_tokens(call.name + call.arguments) for call in self.tool_calls)
        return text_tokens(self.content or "") + calls

    def within(self, room: int) -> Reply:
        """Limit the answer to ``room`` tokens. Cutting it changes the finish reason to ``length``."""
        if self.content is None or self.tokens <= room:
            return self
        return replace(self, content=first_tokens(self.content, room), tool_calls=(), finish_reason="length")


Responder = Callable[[dict[str, Any]], Reply]
"""Returns the reply to a request body."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A reply to one request, ready to send. ``prompt_tokens`` is the size of the request."""

    id: str
    model: str
    created: int
    reply: Reply
    prompt_tokens: int

    def usage(self) -> dict[str, Any]:
        """Return the usage of the request and its answer."""
        out, cached = self.reply.tokens, self.reply.cached
        return {
            **({} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": out,
            "total_tokens": self.prompt_tokens + out,
        }

    def whole(self) -> dict[str, Any]:
        """Return the answer as one object."""
        message: dict[str, Any] = {"role": "assistant", "content": self.reply.content, "refusal": None}
        if self.reply.tool_calls:
            message["tool_calls"] = [call.message_part() for call in self.reply.tool_calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.reply.reason}
        return self._frame("chat.completion") | {"choices": [choice], "usage": self.usage()}

    def chunks(self, *, include_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a stream. With ``include_usage``, the last chunk contains only the usage."""
        frame = self._frame("chat.completion.chunk")
        usage: dict[str, Any] = {"usage": None} if include_usage else {}
        for delta in self._deltas():
            yield frame | {"choices": [_choice(delta, None)]} | usage
        yield frame | {"choices": [_choice({}, self.reply.reason)]} | usage
        if include_usage:
            yield frame | {"choices": [], "usage": self.usage()}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _deltas(self) -> Iterator[dict[str, Any]]:
        text = self.reply.content
        yield {"role": "assistant", "content": None if text is None else "", "refusal": None}
        words = re.findall(r"\s*\S+|\s+$", text or "")
        for start in range(0, len(words), WORDS_PER_CHUNK):
            yield {"content": "".join(words[start : start + WORDS_PER_CHUNK])}
        for index, call in enumerate(self.reply.tool_calls):
            first = call.message_part() | {"function": {"name": call.name, "arguments": ""}}
            yield {"tool_calls": [{"index": index} | first]}
            for start in range(0, len(call.arguments), ARGUMENT_CHARACTERS_PER_CHUNK):
                piece = call.arguments[start : start + ARGUMENT_CHARACTERS_PER_CHUNK]
                yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def event(data: Mapping[str, Any] | str) -> bytes:
    """Format a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return sse.encode(text.encode())


def _choice(delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


# The line before the conversation in the proxy's summary requests.
TRANSCRIPT = "<transcript>"

# The first line of the message that asks the conversation's own model for notes.
NOTES = "<write_notes>"

MAX_TOKENS = 400
LINE_CHARACTERS = 240

# Patterns of facts, most important first.
FACTS = (
    re.compile(r"\b[A-Z]{2,}-\d+\b"),  # tickets
    re.compile(r"https?://\S+"),
    re.compile(r"\b(?:port|version|id|key|branch|commit)\b[\s:=]+\S*\d", re.IGNORECASE),
    re.compile(r"(?:^|[\s\"'`(=])\.{0,2}/?(?:[\w.-]+/)+[\w-]+\.\w+"),  # files
)


def is_summary_request(body: Mapping[str, Any]) -> bool:
    """Return whether a request is the proxy's summary request.

    Such a request isn't streamed. Its last message, from the user, has the line ``<transcript>`` and no tools, or
    the line ``<write_notes>``.
    """
    if body.get("stream"):
        return False
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return False
    last = messages[-1]
    lines = _text(last).splitlines()
    return last.get("role") == "user" and (NOTES in lines or (TRANSCRIPT in lines and not body.get("tools")))


def summarise(body: Mapping[str, Any]) -> Reply:
    """Return an extract of up to ``MAX_TOKENS`` tokens from the transcript of a summary request.

    It consists of lines with facts, in transcript order, with the most important kinds chosen first. If no line has a
    fact, it consists of the first lines.
    """
    *before, last = body["messages"]
    continued = NOTES in _text(last).splitlines()
    transcript = "\n".join(map(_text, before)) if continued else _text(last).split(TRANSCRIPT, 1)[1]
    # Messages in a transcript may be JSON with escaped line breaks.
    lines = list(dict.fromkeys(line.strip() for line in re.split(r"\n|\\n", transcript) if line.strip()))
    excerpts = _excerpts(lines) or {place: line[:LINE_CHARACTERS] for place, line in enumerate(lines)}
    room = MAX_TOKENS
    kept: dict[int, str] = {}
    for place, excerpt in excerpts.items():
        size = text_tokens(excerpt) + 1
        if size <= room:
            kept[place] = excerpt
            room -= size
    text = "\n".join(kept[place] for place in sorted(kept))
    return Reply(content=f"<notes>\n{text}\n</notes>" if continued else text)


def _excerpts(lines: list[str]) -> dict[int, str]:
    """Return excerpts of the lines with facts by line number, most important kinds first."""
    found: dict[int, str] = {}
    for pattern in FACTS:
        for place, line in enumerate(lines):
            match = pattern.search(line)
            if match:
                start = max(0, match.start() - LINE_CHARACTERS // 2)
                found.setdefault(place, line[start : start + LINE_CHARACTERS])
    return found


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(part["text"] for part in parts if isinstance(part, dict) and part.get("type") == "text")
