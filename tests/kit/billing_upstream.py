"""An upstream of three APIs with a ledger of its own. It reports usage, or doesn't, as the test wants."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import brotli
import zstandard
from starlette.types import Message, Receive, Scope, Send

from proxy.tokens.text import encoding

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}
ABSURD = 18_446_744_073_709_551_615

_encoding = encoding("o200k_base")


@dataclass(frozen=True)
class Manner:
    """How to answer. ``usage`` is ``last``, ``first``, ``repeated``, ``missing``, ``zeros``, or ``absurd``.

    With ``stop``, a stream waits after this many events until the client leaves. ``calls`` are the tool calls of chat
    completions.
    """

    text: str = "fine"
    usage: str = "last"
    encoding: str | None = None
    stop: int | None = None
    status: int = 200
    calls: tuple[dict[str, Any], ...] = ()


@dataclass
class Billed:
    """A call that the provider bills."""

    path: str
    prompt: int
    output: int
    reported: bool


@dataclass
class BillingUpstream:
    """An ASGI application. ``manner`` returns how to answer a body."""

    manner: Callable[[str, dict[str, Any]], Manner]
    ledger: list[Billed] = field(default_factory=list)
    stored: dict[str, dict[str, Any]] = field(default_factory=dict)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        raw = b""
        more = True
        while more:
            message = await receive()
            raw += message.get("body", b"")
            more = message.get("more_body", False)
        path = scope["path"].removeprefix("/v1")
        if scope["method"] == "GET":
            await _whole(send, self.stored[unquote(path).rsplit("/", 1)[1]], None)
            return
        body = json.loads(raw)
        manner = self.manner(path, body)
        if manner.status != 200:
            await _whole(send, {"error": {"message": "no", "type": "invalid_request_error"}}, None, manner.status)
            return
        written = tokens(manner.text) + sum(tokens(call["function"]["arguments"]) for call in manner.calls)
        billed = Billed(path, prompt_of(body), written, manner.usage in ("last", "first", "repeated"))
        self.ledger.append(billed)
        if body.get("background") and not body.get("stream"):
            billed.reported = True
            answer = _answer(path, body, manner, billed) | {"id": f"resp_{len(self.ledger)}"}
            self.stored[answer["id"]] = answer
            await _whole(send, answer | {"status": "queued", "output": [], "usage": None}, None)
        elif body.get("stream"):
            await self._stream(receive, send, list(_events(path, body, manner, billed)), manner, billed)
        else:
            if manner.stop == 0:
                billed.output, billed.reported = 0, False
                await _left(receive)
                return
            await _whole(send, _answer(path, body, manner, billed), manner.encoding)

    async def _stream(
        self, receive: Receive, send: Send, events: list[tuple[bytes, int]], manner: Manner, billed: Billed
    ) -> None:
        if manner.stop == 0:
            billed.output, billed.reported = 0, False
            await _left(receive)
            return
        headers = [(b"content-type", b"text/event-stream")]
        if manner.encoding is not None:
            headers.append((b"content-encoding", manner.encoding.encode()))
            body = PACKERS[manner.encoding](b"".join(data for data, _ in events))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        written, reported = 0, False
        for number, (data, output) in enumerate(events):
            if number == manner.stop:
                billed.output, billed.reported = written, reported
                await _left(receive)
                return
            written += output
            final = b'"choices": []' in data or b"message_delta" in data or b"response.completed" in data
            reported = reported or (final and billed.reported)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _left(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def _whole(send: Send, answer: dict[str, Any], encoding: str | None, status: int = 200) -> None:
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json")]
    if encoding is not None:
        body = PACKERS[encoding](body)
        headers.append((b"content-encoding", encoding.encode()))
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def tokens(text: str) -> int:
    """Return the tokens of a text."""
    return len(_encoding.encode(text, disallowed_special=()))


def prompt_of(body: dict[str, Any]) -> int:
    """Return the tokens of a prompt, as providers count them: the texts, and 4 for each message."""
    listed = body.get("messages") or body.get("input") or body.get("prompt") or ""
    parts = listed if isinstance(listed, list) else [listed]
    fixed = [json.dumps(body[name]) for name in ("tools", "system", "instructions") if body.get(name)]
    return 3 + sum(4 + sum(map(tokens, _texts(part))) for part in parts) + sum(map(tokens, fixed))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, dict):
        for name, part in value.items():
            if name not in ("role", "type", "id", "name"):
                yield from _texts(part)


def usage_of(path: str, manner: Manner, billed: Billed) -> dict[str, Any] | None:
    """Return the usage to report."""
    if manner.usage == "missing":
        return None
    prompt, output = billed.prompt, billed.output
    if manner.usage == "zeros":
        prompt = output = 0
    if manner.usage == "absurd":
        prompt = output = ABSURD
    names = ("prompt_tokens", "completion_tokens") if _chat(path) else ("input_tokens", "output_tokens")
    return dict(zip(names, (prompt, output), strict=True))


def _chat(path: str) -> bool:
    return not path.startswith(("/responses", "/messages"))


def _answer(path: str, body: dict[str, Any], manner: Manner, billed: Billed) -> dict[str, Any]:
    usage = usage_of(path, manner, billed)
    report = {} if usage is None else {"usage": usage}
    first, last = (report, {}) if manner.usage == "first" else ({}, report)
    if path == "/embeddings":
        billed.output = 0
        report.get("usage", {}).pop("completion_tokens", None)
        return {**first, "object": "list", "data": [{"object": "embedding", "embedding": [0.5] * 900}], **last}
    if path == "/completions":
        return {**first, "object": "text_completion", "choices": [{"text": manner.text, "index": 0}], **last}
    if path.startswith("/responses"):
        content = [{"type": "output_text", "text": manner.text, "annotations": []}]
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
        if path.endswith("/compact"):
            item = {"type": "compaction", "id": "cmp_1", "encrypted_content": manner.text}
        fixed = {"object": "response", "status": "completed", "model": "m", "output": [item]}
        return {"id": "resp_1", **first, **fixed, **last}
    if path == "/messages":
        fixed = {"type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn"}
        return {"id": "msg_1", **first, **fixed, "content": [{"type": "text", "text": manner.text}], **last}
    message: dict[str, Any] = {"role": "assistant", "content": manner.text}
    if manner.calls:
        message["tool_calls"] = list(manner.calls)
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if manner.calls else "stop"}
    return {"id": "c", **first, "object": "chat.completion", "model": "m", "choices": [choice], **last}


def pieces(text: str) -> list[str]:
    """Return the parts of a text that the events of a stream have."""
    words = text.split(" ")
    return [" ".join(["", *words[at : at + 4]])[not at :] for at in range(0, len(words), 4)]


def _events(path: str, body: dict[str, Any], manner: Manner, billed: Billed) -> Iterator[tuple[bytes, int]]:
    """Yield the events of a stream, each with the tokens of its text."""
    usage = usage_of(path, manner, billed)
    if path.startswith("/responses"):
        whole = _answer(path, body, manner, billed)
        yield _named({"type": "response.created", "response": whole | {"output": [], "usage": None}})
        for piece in pieces(manner.text):
            yield _named({"type": "response.output_text.delta", "delta": piece}, piece)
        yield _named({"type": "response.output_text.done", "text": manner.text})
        yield _named({"type": "response.completed", "response": whole | {"metadata": {"note": "x" * 9_000}}})
        return
    if path == "/messages":
        begun = {} if usage is None else {"usage": usage | {"output_tokens": 1}}
        yield _named({"type": "message_start", "message": {"id": "m", "role": "assistant", "content": [], **begun}})
        yield _named({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
        for piece in pieces(manner.text):
            yield _named({"type": "content_block_delta", "delta": {"type": "text_delta", "text": piece}}, piece)
        yield _named({"type": "content_block_stop", "index": 0})
        ended = {} if usage is None else {"usage": {"output_tokens": usage["output_tokens"]}}
        yield _named({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, **ended})
        yield _named({"type": "message_stop"})
        return
    asked = (body.get("stream_options") or {}).get("include_usage") is True
    null: dict[str, Any] = {"usage": None} if asked else {}
    written = 0
    for piece in pieces(manner.text):
        written += tokens(piece)
        if usage is not None and manner.usage == "repeated":
            null = {"usage": usage | {"completion_tokens": written}}
        yield _chunk({"content": piece}, None, **null), tokens(piece)
    for index, call in enumerate(manner.calls):
        yield _chunk({"tool_calls": [{"index": index, **call}]}, None, **null), tokens(call["function"]["arguments"])
    yield _chunk({}, "tool_calls" if manner.calls else "stop", **null), 0
    if asked and usage is not None:
        yield _data({"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [], "usage": usage}), 0
    else:
        billed.reported = manner.usage == "repeated"
    yield b"data: [DONE]\n\n", 0


def _chunk(delta: dict[str, Any], reason: str | None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return _data({"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **more})


def _named(event: dict[str, Any], text: str = "") -> tuple[bytes, int]:
    return f"event: {event['type']}\n".encode() + _data(event), tokens(text) if text else 0


def _data(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
