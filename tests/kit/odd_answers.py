"""Chat answers in the forms that servers send: the model's texts and calls, and the bytes of a stream with them."""

import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

Object = dict[str, Any]

FRAME: Object = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
USAGE: Object = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
TEXTS = ("Hello", " wörld", "\n\n", "数据", '{"x"', "}", "😀", " data: [DONE]", "\\", "\u2028", "the end.")
REASONS: dict[str, tuple[str, ...]] = {
    "stop": ("stop", "eos", "end_turn", "STOP", "COMPLETE", "tool_calls", "function_call"),
    "tool_calls": ("tool_calls", "stop", "tool_use", "function_call", "STOP", "eos"),
    "length": ("length", "max_tokens", "MAX_TOKENS", "model_length"),
    "content_filter": ("content_filter", "SAFETY", "sensitive", "refusal"),
    "error": ("error", "ERROR", "malformed_function_call", "abort", "network_error"),
}
"""Reasons that servers give, by their meaning. The first two depend on whether there are calls."""


@dataclass
class Said:
    """A model's answer. ``calls`` are names with arguments, and ``end`` is the meaning of the finish reason."""

    thinking: str = ""
    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    end: str = "stop"
    usage: tuple[int, int] | None = (9, 4)


@dataclass
class Sent:
    """The bytes of a stream. ``finished`` is the end of the frame with the finish reason.

    ``broken``: the connection is lost at the end.
    """

    body: bytes
    finished: int
    step: int = 1 << 20
    broken: bool = False


class Upstream:
    """An upstream with chat completions only, whose answers are those for the last message's text."""

    def __init__(self) -> None:
        self.app = Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])
        self.answers: dict[str, Sent | Object] = {}

    async def answer(self, request: Request) -> Response:
        """Serve one request."""
        content = (await request.json())["messages"][-1]["content"]
        answer = self.answers[content if isinstance(content, str) else content[0]["text"]]
        if isinstance(answer, Sent):
            return StreamingResponse(_parts(answer), media_type="text/event-stream")
        return Response(json.dumps(answer), media_type="application/json")


async def _parts(sent: Sent) -> AsyncIterator[bytes]:
    for start in range(0, len(sent.body), sent.step):
        yield sent.body[start : start + sent.step]
    if sent.broken:
        raise ConnectionResetError


def chunk(delta: Any, reason: Any = None, **more: Any) -> Object:
    """Return a chunk of a stream."""
    return {**FRAME, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}], **more}


def completion(message: Object, reason: Any = "stop", **more: Any) -> Object:
    """Return a whole completion."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    return {**FRAME, "object": "chat.completion", "choices": [choice], "usage": USAGE, **more}


def stream(*frames: Any, done: bool = True) -> Sent:
    """Return a stream of chunks and of frames that are bytes."""
    lines = [frame if isinstance(frame, bytes) else b"data: " + json.dumps(frame).encode() for frame in frames]
    body = b"".join(line + b"\n\n" for line in [*lines, *([b"data: [DONE]"] if done else [])])
    return Sent(body, len(body))


def odd_answer(seed: int) -> tuple[Said, Sent]:
    """Return a model's answer, and a stream in the manner of a server made up for it."""
    return _Server(random.Random(seed)).answer()


class _Server:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._reasoning = chance.choice(("reasoning_content", "reasoning", "both", "details", "part"))
        self._index = chance.choice(("right", "right", "none", "zero"))
        self._ids = chance.choice(("each", "each", "first", "none", "equal"))
        self._parts = chance.random() < 0.2
        self._objects = chance.random() < 0.2
        self._usage = chance.choice(("last", "own", "choice", "null", "none"))
        self._end = chance.choice(("\n\n", "\n\n", "\r\n\r\n"))
        self._prefix = chance.choice(("data: ", "data: ", "data:", "event: message\ndata: "))

    def answer(self) -> tuple[Said, Sent]:
        chance = self._chance
        said = Said(thinking=self._text(0.4), text=self._text(0.8))
        if chance.random() < 0.5:
            said.calls = [self._call(number) for number in range(chance.choice((1, 1, 2, 3, 9)))]
        said.end = "tool_calls" if said.calls else "stop"
        if chance.random() < 0.2:
            said.end = chance.choice(("length", "content_filter", "error"))
        said.usage = None if self._usage in ("null", "none") else (9, 4)
        frames = [chunk({"role": "assistant", **({"content": ""} if chance.random() < 0.5 else {})})]
        frames += [chunk(self._thought(piece)) for piece in self._pieces(said.thinking)]
        frames += [chunk({"content": self._content(piece)}) for piece in self._pieces(said.text)]
        frames += [chunk({"tool_calls": parts}) for parts in self._calls(said.calls)]
        if not said.calls and chance.random() < 0.1:
            frames.append({**FRAME, "choices": [{"index": 0, "message": {"content": said.text}}]})
        return said, self._sent(said, frames)

    def _sent(self, said: Said, frames: list[Object]) -> Sent:
        chance = self._chance
        last = chunk(chance.choice(({}, {}, None, {"content": ""}, {"tool_calls": None})))
        last["choices"][0]["finish_reason"] = chance.choice(REASONS[said.end])
        if self._usage in ("last", "null"):
            last["usage"] = USAGE if self._usage == "last" else None
        elif self._usage == "choice":
            last["choices"][0]["usage"] = USAGE
        body = "".join(map(self._line, frames)) + self._line(last)
        finished = len(body.encode())
        if self._usage == "own":
            body += self._line({**FRAME, "choices": [], "usage": USAGE})
        body += chance.choice((f"data: [DONE]{self._end}", f"data: [DONE]{self._end}", ""))
        raw = body.encode()
        step = chance.choice((1 << 20, 1 << 20, 1 << 20, 97, 7, 1 if len(raw) < 3_000 else 13))
        if chance.random() < 0.25:
            raw = raw[: chance.randrange(1, len(raw))]
        return Sent(raw, finished, step, broken=chance.random() < 0.1)

    def _line(self, frame: Object) -> str:
        noise = self._chance.random()
        before = {0: f": keep-alive{self._end}", 1: f"data: {json.dumps({**FRAME, 'choices': []})}{self._end}"}
        before |= {2: f"data: {json.dumps(chunk(None, content_filter_results={}))}{self._end}", 3: self._end}
        text = json.dumps(frame, ensure_ascii=self._chance.random() < 0.5)
        return before.get(int(noise * 20), "") + self._prefix + text + self._end

    def _text(self, likely: float) -> str:
        chance = self._chance
        return "".join(chance.choices(TEXTS, k=chance.randrange(1, 12))) if chance.random() < likely else ""

    def _pieces(self, text: str) -> list[str]:
        pieces = []
        while text:
            size = self._chance.randrange(1, 12)
            pieces.append(text[:size])
            text = text[size:]
        return pieces

    def _thought(self, piece: str) -> Object:
        inner = {"type": "text", "text": piece}
        forms: dict[str, Object] = {
            "both": {"reasoning_content": piece, "reasoning": piece, "content": None},
            "details": {"reasoning_details": [{"type": "reasoning.text", "text": piece, "index": 0}]},
            "part": {"content": [{"type": "thinking", "thinking": [inner]}]},
        }
        return forms.get(self._reasoning, {self._reasoning: piece})

    def _content(self, piece: str) -> Any:
        return [{"type": "text", "text": piece}] if self._parts else piece

    def _call(self, number: int) -> tuple[str, Object]:
        value = self._chance.choice((number, "a" * number, ["x", None], {"y": "}"}, "😀\n"))
        return f"f{number % 2}", {"n": number, "x": value} if self._chance.random() < 0.9 else {}

    def _calls(self, calls: list[tuple[str, Object]]) -> list[list[Object]]:
        made: list[list[Object]] = []
        for number, (name, given) in enumerate(calls):
            text = json.dumps(given)
            pieces = [text] if self._objects or self._index != "right" else self._pieces(text)
            ids = {"each": f"id_{number}", "first": f"id_{number}" if number == 0 else None, "equal": "id_0"}
            for place, piece in enumerate(pieces):
                index = {"right": number, "zero": 0}.get(self._index)
                part: Object = {} if index is None else {"index": index}
                if place == 0 and (id := ids.get(self._ids)) is not None:
                    part |= {"id": id}
                if place == 0 and self._chance.random() < 0.7:
                    part |= {"type": "function"}
                function: Object = {"arguments": given if self._objects else piece}
                made.append([{**part, "function": {"name": name, **function} if place == 0 else function}])
        if self._index == "right" and self._chance.random() < 0.3:
            made = self._mixed(made, len(calls))
        return made

    def _mixed(self, made: list[list[Object]], count: int) -> list[list[Object]]:
        """Return the parts of the calls in turns."""
        queues = [[part for part in made if part[0]["index"] == number] for number in range(count)]
        mixed = [queue.pop(0) for queue in queues]
        while any(queues):
            mixed.append(self._chance.choice([queue for queue in queues if queue]).pop(0))
        return mixed
